"""Detection data as a run reads it: batches to train on and single images to evaluate on, for one of its processes.

Which image comes when, and whether it is flipped, is a function of the seed and of the position in the run.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ..data.loading import UNREADABLE, BatchLoader, DataError
from ..data.order import SINGLE_PROCESS, Batching, MicroBatch, Process, epoch_order
from ..data.randomness import derive_seed
from . import garments
from .coco import CocoData
from .detections import Category, Target

logger = logging.getLogger(__name__)

SKIPPABLE = (*UNREADABLE, DataError)
"""Errors of an image that ``skip_bad`` skips."""

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]
"""Images (3, h, w), each of a size of its own, and what there is to learn about each."""


class DetectionData(Protocol):
    """Images with their objects, by index; ``categories`` are in order of labels."""

    categories: tuple[Category, ...]
    has_masks: bool

    def __len__(self) -> int: ...

    def read(self, index: int, seed: int | None = None) -> tuple[Image.Image, Target]:
        """An RGB image and its objects.

        Data that is made on the fly makes another image for each ``seed``; other data has no use for it.
        """
        ...

    def with_objects(self) -> Sequence[int]:
        """Indices of the images that there is something to learn from; the others are for evaluation only."""
        ...


def open_detection(data: str, split: str, *, masks: bool = True, skip_bad: bool = False) -> DetectionData:
    """The ``split`` of a folder in COCO's format, or of the built-in ``garments``.

    ``garments:320`` are images whose longer side is 320 pixels, for quick runs. Without ``masks``, a folder's masks are
    not read, right or wrong. ``skip_bad`` skips invalid annotations, instead of stopping.
    """
    if data.partition(":")[0] == garments.NAME:
        return garments.open_garments(data, split)
    if not Path(data).exists():
        raise FileNotFoundError(
            f"there is no data {data}; give a folder in COCO's format, or the built-in {garments.NAME}"
        )
    return CocoData(Path(data), split, masks=masks, skip_bad=skip_bad)


class TrainSet:
    """The training batches of a process; its worker processes live as long as this does.

    Images without objects are left out. Data that is made on the fly makes new images for each epoch. ``skipped``
    counts the images that could not be read.

    Args:
        data: images with objects.
        seed: decides everything random.
        batch_size: images per optimiser step, over all processes.
        accumulate: parts into which a process splits its share of the batch.
        process: which of the processes this is.
        workers: data-loading processes.
        hflip: probability of a horizontal flip.
        skip_bad: replace images that cannot be read by others, instead of stopping.
    """

    def __init__(
        self,
        data: DetectionData,
        *,
        seed: int,
        batch_size: int,
        accumulate: int = 1,
        process: Process = SINGLE_PROCESS,
        workers: int = 0,
        hflip: float = 0.5,
        skip_bad: bool = False,
    ) -> None:
        self.categories = data.categories
        self.skipped = 0
        self._batching = Batching(batch_size, accumulate, process)
        self.batches_per_epoch = self._batching.micro_batches(len(data.with_objects()))
        self._requests: list[MicroBatch] = []
        self._loader = BatchLoader(_Batches(data, seed, batch_size, hflip, skip_bad), self._requests, workers)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """An epoch from micro-batch ``start`` on; one such iteration at a time."""
        indices = range(start, self.batches_per_epoch)
        self._requests[:] = [MicroBatch(epoch, self._batching.positions(index)) for index in indices]
        before = self.skipped
        try:
            for batch, skipped in self._loader:
                self.skipped += skipped
                yield batch
        finally:
            if bad := self.skipped - before:
                logger.warning("%d images of epoch %d could not be read; others took their place", bad, epoch)


class _Batches:
    """A batch, and how many images were skipped for it, from a micro-batch's epoch and positions alone.

    So it does not matter which worker is asked for which.
    """

    def __init__(self, data: DetectionData, seed: int, batch_size: int, hflip: float, skip_bad: bool) -> None:
        self._data, self._seed, self._batch_size = data, seed, batch_size
        self._hflip, self._skip_bad = hflip, skip_bad
        self._indices = torch.as_tensor(data.with_objects())
        self._order: tuple[int, Tensor] | None = None

    def __call__(self, request: MicroBatch) -> tuple[Batch, int]:
        images, targets, skipped = [], [], 0
        for position in request.positions:
            image, target, bad = self._read(request.epoch, position)
            drawn = random.Random(derive_seed(self._seed, "augment", request.epoch, position))
            if drawn.random() < self._hflip:
                image, target = flip(image, target)
            images.append(image_tensor(image))
            targets.append(training_target(target))
            skipped += bad
        return (images, targets), skipped

    def _read(self, epoch: int, position: int) -> tuple[Image.Image, Target, int]:
        """The image at a position, or the next good one if bad ones are skipped; and how many were."""
        order = self._epoch_order(epoch)
        for bad in range(len(order)):
            index = int(order[(position + bad) % len(order)])
            try:
                return *self._data.read(index, derive_seed(self._seed, "images", epoch)), bad
            except SKIPPABLE:
                if not self._skip_bad:
                    raise
        raise DataError("none of the images can be read")

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._indices[epoch_order(len(self._indices), self._seed, epoch, self._batch_size)]
        return self._order[1]


class EvalSet:
    """A process's share of the images to evaluate on: process r of n takes images r, r + n, …, each in its own size.

    - ``size``: images over all processes; ``skipped``: those of this process that could not be read.
    """

    def __init__(
        self, data: DetectionData, *, process: Process = SINGLE_PROCESS, workers: int = 0, skip_bad: bool = False
    ) -> None:
        self.categories = data.categories
        self.size = len(data)
        self.skipped = 0
        self._samples = _EvalSamples(data, skip_bad)
        self._loader = BatchLoader(self._samples, range(process.rank, self.size, process.count), workers)

    def images(self) -> Iterator[tuple[Tensor, Target]]:
        """Images (3, h, w) and their objects, in order."""
        self.skipped = 0
        for sample in self._loader:
            if sample is None:
                self.skipped += 1
            else:
                yield sample

    def examples(self, count: int) -> list[Image.Image]:
        """The first ``count`` images of the whole set that can be read."""
        readable = filter(None, map(self._samples.read, range(self.size)))
        return [image for image, _ in islice(readable, count)]


class _EvalSamples:
    """Images and their objects by number; None for one that cannot be read, if such are skipped."""

    def __init__(self, data: DetectionData, skip_bad: bool) -> None:
        self._data, self._skip_bad = data, skip_bad

    def __call__(self, index: int) -> tuple[Tensor, Target] | None:
        sample = self.read(index)
        return None if sample is None else (image_tensor(sample[0]), sample[1])

    def read(self, index: int) -> tuple[Image.Image, Target] | None:
        try:
            return self._data.read(index)
        except SKIPPABLE:
            if not self._skip_bad:
                raise
            return None


def flip(image: Image.Image, target: Target) -> tuple[Image.Image, Target]:
    """Left and right exchanged, in the image and in its objects."""
    left, top, right, bottom = target.boxes.unbind(1)
    boxes = torch.stack((image.width - right, top, image.width - left, bottom), 1)
    masks = None if target.masks is None else target.masks.flip(2)
    return ImageOps.mirror(image), replace(target, boxes=boxes, masks=masks)


def image_tensor(image: Image.Image) -> Tensor:
    """(3, h, w), float32, 0 to 1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)


def training_target(target: Target) -> dict[str, Tensor]:
    """What torchvision's detectors learn from: all objects but crowds."""
    single = ~target.crowd
    learned = {"boxes": target.boxes[single], "labels": target.labels[single]}
    if target.masks is not None:
        learned["masks"] = target.masks[single].to(torch.uint8)
    return learned
