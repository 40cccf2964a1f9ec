"""Our own files: safetensors with the model's configuration as JSON in the header, so that one file says it all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..config import ModelConfig
from ..errors import CheckpointError
from ..files import written_whole
from ..model import VisionLongformer

FORMAT = "vision_longformer/1"


def save(
    model: VisionLongformer, path: str | Path, *, info: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Path:
    """Write weights and configuration to ``path`` (``.safetensors``); the file appears whole or not at all.

    ``info`` is JSON data about them, such as names of classes, for :func:`load_info`.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path.name} should end in .safetensors")
    if len(model.stages) != len(model.config.stages):
        raise ValueError("this model was pruned for features and cannot be saved; save the whole one")
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}
    metadata = {"format": FORMAT, "config": json.dumps(model.config.to_dict()), "info": json.dumps(info or {})}
    with written_whole(path, overwrite=overwrite) as temporary:
        save_file(tensors, temporary, metadata)
    return path


def load(path: str | Path) -> VisionLongformer:
    """The model of a file written by :func:`save`, in evaluation mode."""
    path = Path(path)
    with _opened(path) as file:
        config = _config(path, file.metadata())
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = VisionLongformer(config)
    try:
        model.to(next(iter(state.values())).dtype).load_state_dict(state)
    except (RuntimeError, StopIteration) as error:
        raise CheckpointError(f"{path} does not hold the weights its configuration describes: {error}") from error
    return model.eval()


def load_info(path: str | Path) -> dict[str, Any]:
    """What :func:`save` was given as ``info``."""
    path = Path(path)
    with _opened(path) as file:
        try:
            return dict(json.loads(file.metadata().get("info", "{}")))
        except ValueError as error:
            raise CheckpointError(f"{path} holds unreadable information about its weights ({error})") from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of ours, open; others are refused."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                raise CheckpointError(
                    f"{path} is a safetensors file, but not one of ours; a released .pth file is read by load_release"
                )
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); nothing was loaded") from error


def _config(path: Path, metadata: dict[str, str]) -> ModelConfig:
    try:
        return ModelConfig.from_dict(json.loads(metadata["config"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no readable configuration ({error}); nothing was loaded") from error
