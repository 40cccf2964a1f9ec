"""A model as a folder: ``model.safetensors``, ``config.json`` (also for timm) and a model card, ``README.md``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from ..checkpoint import load, save
from ..checkpoint.container import DETECTOR, describe
from ..checkpoint.location import HUB, WEIGHTS, weights_file
from ..model import VisionLongformer
from .about import about
from .card import model_card
from .run_facts import run_facts


def save_pretrained(source: nn.Module | str | Path, folder: str | Path, *, license: str | None = None) -> Path:
    """Write a model to a new folder that appears whole or not at all.

    ``source`` is a model of ours, or a checkpoint, whose classes and preprocessing go along; if it is the best or last
    one of a run directory, the card tells of the run, too. ``license`` is the hub's name of one, such as ``"mit"``.
    """
    folder = Path(folder)
    with _new_folder(folder) as temporary:
        weights = temporary / WEIGHTS
        if isinstance(source, nn.Module):
            _save_model(source, weights)
            origin = weights
        else:
            origin = weights_file(source)
            shutil.copyfile(origin, weights)
        description = describe(weights)
        model = about(description)
        (temporary / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
        model_card(folder.name, model, run_facts(origin, description.format), license).save(temporary / "README.md")
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
