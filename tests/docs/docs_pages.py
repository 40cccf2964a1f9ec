"""The README and the pages of ``docs/`` as data: their code blocks, commands and links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block, and where its code begins, as ``docs/training.md:10``."""

    location: str
    language: str
    code: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        yield Block(f"{page.relative_to(ROOT)}:{line}", match[1], match[2])


def shell_commands(code: str) -> list[str]:
    """The single commands of a bash block, continued lines joined, each as it would be typed alone."""
    lines = code.replace("\\\n", " ").splitlines()
    parts = [part for line in lines if not line.startswith("#") for part in line.split("&&")]
    return [" ".join(part.split()) for part in parts if part.strip()]


def vil_arguments(command: str) -> list[str] | None:
    """Arguments of ``vil`` in a command, also under torchrun; None if it is another program."""
    words = shlex.split(command)
    if words[0] == "vil":
        return words[1:]
    return words[words.index("vision_longformer") + 1 :] if "vision_longformer" in words else None


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets of links and images inside the repository."""
    return [target for target in LINK.findall(prose(page)) if not re.match(r"https?:|mailto:", target)]


def anchors(page: Path) -> set[str]:
    """What headings are linked by: lower case, words joined by hyphens."""
    cleaned = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in HEADING.findall(prose(page)))
    return {re.sub(r"[\s-]+", "-", heading) for heading in cleaned}
