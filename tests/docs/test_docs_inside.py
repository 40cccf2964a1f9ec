"""The page about the code names files that exist, and its walks are as short as it says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "vision_longformer"
PAGE = (ROOT / "docs" / "inside.md").read_text()
LONGEST = {"From an image to logits": 13, "From a command to a training step": 15}


def test_every_file_named_exists() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", PAGE))
    assert len(named) > 40
    homes = (PACKAGE, ROOT, PACKAGE / "training")  # "the task's `recipe.py`" is in each task's package
    assert [name for name in sorted(named) if not any((home / name).exists() for home in homes)] == []


def test_walks_are_short_and_never_return() -> None:
    walks = re.findall(r"^### (From .*?)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    assert len(walks) == 5
    for title, text in walks:
        files = re.findall(r"^\d+\. `(.*?)`", text, re.MULTILINE)
        assert len(set(files)) == len(files) <= LONGEST.get(title, 12), title


def test_every_package_is_described() -> None:
    table = PAGE.split("## Four walks")[0]
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {name for name in packages if f"`{name}/`" not in table} == set()
