"""Our own files: safetensors with a model's configuration, and information about its weights, as JSON in the header.

:func:`save` and :func:`load` are for classifiers; :func:`write` and :func:`read` for models with a format of their own.
A file may lie by itself, in a folder of :mod:`vision_longformer.hub`, or on the Hugging Face Hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError
from ..files import atomic_write, suggest_path
from ..models.config import ModelConfig
from ..models.vision_longformer import VisionLongformer
from ..models.zoo import SHIPPED

CLASSIFIER, DETECTOR = "vision_longformer/1", "vision_longformer_detector/1"

READERS = {
    CLASSIFIER: "a classifier, which is for 'vil predict' and 'vil evaluate'",
    DETECTOR: "a detector, which is for 'vil detect predict' and 'vil detect evaluate'",
}
"""What a file of each format is."""

WEIGHTS = "model.safetensors"
"""The file of a folder that holds the weights."""

BEST = "best.safetensors"
"""The best checkpoint of a run directory."""

EXPORTED = (".onnx", ".pt2", ".xml")
"""How the names of files from 'vil export' end, which hold a graph instead of a checkpoint."""

HUB = "hf-hub:"
"""What a location on the hub begins with, as in ``hf-hub:owner/name`` or ``hf-hub:owner/name@revision``."""

TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer."""


# Classifiers


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

    It has the file's dtype, but for float16, which only keeps files small: such weights are loaded as float32.
    ``path`` may also be a folder of :mod:`vision_longformer.hub`, or ``hf-hub:owner/name`` on the Hugging Face Hub.
    """
    data, state = read(path, CLASSIFIER)
    try:
        config = ModelConfig.from_dict(data)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no readable configuration ({error}); nothing was loaded") from error
    model = VisionLongformer(config)
    try:
        stored = next(iter(state.values())).dtype
        model.to(torch.float32 if stored == torch.float16 else stored).load_state_dict(state)
    except (RuntimeError, StopIteration) as error:
        raise CheckpointError(f"{path} does not hold the weights its configuration describes: {error}") from error
    return model.eval()


def load_info(path: str | Path) -> dict[str, Any]:
    """What :func:`save` was given as ``info``."""
    return read_info(path, CLASSIFIER)


# Files of any format


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
    with atomic_write(path, overwrite=overwrite) as temporary:
        save_file(copies, temporary, metadata)
    return path


def read(path: str | Path, format: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a file of this format."""
    with _opened(path, format) as file:
        return _config(path, file), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_config(path: str | Path, format: str) -> dict[str, Any]:
    """The configuration of a file of this format, without its tensors."""
    with _opened(path, format) as file:
        return _config(path, file)


def read_info(path: str | Path, format: str) -> dict[str, Any]:
    """What :func:`write` was given as ``info``."""
    with _opened(path, format) as file:
        return _info(path, file)


class Description(NamedTuple):
    """What a file says of itself: its format, the configuration of its model, information about its weights."""

    format: str
    config: dict[str, Any]
    info: dict[str, Any]


def describe(path: str | Path) -> Description:
    """What a file of any format of ours says of itself."""
    with _opened(path, *READERS) as file:
        return Description(file.metadata()["format"], _config(path, file), _info(path, file))


@contextmanager
def _opened(location: str | Path, *formats: str) -> Iterator[Any]:
    """A file of one of these formats, open; others are refused by what they are."""
    path = weights_file(location)
    if path.suffix in EXPORTED:
        raise CheckpointError(
            f"{path} is an exported file, as its name says; a checkpoint is needed here; give the .safetensors file or "
            "run directory that it was exported from; nothing was loaded"
        )
    try:
        with safe_open(path, framework="pt") as file:
            format = (file.metadata() or {}).get("format", "")
            if format not in formats:
                what = READERS.get(format, "a safetensors file, but not one of ours")
                wanted = " or ".join(READERS[wanted].partition(",")[0] for wanted in formats)
                raise CheckpointError(f"{path} is {what}; {wanted} is needed here; nothing was loaded")
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a valid safetensors file ({error}); nothing was loaded") from error


def _config(path: str | Path, file: Any) -> dict[str, Any]:
    return _json(path, file.metadata(), "config", "configuration")


def _info(path: str | Path, file: Any) -> dict[str, Any]:
    return _json(path, {"info": "{}", **file.metadata()}, "info", "information about its weights")


def _json(path: str | Path, metadata: Mapping[str, str], key: str, what: str) -> dict[str, Any]:
    try:
        return dict(json.loads(metadata[key]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no readable {what} ({error}); nothing was loaded") from error


# Where a file is


def resolve_checkpoint(path: str | Path) -> Path:
    """The best checkpoint of a run directory, where ``path`` is one; any other path as it is."""
    path = Path(path)
    return path / BEST if (path / BEST).is_file() else path


def weights_file(location: str | Path) -> Path:
    """The local file of a checkpoint, downloaded if it is on the hub and newer there than in the hub's cache.

    A name of built-in weights is theirs, unless there is a checkpoint of that name.
    """
    if str(location).startswith(HUB):
        return _from_hub(str(location).removeprefix(HUB))
    path = resolve_checkpoint(location)
    if path.is_dir() and (path / WEIGHTS).is_file():
        return path / WEIGHTS
    if path.is_file():
        return path
    if str(location) in shipped_weights():
        return SHIPPED / f"{location}.safetensors"
    if path.is_dir():
        raise FileNotFoundError(
            f"the folder {path} has neither {BEST} nor {WEIGHTS}; give a .safetensors file, a run directory that "
            "has been evaluated at least once, or a folder that 'vil hub save' wrote"
        )
    built_in = f"weights that are built in are {', '.join(shipped_weights())}"
    raise FileNotFoundError(f"there is no file or run directory {path}; {suggest_path(path) or built_in}")


def shipped_weights() -> list[str]:
    """Names of weights that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.safetensors"))


@cache
def _from_hub(name: str) -> Path:
    """Once per process, so that all that is read of a model is of one revision.

    Asking for the revision first fails at once without a network, where downloading would try for a minute.
    """
    repo, _, revision = name.partition("@")
    try:
        info = HfApi().model_info(repo, revision=revision or None, timeout=TIMEOUT)
        return Path(hf_hub_download(repo, WEIGHTS, revision=info.sha))
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise FileNotFoundError(
            f"the hub has no model {name}, or you have no access to it; log in with 'hf auth login'"
        ) from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"{name} on the hub has no {WEIGHTS}, so it is not a model of ours") from error
    except (HTTPError, OSError) as error:
        return _from_cache(repo, revision or None, error)


def _from_cache(repo: str, revision: str | None, reason: Exception) -> Path:
    """What an earlier download left behind."""
    path = try_to_load_from_cache(repo, WEIGHTS, revision=revision)
    if not isinstance(path, str):
        raise unreachable(f"and {repo} was not downloaded before", reason) from reason
    return Path(path)


def unreachable(consequence: str, reason: Exception) -> ConnectionError:
    """The error for a hub that does not answer."""
    why = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
    return ConnectionError(f"the Hugging Face Hub cannot be reached ({why}), {consequence}; use a local folder instead")
