"""What a training loop sees of the data, whatever it is read from.

Training and evaluation on a data set with random access.

Training on images that are all in memory, whole batches augmented at once: for small ones, where time counts.

From a recipe to its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ..data.loading import UNREADABLE, Batch, BatchDataset, DataError, Loaded, batch_loader, loaded
from ..data.order import Batching, Process, epoch_order
from ..data.randomness import derive, seeded
from ..data.sources import ArraySource, Source, open_source
from ..models.config import ModelConfig
from .augment import BatchAugmentation, crop_padding, image_augmentation, resize_before_crop
from .preprocessing import Preprocessing
from .preprocessing import preprocessing as recipe_preprocessing
from .recipe import ClassificationRecipe
from .streaming import StreamingEvalData, StreamingTrainData, eval_batch


class TrainData(Protocol):
    """Augmented images of a process, in an order that its seed decides.

    - ``batches_per_epoch``: micro-batches of the process in an epoch, the same for all; the incomplete last is dropped.
    - ``skipped``: images that could not be read so far, and were replaced.
    """

    classes: tuple[str, ...]
    batches_per_epoch: int
    skipped: int

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """An epoch from micro-batch ``start`` on; one such iteration at a time."""
        ...


class EvalData(Protocol):
    """A process's share of a set; over all processes every sample comes exactly once.

    - ``size``: samples over all processes; ``skipped``: those of this process that could not be read and were left out.

    The shares differ by a sample at most (of shards: by a shard), and so some processes may have a batch less.
    """

    classes: tuple[str, ...]
    skipped: int

    @property
    def size(self) -> int: ...

    def batches(self) -> Iterator[Batch]:
        """All batches of this process; the last may be smaller."""
        ...


Place = tuple[int, range]
"""An epoch, and the positions in it that make a micro-batch."""


class AugmentedSamples:
    """Makes training batches from places alone, so that it does not matter which worker is asked for which."""

    def __init__(self, source: Source, recipe: ClassificationRecipe, preprocessing: Preprocessing) -> None:
        self._source = source
        self._recipe = recipe
        self._augment = image_augmentation(recipe, preprocessing)
        self._order: tuple[int, Tensor] | None = None

    def __call__(self, place: Place) -> Loaded:
        epoch, positions = place
        skipped = 0
        samples = []
        for position in positions:
            image, label, bad = self._read(epoch, position)
            with seeded(derive(self._recipe.seed, "augment", epoch, position)):
                samples.append((self._augment(image), label))
            skipped += bad
        return Loaded.of(samples, skipped)

    def _read(self, epoch: int, position: int) -> tuple[Image.Image, int, int]:
        """The sample at a position, or the next readable one if bad ones are skipped; and how many were."""
        order = self._epoch_order(epoch)
        for bad in range(len(order)):
            try:
                return *self._source.read(int(order[(position + bad) % len(order)])), bad
            except UNREADABLE:
                if not self._recipe.skip_bad_images:
                    raise
        raise DataError(f"none of the images of {self._recipe.data} can be read")

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            recipe = self._recipe
            order = epoch_order(len(self._source), recipe.seed, epoch, recipe.batch_size, recipe.repeats)
            self._order = epoch, order
        return self._order[1]


class RandomAccessTrainData:
    """:class:`TrainData` from a source; worker processes live as long as this does."""

    def __init__(
        self, source: Source, recipe: ClassificationRecipe, preprocessing: Preprocessing, process: Process
    ) -> None:
        self.classes = source.classes
        self.skipped = 0
        self._batching = Batching(recipe.batch_size, recipe.accumulate, process)
        self.batches_per_epoch = self._batching.micro_batches(len(source))
        self._places: list[Place] = []
        dataset = BatchDataset(AugmentedSamples(source, recipe, preprocessing))
        self._loader = batch_loader(dataset, self._places, recipe.workers)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        numbers = range(start, self.batches_per_epoch)
        self._places[:] = [(epoch, self._batching.positions(number)) for number in numbers]
        for images, labels, skipped in loaded(self._loader):
            self.skipped += skipped
            yield images, labels


class PreparedSamples:
    """Makes evaluation batches from indices; with ``skip_bad`` a batch may have less samples than indices."""

    def __init__(self, source: Source, preprocessing: Preprocessing, skip_bad: bool) -> None:
        self._source = source
        self._transform = preprocessing.transform()
        self._skip_bad = skip_bad

    def __call__(self, indices: range) -> Loaded:
        samples = []
        for index in indices:
            try:
                image, label = self._source.read(index)
            except UNREADABLE:
                if not self._skip_bad:
                    raise
                continue
            samples.append((self._transform(image), label))
        return Loaded.of(samples, len(indices) - len(samples))


class RandomAccessEvalData:
    """:class:`EvalData` from a source: process r of n takes samples r, r + n, …"""

    def __init__(
        self,
        source: Source,
        recipe: ClassificationRecipe,
        preprocessing: Preprocessing,
        process: Process,
    ) -> None:
        self.classes = source.classes
        self.size = len(source)
        self.skipped = 0
        share = range(process.rank, self.size, process.count)
        batch = eval_batch(recipe, process)
        indices = [share[start : start + batch] for start in range(0, len(share), batch)]
        dataset = BatchDataset(PreparedSamples(source, preprocessing, recipe.skip_bad_images))
        self._loader = batch_loader(dataset, indices, 0 if recipe.in_memory else recipe.workers)

    def batches(self) -> Iterator[Batch]:
        self.skipped = 0
        for images, labels, skipped in loaded(self._loader):
            self.skipped += skipped
            if len(labels):
                yield images, labels


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
        self._batching = Batching(recipe.batch_size, recipe.accumulate, process)
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


ALONE = Process()


def train_data(
    recipe: ClassificationRecipe,
    config: ModelConfig,
    preprocessing: Preprocessing | None = None,
    process: Process = ALONE,
) -> TrainData:
    """The training split, for one of the processes; ``preprocessing`` is the recipe's by default."""
    source = (
        None if _is_streamed(recipe) else open_source(recipe.data, recipe.train_split, num_classes=recipe.num_classes)
    )
    if preprocessing is None:
        preprocessing = recipe_preprocessing(recipe, config, source.classes if source else class_names(recipe))
    if source is None:
        return StreamingTrainData(recipe, preprocessing, process)
    if not recipe.in_memory:
        return RandomAccessTrainData(source, recipe, preprocessing, process)
    return InMemoryTrainData(_arrays(source, recipe), recipe, preprocessing, process)


