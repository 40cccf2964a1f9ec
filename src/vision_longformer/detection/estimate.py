"""How long a detection recipe would train on this machine, and in how much memory, from a step on one image."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn

from ..training.callbacks import counted
from ..training.estimate import Estimate, Trial, scale_up, trial_step
from .dataset import TrainSet, open_splits
from .detectors import build_detector
from .recipe import DetectionRecipe
from .statistics import ObjectStatistics, object_statistics

COCO_IMAGES, COCO_EVALUATED, COCO_CATEGORIES, COCO_SIZE, COCO_OBJECTS = 117_266, 5000, 80, (640, 480), 7
"""What is assumed where the data is not here: COCO's training images with objects, and one of them."""


def estimate(recipe: DetectionRecipe) -> Estimate:
    """Measure a step on one image and scale it up. Data that is not there is taken to be COCO."""
    try:
        train, evaluation, *_ = open_splits(recipe)
        statistics, images, evaluated = object_statistics(train), len(train), len(evaluation)
        categories, known = len(train.categories), ""
        train_set = TrainSet(train, seed=recipe.seed, batch_size=recipe.batch_size, accumulate=recipe.accumulate)
        batches = train_set.batches_per_epoch
    except FileNotFoundError:
        statistics, images, evaluated, categories = _coco_statistics(), COCO_IMAGES, COCO_EVALUATED, COCO_CATEGORIES
        known, batches = " (assumed; the data were not found)", images // recipe.batch_size * recipe.accumulate
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_detector(recipe.detector_config(categories).without_pretrained())
    words = f"{counted(images, 'image')} of {categories:,} {'category' if categories == 1 else 'categories'}{known}"
    trial = trial_of_detector(model, statistics, device)
    return scale_up(recipe, model, words, batches, evaluated, trial)


def trial_of_detector(model: nn.Module, statistics: ObjectStatistics, device: torch.device) -> Trial:
    """A training step of a copy of the model, for an image and objects of usual size."""
    copy = deepcopy(model).to(device).train()
    image, target = _usual_sample(statistics, device)
    return trial_step(copy, lambda: torch.stack(list(copy([image], [target]).values())).sum())


def _usual_sample(statistics: ObjectStatistics, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """An image of the median size with the median number of objects, in a row, each of the median side."""
    width, height = (round(float(side)) for side in np.median(statistics.image_sizes, axis=0))
    count = max(1, round(float(np.median(statistics.per_image))))
    side = min(float(np.median(statistics.sides)) * max(width, height), width, height)
    left = torch.linspace(0, width - side, count)
    boxes = torch.stack([left, torch.zeros(count), left + side, torch.full((count,), side)], 1)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    masks[:, : round(side)] = 1
    target = {"boxes": boxes, "labels": torch.ones(count, dtype=torch.int64), "masks": masks}
    moved = {name: value.to(device) for name, value in target.items()}
    return torch.rand(3, height, width, device=device), moved


def _coco_statistics() -> ObjectStatistics:
    sides = np.full(COCO_OBJECTS, 0.15)
    sizes, per_image = np.array([COCO_SIZE], dtype=float), np.array([COCO_OBJECTS])
    return ObjectStatistics({}, sizes, per_image, sides, np.ones(COCO_OBJECTS))
