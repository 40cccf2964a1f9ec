"""Our own files: safetensors with the model's configuration as JSON in the header, so that one file says it all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..config import ModelConfig
from ..errors import CheckpointError
from ..model import VisionLongformer

FORMAT = "vision_longformer/1"


def save(model: VisionLongformer, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write weights and configuration to ``path`` (``.safetensors``); the file appears whole or not at all."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path.name} should end in .safetensors")
    if len(model.stages) != len(model.config.stages):
        raise ValueError("this model was pruned for features and cannot be saved; save the whole one")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; give another name or ask to overwrite it")
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}
    metadata = {"format": FORMAT, "config": json.dumps(model.config.to_dict())}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def load(path: str | Path) -> VisionLongformer:
    """The model of a file written by :func:`save`, in evaluation mode."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(
                    f"{path} is a safetensors file, but not one of ours; a released .pth file is read by load_release"
                )
            config = _config(path, metadata)
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); nothing was loaded") from error
    model = VisionLongformer(config)
    try:
        model.to(next(iter(state.values())).dtype).load_state_dict(state)
    except (RuntimeError, StopIteration) as error:
        raise CheckpointError(f"{path} does not hold the weights its configuration describes: {error}") from error
    return model.eval()


def _config(path: Path, metadata: dict[str, str]) -> ModelConfig:
    try:
        return ModelConfig.from_dict(json.loads(metadata["config"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no readable configuration ({error}); nothing was loaded") from error


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