def eval_data(recipe: ClassificationRecipe, preprocessing: Preprocessing, process: Process = ALONE) -> EvalData:
    """The evaluation split, for one of the processes; its classes must be those of ``preprocessing``."""
    if _is_streamed(recipe):
        return StreamingEvalData(recipe, preprocessing, process)
    source = open_source(recipe.data, recipe.eval_split, classes=preprocessing.classes, num_classes=recipe.num_classes)
    return RandomAccessEvalData(source, recipe, preprocessing, process)


def class_names(recipe: ClassificationRecipe) -> tuple[str, ...]:
    """The classes of the training split; numbers, where the data does not name them."""
    if not _is_streamed(recipe):
        return open_source(recipe.data, recipe.train_split, num_classes=recipe.num_classes).classes
    if recipe.num_classes is None:
        raise ValueError(f"{recipe.data} is streamed; say how many classes there are: num_classes")
    return tuple(map(str, range(recipe.num_classes)))


def _is_streamed(recipe: ClassificationRecipe) -> bool:
    if recipe.data.startswith("wds/") and recipe.in_memory:
        raise ValueError("in_memory is for arrays; streamed shards cannot be kept in memory")
    return recipe.data.startswith("wds/")


def _arrays(source: Source, recipe: ClassificationRecipe) -> ArraySource:
    if not isinstance(source, ArraySource):
        raise ValueError(f"in_memory is for arrays (.npz files, fashion-mnist, torch/cifar10 …), not for {recipe.data}")
    return source
