"""Training and evaluation sets of labelled images, whatever they are read from.

Arrays, folders and archives are read by index, here; shards are streamed, in :mod:`.streaming`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ..checkpoint import load_info
from ..checkpoint.native import weights_file
from ..data.loading import UNREADABLE, Batch, BatchLoader, DataError, LabelledBatch
from ..data.order import SINGLE_PROCESS, MicroBatch, Process, epoch_order
from ..data.randomness import derive_seed, seeded
from ..data.shards import ShardSource
from ..data.sources import CLASS_FOLDERS, ArraySource, NoSplitError, Source, open_source, split_names, subset
from ..data.split import AS_BEFORE, EVAL_FRACTION, HELD_OUT, INHERITED, UNKNOWN, Split, hold_out
from ..errors import check_at_least
from ..export.runtime import is_exported
from ..training.recipe import resolve
from ..training.run_directory import RECIPE, find_run, no_run_error
from .augment import BatchAugmentation, crop_padding, image_augmentation, resize_before_crop
from .preprocessing import Preprocessing
from .recipe import ClassificationRecipe
from .streaming import StreamingEvalSet, StreamingTrainSet


class TrainSet(Protocol):
    """Augmented images of a process, in an order that the recipe's seed decides.

    - ``batches_per_epoch``: micro-batches of the process in an epoch, the same for all; the incomplete last is dropped.
    - ``skipped``: names of the images that could not be read so far, and were replaced.
    """

    batches_per_epoch: int

    @property
    def skipped(self) -> Collection[str]: ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """An epoch from micro-batch ``start`` on; one such iteration at a time."""
        ...


class EvalSet(Protocol):
    """A process's share of a set; over all processes every sample comes exactly once.

    - ``size``: samples over all processes; ``skipped``: names of those of this process that could not be read and were
      left out of the latest ``batches``.
    - ``shape``: (C, H, W) of an image.

    The shares differ by a sample at most (of shards: by a shard), and so some processes may have a batch less.
    """

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    skipped: list[str]

    @property
    def size(self) -> int: ...

    def batches(self) -> Iterator[Batch]:
        """All batches of this process; the last may be smaller."""
        ...

    def examples(self, count: int) -> Batch:
        """At most ``count`` images of the whole set, far apart, and their labels; no others are read."""
        ...


def open_images(
    data: str, split: str, *, classes: Sequence[str] | None = None, num_classes: int | None = None
) -> Source | ShardSource:
    """The ``split`` of ``data``, shards (``wds/…``) or else as :func:`open_source` opens it."""
    if data.startswith("wds/"):
        return ShardSource(data, split, classes=classes, num_classes=num_classes)
    return open_source(data, split, classes=classes, num_classes=num_classes)


class Splits(NamedTuple):
    """Images to train on and to evaluate on; ``split`` names them if they were held out from one set.

    ``how`` says in words which were held out.
    """

    train: Source | ShardSource
    evaluation: Source | ShardSource
    split: Split | None
    how: str = ""


def open_splits(recipe: ClassificationRecipe, run: Path | None = None) -> Splits:
    """The recipe's training and evaluation images, as ``run`` divided them if it is given and did.

    Where the data has no evaluation split, or ``eval_fraction`` says so, some of the training images are held out.
    """
    train = open_images(recipe.data, recipe.train_split, num_classes=recipe.num_classes)
    if len(train.classes) == 1:
        raise ValueError(f"{recipe.data} has a single class, {train.classes[0]!r}: nothing to learn; {CLASS_FOLDERS}")
    split = Split.read(run)
    if split is None and recipe.eval_fraction is None:
        try:
            return Splits(train, open_images(recipe.data, recipe.eval_split, classes=train.classes), None)
        except NoSplitError:
            if isinstance(train, ShardSource) or not len(train.labels):
                raise
    if isinstance(train, ShardSource) or not len(train.labels):
        raise ValueError(f"eval_fraction cannot hold out images of {recipe.data}, which does not list its labels")
    how = AS_BEFORE
    if split is None:
        split, how = _inherited_split(recipe, train)
    if split is None:
        split = hold_out(train.names, list(train.labels), recipe.eval_fraction or EVAL_FRACTION, recipe.seed)
    return Splits(subset(train, split.train, recipe.data), subset(train, split.evaluation, recipe.data), split, how)


def _inherited_split(recipe: ClassificationRecipe, train: Source) -> tuple[Split | None, str]:
    """That of the weights that the run starts from, which have seen its training images, and how images are held out.

    Images of arrays have no names of their own, so that a split is known to be theirs only by the run's recipe.
    """
    split = None if recipe.init is None else Split.read(weights_file(recipe.init).parent)
    if split is None or recipe.init is None:
        return None, HELD_OUT
    run = find_run(weights_file(recipe.init))
    named = not isinstance(train, ArraySource)
    if named or (run and _same(recipe.data, resolve(ClassificationRecipe, str(run / RECIPE)).data)):
        split = split.applied_to(train.names)
    else:
        split = None
    return split, INHERITED if split else UNKNOWN


def build_train_set(
    images: Source | ShardSource,
    recipe: ClassificationRecipe,
    preprocessing: Preprocessing,
    process: Process = SINGLE_PROCESS,
) -> TrainSet:
    """A process's part of the training images, augmented as the recipe says."""
    if recipe.balance != "none" and (isinstance(images, ShardSource) or not len(images.labels)):
        raise ValueError(f"balance is {recipe.balance!r}, but {recipe.data} does not list its labels; use 'none'")
    if recipe.in_memory:
        if not isinstance(images, ArraySource):
            raise ValueError(
                f"in_memory is for arrays (.npz files, fashion-mnist, torch/cifar10 …), not for {recipe.data}"
            )
        return InMemoryTrainSet(images, recipe, preprocessing, process)
    if isinstance(images, ShardSource):
        return StreamingTrainSet(images, recipe, preprocessing, process)
    return IndexedTrainSet(images, recipe, preprocessing, process)


