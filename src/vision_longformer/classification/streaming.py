"""Training and evaluation sets from shards that are read as streams, for data too large to be listed.

Each worker of each process has shards of its own. Samples are decoded last, so that a resumed run quickly skips what it
has seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import islice

from PIL import Image

from ..data.images import ImageError, decode_image
from ..data.loading import UNREADABLE, Batch, DataError, LabelledBatch, StreamLoader
from ..data.order import Process
from ..data.randomness import derive_seed, seeded
from ..data.shards import Sample, ShardSource, shuffled
from ..geometry import ceil_div
from .augment import image_augmentation
from .preprocessing import Preprocessing
from .recipe import ClassificationRecipe

SHUFFLE_BUFFER = 1000
"""Samples that wait in a worker's memory, as files, to be mixed with those that follow."""


class StreamingTrainSet:
    """Training images from shards; what is drawn depends on the numbers of processes and of workers.

    Worker w of n makes micro-batches w, w + n, … from its own shards, which it begins again should they not suffice.
    """

    def __init__(
        self, source: ShardSource, recipe: ClassificationRecipe, preprocessing: Preprocessing, process: Process
    ) -> None:
        if recipe.num_images is None:
            raise ValueError(f"{recipe.data} is streamed and not counted; set num_images to the images per epoch")
        self.skipped: set[str] = set()
        self._source, self._recipe = source, recipe
        self._batching = recipe.batching(process)
        self._augment = image_augmentation(recipe, preprocessing)
        self.batches_per_epoch = self._batching.micro_batches(recipe.num_images)
        readers = process.count * max(1, recipe.workers)
        if len(source.paths) < readers:
            raise ValueError(
                f"{recipe.data} has {len(source.paths)} shards, fewer than the {readers} workers of all processes; "
                "use fewer workers or more shards"
            )

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        stream = partial(self._stream, epoch, range(start, self.batches_per_epoch))
        for images, labels, skipped in StreamLoader(stream, self._recipe.workers):
            self.skipped.update(skipped)
            yield images, labels

    def _stream(self, epoch: int, indices: range, worker: int, workers: int) -> Iterator[LabelledBatch]:
        """Those of the micro-batches ``indices`` that a worker makes."""
        own = indices[worker::workers]
        role = own.start % workers  # the worker that comes first need not be the one of micro-batch 0
        process, positions = self._batching.process, self._batching.positions
        samples = self._samples(epoch, process.rank * workers + role, process.count * workers)
        samples = islice(samples, sum(len(positions(index)) for index in range(role, own.start, workers)), None)
        for index in own:
            yield self._augmented(list(islice(samples, len(positions(index)))), epoch, positions(index))

    def _samples(self, epoch: int, reader: int, readers: int) -> Iterator[Sample]:
        """An endless stream: the reader's share of the shards, shuffled, again and again."""
        seed = self._recipe.seed
        paths = list(self._source.paths)
        random.Random(derive_seed(seed, "shards", epoch)).shuffle(paths)
        own = paths[reader::readers]
        generator = random.Random(derive_seed(seed, "samples", epoch, reader))
        empty = False
        while not empty:
            empty = True
            for sample in shuffled(self._source.samples(own), generator, SHUFFLE_BUFFER):
                empty = False
                yield sample
        raise DataError(f"there are no samples in {', '.join(own)}")

    def _augmented(self, samples: list[Sample], epoch: int, positions: range) -> LabelledBatch:
        """A batch; a bad image, if such are skipped, is replaced by the next good one of the batch.

        Not by the next of the stream: a resumed run would have to decode all samples before it to know which that is.
        """
        recipe = self._recipe
        images = [_decode(sample, recipe.skip_bad_images) for sample in samples]
        good = {index: image for index, image in enumerate(images) if image is not None}
        if not good:
            raise ImageError(f"none of the {len(samples)} images from {samples[0].name} on can be read")
        batch = []
        for index, position in enumerate(positions):
            chosen = next((other for other in good if other >= index), min(good))
            with seeded(derive_seed(recipe.seed, "augment", epoch, position)):
                batch.append((self._augment(good[chosen]), samples[chosen].label))
        return LabelledBatch.collate(batch, _bad_names(samples, images))


class StreamingEvalSet:
    """A process's share of the shards to evaluate on, each read once and in order."""

    def __init__(
        self,
        source: ShardSource,
        preprocessing: Preprocessing,
        batch_size: int,
        workers: int,
        skip_bad_images: bool,
        process: Process,
    ) -> None:
        self.classes = source.classes
        self.shape = preprocessing.shape
        self.skipped: list[str] = []
        self._source, self._batch_size, self._workers, self._process = source, batch_size, workers, process
        self._skip_bad_images = skip_bad_images
        self._transform = preprocessing.transform()

    @cached_property
    def size(self) -> int:
        return self._source.count_samples()

    def batches(self) -> Iterator[Batch]:
        self.skipped = []
        for images, labels, skipped in StreamLoader(self._stream, self._workers):
            self.skipped += skipped
            if len(labels):
                yield images, labels

    def examples(self, count: int) -> Batch:
        """The first images of shards far apart."""
        paths = self._source.paths[:: max(1, len(self._source.paths) // count)][:count]
        each = ceil_div(count, len(paths))
        firsts = [sample for path in paths for sample in islice(self._source.samples([path]), each)]
        images, labels, _ = self._prepared(firsts[:count])
        return images, labels

    def _stream(self, worker: int, workers: int) -> Iterator[LabelledBatch]:
        """The batches that a worker makes of its own shards."""
        own = self._source.paths[self._process.rank * workers + worker :: self._process.count * workers]
        samples = self._source.samples(own)
        while batch := list(islice(samples, self._batch_size)):
            yield self._prepared(batch)

    def _prepared(self, samples: list[Sample]) -> LabelledBatch:
        images = [_decode(sample, self._skip_bad_images) for sample in samples]
        pairs = zip(images, samples, strict=True)
        good = [(self._transform(image), sample.label) for image, sample in pairs if image is not None]
        return LabelledBatch.collate(good, _bad_names(samples, images))


def _decode(sample: Sample, skip_bad_images: bool) -> Image.Image | None:
    """The image; None if it cannot be read and such are skipped."""
    try:
        return decode_image(sample.image, sample.name)
    except UNREADABLE:
        if not skip_bad_images:
            raise
        return None


def _bad_names(samples: Sequence[Sample], images: Sequence[Image.Image | None]) -> list[str]:
    """Names of the samples whose image could not be read."""
    return [sample.name for sample, image in zip(samples, images, strict=True) if image is None]
