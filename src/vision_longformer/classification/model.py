"""Classifiers: the model that a run starts from, and a trained one with the preprocessing that it was trained for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor

from ..checkpoint import load, load_info
from ..data.randomness import derive_seed, seeded
from ..errors import CheckpointError, unknown_name
from ..models import VisionLongformer
from ..models.adapt import adapt_state
from ..models.config import size_pair
from .preprocessing import Preprocessing
from .recipe import ClassificationRecipe

logger = logging.getLogger(__name__)


def initial_model(recipe: ClassificationRecipe, classes: tuple[str, ...]) -> tuple[VisionLongformer, str]:
    """The model of a recipe for these classes, newly drawn or from a checkpoint, and what it starts from, in words."""
    with seeded(derive_seed(recipe.seed, "weights")):
        model = VisionLongformer(recipe.model_config(len(classes)))
    if recipe.init is None:
        return model, "random weights"
    source = load(recipe.init)
    state = source.state_dict()
    rows = _head_rows(recipe, source, classes)
    head = _head(state, model, rows)
    state, report = adapt_state({**state, **head}, model, recipe.table_resize, source.config.grids())
    model.load_state_dict(state)
    reused = sum(row is not None for row in rows)
    if report.resized:
        logger.info("%s", report)
    words = {0: "a new head", len(classes): "its head"}.get(reused, f"its head for {reused} of {len(classes)} classes")
    return model, f"{recipe.init}, with {words}"


def _head_rows(recipe: ClassificationRecipe, source: VisionLongformer, classes: tuple[str, ...]) -> list[int | None]:
    """For each class, its row in the checkpoint's head; None if it is not among the checkpoint's classes."""
    known = tuple(load_info(str(recipe.init)).get("preprocessing", {}).get("classes", ()))
    if recipe.class_map is not None:
        return _mapped_rows(Path(recipe.class_map), classes, known, source.num_classes)
    same = known == classes or (not known and source.num_classes == len(classes))
    return [index if same else None for index in range(len(classes))]


def _mapped_rows(path: Path, classes: tuple[str, ...], known: tuple[str, ...], count: int) -> list[int | None]:
    """The same by a file of ``class of the data: class of the checkpoint``, the latter by name or number."""
    try:
        mapping = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not readable as YAML or JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{path} should hold lines of 'class of the data: class of the checkpoint'")
    mapping = {str(name): value for name, value in mapping.items()}
    names = {name: index for index, name in enumerate(known)}
    for name in mapping:
        if name not in classes:
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
    """Weights of the model's head: ``rows`` from the checkpoint, the others as drawn."""
    head = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith("head.")}
    if any(name not in state for name in head):
        return head
    width, own_width = state["head.weight"].shape[1], head["head.weight"].shape[1]
    if width != own_width:
        raise CheckpointError(
            f"the checkpoint's last stage has {width} channels, the model {own_width}; use the same model"
        )
    new = [index for index, row in enumerate(rows) if row is not None]
    old = torch.tensor([row for row in rows if row is not None], dtype=torch.long)
    for name, tensor in head.items():
        tensor[new] = state[name][old].to(tensor.dtype)
    return head


class Classifier(NamedTuple):
    """A trained model; ``named`` says whether its classes have names in the checkpoint, or only numbers."""

    model: VisionLongformer
    preprocessing: Preprocessing
    named: bool


def load_classifier(checkpoint: str | Path, size: int | tuple[int, int] | None = None) -> Classifier:
    """The float32 model of a checkpoint in evaluation mode, for images of ``size`` (its own, if None).

    A checkpoint without preprocessing, such as one converted from the authors' release, gets ImageNet's.
    """
    model, preprocessing, named = load_encoder(checkpoint)
    if not model.num_classes:
        raise CheckpointError(f"{checkpoint} is not a classifier: its model has no classes, only features")
    if size is not None:
        preprocessing = replace(preprocessing, size=size_pair(size))
        model.config.grids(preprocessing.size)
    return Classifier(model, preprocessing, named)


def load_encoder(checkpoint: str | Path) -> Classifier:
    """The same for images of any size and for models that may have no classes, only features."""
    model = load(checkpoint).float()
    count = model.num_classes
    stored = load_info(checkpoint).get("preprocessing")
    if stored is None:
        preprocessing = Preprocessing.for_model(model.config, [str(number) for number in range(count)])
    else:
        preprocessing = Preprocessing.from_dict(stored, str(checkpoint))
    if len(preprocessing.classes) != count:
        raise CheckpointError(f"{checkpoint} names {len(preprocessing.classes)} classes, but its model has {count}")
    return Classifier(model, preprocessing, named=stored is not None)
