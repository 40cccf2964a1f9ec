"""A classifier as it is used after training: a checkpoint's model with the preprocessing that it was trained for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..checkpoint import load, load_info
from ..errors import CheckpointError, check_at_least
from ..model import VisionLongformer
from .preprocessing import Preprocessing, preprocessing
from .recipe import ClassificationRecipe


class Classifier(NamedTuple):
    """``named`` says whether the checkpoint knows its classes' names; otherwise they are called by their numbers."""

    model: VisionLongformer
    preprocessing: Preprocessing
    named: bool


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
