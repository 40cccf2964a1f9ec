"""A run on disk: its recipe, environment, metrics and checkpoints, safe against crashes and against each other."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import CheckpointError
from ..files import written_whole

RECIPE, ENVIRONMENT, METRICS = "recipe.yaml", "environment.json", "metrics.jsonl"


class RunDirectory:
    """The files of one run. A checkpoint is one file per step; the previous one goes when the next one is safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, recipe: str) -> RunDirectory:
        """A new one; a directory that holds anything is refused."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(f"{path} exists; give another --output, or go on with that run by --resume {path}")
        run = cls(path)
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        run.lock()
        with written_whole(path / ENVIRONMENT) as temporary:
            temporary.write_text(json.dumps(environment(), indent=2) + "\n")
        with written_whole(path / RECIPE) as temporary:
            temporary.write_text(recipe)
        return run

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """An earlier one, to go on with."""
        if not (path / RECIPE).is_file():
            raise FileNotFoundError(f"{path} is not a run: it has no {RECIPE}")
        return cls(path)

    def lock(self) -> None:
        """Hold the directory until this process ends, however it ends."""
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is training in {self.path}; wait for it or stop it first") from None

    # Metrics

    def record(self, values: dict[str, Any]) -> None:
        """Add a line of metrics."""
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(values) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All whole lines of metrics; one that a crash cut off is left out."""
        path = self.path / METRICS
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def forget_after(self, step: int) -> None:
        """Drop metrics of later steps, which will be taken again."""
        kept = [line for line in self.records() if line["step"] <= step]
        with written_whole(self.path / METRICS, overwrite=True) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))

    # Checkpoints

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then remove those before it."""
        path = self.path / "checkpoints" / f"step_{step:09d}.pt"
        with written_whole(path, overwrite=True) as temporary:
            torch.save(state, temporary)
        for old in self._checkpoints():
            if old.name < path.name:
                old.unlink()
        return path

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        return max(self._checkpoints(), default=None)

    def _checkpoints(self) -> list[Path]:
        return list((self.path / "checkpoints").glob("step_*.pt"))


def load_state(path: Path) -> dict[str, Any]:
    """A checkpoint written by :meth:`RunDirectory.save`."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise nearly anything
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}); the run cannot go on") from error


def next_free(folder: Path, name: str) -> Path:
    """``folder/name-1``, or the first number that is free."""
    number = 1
    while (folder / f"{name}-{number}").exists():
        number += 1
    return folder / f"{name}-{number}"


def environment() -> dict[str, Any]:
    """What the run depends on beside its recipe."""
    packages = ("vision-longformer", "torch", "torchvision", "timm", "accelerate", "numpy")
    return {
        "packages": {name: version(name) for name in packages},
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
    }
