"""Settings of a run on someone's own objects, from the images, their annotations and the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..checkpoint.native import CLASSIFIER, read_config
from ..geometry import ceil_div
from ..models.config import ModelConfig
from ..models.zoo import MODELS
from ..training.recipe import load_recipe, named_model
from .config import DETECTORS
from .dataset import open_detection
from .recipe import DetectionRecipe
from .statistics import ObjectStatistics, object_statistics

BACKBONE = "vision_longformer_tiny"


class Machine(NamedTuple):
    """What a machine is used for: longest side of images, images per step, image passes of a run, loading processes."""

    image_side: int
    batch_size: int
    passes: int
    workers: int


CPU, GPU = Machine(512, 2, 720, 1), Machine(1333, 8, 16_000, 4)
"""A run on a CPU should be over in minutes, from a small backbone; a GPU trains ViL-Tiny on larger images."""

EPOCHS = 10, 200
"""Fewest and most."""

EVALUATIONS = 5
"""Of a run, about."""


def derive(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe with ``auto`` leaves open of a detection run; ``values`` are those that are given."""
    given = {**load_recipe(DetectionRecipe, "own_objects"), **values}
    if "data" not in given:
        raise ValueError("a recipe with auto needs --data: a folder of annotated images, in COCO's format")
    detector = given.get("detector")
    data = open_detection(
        str(given["data"]),
        given["train_split"],
        masks=detector != "retinanet",
        skip_bad=bool(given.get("skip_bad")),
    )
    detector = detector or ("mask_rcnn" if data.has_masks else "retinanet")
    statistics, images = object_statistics(data), len(data.with_objects())
    machine = GPU if torch.cuda.is_available() else CPU
    batch_size = int(given.get("batch_size", min(machine.batch_size, max(1, images // 4))))
    epochs = int(given.get("epochs", min(max(ceil_div(machine.passes, images), EPOCHS[0]), EPOCHS[1])))
    steps = given.get("steps") or epochs * max(1, images // batch_size)
    small = machine is CPU and "init" not in given and "model" not in given
    backbone = _backbone(given, small)
    return {
        "detector": detector,
        "detector_options": {
            **_detector_options(statistics, detector, _image_side(given, statistics, machine), small),
            "levels": _levels({**backbone, **given}),
        },
        **backbone,
        "batch_size": batch_size,
        "epochs": epochs,
        "steps": given.get("steps"),
        "lr": 1e-3 if small else 2e-4 if given.get("init") else 5e-4,
        "warmup_steps": max(1, round(0.07 * steps)),
        "ema": round(max(0.0, 1 - 10 / steps), 4),
        "eval_every": max(1, round(epochs / EVALUATIONS)),
        "log_every": min(50, max(1, images // batch_size)),
        "workers": min(machine.workers, os.cpu_count() or 1),
        "precision": "bf16" if machine is GPU and torch.cuda.is_bf16_supported() else "fp32",
    }


def _image_side(given: Mapping[str, Any], statistics: ObjectStatistics, machine: Machine) -> int:
    """As given, or as suits the objects."""
    sides = given.get("detector_options", {}).get("min_size") or statistics.image_side(machine.image_side)
    return max(sides) if isinstance(sides, (list, tuple)) else int(sides)


def _detector_options(statistics: ObjectStatistics, detector: str, side: int, small: bool) -> dict[str, Any]:
    """Image size, anchors that suit the objects, and small heads on a small backbone."""
    assert detector in DETECTORS
    options: dict[str, Any] = {"min_size": [side], "max_size": side, "anchor_scale": statistics.anchor_scale(side)}
    if small:
        options = {**load_recipe(DetectionRecipe, "quickstart")["detector_options"], **options}
    busiest = int(statistics.per_image.max())
    return options if busiest <= 100 else {**options, "detections": ceil_div(busiest, 100) * 100}


def _backbone(given: Mapping[str, Any], small: bool) -> dict[str, Any]:
    """The quick start's small backbone, the one that the starting weights are for, or ViL-Tiny."""
    if small:
        return {"model": BACKBONE, "model_options": load_recipe(DetectionRecipe, "quickstart")["model_options"]}
    if "model" in given or given.get("init") is None:
        return {"model": BACKBONE}
    return named_model(ModelConfig.from_dict(read_config(given["init"], CLASSIFIER)))


def _levels(settings: Mapping[str, Any]) -> list[int]:
    """Stages of the backbone under the pyramid: all from the second on, whose maps have stride 8."""
    if settings["model"] not in MODELS:
        return [2, 3, 4]
    count = len(MODELS[settings["model"]].override(**settings.get("model_options", {})).stages)
    return list(range(min(2, count), count + 1))
