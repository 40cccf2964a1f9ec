"""Two files of one classifier on the same images: size, speed, accuracy, and how often they disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

from torch import Tensor

from ..classification.classifier import ExportedClassifier, load_exported_classifier
from ..classification.data import EvalData, class_names, eval_data
from ..classification.metrics import Result, Score
from ..classification.recipe import ClassificationRecipe
from .checked import Tell


@dataclass(frozen=True)
class Measured:
    """A file: its length, the median time of an image over all batches, and how good it is."""

    path: Path
    bytes: int
    seconds: float
    result: Result


@dataclass(frozen=True)
class Comparison:
    """Two files, and for how many images they name different classes."""

    before: Measured
    after: Measured
    changed: int


def compare_files(
    before: str | Path,
    after: str | Path,
    data: str,
    split: str = "validation",
    *,
    batch_size: int = 64,
    workers: int = 2,
    tell: Tell | None = None,
) -> Comparison:
    """Run both files on each batch of the ``split`` of ``data``, in turns, so that the machine is equally busy."""
    recipe = ClassificationRecipe(data=data, eval_split=split, eval_batch_size=batch_size, workers=workers)
    classifiers = [load_exported_classifier(path) for path in (before, after)]
    images = _images(classifiers[0], recipe)
    runs = [_Run(classifier, len(images.classes)) for classifier in classifiers]
    changed = done = 0
    for batch, labels in images.batches():
        if not done:
            for run in runs:
                run.model(batch)  # the first call is slower
        named = [run.add(batch, labels) for run in (runs if done % 2 else runs[::-1])]
        changed += int((named[0] != named[1]).sum())
        done += len(labels)
        if tell is not None:
            tell(done, images.size)
    if not done:
        raise ValueError(f"there are no images in the {split} split of {data}")
    first, second = (run.measured(Path(path)) for run, path in zip(runs, (before, after), strict=True))
    return Comparison(first, second, changed)


def _images(classifier: ExportedClassifier, recipe: ClassificationRecipe) -> EvalData:
    """The evaluation images, prepared for the classifier; one without names takes those of the data."""
    preprocessing = classifier.preprocessing
    if not classifier.named:
        own = replace(recipe, train_split=recipe.eval_split, num_classes=len(preprocessing.classes))
        preprocessing = replace(preprocessing, classes=class_names(own))
    return eval_data(recipe, preprocessing)


class _Run:
    """What one file has done so far."""

    def __init__(self, classifier: ExportedClassifier, classes: int) -> None:
        self.model: Callable[[Tensor], Tensor] = classifier.model
        self._score = Score(classes, "cpu")
        self._seconds: list[float] = []

    def add(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run on a batch; the class of each image, (b,)."""
        start = perf_counter()
        logits = self.model(images)
        self._seconds.append((perf_counter() - start) / len(images))
        self._score.add(logits, labels)
        return logits.argmax(1)

    def measured(self, path: Path) -> Measured:
        return Measured(path, path.stat().st_size, median(self._seconds), self._score.result())
