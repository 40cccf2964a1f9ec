"""Where a checkpoint is: a file, a folder of :mod:`vision_longformer.hub`, or a model on the Hugging Face Hub."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

WEIGHTS = "model.safetensors"
"""The file of a folder that holds the weights."""

HUB = "hf-hub:"
"""What a location on the hub begins with, as in ``hf-hub:owner/name`` or ``hf-hub:owner/name@revision``."""

TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer."""


def weights_file(location: str | Path) -> Path:
    """The local file of a checkpoint, downloaded if it is on the hub and newer there than in the hub's cache."""
    if str(location).startswith(HUB):
        return _from_hub(str(location).removeprefix(HUB))
    path = Path(location)
    if path.is_dir():
        if not (path / WEIGHTS).is_file():
            raise FileNotFoundError(
                f"the folder {path} has no {WEIGHTS}; give a .safetensors file or a folder that 'vil hub save' wrote"
            )
        return path / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return path


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
        raise FileNotFoundError(f"the hub has no model {name}, or not for you; 'hf auth login' lets you in") from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"{name} on the hub has no {WEIGHTS}, so it is no model of ours") from error
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
