"""Batches for training and single images for evaluation, for one of the processes of a run.

Which image comes when, and how it is mirrored, is a function of the seed and the place in the run, as in
classification, whose order and worker processes these are.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..classification.data.contract import DataError, Process
from ..classification.data.loading import UNREADABLE, BatchDataset, batch_loader, loaded
from ..classification.data.order import Batching, epoch_order
from ..training.randomness import derive
from .dataset import DetectionData, Target
from .transforms import Sample, image_tensor, mirror, training_target

logger = logging.getLogger(__name__)

ALONE = Process()

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]
"""Images (3, h, w), each of a size of its own, and what there is to learn about each."""

Place = tuple[int, range]
"""An epoch, and the positions in it that make a micro-batch."""


class _TrainingSamples:
    """Makes batches from places alone, so that it does not matter which worker is asked for which.

    Beside a batch there is the number of images that were passed over for it.
    """

    def __init__(self, data: DetectionData, seed: int, batch: int, hflip: float, skip_bad: bool) -> None:
        self._data, self._seed, self._batch, self._hflip, self._skip_bad = data, seed, batch, hflip, skip_bad
        self._indices = torch.as_tensor(data.with_objects())
        self._order: tuple[int, Tensor] | None = None

    def __call__(self, place: Place) -> Any:
        epoch, positions = place
        images, targets, skipped = [], [], 0
        for position in positions:
            sample, bad = self._read(epoch, position)
            drawn = random.Random(derive(self._seed, "augment", epoch, position))
            image, target = mirror(*sample) if drawn.random() < self._hflip else sample
            images.append(image_tensor(image))
            targets.append(training_target(target))
            skipped += bad
        return (images, targets), skipped

    def _read(self, epoch: int, position: int) -> tuple[Sample, int]:
        """The sample at a position, or the next good one if bad ones are skipped; and how many were."""
        order = self._epoch_order(epoch)
        for bad in range(len(order)):
            index = int(order[(position + bad) % len(order)])
            try:
                return self._data.read(index, derive(self._seed, "images", epoch)), bad
            except (*UNREADABLE, DataError):
                if not self._skip_bad:
                    raise
        raise DataError("none of the images can be read")

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._indices[epoch_order(len(self._indices), self._seed, epoch, self._batch)]
        return self._order[1]


class DetectionLoader:
    """Training batches of a process; worker processes live as long as this does.

    Images without objects are not shown. Data that is made on the fly makes new images for each epoch.

    Args:
        data: what to show.
        seed: decides everything random.
        batch_size: images per optimiser step, over all processes.
        accumulate: parts into which a process splits its share of the batch.
        process: which of the processes this is.
        workers: data-loading processes.
        hflip: probability of mirroring.
        skip_bad: replace images that cannot be read by others, instead of stopping.
    """

    def __init__(
        self,
        data: DetectionData,
        *,
        seed: int,
        batch_size: int,
        accumulate: int = 1,
        process: Process = ALONE,
        workers: int = 0,
        hflip: float = 0.5,
        skip_bad: bool = False,
    ) -> None:
        self.categories = data.categories
        self.skipped = 0
        self._batching = Batching(batch_size, accumulate, process)
        self.batches_per_epoch = self._batching.micro_batches(len(data.with_objects()))
        self._places: list[Place] = []
        samples = _TrainingSamples(data, seed, batch_size, hflip, skip_bad)
        self._loader = batch_loader(BatchDataset(samples), self._places, workers)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """An epoch from micro-batch ``start`` on; one such iteration at a time."""
        numbers = range(start, self.batches_per_epoch)
        self._places[:] = [(epoch, self._batching.positions(number)) for number in numbers]
        items: Iterator[Any] = loaded(self._loader)
        before = self.skipped
        try:
            for batch, skipped in items:
                self.skipped += skipped
                yield batch
        finally:
            if bad := self.skipped - before:
                logger.warning("%d images of epoch %d could not be read; others took their place", bad, epoch)


class DetectionShare:
    """A process's share of an evaluation: process r of n takes images r, r + n, …, each in its own size.

    - ``size``: images over all processes; ``skipped``: those of this process that could not be read.
    """

    def __init__(
        self, data: DetectionData, *, process: Process = ALONE, workers: int = 0, skip_bad: bool = False
    ) -> None:
        self.categories = data.categories
        self.size = len(data)
        self.skipped = 0
        self._data, self._skip_bad = data, skip_bad
        self._loader = batch_loader(BatchDataset(self._shown), range(process.rank, self.size, process.count), workers)

    def images(self) -> Iterator[tuple[Tensor, Target]]:
        """Images (3, h, w) and their objects, in order."""
        self.skipped = 0
        items: Iterator[Any] = loaded(self._loader)
        for sample in items:
            if sample is None:
                self.skipped += 1
            else:
                yield sample

    def _shown(self, index: int) -> Any:
        """A sample; None if it cannot be read and such are skipped."""
        try:
            image, target = self._data.read(index)
        except (*UNREADABLE, DataError):
            if not self._skip_bad:
                raise
            return None
        return image_tensor(image), target