class EvalImages(NamedTuple):
    """Images to evaluate on: the ``split`` of ``data``, or ``names`` of them if a run divided it, and why those.

    ``skip_bad_images``: whether the run that they are of skips what it cannot read.
    """

    data: str
    split: str
    names: tuple[str, ...] | None = None
    why: str = ""
    skip_bad_images: bool = False

    def __str__(self) -> str:
        return f"{self.data}, {self.why or self.split}"

    def open(self, preprocessing: Preprocessing, named: bool) -> Source | ShardSource:
        """Those images, whose classes must be those of ``preprocessing``, or as many if the model's have no names."""
        expected: dict[str, Any] = (
            {"classes": preprocessing.classes} if named else {"num_classes": len(preprocessing.classes)}
        )
        images = open_images(self.data, self.split, **expected)
        if self.names is None or isinstance(images, ShardSource):
            return images
        return subset(images, self.names, self.data)


def find_images(checkpoint: str | Path, data: str | None, split: str | None) -> EvalImages:
    """What to evaluate a checkpoint on, by default what its run was evaluated on.

    Of the run's own data, "train" and "validation" are the images that the run trained and was evaluated on, also where
    the data is not divided. So they are of a copy of it, and for a folder of 'vil hub save', by the images' names.
    """
    if not is_exported(checkpoint):
        load_info(checkpoint)  # says if there is no such file, or another kind of model in it
    run = find_run(checkpoint)
    recipe = None if run is None else resolve(ClassificationRecipe, str(run / RECIPE))
    if data is None and recipe is None:
        raise no_run_error(checkpoint)
    if recipe is None or (data is not None and not _same(data, recipe.data)):
        return _known_part(checkpoint, str(data), split) or EvalImages(str(data), split or "validation")
    divided = Split.read(run)
    names = divided and divided.part(split, recipe.train_split, recipe.eval_split)
    if divided is None or names is None:
        return EvalImages(recipe.data, split or recipe.eval_split, skip_bad_images=recipe.skip_bad_images)
    why = HELD_OUT_BY_RUN if names is divided.evaluation else TRAINED_ON
    return EvalImages(recipe.data, recipe.train_split, names, why, recipe.skip_bad_images)


