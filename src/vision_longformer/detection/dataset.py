"""Images with boxes and masks by number: one form, whatever they are read from.

Images and their objects mirrored together, and as tensors to learn from.

Batches for training and single images for evaluation, for one of the processes of a run.

Which image comes when, and how it is mirrored, is a function of the seed and the place in the run, as in
classification, whose order and worker processes these are.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ..data.loading import UNREADABLE, BatchDataset, DataError, batch_loader, loaded
from ..data.order import Batching, Process, epoch_order
from ..data.randomness import derive


class Category(NamedTuple):
    """What an object may be; ``id`` is the data set's own number, which need not follow on the one before."""

    id: int
    name: str


@dataclass
class Target:
    """The n objects of an image of h × w pixels.

    - ``boxes``: (n, 4) float32, left, top, right, bottom; ``labels``: (n,) int64, label k is category number k - 1.
    - ``masks``: (n, h, w) bool, or None if the data has boxes only.
    - ``crowd``: (n,) bool, regions of objects too many to tell apart: not learned, and not held against a detector.
    - ``area``: (n,) float32, by which objects count as small, medium or large.
    """

    image_id: int
    boxes: Tensor
    labels: Tensor
    masks: Tensor | None
    crowd: Tensor
    area: Tensor


class DetectionData(Protocol):
    """Images with their objects; ``categories`` are in order of labels."""

    categories: tuple[Category, ...]
    has_masks: bool

    def __len__(self) -> int: ...

    def read(self, index: int, seed: int | None = None) -> tuple[Image.Image, Target]:
        """An RGB image and its objects.

        Data that is made on the fly makes another image for each ``seed``; other data has no use for it.
        """
        ...

    def with_objects(self) -> Sequence[int]:
        """Numbers of the images that there is something to learn from; the others are for evaluation only."""
        ...


def open_detection(data: str, split: str, *, masks: bool = True, skip_bad: bool = False) -> DetectionData:
    """The ``split`` of a folder in COCO's form, or of the built-in ``garments``.

    ``garments:320`` are images whose longer side is 320 pixels, for quick runs. Without ``masks``, a folder's masks are
    not looked at, right or wrong. ``skip_bad`` passes over annotations that make no sense, instead of stopping.
    """
    from .coco import CocoData
    from .garments import NAME, open_garments

    if data.partition(":")[0] == NAME:
        return open_garments(data, split)
    if not Path(data).exists():
        raise FileNotFoundError(f"there is no data {data}; give a folder in COCO's form, or the built-in {NAME}")
    return CocoData(Path(data), split, masks=masks, skip_bad=skip_bad)


Sample = tuple[Image.Image, Target]


def mirror(image: Image.Image, target: Target) -> Sample:
    """Left and right exchanged."""
    left, top, right, bottom = target.boxes.unbind(1)
    boxes = torch.stack((image.width - right, top, image.width - left, bottom), 1)
    masks = None if target.masks is None else target.masks.flip(2)
    return ImageOps.mirror(image), replace(target, boxes=boxes, masks=masks)


def image_tensor(image: Image.Image) -> Tensor:
    """(3, h, w), float32, 0 to 1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)


def training_target(target: Target) -> dict[str, Tensor]:
    """What torchvision's detectors learn from: all but crowds."""
    single = ~target.crowd
    learned = {"boxes": target.boxes[single], "labels": target.labels[single]}
    if target.masks is not None:
        learned["masks"] = target.masks[single].to(torch.uint8)
    return learned


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
