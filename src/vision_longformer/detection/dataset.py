"""Detection data as a run reads it: batches to train on and single images to evaluate on, for one of its processes.

Which image comes when, and how it is augmented, is a function of the seed and of the position in the run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..checkpoint.native import weights_file
from ..data.loading import UNREADABLE, BatchLoader, DataError
from ..data.order import SINGLE_PROCESS, Batching, MicroBatch, Process, epoch_order
from ..data.randomness import derive_seed
from ..data.split import AS_BEFORE, EVAL_FRACTION, HELD_OUT, INHERITED, UNKNOWN, Split, hold_out
from . import garments
from .augment import Augmentation
from .coco import CocoData, split_file
from .detections import Category, Target
from .recipe import DetectionRecipe

SKIPPABLE = (*UNREADABLE, DataError)
"""Errors of an image that ``skip_bad`` skips."""

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]
"""Images (3, h, w), each of a size of its own, and what there is to learn about each."""


Shapes = tuple[int, int, np.ndarray, list[int]]
"""Width and height of an image, boxes (n, 4) and labels of its objects without crowds."""


class DetectionData(Protocol):
    """Images with their objects, by index; ``categories`` are in order of labels, ``names`` tell images apart."""

    categories: tuple[Category, ...]
    has_masks: bool

    @property
    def names(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def read(self, index: int, seed: int | None = None) -> tuple[Image.Image, Target]:
        """An RGB image and its objects.

        Data that is made on the fly makes another image for each ``seed``; other data has no use for it.
        """
        ...

    def with_objects(self) -> Sequence[int]:
        """Indices of the images that there is something to learn from; the others are for evaluation only."""
        ...

    def shapes(self, index: int) -> Shapes:
        """What :meth:`read` would give but for the pixels."""
        ...


class Subset:
    """:class:`DetectionData` of some images of ``data``, by their names, in the order of the data."""

    def __init__(self, data: DetectionData, names: Collection[str]) -> None:
        wanted = set(names)
        self._data = data
        self._indices = [index for index, name in enumerate(data.names) if name in wanted]
        self.categories, self.has_masks = data.categories, data.has_masks
        if lost := sorted(wanted.difference(data.names)):
            raise FileNotFoundError(f"the data no longer has {lost[0]}, which the run's split names; restore it")

    @property
    def names(self) -> Sequence[str]:
        return [self._data.names[index] for index in self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int, seed: int | None = None) -> tuple[Image.Image, Target]:
        return self._data.read(self._indices[index], seed)

    def with_objects(self) -> Sequence[int]:
        having = set(self._data.with_objects())
        return [position for position, index in enumerate(self._indices) if index in having]

    def shapes(self, index: int) -> Shapes:
        return self._data.shapes(self._indices[index])


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


def has_split(data: str, split: str) -> bool:
    """Whether the data has a ``split`` of its own."""
    return data.partition(":")[0] == garments.NAME or split_file(Path(data), split) is not None


def hold_out_images(data: DetectionData, fraction: float, seed: int) -> Split:
    """Hold out a ``fraction`` of the images of each category, the rarest of an image's counting for it."""
    labels = [data.shapes(index)[3] for index in range(len(data))]
    frequency = Counter(label for one in labels for label in set(one))
    rarest = [min(one, key=lambda label: (frequency[label], label)) if one else 0 for one in labels]
    return hold_out(data.names, rarest, fraction, seed)


class Splits(NamedTuple):
    """Images to train on and to evaluate on, of the same categories; ``split`` names them if the run divided one set.

    ``how`` says in words which were held out.
    """

    train: DetectionData
    evaluation: DetectionData
    split: Split | None
    how: str = ""


def open_splits(recipe: DetectionRecipe, run: Path | None = None) -> Splits:
    """The recipe's training and evaluation images, as ``run`` divided them if it is given and did."""
    masks = recipe.detector == "mask_rcnn"
    train_data = open_detection(recipe.data, recipe.train_split, masks=masks, skip_bad=recipe.skip_bad)
    if masks and not train_data.has_masks:
        raise ValueError(f"{recipe.data} has boxes but no masks, which mask_rcnn learns from; use --detector retinanet")
    if recipe.eval_fraction is not None or not has_split(recipe.data, recipe.eval_split):
        fraction = EVAL_FRACTION if recipe.eval_fraction is None else recipe.eval_fraction
        split, how = Split.read(run), AS_BEFORE
        if split is None:
            split, how = _inherited_split(recipe.init, train_data.names)
        split = split or hold_out_images(train_data, fraction, recipe.seed)
        return Splits(Subset(train_data, split.train), Subset(train_data, split.evaluation), split, how)
    eval_data = open_detection(recipe.data, recipe.eval_split, masks=masks, skip_bad=recipe.skip_bad)
    if train_data.categories != eval_data.categories:
        raise ValueError(
            f"the categories of {recipe.train_split} and {recipe.eval_split} in {recipe.data} differ; use one list"
        )
    return Splits(train_data, eval_data, None)


