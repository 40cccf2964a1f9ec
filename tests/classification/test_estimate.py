"""What a recipe would take, as 'vil train --dry-run' prints it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import write_npz
from classification_builders import IN_MEMORY, image_recipe

from vision_longformer import VisionLongformer
from vision_longformer.classification.estimate import estimate
from vision_longformer.cli.main import main


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """50 images of three classes, and 6 to evaluate on."""
    pixels, labels = np.zeros((50, 16, 16, 3), np.uint8), np.arange(50) % 3
    return write_npz(tmp_path / "images.npz", train_x=pixels, train_y=labels, val_x=pixels[:6], val_y=labels[:6])


def test_counts(images: Path) -> None:
    """50 images in batches of 8 are six steps an epoch; weights, gradients, two moments and an average are five."""
    recipe = image_recipe(images, batch_size=8, accumulate=2, epochs=5, ema=0.9, lr=0.1, warmup=1, **IN_MEMORY)
    plan = estimate(recipe)
    assert plan.data == "50 images of 3 classes"
    assert (plan.steps, plan.images) == (30, 4)
    parameters = sum(parameter.numel() for parameter in VisionLongformer(recipe.model_config(3)).parameters())
    assert plan.fixed_bytes == 5 * 4 * parameters
    assert plan.trial.reading_seconds == 0
    assert plan.seconds == pytest.approx((30 * 8 + 5 * 6 / 3) * plan.trial.seconds)
    assert plan.bytes == plan.fixed_bytes + 4 * plan.trial.activation_bytes
    assert [epoch for epoch, _ in plan.rates] == pytest.approx([0, 1, 7 / 6, 15 / 6, 22 / 6, 29 / 6])
    assert max(rate for _, rate in plan.rates) == pytest.approx(0.1)


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 4), ("sgd", 3), ("release_qhm", 3)])
def test_memory_of_the_optimiser(images: Path, optimizer: str, copies: int) -> None:
    """Weights, gradients, and one moment or two."""
    recipe = image_recipe(images, optimizer=optimizer)
    parameters = sum(parameter.numel() for parameter in VisionLongformer(recipe.model_config(3)).parameters())
    assert estimate(recipe).fixed_bytes == copies * 4 * parameters


def test_a_dry_run_says_what_it_would_take(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "quickstart", "--data", str(images), "--batch_size", "8", "--epochs", "5", "--dry-run"])
    output = capsys.readouterr().out
    assert "epochs: 5" in output
    assert "50 images of 3 classes" in output
    assert "30" in output  # optimiser steps
    assert "whole run with its evaluations" in output
    main(["train", "cifar10", "--data", "nowhere", "--dry-run"])
    assert "1,281,167 images of 1,000 classes (assumed; the data were not found)" in capsys.readouterr().out


def test_settings_that_cannot_train_are_refused(images: Path) -> None:
    with pytest.raises(ValueError, match="in_memory does not support colour"):
        estimate(image_recipe(images, **{**IN_MEMORY, "color_jitter": 0.4}))
