"""A run on disk: its recipe, environment, metrics and checkpoints, safe against crashes and against other processes."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from ..files import atomic_write

RECIPE, ENVIRONMENT, METRICS = "recipe.yaml", "environment.json", "metrics.jsonl"


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, recipe: str, others: Mapping[str, str] | None = None) -> RunDirectory:
        """A new one, locked, with a recipe and other texts by file name; a directory that holds anything is refused."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(f"{path} exists; give another --output, or resume that run by --resume {path}")
        run = cls(path)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        run.lock()
        with atomic_write(path / ENVIRONMENT) as temporary:
            temporary.write_text(json.dumps(environment(), indent=2) + "\n")
        for name, text in (others or {}).items():
            with atomic_write(path / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
        run.write_recipe(recipe)
        return run

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """An earlier one, to resume."""
        if not (path / RECIPE).is_file():
            raise FileNotFoundError(f"{path} is not a run: it has no {RECIPE}")
        return cls(path)

    def write_recipe(self, recipe: str) -> None:
        """The recipe, in place of an earlier one: a finished run may be given more epochs."""
        with atomic_write(self.path / RECIPE, overwrite=True) as temporary:
            temporary.write_text(recipe, encoding="utf-8")

    def lock(self) -> None:
        """Hold the directory until this process ends, however it ends."""
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is training in {self.path}; wait for it or stop it first") from None

    def record(self, values: dict[str, Any]) -> None:
        """Add a line of metrics."""
        with (self.path / METRICS).open("a") as file:
            file.write(_json_line(values))

    def records(self) -> list[dict[str, Any]]:
        """All whole lines of metrics; one that a crash cut off is left out."""
        path = self.path / METRICS
        records = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def evaluation(self, step: int) -> dict[str, float]:
        """The results at a step that was evaluated; null stands for NaN."""
        (values,) = (line["evaluation"] for line in self.records() if "evaluation" in line and line["step"] == step)
        return {name: math.nan if value is None else value for name, value in values.items()}

    def drop_metrics_after(self, step: int, evaluated: int) -> None:
        """Drop metrics of training after ``step`` and of evaluation after ``evaluated``: a resumed run repeats them."""
        earlier = [line for line in self.records() if line["step"] <= (evaluated if "evaluation" in line else step)]
        with atomic_write(self.path / METRICS, overwrite=True) as temporary:
            temporary.write_text("".join(map(_json_line, earlier)))


def _json_line(values: dict[str, Any]) -> str:
    """Values and groups of values as a line of JSON, which has no NaN or infinity: those become null."""
    return json.dumps(_finite(values), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def find_run(checkpoint: str | Path) -> Path | None:
    """The directory of the run that wrote a checkpoint, or that ``checkpoint`` is itself; None if there is none."""
    return next((path for path in (Path(checkpoint), Path(checkpoint).parent) if (path / RECIPE).is_file()), None)


def next_free(folder: Path, name: str) -> Path:
    """``folder/name-1``, or the first number that is free."""
    number = 1
    while (folder / f"{name}-{number}").exists():
        number += 1
    return folder / f"{name}-{number}"


def environment() -> dict[str, Any]:
    """What the run depends on beside its recipe."""
    import torch

    packages = ("vision-longformer", "torch", "torchvision", "timm", "accelerate", "numpy")
    return {
        "packages": {name: version(name) for name in packages},
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
    }
