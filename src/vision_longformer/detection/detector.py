"""A detector as it is used after training: a checkpoint's model with the names of what it finds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import nn

from ..errors import CheckpointError
from ..export.loaded import is_exported
from .checkpoint import load_detector, load_detector_info
from .config import DetectorConfig
from .dataset import Category
from .exported import load_exported_detector


class Detector(NamedTuple):
    """``named`` says whether the checkpoint knows its categories; otherwise they are called by their numbers."""

    model: nn.Module
    config: DetectorConfig
    categories: tuple[Category, ...]
    named: bool


def load_named(checkpoint: str | Path) -> Detector:
    """The detector of a checkpoint, or of a file exported from one, in evaluation mode."""
    model: nn.Module
    if is_exported(checkpoint):
        model = load_exported_detector(checkpoint)
        stored = model.metadata.get("categories") if model.metadata.get("named", True) else None
    else:
        model = load_detector(checkpoint)
        stored = load_detector_info(checkpoint).get("categories")
    config = model.config
    assert isinstance(config, DetectorConfig)
    count = config.num_classes
    if stored is None:
        return Detector(model, config, tuple(Category(number, str(number)) for number in range(1, count + 1)), False)
    try:
        categories = tuple(Category(int(category["id"]), str(category["name"])) for category in stored)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} names categories without id and name: {stored}") from error
    if len(categories) != count:
        raise CheckpointError(f"{checkpoint} names {len(categories)} categories, but its detector tells {count} apart")
    return Detector(model, config, categories, True)
