"""Training on images that are all in memory, whole batches augmented at once: for small ones, where time counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...training.randomness import derive
from ..preprocessing import Preprocessing
from ..recipe import ClassificationRecipe
from .arrays import ArraySource
from .augment import crop_padding, resize_before_crop
from .batch_augment import BatchAugmentation
from .contract import Batch, Process
from .order import Batching, epoch_order

RESIZED_AT_ONCE = 1024


class InMemoryTrainData:
    """:class:`TrainData` from arrays, without worker processes."""

    skipped = 0

    def __init__(
        self, source: ArraySource, recipe: ClassificationRecipe, preprocessing: Preprocessing, process: Process
    ) -> None:
        _check_recipe(recipe)
        self.classes = source.classes
        self._recipe = recipe
        self._preprocessing = preprocessing
        self._batching = Batching.of(recipe, process)
        self.batches_per_epoch = self._batching.micro_batches(len(source))
        self._labels = torch.from_numpy(source.labels)
        self._images = _stored_images(source.images, recipe, preprocessing)
        self._augment = BatchAugmentation(preprocessing.size, recipe.batch_size, recipe.hflip, recipe.erase)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        recipe = self._recipe
        order = epoch_order(len(self._labels), recipe.seed, epoch, recipe.batch_size, recipe.repeats)
        for number in range(start, self.batches_per_epoch):
            positions = self._batching.positions(number)
            samples = order[positions.start : positions.stop]
            step, first = divmod(positions.start, recipe.batch_size)
            part = slice(first, first + len(positions))
            seed = derive(recipe.seed, "augment", epoch, step)
            crops = self._augment.crop(self._images, samples, seed, part)
            yield self._augment.erase(self._preprocessing.normalise(crops), seed, part), self._labels[samples]


def _check_recipe(recipe: ClassificationRecipe) -> None:
    if recipe.crop == "random_resized":
        raise ValueError("in_memory cannot crop 'random_resized'; use crop random, pad or none, or in_memory false")
    if recipe.auto_augment or recipe.color_jitter:
        raise ValueError(
            "in_memory changes no colours; set auto_augment to null and color_jitter to 0, or in_memory to false"
        )


def _stored_images(arrays: np.ndarray, recipe: ClassificationRecipe, preprocessing: Preprocessing) -> Tensor:
    """(N, H, W[, 3]) as (N, C, H', W'), uint8: resized and padded, so that augmentation only has to crop."""
    images = torch.from_numpy(arrays)
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    resize = resize_before_crop(recipe, preprocessing)
    channels = len(preprocessing.mean)
    images = torch.cat([_with_channels(resize(part), channels) for part in images.split(RESIZED_AT_ONCE)])
    vertical, horizontal = crop_padding(recipe, preprocessing.size)
    return functional.pad(images, (horizontal, horizontal, vertical, vertical))


def _with_channels(images: Tensor, channels: int) -> Tensor:
    """(N, 1 or 3, H, W) to (N, ``channels``, H, W); colours become grey by Pillow's weights, which are in 1/65536."""
    if channels == 1 and images.shape[1] == 3:
        weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32).view(3, 1, 1)
        return (((images.int() * weights).sum(1, keepdim=True) + 32768) >> 16).to(torch.uint8)
    return images.expand(-1, channels, -1, -1)
