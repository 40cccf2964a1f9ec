"""A classifier as it is used after training: a model with the preprocessing that it was trained for.

It comes from a checkpoint or from a file that was exported, and is used alike.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..checkpoint import load, load_info
from ..errors import CheckpointError, check_at_least
from ..export.loaded import ExportedModel, is_exported, load_exported
from ..model import VisionLongformer
from .preprocessing import Preprocessing, preprocessing
from .recipe import ClassificationRecipe


class Classifier(NamedTuple):
    """``named`` says whether the checkpoint knows its classes' names; otherwise they are called by their numbers."""

    model: VisionLongformer
    preprocessing: Preprocessing
    named: bool


class ExportedClassifier(NamedTuple):
    """As :class:`Classifier`, of an exported file."""

    model: ExportedModel
    preprocessing: Preprocessing
    named: bool


def open_classifier(path: str | Path, size: int | None = None) -> Classifier | ExportedClassifier:
    """The classifier of a checkpoint or of an exported file (``.onnx``, ``.pt2``)."""
    return load_exported_classifier(path, size) if is_exported(path) else load_classifier(path, size)


def load_classifier(checkpoint: str | Path, size: int | None = None) -> Classifier:
    """The float32 model of a checkpoint in evaluation mode, for square images of ``size`` (its own, if None).

    A checkpoint without preprocessing, such as one converted from the authors' release, gets ImageNet's.
    """
    model = load(checkpoint).float()
    count = model.num_classes
    if not count:
        raise CheckpointError(f"{checkpoint} is no classifier: its model has no classes, only features")
    stored = load_info(checkpoint).get("preprocessing")
    if stored is None:
        prepare = preprocessing(ClassificationRecipe(), model.config, tuple(map(str, range(count))))
    else:
        prepare = Preprocessing.from_dict(stored, str(checkpoint))
    if len(prepare.classes) != count:
        raise CheckpointError(f"{checkpoint} names {len(prepare.classes)} classes, but its model has {count}")
    if size is not None:
        check_at_least("size", size, 1)
        model.config.grids((size, size))
        prepare = replace(prepare, size=(size, size))
    return Classifier(model, prepare, named=stored is not None)


def load_exported_classifier(path: str | Path, size: int | None = None) -> ExportedClassifier:
    """The classifier of an exported file; one that was exported for a fixed size takes no other ``size``."""
    model = load_exported(path)
    data = model.metadata
    if data["kind"] != "classifier":
        raise CheckpointError(f"{path} is an exported {data['kind']}; a classifier was asked for")
    prepare = Preprocessing.from_dict(data, str(path))
    if size is not None:
        check_at_least("size", size, 1)
        if not data["dynamic"] and (size, size) != prepare.size:
            height, width = prepare.size
            raise ValueError(f"{path} takes images of {height}×{width} only; export with --dynamic for other sizes")
        model.config.grids((size, size))
        prepare = replace(prepare, size=(size, size))
    return ExportedClassifier(model, prepare, data.get("named", True))
