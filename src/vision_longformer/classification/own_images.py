"""Settings for data of one's own, from what is found there and from the machine: the recipe ``own_images``.

The numbers are choices that worked on a few hundred photos and two cores; a setting that is given always wins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from ..checkpoint.native import CLASSIFIER, describe
from ..data.loading import UNREADABLE
from ..data.shards import ShardSource
from ..data.sources import Source
from ..models.config import ModelConfig
from ..training.recipe import build, named_model
from .dataset import open_splits
from .recipe import ClassificationRecipe

FEW_IMAGES = 5000
"""Up to which even a GPU starts from the small built-in weights."""

SMALL_MODEL, SMALL_WEIGHTS, LARGE_MODEL = "vision_longformer_nano", "cifar10_nano", "vision_longformer_tiny"

SIZES = {SMALL_MODEL: (64, 96, 128), LARGE_MODEL: (96, 128, 160, 192, 224)}
"""Sides of the input to choose from."""

MEASURED_IMAGES = 32
"""Images of which the size is looked at."""

IMAGES_SEEN = {"cpu": 10_000, "cuda": 100_000}
"""Over all epochs of a run, unless that is fewer than MIN_EPOCHS or more than MAX_EPOCHS."""

MIN_EPOCHS, MAX_EPOCHS = 5, 40


def derive_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """What ``values``, the settings that are given, leave open."""
    if "data" not in values:
        raise ValueError("own_images is for data of your own; say where it is with --data FOLDER")
    recipe = build(ClassificationRecipe, values, "own_images")
    images = open_splits(recipe).train
    if isinstance(images, ShardSource):
        raise ValueError(f"{recipe.data} is streamed, and its images cannot be counted; choose a recipe by name")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = len(images)
    batch_size = values.get("batch_size", _batch_size(count, recipe.accumulate, device))
    epochs = values.get("epochs", max(MIN_EPOCHS, min(MAX_EPOCHS, IMAGES_SEEN[device] // count)))
    start = _start(values, count, device)
    return {
        **start,
        "image_size": start.get("image_size") or _image_size(images, values.get("model") or start["model"]),
        "batch_size": batch_size,
        "epochs": epochs,
        "warmup": round(0.1 * epochs, 1),
        "ema": 0.99 if epochs * count < 5000 * batch_size else 0.999,
        "lr": 5e-4 if values.get("init", start.get("init")) else 1e-3,
        "eval_every": max(1, epochs // 20),
        "workers": _workers(device),
    }


def _start(values: Mapping[str, Any], count: int, device: str) -> dict[str, Any]:
    """Model and starting weights, with the size and the normalisation that the weights are used to."""
    if values.get("init"):
        return _as_checkpoint(str(values["init"]))
    if "init" in values or "model" in values or (device == "cuda" and count > FEW_IMAGES):
        return {"model": LARGE_MODEL if device == "cuda" else SMALL_MODEL}
    normalisation = {name: _as_checkpoint(SMALL_WEIGHTS)[name] for name in ("mean", "std")}
    return {"model": SMALL_MODEL, "init": SMALL_WEIGHTS, **normalisation}


def _as_checkpoint(location: str) -> dict[str, Any]:
    """Settings that make the model of a checkpoint, and its images."""
    description = describe(location)
    if description.format != CLASSIFIER:
        raise ValueError(
            f"{location} is not a checkpoint of a classifier; give one, or train from scratch, --init null"
        )
    preprocessing = description.info.get("preprocessing", {})
    settings = {name: preprocessing[name] for name in ("mean", "std", "crop_pct") if name in preprocessing}
    config = ModelConfig.from_dict(description.config)
    return {**settings, "image_size": list(config.img_size), **named_model(config)}


def _image_size(images: Source, model: str) -> int | None:
    """The largest side that is not larger than those of most images; the model's own for other models."""
    if model not in SIZES:
        return None
    sides = []
    for index in range(0, len(images), max(1, len(images) // MEASURED_IMAGES)):
        try:
            sides.append(min(images.read(index)[0].size))
        except UNREADABLE:  # the run will say so, or skip it
            continue
    smallest, *others = SIZES[model]
    return max([smallest, *(size for size in others if sides and size <= median(sides))])


def _batch_size(count: int, accumulate: int, device: str) -> int:
    """About a sixteenth of the images, within limits; every process and part of a step has at least two."""
    unit = 2 * accumulate * int(os.environ.get("WORLD_SIZE", 1))
    sixteenth = 2 ** max(0, (count // 16).bit_length() - 1)
    wanted = min(count, max(16, min(sixteenth, 128 if device == "cuda" else 32)))
    return max(unit, wanted // unit * unit)


def _workers(device: str) -> int:
    """On a CPU the model needs the cores, and one worker reads ahead."""
    return min(8, os.cpu_count() or 1) if device == "cuda" else 1
