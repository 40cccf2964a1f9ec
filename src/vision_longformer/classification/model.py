"""The model a run starts from: freshly drawn, or from a checkpoint fitted to the run's sizes and classes.

A classifier as it is used after training: a model with the preprocessing that it was trained for.

It comes from a checkpoint or from a file that was exported, and is used alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor

from ..checkpoint import load, load_info
from ..data.randomness import derive, seeded
from ..errors import CheckpointError, check_at_least, unknown_name
from ..export.runtime import ExportedModel, is_exported, load_exported
from ..models import VisionLongformer
from ..models.adapt import adapt_state
from .preprocessing import Preprocessing, preprocessing
from .recipe import ClassificationRecipe


def initial_model(recipe: ClassificationRecipe, classes: tuple[str, ...]) -> tuple[VisionLongformer, str]:
    """The model of a recipe for these classes, and a report of what a checkpoint was changed in on the way."""
    with seeded(derive(recipe.seed, "weights")):
        model = VisionLongformer(recipe.model_config(len(classes)))
    if recipe.init is None:
        return model, ""
    source = load(recipe.init)
    state = source.state_dict()
    head = _head(state, model, _head_rows(recipe, source, classes))
    state, report = adapt_state({**state, **head}, model, recipe.table_resize, source.config.grids())
    model.load_state_dict(state)
    kept = sum(row is not None for row in _head_rows(recipe, source, classes))
    return model, f"{report}\nhead: {kept} of {len(classes)} classes from the checkpoint, the others new"


def _head_rows(recipe: ClassificationRecipe, source: VisionLongformer, classes: tuple[str, ...]) -> list[int | None]:
    """For each class, the row of the checkpoint's head that knows it."""
    known = tuple(load_info(str(recipe.init)).get("preprocessing", {}).get("classes", ()))
    if recipe.class_map is not None:
        return _mapped_rows(Path(recipe.class_map), classes, known, source.num_classes)
    same = known == classes or (not known and source.num_classes == len(classes))
    return [index if same else None for index in range(len(classes))]


def _mapped_rows(path: Path, classes: tuple[str, ...], known: tuple[str, ...], count: int) -> list[int | None]:
    """By a file of ``class of the data: class of the checkpoint``, the latter by name or number."""
    try:
        mapping = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not readable as YAML or JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{path} should hold lines of 'class of the data: class of the checkpoint'")
    names = {name: index for index, name in enumerate(known)}
    for name in mapping:
        if str(name) not in classes:
            raise unknown_name(f"class of the data in {path},", name, classes)
    rows: list[int | None] = []
    for name in classes:
        value = mapping.get(name)
        row = names.get(value, value) if value is not None else None
        if row is not None and not (isinstance(row, int) and 0 <= row < count):
            raise unknown_name(f"class of the checkpoint in {path},", value, known or (f"0 to {count - 1}",))
        rows.append(row)
    return rows


def _head(state: Mapping[str, Tensor], model: VisionLongformer, rows: list[int | None]) -> dict[str, Tensor]:
    """Weights of the head: known rows from the checkpoint, the others as drawn."""
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith("head.")}
    if any(name not in state for name in wanted):
        return wanted
    width = state["head.weight"].shape[1]
    if width != wanted["head.weight"].shape[1]:
        raise CheckpointError(
            f"the checkpoint's last stage has {width} channels, the model {wanted['head.weight'].shape[1]}; use the "
            "same model"
        )
    new = [index for index, row in enumerate(rows) if row is not None]
    old = torch.tensor([row for row in rows if row is not None], dtype=torch.long)
    for name, tensor in wanted.items():
        tensor[new] = state[name][old].to(tensor.dtype)
    return wanted


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
