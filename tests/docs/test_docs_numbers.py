"""Figures and numbers of the pages are those of the code and of ``scripts/``."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from docs_pages import DOCS, ROOT
from PIL import Image

from vision_longformer.costs import count_parameters, paper_macs
from vision_longformer.data.images import IMAGE_EXTENSIONS
from vision_longformer.models.zoo import model_config

SCRIPTS = ROOT / "scripts"

MAX_FIGURE_BYTES = 150_000


@pytest.fixture(autouse=True)
def _importable_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_scripts_find_what_they_import(path: Path) -> None:
    runpy.run_path(str(path))


def test_figures_are_as_drawn(tmp_path: Path) -> None:
    from draw_figures import FIGURES, main

    main(tmp_path)
    assert {path.name for path in DOCS.glob("*.png")} >= set(FIGURES)
    for name in FIGURES:
        drawn, stored = (np.asarray(Image.open(folder / name).convert("L"), float) for folder in (tmp_path, DOCS))
        assert drawn.shape == stored.shape, name
        assert np.abs(drawn - stored).mean() < 2, f"{name} differs; run scripts/draw_figures.py"
        assert (DOCS / name).stat().st_size <= MAX_FIGURE_BYTES


def test_estimates_are_as_computed() -> None:
    from estimate_runs import classification_run, table_head, table_row

    page = (DOCS / "scaling.md").read_text()
    assert "\n".join(table_head()) in page
    assert table_row(classification_run("imagenet1k_tiny")) in page


@pytest.mark.slow
def test_all_estimates_are_as_computed(capsys: pytest.CaptureFixture[str]) -> None:
    from estimate_runs import main

    main()
    assert capsys.readouterr().out in (DOCS / "scaling.md").read_text()


def test_pages_of_studies_are_as_made() -> None:
    from study_pages import pages, stored_tables

    for name, text in pages(stored_tables()).items():
        assert (DOCS / "studies" / name).read_text() == text, f"{name} differs; run scripts/study_pages.py"


def test_costs_of_shared_images_are_as_computed() -> None:
    from spatial_cost import BLOCK_HEAD, IMAGE_HEAD, block_rows, head, image_row

    page = (DOCS / "scaling.md").read_text()
    assert "\n".join([head(BLOCK_HEAD), *block_rows(2048, 4)]) in page
    assert head(IMAGE_HEAD) in page
    assert image_row(1024, 4) in page


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
    counts = "{gflops[rounded]} of {gflops[of]} GFLOPs and {params[rounded]} of {params[of]} parameter counts are equal"
    assert f"rounded to the printed digits, {counts.format(**cost)} (mark `=`); " in page
    assert cost["gflops"]["truncated"] == 0
    assert "; {params[truncated]} more parameter counts are equal only if ours are truncated".format(**cost) in page
    more = "{gflops[truncated]} more GFLOPs and {params[truncated]} more parameter count only when truncated"
    assert f"{counts} when rounded, and {more}".format(**detection) in page


def test_every_extension_is_documented() -> None:
    text = (ROOT / "docs/own_images.md").read_text()
    listed = re.search(r"Files that are read: (.*?), in", text, re.DOTALL)
    assert listed is not None
    assert tuple(re.findall(r"`(\.\w+)`", listed[1])) == IMAGE_EXTENSIONS
