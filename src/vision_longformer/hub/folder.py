"""A model as a folder, on this machine or on the Hugging Face Hub.

It holds ``model.safetensors``, ``config.json`` (also for timm) and a model card, ``README.md``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from torch import nn

from ..checkpoint import load, save
from ..checkpoint.native import DETECTOR, HUB, WEIGHTS, describe, unreachable, weights_file
from ..data.split import SPLIT_FILE
from ..models.vision_longformer import VisionLongformer
from .card import model_card, model_facts, run_facts


def save_pretrained(source: nn.Module | str | Path, folder: str | Path, *, license: str | None = None) -> Path:
    """Write a model to a new folder that appears whole or not at all.

    ``source`` is a model of ours, or a checkpoint, whose classes and preprocessing go along; if it is the best or last
    one of a run directory, the card describes the run, too, and the names of the images that it held out go along.
    ``license`` is the hub's name of one, such as ``"mit"``.
    """
    folder = Path(folder)
    with _new_folder(folder) as temporary:
        weights = temporary / WEIGHTS
        if isinstance(source, nn.Module):
            _save_model(source, weights)
            origin = weights
        else:
            origin = weights_file(source)
        description = describe(origin)  # before it is copied, so that an error names the source
        if origin != weights:
            shutil.copyfile(origin, weights)
            if (origin.parent / SPLIT_FILE).is_file():
                shutil.copyfile(origin.parent / SPLIT_FILE, temporary / SPLIT_FILE)
        model, run = model_facts(description), run_facts(origin, description.format)
        (temporary / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
        model_card(folder.name, model, run, license).save(temporary / "README.md")
    return folder


def from_pretrained(location: str | Path) -> nn.Module:
    """The classifier or detector, in evaluation mode, of a local folder or file, or of ``owner/name`` on the hub."""
    if not Path(location).exists() and not str(location).startswith(HUB):
        if str(location).count("/") != 1:
            raise FileNotFoundError(f"there is no folder {location}; give one, or OWNER/NAME of a model on the hub")
        location = f"{HUB}{location}"
    if describe(location).format == DETECTOR:
        from ..detection import load_detector

        return load_detector(location)
    return load(location)


def _save_model(model: nn.Module, path: Path) -> None:
    if isinstance(model, VisionLongformer):
        save(model, path)
    else:
        from ..detection import save_detector

        save_detector(model, path)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its name at the end; if anything fails, it vanishes."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists; give the name of a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as private:
        temporary = Path(private) / folder.name
        temporary.mkdir()
        yield temporary
        temporary.replace(folder)


def push_to_hub(source: nn.Module | str | Path, repo_id: str, *, private: bool = False, overwrite: bool = False) -> str:
    """Upload a folder of :func:`save_pretrained`, or a model, to ``owner/name``; returns its address.

    A repository that holds a model already is left alone unless ``overwrite``; the hub keeps what was there before.
    The names of images in ``split.json`` are not uploaded. Who uploads is known from ``hf auth login`` or the variable
    HF_TOKEN.
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
        raise PermissionError(f"the hub refused {repo_id} ({why}); log in with 'hf auth login'") from error
    except (HTTPError, ConnectionError) as error:
        raise unreachable(f"and nothing was uploaded from {source}", error) from error


def _upload(folder: Path, repo_id: str, private: bool, overwrite: bool) -> str:
    api = HfApi()
    if not overwrite and api.file_exists(repo_id, WEIGHTS):
        raise FileExistsError(f"{repo_id} holds a model already; ask to overwrite it or give another name")
    address = api.create_repo(repo_id, private=private, exist_ok=True)
    message = "Upload a Vision Longformer"
    api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message=message, ignore_patterns=SPLIT_FILE)
    return str(address)
