"""What several tests of classification share: recipes for small images, their training and evaluation sets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from builders import IMAGE_CLASSES, IMAGE_SIDE
from torch import Tensor

from vision_longformer.classification.dataset import (
    EvalSet,
    TrainSet,
    build_eval_set,
    build_train_set,
    open_images,
)
from vision_longformer.classification.preprocessing import recipe_preprocessing
from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.data.order import Process

UNCHANGED: dict[str, Any] = {"crop": "none", "hflip": 0.0, "color_jitter": 0.0, "auto_augment": None, "erase": 0.0}
"""No augmentation."""

IN_MEMORY: dict[str, Any] = {"crop": "pad", "color_jitter": 0.0, "auto_augment": None, "erase": 0.5, "in_memory": True}


def image_recipe(data: str | Path, **changes: Any) -> ClassificationRecipe:
    """Small images with values that can be read off: an input is ``(value - 127.5) / 127.5``."""
    settings: dict[str, Any] = {
        "data": str(data),
        "image_size": IMAGE_SIDE,
        "batch_size": 4,
        "workers": 0,
        "crop_pct": 1.0,
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
    }
    return ClassificationRecipe(**{**settings, **changes})


def train_set_of(recipe: ClassificationRecipe, *process: int) -> TrainSet:
    images = open_images(recipe.data, recipe.train_split, num_classes=recipe.num_classes)
    config = recipe.model_config(len(images.classes))
    return build_train_set(images, recipe, recipe_preprocessing(recipe, config, images.classes), Process(*process))


def eval_set_of(recipe: ClassificationRecipe, *process: int, classes: tuple[str, ...] = IMAGE_CLASSES) -> EvalSet:
    return build_eval_set(
        open_images(recipe.data, recipe.eval_split, classes=classes),
        recipe_preprocessing(recipe, recipe.model_config(len(classes)), classes),
        batch_size=recipe.eval_batch_size or recipe.batch_size,
        workers=recipe.workers,
        skip_bad_images=recipe.skip_bad_images,
        process=Process(*process),
    )


def samples_of(batches: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[int, int]]:
    """(grey value, label) of each sample; images must be of one colour."""
    samples = []
    for images, labels in batches:
        assert images.shape[1:] == (3, IMAGE_SIDE, IMAGE_SIDE)
        assert (images == images[:, :1, :1, :1]).all()
        values = (images[:, 0, 0, 0] * 127.5 + 127.5).round().int().tolist()
        samples += list(zip(values, labels.tolist(), strict=True))
    return samples


def assert_same(batches: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> None:
    assert len(batches) == len(expected)
    for (images, labels), (expected_images, expected_labels) in zip(batches, expected, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)
