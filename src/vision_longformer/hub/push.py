"""Folders to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from torch import nn

from ..checkpoint.container import describe
from ..checkpoint.location import WEIGHTS, unreachable
from .folder import save_pretrained


def push_to_hub(source: nn.Module | str | Path, repo_id: str, *, private: bool = False, overwrite: bool = False) -> str:
    """Upload a folder of :func:`save_pretrained`, or a model, to ``owner/name``; returns its address.

    A repository that holds a model already is left alone unless ``overwrite``; the hub keeps what was there before.
    Who uploads is known from ``hf auth login`` or the variable HF_TOKEN.
    """
    if isinstance(source, nn.Module):
        with TemporaryDirectory() as temporary:
            folder = save_pretrained(source, Path(temporary) / repo_id.rpartition("/")[2])
            return push_to_hub(folder, repo_id, private=private, overwrite=overwrite)
    if not Path(source).is_dir():
        raise FileNotFoundError(f"there is no folder {source}; 'vil hub save CHECKPOINT {source}' makes one")
    describe(source)
    try:
        return _upload(Path(source), repo_id, private, overwrite)
    except HfHubHTTPError as error:
        why = error.server_message or str(error).splitlines()[0]
        raise PermissionError(f"the hub refused {repo_id} ({why}); 'hf auth login' lets you in") from error
    except (HTTPError, ConnectionError) as error:
        raise unreachable(f"and nothing was uploaded from {source}", error) from error


def _upload(folder: Path, repo_id: str, private: bool, overwrite: bool) -> str:
    api = HfApi()
    if not overwrite and api.file_exists(repo_id, WEIGHTS):
        raise FileExistsError(f"{repo_id} holds a model already; ask to overwrite it or give another name")
    address = api.create_repo(repo_id, private=private, exist_ok=True)
    api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Upload a Vision Longformer")
    return str(address)
