"""Listings at the widths of small terminals: names are whole, nothing is cut, and tables fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.cli.main import main
from vision_longformer.costs import detection as detection_costs
from vision_longformer.costs.detection import detection_entries
from vision_longformer.costs.paper_tables import paper_entries
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.models.zoo import MODELS
from vision_longformer.ops import IMPLEMENTATIONS
from vision_longformer.training.recipe import recipe_names


def _recipe_models(recipes: type[ClassificationRecipe] | type[DetectionRecipe]) -> list[str]:
    return [str(values["model"]) for values in recipes.generated.values() if "model" in values]


LISTINGS: dict[str, Callable[[], list[str]]] = {
    "models": lambda: list(MODELS),
    "recipes": lambda: [*recipe_names(ClassificationRecipe), *_recipe_models(ClassificationRecipe)],
    "detect recipes": lambda: [*recipe_names(DetectionRecipe), *_recipe_models(DetectionRecipe)],
    "table cost": lambda: [word for entry in paper_entries() for word in entry.model.split()],
    "table detection": lambda: [word for entry in list(detection_entries())[:1] for word in entry.model.split()],
    "doctor": lambda: list(IMPLEMENTATIONS),
}
"""Commands, and words that they print."""


def _check(output: str, names: list[str], width: int) -> None:
    assert "…" not in output
    words = {word.rstrip(";,:") for word in output.split()}
    assert [name for name in names if name not in words] == []
    rows = [line.rstrip() for line in output.splitlines() if line.startswith(" ") and not line.startswith("  ! ")]
    assert len(rows) >= len(set(names)) / 5
    assert [row for row in rows if len(row) > width] == []


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", LISTINGS)
def test_listings(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    entries = list(detection_entries())[:1]
    monkeypatch.setattr(detection_costs, "detection_entries", lambda: entries)
    main(command.split())
    _check(capsys.readouterr().out, LISTINGS[command](), width)
