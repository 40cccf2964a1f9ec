"""README and docs: links lead somewhere, every page is in the navigation, the site is built."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_pages import DOCS, PAGES, ROOT, anchors, links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target} has no such heading"


def _nav_files(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [file for part in (entry if isinstance(entry, list) else entry.values()) for file in _nav_files(part)]


def test_every_page_is_in_the_navigation() -> None:
    nav = _nav_files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(nav) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.slow
def test_site_is_built(tmp_path: Path) -> None:
    """Strictly: links, navigation, and names of the API; no role of a docstring is left in the text."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "api.html").read_text()
    assert "Attention of the tokens of a map to all global tokens" in api
    assert not re.search(r":(func|class|data|meth):", api)
