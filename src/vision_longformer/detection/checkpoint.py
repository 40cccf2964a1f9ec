"""Detectors in files: weights, configuration and categories in one; and the weights of classifiers in backbones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..checkpoint import load
from ..checkpoint.native import DETECTOR, read, read_info, write
from ..errors import CheckpointError, check_choice
from ..models import VisionLongformer
from ..models.adapt import AdaptReport, adapt_state
from ..models.config import PAPER_TABLE_RESIZE
from .backbone import StageMaps
from .config import DetectorConfig
from .detections import Category
from .detectors import build_detector


def save_detector(
    model: nn.Module, path: str | Path, *, info: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Path:
    """Write a detector to ``path`` (``.safetensors``); ``info`` is JSON data such as names of categories."""
    config = _config(model).without_pretrained().to_dict()  # its weights are in the file
    return write(path, model.state_dict(), format=DETECTOR, config=config, info=info, overwrite=overwrite)


SETTINGS = ("min_size", "max_size", "scale", "proposals", "score_threshold", "nms_threshold", "detections")
"""Fields of a :class:`DetectorConfig` that say how a detector is used, and not what its weights are."""


def load_detector(path: str | Path, **settings: Any) -> nn.Module:
    """The detector of a file written by :func:`save_detector`, in evaluation mode.

    ``settings`` take the place of the file's: ``scale=1`` for images as they are, ``detections=1000`` for more objects
    per image; any of :data:`SETTINGS`.
    """
    for name in settings:
        check_choice("setting", name, SETTINGS)
    data, state = read(path, DETECTOR)
    try:
        config = DetectorConfig.from_dict(data)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no readable configuration ({error}); nothing was loaded") from error
    config = config.override(**settings)
    model = build_detector(config)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not hold the weights its configuration describes: {error}") from error
    return model.eval()


def load_detector_info(path: str | Path) -> dict[str, Any]:
    """What :func:`save_detector` was given as ``info``."""
    return read_info(path, DETECTOR)


class Detector(NamedTuple):
    """A detector and the categories of its labels.

    ``named`` says whether its file names them; otherwise they are called by their numbers.
    """

    model: nn.Module
    config: DetectorConfig
    categories: tuple[Category, ...]
    named: bool

    @classmethod
    def from_stored(cls, model: nn.Module, stored: Any, path: str | Path) -> Detector:
        """With the categories that the file at ``path`` states as ``id`` and ``name`` each; None if it states none."""
        config = _config(model)
        count = config.num_classes
        if stored is None:
            return cls(model, config, tuple(Category(number, str(number)) for number in range(1, count + 1)), False)
        try:
            categories = tuple(Category(int(category["id"]), str(category["name"])) for category in stored)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} names categories without id and name: {stored}") from error
        if len(categories) != count:
            raise CheckpointError(f"{path} names {len(categories)} categories, but its detector has {count}")
        return cls(model, config, categories, True)


def load_backbone(model: nn.Module, path: str | Path, table_resize: str = PAPER_TABLE_RESIZE) -> AdaptReport:
    """Put the weights of a classifier's file into a detector's backbone, and say what was resized.

    Full-attention stages become Longformer stages; relative-position tables change size by ``"bilinear"``, as in the
    paper, or by ``"offset"``; absolute embeddings are resized to the backbone's map. The classifier's norm and head
    are not used in a detector.
    """
    backbone = detector_backbone(model)
    source = load(path)
    wanted = backbone.state_dict()
    used = tuple(f"stages.{index}." for index in range(len(backbone.stages)))
    state = {name: tensor for name, tensor in source.state_dict().items() if name in wanted or name.startswith(used)}
    adapted, report = adapt_state(state, backbone, table_resize, source.config.grids())
    backbone.load_state_dict(adapted)
    return report


def freeze_stages(model: nn.Module, stages: int) -> None:
    """Keep the first ``stages`` of a detector's backbone as they are, patch embeddings included."""
    detector_backbone(model)  # refuses timm's
    body = model.get_submodule("backbone.body")
    assert isinstance(body, StageMaps)
    body.freeze(stages)


def detector_backbone(model: nn.Module) -> VisionLongformer:
    """The Vision Longformer inside a detector."""
    config, body = _config(model), model.get_submodule("backbone.body")
    if not isinstance(body, StageMaps):
        raise ValueError(f"the backbone {config.backbone} is timm's; this needs a detector on a backbone of ours")
    return body.model


def _config(model: nn.Module) -> DetectorConfig:
    config = getattr(model, "config", None)
    if not isinstance(config, DetectorConfig):
        raise ValueError(f"a {type(model).__name__} was not built by build_detector")
    return config