HELD_OUT_BY_RUN, TRAINED_ON = "the images that the run held out", "the images that the run trained on"


def _known_part(checkpoint: str | Path, data: str, split: str | None) -> EvalImages | None:
    """The part of data that is not divided, by the split that lies beside the checkpoint, if it is of these images."""
    if Split.beside(checkpoint) is None:
        return None
    try:
        open_images(data, "validation")
        return None
    except NoSplitError:
        images = open_images(data, "train")
    if isinstance(images, (ShardSource, ArraySource)):  # whose images have no names of their own
        return None
    names = Split.known(checkpoint, images.names, split)
    why = TRAINED_ON if split in split_names("train") else HELD_OUT_BY_RUN
    return None if names is None else EvalImages(data, "train", names, why)


def _same(data: str, other: str) -> bool:
    return data == other or (Path(data).exists() and Path(data).resolve() == Path(other).resolve())


def build_eval_set(
    images: Source | ShardSource,
    preprocessing: Preprocessing,
    *,
    batch_size: int,
    workers: int,
    skip_bad_images: bool = False,
    process: Process = SINGLE_PROCESS,
) -> EvalSet:
    """A process's share of the evaluation images, prepared for a model with the same classes."""
    check_at_least("batch_size", batch_size, 1)
    check_at_least("workers", workers, 0)
    if isinstance(images, ShardSource):
        return StreamingEvalSet(images, preprocessing, batch_size, workers, skip_bad_images, process)
    return IndexedEvalSet(images, preprocessing, batch_size, workers, skip_bad_images, process)


# Images read by index


class IndexedTrainSet:
    """:class:`TrainSet` from a source; worker processes live as long as this does."""

    def __init__(
        self, source: Source, recipe: ClassificationRecipe, preprocessing: Preprocessing, process: Process
    ) -> None:
        self.skipped: set[str] = set()
        self._batching = recipe.batching(process)
        self.batches_per_epoch = self._batching.micro_batches(len(source))
        self._requests: list[MicroBatch] = []
        self._loader = BatchLoader(_AugmentedSamples(source, recipe, preprocessing), self._requests, recipe.workers)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        indices = range(start, self.batches_per_epoch)
        self._requests[:] = [MicroBatch(epoch, self._batching.positions(index)) for index in indices]
        for images, labels, skipped in self._loader:
            self.skipped.update(skipped)
            yield images, labels


class _AugmentedSamples:
    """Makes training batches from nothing but their positions, so that any worker may make any of them."""

    def __init__(self, source: Source, recipe: ClassificationRecipe, preprocessing: Preprocessing) -> None:
        self._source = source
        self._recipe = recipe
        self._augment = image_augmentation(recipe, preprocessing)
        self._order: tuple[int, Tensor] | None = None

    def __call__(self, micro_batch: MicroBatch) -> LabelledBatch:
        epoch, positions = micro_batch
        samples, skipped = [], []
        for position in positions:
            image, label, bad = self._read(epoch, position)
            with seeded(derive_seed(self._recipe.seed, "augment", epoch, position)):
                samples.append((self._augment(image), label))
            skipped += bad
        return LabelledBatch.collate(samples, skipped)

    def _read(self, epoch: int, position: int) -> tuple[Image.Image, int, list[str]]:
        """The sample at a position, or the next readable one if bad ones are skipped; and the names of those."""
        order, bad = self._epoch_order(epoch), list[str]()
        for later in range(len(order)):
            index = int(order[(position + later) % len(order)])
            try:
                return *self._source.read(index), bad
            except UNREADABLE as error:
                if not self._recipe.skip_bad_images:
                    raise _with_remedy(error) from error
                bad.append(_name(self._source, index))
        raise DataError(f"none of the images of {self._recipe.data} can be read")

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, _order(self._source, self._recipe, epoch)
        return self._order[1]


def _order(source: Source, recipe: ClassificationRecipe, epoch: int) -> Tensor:
    """Indices of images by position in an epoch."""
    balanced = list(source.labels) if recipe.balance == "sample" else None
    return epoch_order(len(source), recipe.seed, epoch, recipe.batch_size, recipe.repeats, balanced)


