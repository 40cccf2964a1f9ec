"""How long a recipe would train on this machine, and in how much memory, from two small training steps."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import torch
from torch import Tensor

from ..models import VisionLongformer
from ..training.optimizer import learning_rate
from .dataset import build_train_set, open_images
from .preprocessing import recipe_preprocessing
from .recipe import ClassificationRecipe

TRIAL_BATCH_SIZE = 4
"""Images of the trial step."""


class Estimate(NamedTuple):
    """``images`` are those a process holds at a time; ``rates`` are (epoch, learning rate) along the run."""

    data: str
    steps: int
    images: int
    seconds_per_image: float
    seconds: float
    fixed_bytes: int
    image_bytes: float
    rates: list[tuple[float, float]]

    @property
    def bytes(self) -> float:
        return self.fixed_bytes + self.images * self.image_bytes


def estimate(recipe: ClassificationRecipe) -> Estimate:
    """Run a trial step in float32 and scale it up."""
    images, classes, assumed = _data_size(recipe)
    model = VisionLongformer(recipe.model_config(classes)).train()
    steps_per_epoch = max(1, images // recipe.batch_size)
    steps = recipe.steps or recipe.epochs * steps_per_epoch
    processes = int(os.environ.get("WORLD_SIZE", 1))
    seconds, activations = _trial(model)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    moments = 1 if recipe.optimizer in ("sgd", "release_qhm") else 2
    warmup = recipe.count_warmup(steps_per_epoch)
    marks = sorted({0, warmup, steps // 4, steps // 2, 3 * steps // 4, steps - 1})
    return Estimate(
        data=f"{images:,} images of {classes:,} classes{' (assumed; the data were not found)' if assumed else ''}",
        steps=steps,
        images=recipe.batch_size // recipe.accumulate // processes,
        seconds_per_image=seconds,
        seconds=steps * recipe.batch_size * seconds / processes,
        fixed_bytes=weights * (2 + moments + (recipe.ema is not None)),
        image_bytes=activations,
        rates=[(mark / steps_per_epoch, learning_rate(recipe, mark, steps, warmup)) for mark in marks],
    )


def _data_size(recipe: ClassificationRecipe) -> tuple[int, int, bool]:
    """Images and classes to train on, and whether they are a guess: as the recipe or ImageNet-1K has them."""
    try:
        images = open_images(recipe.data, recipe.train_split, num_classes=recipe.num_classes)
        config = recipe.model_config(len(images.classes))
        train_set = build_train_set(images, recipe, recipe_preprocessing(recipe, config, images.classes))
        return train_set.batches_per_epoch * recipe.batch_size // recipe.accumulate, len(images.classes), False
    except FileNotFoundError:
        return recipe.num_images or 1_281_167, recipe.num_classes or 1000, True


def _trial(model: VisionLongformer) -> tuple[float, float]:
    """Seconds of forward and backward, and bytes of activations saved in between, per image."""
    config = model.config
    images = torch.randn(TRIAL_BATCH_SIZE, config.in_chans, *config.img_size)
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model(images).logsumexp(1).mean()
    loss.backward()
    activations = sum(size for pointer, size in saved.items() if pointer not in parameters)
    start = time.perf_counter()
    model(images).logsumexp(1).mean().backward()
    return (time.perf_counter() - start) / TRIAL_BATCH_SIZE, activations / TRIAL_BATCH_SIZE
