"""Training and evaluation on shards that are read as streams, for data too large to be listed.

Each worker of each process has shards of its own. Samples are decoded last, so that a resumed run passes quickly over
what it has seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any

from PIL import Image
from torch.utils.data import IterableDataset, get_worker_info

from ..data.images import ImageError, decode_image
from ..data.loading import UNREADABLE, USERS_MISTAKES, Batch, DataError, Loaded, batch_loader, loaded
from ..data.order import Batching, Process
from ..data.randomness import derive, seeded
from ..data.shards import Sample, count_samples, find_shards, shard_samples, shuffled
from .augment import image_augmentation
from .preprocessing import Preprocessing
from .recipe import ClassificationRecipe

SHUFFLED_AT_ONCE = 1000
"""Samples that wait in a worker's memory, as files, to be mixed with those that follow."""


def eval_batch(recipe: ClassificationRecipe, process: Process) -> int:
    """Samples that a process evaluates at once; nothing needs to be divisible here."""
    return recipe.eval_batch_size or max(1, recipe.batch_size // process.count // recipe.accumulate)


class Stream(IterableDataset[Any]):
    """Batches of a worker; users' mistakes are yielded, not raised, as :class:`BatchDataset` returns them."""

    def __iter__(self) -> Iterator[Loaded | Exception]:
        info = get_worker_info()
        try:
            yield from self._batches(*(0, 1) if info is None else (info.id, info.num_workers))
        except USERS_MISTAKES as error:
            yield error

    def _batches(self, worker: int, workers: int) -> Iterator[Loaded]:
        """The batches that worker number ``worker`` makes."""
        raise NotImplementedError


class StreamingTrainData:
    """:class:`TrainData` from shards; what is drawn depends on the numbers of processes and of workers.

    Worker w of n makes micro-batches w, w + n, … from its own shards, which it begins again should they not suffice.
    """

    def __init__(self, recipe: ClassificationRecipe, preprocessing: Preprocessing, process: Process) -> None:
        if recipe.num_images is None:
            raise ValueError(f"{recipe.data} is streamed and not counted; say how many images an epoch has: num_images")
        self.classes = preprocessing.classes
        self.skipped = 0
        self.shards = find_shards(recipe.data, recipe.train_split)
        self.recipe = recipe
        self.batching = Batching(recipe.batch_size, recipe.accumulate, process)
        self.augment = image_augmentation(recipe, preprocessing)
        self.batches_per_epoch = self.batching.micro_batches(recipe.num_images)
        readers = process.count * max(1, recipe.workers)
        if len(self.shards) < readers:
            raise ValueError(
                f"{recipe.data} has {len(self.shards)} shards, fewer than the {readers} workers of all processes; "
                "use fewer workers or more shards"
            )

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        stream = _TrainStream(self, epoch, range(start, self.batches_per_epoch))
        for images, labels, skipped in loaded(batch_loader(stream, None, self.recipe.workers)):
            self.skipped += skipped
            yield images, labels


class _TrainStream(Stream):
    """Micro-batches ``numbers`` of an epoch."""

    def __init__(self, data: StreamingTrainData, epoch: int, numbers: range) -> None:
        self._data = data
        self._epoch = epoch
        self._numbers = numbers

    def _batches(self, worker: int, workers: int) -> Iterator[Loaded]:
        numbers = self._numbers[worker::workers]
        before, role = divmod(numbers.start, workers)  # the worker that comes first need not be the one of batch 0
        process, size = self._data.batching.process, self._data.batching.micro_batch
        samples = self._samples(process.rank * workers + role, process.count * workers)
        samples = islice(samples, before * size, None)
        for number in numbers:
            yield self._augmented(list(islice(samples, size)), self._data.batching.positions(number))

    def _samples(self, reader: int, readers: int) -> Iterator[Sample]:
        """An endless stream: the reader's share of the shards, shuffled, again and again."""
        seed = self._data.recipe.seed
        shards = list(self._data.shards)
        random.Random(derive(seed, "shards", self._epoch)).shuffle(shards)
        own = shards[reader::readers]
        generator = random.Random(derive(seed, "samples", self._epoch, reader))
        found = True
        while found:
            found = False
            stream = (sample for shard in own for sample in shard_samples(shard, len(self._data.classes)))
            for sample in shuffled(stream, generator, SHUFFLED_AT_ONCE):
                found = True
                yield sample
        raise DataError(f"there are no samples in {', '.join(own)}")

    def _augmented(self, samples: list[Sample], positions: range) -> Loaded:
        """A batch; a bad image, if such are skipped, is replaced by the next good one of the batch.

        Not by one of the stream, which would have to be decoded from its beginning to find out where it is.
        """
        recipe = self._data.recipe
        images = (_decoded(sample, recipe.skip_bad_images) for sample in samples)
        good = {place: image for place, image in enumerate(images) if image is not None}
        if not good:
            raise ImageError(f"none of the {len(samples)} images from {samples[0].name} on can be read")
        made = []
        for place, position in enumerate(positions):
            shown = next((other for other in good if other >= place), min(good))
            with seeded(derive(recipe.seed, "augment", self._epoch, position)):
                made.append((self._data.augment(good[shown]), samples[shown].label))
        return Loaded.of(made, len(samples) - len(good))


class StreamingEvalData:
    """:class:`EvalData` from shards."""

    def __init__(self, recipe: ClassificationRecipe, preprocessing: Preprocessing, process: Process) -> None:
        self.classes = preprocessing.classes
        self.skipped = 0
        self._shards = find_shards(recipe.data, recipe.eval_split)
        self._loader = batch_loader(_EvalStream(self._shards, recipe, preprocessing, process), None, recipe.workers)

    @cached_property
    def size(self) -> int:
        return sum(map(count_samples, self._shards))

    def batches(self) -> Iterator[Batch]:
        self.skipped = 0
        for images, labels, skipped in loaded(self._loader):
            self.skipped += skipped
            if len(labels):
                yield images, labels


class _EvalStream(Stream):
    """All samples of a worker's shards in order."""

    def __init__(
        self, shards: list[str], recipe: ClassificationRecipe, preprocessing: Preprocessing, process: Process
    ) -> None:
        self._shards = shards
        self._batch = eval_batch(recipe, process)
        self._skip_bad = recipe.skip_bad_images
        self._transform = preprocessing.transform()
        self._num_classes = len(preprocessing.classes)
        self._process = process

    def _batches(self, worker: int, workers: int) -> Iterator[Loaded]:
        own = self._shards[self._process.rank * workers + worker :: self._process.count * workers]
        samples = (sample for shard in own for sample in shard_samples(shard, self._num_classes))
        while batch := list(islice(samples, self._batch)):
            images = [(_decoded(sample, self._skip_bad), sample.label) for sample in batch]
            made = [(self._transform(image), label) for image, label in images if image is not None]
            yield Loaded.of(made, len(images) - len(made))


def _decoded(sample: Sample, skip_bad: bool) -> Image.Image | None:
    """The image; None if it cannot be read and such are skipped."""
    try:
        return decode_image(sample.image, sample.name)
    except UNREADABLE:
        if not skip_bad:
            raise
        return None
