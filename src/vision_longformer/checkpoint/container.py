"""The container of our files: safetensors with a format, a configuration and information as JSON in the header."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError
from ..files import written_whole

CLASSIFIER, DETECTOR = "vision_longformer/1", "vision_longformer_detector/1"

READERS = {
    CLASSIFIER: "a classifier, which vision_longformer.load reads",
    DETECTOR: "a detector, which load_detector reads",
}
"""What a file of each format is."""


def write(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    format: str,
    config: Mapping[str, Any],
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a file (``.safetensors``) that appears whole or not at all."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path.name} should end in .safetensors")
    metadata = {"format": format, "config": json.dumps(config), "info": json.dumps(info or {})}
    copies = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    with written_whole(path, overwrite=overwrite) as temporary:
        save_file(copies, temporary, metadata)
    return path


def read(path: str | Path, format: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a file of this format."""
    path = Path(path)
    with _opened(path, format) as file:
        config = _json(path, file.metadata(), "config", "configuration")
        return config, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_info(path: str | Path, format: str) -> dict[str, Any]:
    """What :func:`write` was given as ``info``."""
    path = Path(path)
    with _opened(path, format) as file:
        return _json(path, {"info": "{}", **file.metadata()}, "info", "information about its weights")


@contextmanager
def _opened(path: Path, format: str) -> Iterator[Any]:
    """A file of this format, open; others are refused by what they are."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("format", "")
            if found != format:
                what = READERS.get(found, "a safetensors file, but not one of ours")
                wanted = READERS[format].partition(",")[0]
                raise CheckpointError(f"{path} is {what}; {wanted} was asked for, and nothing was loaded")
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); nothing was loaded") from error


def _json(path: Path, metadata: Mapping[str, str], key: str, what: str) -> dict[str, Any]:
    try:
        return dict(json.loads(metadata[key]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no readable {what} ({error}); nothing was loaded") from error
