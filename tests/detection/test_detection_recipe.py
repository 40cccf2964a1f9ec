"""The shipped detection recipes: the paper's settings, and that each of them trains."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import write_garments

from vision_longformer.costs.detection import detection_entries
from vision_longformer.detection.config import DETECTORS
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.detection.task import DetectionTask, train
from vision_longformer.training.optimizer import learning_rate
from vision_longformer.training.recipe import recipe_names, resolve, to_yaml
from vision_longformer.training.run_directory import RunDirectory

NAMES = recipe_names(DetectionRecipe)
COMPARED = resolve(DetectionRecipe, "mask_rcnn_small_1x")

PEAK_AND_DROP_PATH = {"tiny": (1e-4, 0.05), "small": (1e-4, 0.1), "medium": (1e-4, 0.2), "base": (8e-5, 0.2)}
"""By size; of drop path, the first of the paper's two values."""

SCHEDULES = {"1x": (90_000, 60_000, 80_000, (800,)), "3x": (270_000, 180_000, 240_000, (640, 672, 704, 736, 768, 800))}
"""Steps, those at which the rate falls, and sizes of the shorter side."""


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes(name: str, tmp_path: Path) -> None:
    """Each builds, says what it is for, and comes back from what it is written as, whole or as a delta."""
    recipe = resolve(DetectionRecipe, name)
    assert 10 < len(recipe.about) < 100
    for changed_only in (False, True):
        path = tmp_path / "mine.yaml"
        path.write_text(to_yaml(recipe, changed_only=changed_only))
        assert resolve(DetectionRecipe, str(path)) == recipe


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("size", PEAK_AND_DROP_PATH)
@pytest.mark.parametrize("length", SCHEDULES)
def test_training_table_of_the_paper(detector: str, size: str, length: str) -> None:
    recipe = resolve(DetectionRecipe, f"{detector}_{size}_{length}")
    (peak, drop_path), (total, first, second, sizes) = PEAK_AND_DROP_PATH[size], SCHEDULES[length]
    assert (recipe.detector, recipe.model, recipe.drop_path) == (detector, f"vision_longformer_{size}", drop_path)
    assert (recipe.steps, recipe.batch_size, recipe.optimizer) == (total, 16, "adamw")
    assert (recipe.clip_norm, recipe.weight_decay, recipe.decay, recipe.hflip) == (1.0, 0.05, "all", 0.5)
    assert (recipe.train_split, recipe.eval_split, recipe.eval_every) == ("train2017", "val2017", 1)
    assert recipe.skip_bad
    assert (recipe.detector_config(80).min_size, recipe.detector_config(80).max_size) == (sizes, 1333)
    assert _rates(recipe, total, 0, 500, 1000, first - 1) == pytest.approx([0.01 * peak, 0.505 * peak, peak, peak])
    falls = _rates(recipe, total, first, second - 1, second, total - 1)
    assert falls == pytest.approx([0.1 * peak, 0.1 * peak, 0.01 * peak, 0.01 * peak])


def _rates(recipe: DetectionRecipe, total: int, *steps: int) -> list[float]:
    return [learning_rate(recipe, step, total, recipe.count_warmup(7330)) for step in steps]


def test_comparison_of_mechanisms() -> None:
    """One recipe for each row of the paper's table, which differs from ViL-Small's in the backbone only."""
    names = [name for name in NAMES if name.startswith("mask_rcnn_small_1x_")]
    recipes = [resolve(DetectionRecipe, name) for name in names]
    assert sorted(recipe.model for recipe in recipes) == sorted(e.backbone for e in detection_entries() if e.memory)
    for name, recipe in zip(names, recipes, strict=True):
        assert recipe.model == f"msvit_small_1_2_8_1_{name.removeprefix('mask_rcnn_small_1x_')}"
        assert recipe == replace(COMPARED, about=recipe.about, model=recipe.model)


def test_performer_draws_features_anew_every_thousand_steps() -> None:
    assert [step for step in range(3500) if DetectionTask.redraws_features(step, 0, step)] == [1000, 2000, 3000]


def test_recipes_are_read_without_torch() -> None:
    """Commands that list them start at once; timm is asked only about names that are not ours."""
    script = """
import sys
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.training.recipe import recipe_names, resolve
for name in recipe_names(DetectionRecipe):
    resolve(DetectionRecipe, name).detector_config(80)
print([name for name in ("torch", "torchvision", "timm") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_garments(tmp_path_factory.mktemp("coco"), ("train2017", 4), ("val2017", 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_takes_two_steps(name: str, coco: Path, tmp_path: Path) -> None:
    """The detector at full depth and width, on small images."""
    options = {**resolve(DetectionRecipe, name).detector_options, "min_size": [128], "max_size": 160}
    changes = {"data": str(coco), "batch_size": 2, "steps": 2, "workers": 0, "log_every": 1}
    result = train(name, output=tmp_path / "run", detector_options=options, **changes)
    records = RunDirectory(result.run).records()
    shutil.rmtree(result.run)  # up to two gigabytes, which pytest would keep
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 2
    assert all(np.isfinite(losses))
    assert 0 <= records[-1]["evaluation"]["box_AP"] <= 100