def _name(source: Source, index: int) -> str:
    """Of an image; its number in data whose images have no names."""
    return source.names[index] if len(source.names) else f"image {index}"


def _with_remedy(error: Exception) -> Exception:
    return type(error)(f"{error}; 'vil check' lists all such files: remove them, or start with --skip-bad-images")


class IndexedEvalSet:
    """:class:`EvalSet` from a source: process r of n takes samples r, r + n, …"""

    def __init__(
        self,
        source: Source,
        preprocessing: Preprocessing,
        batch_size: int,
        workers: int,
        skip_bad_images: bool,
        process: Process,
    ) -> None:
        self.classes = source.classes
        self.shape = preprocessing.shape
        self.size = len(source)
        self.skipped: list[str] = []
        share = range(process.rank, self.size, process.count)
        requests = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
        self._read = _PreparedSamples(source, preprocessing, skip_bad_images)
        self._loader = BatchLoader(self._read, requests, workers)

    def batches(self) -> Iterator[Batch]:
        self.skipped = []
        for images, labels, skipped in self._loader:
            self.skipped += skipped
            if len(labels):
                yield images, labels

    def examples(self, count: int) -> Batch:
        count = min(count, self.size)
        images, labels, _ = self._read([index * self.size // count for index in range(count)])
        return images, labels


class _PreparedSamples:
    """Makes evaluation batches from indices, without the images that cannot be read, if such are skipped.

    Not a part of the set: workers would outlive a set that its own loader refers to.
    """

    def __init__(self, source: Source, preprocessing: Preprocessing, skip_bad_images: bool) -> None:
        self._source, self._skip_bad_images = source, skip_bad_images
        self._transform = preprocessing.transform()

    def __call__(self, indices: Sequence[int]) -> LabelledBatch:
        samples, skipped = [], []
        for index in indices:
            try:
                image, label = self._source.read(index)
            except UNREADABLE as error:
                if not self._skip_bad_images:
                    raise _with_remedy(error) from error
                skipped.append(_name(self._source, index))
                continue
            samples.append((self._transform(image), label))
        return LabelledBatch.collate(samples, skipped)


# Images in memory

RESIZED_AT_ONCE = 1024


class InMemoryTrainSet:
    """:class:`TrainSet` from arrays, whole batches augmented at once, without worker processes.

    For small images, where decoding and augmenting one by one would take longer than training.
    """

    skipped = ()

    def __init__(
        self, source: ArraySource, recipe: ClassificationRecipe, preprocessing: Preprocessing, process: Process
    ) -> None:
        _check_in_memory(recipe)
        self._recipe = recipe
        self._preprocessing = preprocessing
        self._batching = recipe.batching(process)
        self.batches_per_epoch = self._batching.micro_batches(len(source))
        self._source = source
        self._labels = torch.from_numpy(source.labels)
        self._images = _resized_images(source.images, recipe, preprocessing)
        self._augment = BatchAugmentation(preprocessing.size, recipe.batch_size, recipe.hflip, recipe.erase)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        recipe = self._recipe
        order = _order(self._source, recipe, epoch)
        for index in range(start, self.batches_per_epoch):
            positions = self._batching.positions(index)
            samples = order[positions.start : positions.stop]
            step, first = divmod(positions.start, recipe.batch_size)
            part = slice(first, first + len(positions))
            seed = derive_seed(recipe.seed, "augment", epoch, step)
            crops = self._augment.crop(self._images, samples, seed, part)
            yield self._augment.erase(self._preprocessing.normalise(crops), seed, part), self._labels[samples]


def _check_in_memory(recipe: ClassificationRecipe) -> None:
    if recipe.crop == "random_resized":
        raise ValueError("in_memory cannot crop 'random_resized'; use crop random, pad or none, or in_memory false")
    if recipe.auto_augment or recipe.color_jitter:
        raise ValueError(
            "in_memory does not support colour augmentation; set auto_augment to null and color_jitter to 0, or "
            "in_memory to false"
        )


def _resized_images(arrays: np.ndarray, recipe: ClassificationRecipe, preprocessing: Preprocessing) -> Tensor:
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
