"""The model a run starts from: freshly drawn, or from a checkpoint fitted to the run's sizes and classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import yaml
from torch import Tensor

from ..checkpoint import load, load_info
from ..checkpoint.adapt import adapt_state
from ..errors import CheckpointError, unknown_name
from ..model import VisionLongformer
from ..training.randomness import derive, seeded
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