def _inherited_split(init: str | None, names: Sequence[str]) -> tuple[Split | None, str]:
    """That of the starting weights, which have seen its training images, and how images are held out."""
    known = None if init is None else Split.read(weights_file(init).parent)
    if known is None:
        return None, HELD_OUT
    split = known.applied_to(names)
    return split, INHERITED if split else UNKNOWN


class TrainSet:
    """The training batches of a process; its worker processes live as long as this does.

    Images without objects are left out. Data that is made on the fly makes new images for each epoch. ``skipped`` has
    the names of the images that could not be read so far.

    Args:
        data: images with objects.
        seed: decides everything random.
        batch_size: images per optimiser step, over all processes.
        accumulate: parts into which a process splits its share of the batch.
        process: which of the processes this is.
        workers: data-loading processes.
        augmentation: what is done to each image.
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
        augmentation: Augmentation | None = None,
        skip_bad: bool = False,
    ) -> None:
        self.categories = data.categories
        self.skipped: set[str] = set()
        self._batching = Batching(batch_size, accumulate, process)
        self.batches_per_epoch = self._batching.micro_batches(len(data.with_objects()))
        self._requests: list[MicroBatch] = []
        self._loader = BatchLoader(
            _Batches(data, seed, batch_size, augmentation or Augmentation(), skip_bad), self._requests, workers
        )

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """An epoch from micro-batch ``start`` on; one such iteration at a time."""
        indices = range(start, self.batches_per_epoch)
        self._requests[:] = [MicroBatch(epoch, self._batching.positions(index)) for index in indices]
        for batch, skipped in self._loader:
            self.skipped.update(skipped)
            yield batch


class _Batches:
    """A batch, and the names of the images that were skipped for it, from a micro-batch's epoch and positions alone.

    So it does not matter which worker is asked for which.
    """

    def __init__(
        self, data: DetectionData, seed: int, batch_size: int, augmentation: Augmentation, skip_bad: bool
    ) -> None:
        self._data, self._seed, self._batch_size = data, seed, batch_size
        self._augmentation, self._skip_bad = augmentation, skip_bad
        self._indices = torch.as_tensor(data.with_objects())
        self._order: tuple[int, Tensor] | None = None

    def __call__(self, request: MicroBatch) -> tuple[Batch, list[str]]:
        images, targets, skipped = [], [], list[str]()
        for position in request.positions:
            image, target, bad = self._read(request.epoch, position)
            drawn = random.Random(derive_seed(self._seed, "augment", request.epoch, position))
            image, target = self._augmentation(image, target, drawn)
            images.append(image_tensor(image))
            targets.append(training_target(target))
            skipped += bad
        return (images, targets), skipped

    def _read(self, epoch: int, position: int) -> tuple[Image.Image, Target, list[str]]:
        """The image at a position, or the next good one if bad ones are skipped; and the names of those."""
        order, bad = self._epoch_order(epoch), list[str]()
        for later in range(len(order)):
            index = int(order[(position + later) % len(order)])
            try:
                return *self._data.read(index, derive_seed(self._seed, "images", epoch)), bad
            except SKIPPABLE:
                if not self._skip_bad:
                    raise
                bad.append(self._data.names[index])
        raise DataError("none of the images can be read")

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._indices[epoch_order(len(self._indices), self._seed, epoch, self._batch_size)]
        return self._order[1]


class EvalSet:
    """A process's share of the images to evaluate on: process r of n takes images r, r + n, …, each in its own size.

    - ``size``: images over all processes; ``skipped``: names of those of this process that could not be read.
    """

    def __init__(
        self, data: DetectionData, *, process: Process = SINGLE_PROCESS, workers: int = 0, skip_bad: bool = False
    ) -> None:
        self.categories = data.categories
        self.size = len(data)
        self.skipped: list[str] = []
        self._names = data.names
        self._share = range(process.rank, self.size, process.count)
        self._samples = _EvalSamples(data, skip_bad)
        self._loader = BatchLoader(self._samples, self._share, workers)

    def images(self) -> Iterator[tuple[Tensor, Target]]:
        """Images (3, h, w) and their objects, in order."""
        self.skipped = []
        for index, sample in zip(self._share, self._loader, strict=True):
            if sample is None:
                self.skipped.append(self._names[index])
            else:
                yield sample

    def examples(self, count: int) -> list[tuple[Image.Image, Target]]:
        """The first ``count`` images of the whole set that can be read, and their objects."""
        return list(islice(filter(None, map(self._samples.read, range(self.size))), count))


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
