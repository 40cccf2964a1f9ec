"""README and docs: links lead somewhere, the site is built, figures and numbers are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from docs_pages import DOCS, PAGES, ROOT, anchors, links
from PIL import Image

from vision_longformer.costs import count_parameters, paper_macs
from vision_longformer.models.zoo import model_config

LARGEST_FIGURE = 150_000
"""Bytes."""


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
    assert sorted(nav) == sorted(page.name for page in DOCS.glob("*.md"))


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


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``scripts/`` can be imported."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


def test_figures_are_as_drawn(scripts: None, tmp_path: Path) -> None:
    from draw_figures import FIGURES, main

    main(tmp_path)
    assert {path.name for path in DOCS.glob("*.png")} >= set(FIGURES)
    for name in FIGURES:
        drawn, stored = (np.asarray(Image.open(folder / name).convert("L"), float) for folder in (tmp_path, DOCS))
        assert drawn.shape == stored.shape, name
        assert np.abs(drawn - stored).mean() < 2, f"{name} differs; run scripts/draw_figures.py"
        assert (DOCS / name).stat().st_size <= LARGEST_FIGURE


def test_estimates_are_as_computed(scripts: None) -> None:
    from estimate_runs import classification_run, table_head, table_row

    page = (DOCS / "scaling.md").read_text()
    assert "\n".join(table_head()) in page
    assert table_row(classification_run("imagenet1k_tiny")) in page


@pytest.mark.slow
def test_all_estimates_are_as_computed(scripts: None, capsys: pytest.CaptureFixture[str]) -> None:
    from estimate_runs import main

    main()
    assert capsys.readouterr().out in (DOCS / "scaling.md").read_text()


def test_costs_of_the_model_cards() -> None:
    configs = [model_config(f"vision_longformer_{size}") for size in ("tiny", "small", "medium", "base")]
    params = " | ".join(f"{count_parameters(config).paper / 1e6:.2f}" for config in configs)
    macs = " | ".join(f"{paper_macs(config).total / 1e9:.2f}" for config in configs)
    page = (DOCS / "models.md").read_text()
    assert f"| parameters (M) | {params} |" in page
    assert f"| GMACs at 224×224 | {macs} |" in page


@pytest.mark.slow
def test_counts_of_the_reproduction_page() -> None:
    from vision_longformer.costs import agreement, compare_entry, paper_entries
    from vision_longformer.costs.detection import compare_detector, detection_entries

    page = " ".join((DOCS / "reproduction.md").read_text().split())
    cost = agreement([compare_entry(entry) for entry in paper_entries()])
    detection = agreement([compare_detector(entry) for entry in detection_entries()])
    told = "{gflops[agree]} of {gflops[of]} GFLOPs and {params[agree]} of {params[of]} parameter counts"
    assert f"Equal to the printed digit are {told.format(**cost)}" in page
    told = "{params[agree]} of {params[of]} parameter counts and {gflops[agree]} of {gflops[of]} GFLOPs"
    assert f"Equal are {told.format(**detection)}" in page
