"""Classifiers in files: weights and configuration in one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import CheckpointError
from ..model import VisionLongformer
from .container import CLASSIFIER, read, read_info, write


def save(
    model: VisionLongformer, path: str | Path, *, info: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Path:
    """Write weights and configuration to ``path`` (``.safetensors``); the file appears whole or not at all.

    ``info`` is JSON data about them, such as names of classes, for :func:`load_info`.
    """
    if len(model.stages) != len(model.config.stages):
        raise ValueError("this model was pruned for features and cannot be saved; save the whole one")
    config = model.config.to_dict()
    return write(path, model.state_dict(), format=CLASSIFIER, config=config, info=info, overwrite=overwrite)


def load(path: str | Path) -> VisionLongformer:
    """The model of a file written by :func:`save`, in evaluation mode.

    ``path`` may also be a folder of :mod:`vision_longformer.hub`, or ``hf-hub:owner/name`` on the Hugging Face Hub.
    """
    data, state = read(path, CLASSIFIER)
    try:
        config = ModelConfig.from_dict(data)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no readable configuration ({error}); nothing was loaded") from error
    model = VisionLongformer(config)
    try:
        model.to(next(iter(state.values())).dtype).load_state_dict(state)
    except (RuntimeError, StopIteration) as error:
        raise CheckpointError(f"{path} does not hold the weights its configuration describes: {error}") from error
    return model.eval()


def load_info(path: str | Path) -> dict[str, Any]:
    """What :func:`save` was given as ``info``."""
    return read_info(path, CLASSIFIER)
