"""Training and evaluation on a data set with random access."""

from __future__ import annotations

from collections.abc import Iterator

from PIL import Image
from torch import Tensor

from ...training.randomness import derive, seeded
from ..preprocessing import Preprocessing
from ..recipe import ClassificationRecipe
from .augment import image_augmentation
from .contract import Batch, DataError, Process
from .loading import UNREADABLE, BatchDataset, Loaded, batch_loader, loaded
from .order import Batching, epoch_order, eval_batch
from .source import Source

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
        self._batching = Batching.of(recipe, process)
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
