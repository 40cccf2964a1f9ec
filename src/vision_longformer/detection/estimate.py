"""How long a detection recipe would train on this machine, and in how much memory, from a step on one image."""

from __future__ import annotations

import os
import time
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..geometry import ceil_div
from ..training.loop import total_steps
from ..training.optimizer import learning_rate
from .dataset import has_split, open_detection
from .detectors import build_detector
from .recipe import DetectionRecipe
from .statistics import ObjectStatistics, object_statistics

COCO_IMAGES, COCO_CATEGORIES, COCO_SIZE, COCO_OBJECTS = 117_266, 80, (640, 480), 7
"""What is assumed where the data is not here: COCO's training images with objects, and one of them."""

REPEATED_BELOW = 2.0
"""Seconds of a step up to which a second one is measured: the first also pays for what happens once."""

EVALUATION_SHARE = 1 / 3
"""Time of an image in evaluation, which has no backward pass, as a part of that in training."""


class Trial(NamedTuple):
    """A training step on one image: its time, and the activations kept for the backward pass."""

    seconds: float
    activation_bytes: int


class Estimate(NamedTuple):
    """``images`` are those a process holds at a time; ``rates`` are (epoch, learning rate) along the run."""

    data: str
    steps: int
    images: int
    seconds_per_image: float
    seconds: float
    fixed_bytes: int
    image_bytes: int
    rates: list[tuple[float, float]]

    @property
    def bytes(self) -> int:
        return self.fixed_bytes + self.images * self.image_bytes


def estimate(recipe: DetectionRecipe) -> Estimate:
    """Measure a step on one image and scale it up."""
    try:
        data = open_detection(recipe.data, recipe.train_split, masks=False, skip_bad=recipe.skip_bad)
        statistics, images = object_statistics(data), len(data.with_objects())
        categories, known = len(data.categories), ""
    except FileNotFoundError:
        statistics, images, categories = _coco_statistics(), COCO_IMAGES, COCO_CATEGORIES
        known = " (assumed; the data were not found)"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_detector(recipe.detector_config(categories).without_pretrained())
    trial = trial_step(model, statistics, device)
    batches = max(1, images // recipe.batch_size) * recipe.accumulate
    steps, per_epoch = total_steps(recipe, batches), batches // recipe.accumulate
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    moments = 1 if recipe.optimizer in ("sgd", "release_qhm") else 2
    warmup = recipe.count_warmup(per_epoch)
    marks = sorted({0, min(warmup, steps - 1), steps // 4, steps // 2, 3 * steps // 4, steps - 1})
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return Estimate(
        data=f"{images:,} images of {categories:,} categories{known}",
        steps=steps,
        images=ceil_div(recipe.batch_size, recipe.accumulate * processes),
        seconds_per_image=trial.seconds,
        seconds=run_seconds(recipe, steps, batches, _eval_images(recipe, images), trial) / processes,
        fixed_bytes=weights * (2 + moments + (recipe.ema is not None)),
        image_bytes=trial.activation_bytes,
        rates=[(mark / per_epoch, learning_rate(recipe, mark, steps, warmup)) for mark in marks],
    )


def run_seconds(recipe: DetectionRecipe, steps: int, batches_per_epoch: int, eval_images: int, trial: Trial) -> float:
    """Of training and evaluation on one process."""
    per_epoch = max(1, batches_per_epoch // recipe.accumulate)
    evaluations = max(1, steps // (per_epoch * recipe.eval_every))
    return trial.seconds * (steps * recipe.batch_size + EVALUATION_SHARE * evaluations * eval_images)


def trial_step(model: nn.Module, statistics: ObjectStatistics, device: torch.device) -> Trial:
    """Forward and backward of a copy of the model, for an image and objects of usual size."""
    copy = deepcopy(model).to(device).train()
    image, target = _usual_sample(statistics, device)
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        seconds = _step(copy, image, target)
        weights = {parameter.untyped_storage().data_ptr() for parameter in copy.parameters()}
        activations = sum(size for pointer, size in saved.items() if pointer not in weights)
    if seconds < REPEATED_BELOW:
        with torch.random.fork_rng():
            seconds = _step(copy, image, target)
    return Trial(seconds, activations)


def _step(model: nn.Module, image: Tensor, target: dict[str, Tensor]) -> float:
    start = time.perf_counter()
    torch.stack(list(model([image], [target]).values())).sum().backward()
    if image.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


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


def _eval_images(recipe: DetectionRecipe, training_images: int) -> int:
    """Images of an evaluation; where the data has no such split, as many as are held out."""
    if recipe.eval_fraction is None and os.path.exists(recipe.data) and has_split(recipe.data, recipe.eval_split):
        return len(open_detection(recipe.data, recipe.eval_split, masks=False, skip_bad=True))
    return ceil_div(training_images, 7)
