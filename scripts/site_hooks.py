"""What mkdocs does to pages of the API: the roles of our docstrings become code, as ``:func:`~a.b``` becomes ``b``."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    return ROLE.sub(r"<code>\1</code>", html)
