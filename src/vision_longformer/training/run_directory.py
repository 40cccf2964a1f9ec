"""A run on disk: its recipe, environment, metrics and checkpoints, safe against crashes and against other processes."""

from __future__ import annotations

import fcntl
import glob
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from ..files import atomic_write, remove_unfinished, suggest_path

RECIPE, ENVIRONMENT, METRICS, IDENTITY = "recipe.yaml", "environment.json", "metrics.jsonl", "identity.json"
LOCK = ".lock"


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, recipe: str, others: Mapping[str, str] | None = None) -> RunDirectory:
        """A new one, locked, with a recipe and other texts by file name; a directory that holds anything is refused."""
        run = cls(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())) and not run._half_made():
            raise FileExistsError(f"{path} exists; give another --output, or resume that run by --resume {path}")
        path.mkdir(parents=True, exist_ok=True)
        run.lock()
        run.checkpoints.mkdir(exist_ok=True)
        for name, text in {**(others or {}), ENVIRONMENT: json.dumps(environment(), indent=2) + "\n"}.items():
            run._write(name, text)
        run.write_recipe(recipe)
        return run

    def _half_made(self) -> bool:
        """Whether a process was killed while it made this directory: it locks it first, and writes the recipe last."""
        unlocked, has_recipe = not (self.path / LOCK).exists(), (self.path / RECIPE).exists()
        return not (unlocked or has_recipe or any(self.checkpoints.glob("*")))

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """An earlier one, to resume."""
        if not path.is_dir():
            raise FileNotFoundError(f"there is no directory {path}; {suggest_path(path) or 'give that of a run'}")
        if not (path / RECIPE).is_file():
            raise FileNotFoundError(f"{path} is not a run: it has no {RECIPE}")
        return cls(path)

    def write_recipe(self, recipe: str) -> None:
        """The recipe, in place of an earlier one: a finished run may be given more epochs."""
        self._write(RECIPE, recipe)

    def _write(self, name: str, text: str) -> None:
        with atomic_write(self.path / name, overwrite=True) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def lock(self, patience: float = 0.0) -> None:
        """Hold the directory until this process ends, however it ends; wait for another one so many seconds.

        What a process that was killed has left half written is removed.
        """
        self._lock = (self.path / LOCK).open("w")
        give_up = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > give_up:
                    sentence = f"another process is training in {self.path}; wait for it or stop it first"
                    raise ValueError(sentence) from None
                time.sleep(0.2)
        for folder in (self.path, self.checkpoints):
            remove_unfinished(folder)

    @property
    def logs(self) -> Path:
        """The folder of the logs of all processes."""
        return self.path / "logs"

    def started_with(self) -> int:
        """How many processes the run was started with."""
        return int(json.loads((self.path / ENVIRONMENT).read_text())["processes"])

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


def no_run_error(checkpoint: str | Path) -> ValueError:
    """The error for a model that is to be evaluated on unnamed data, and whose run cannot be found."""
    return ValueError(
        f"{checkpoint} is not in a run directory, so its data is not known; give --data DATA. A file that is exported "
        "into a run directory, RUN/best.onnx by default, is evaluated on the run's own images"
    )


@dataclass(frozen=True)
class Identity:
    """By what a run is known when its command is started again.

    - ``given``: the settings that the recipe and the command give.
    - ``torchrun``: which torchrun started it: its --rdzv-id, or a name of its own for the process itself.
    - ``slurm``: the job of Slurm, the same when it is requeued.
    """

    given: dict[str, Any]
    torchrun: str | None = None
    slurm: str | None = None

    @classmethod
    def of_this_process(cls, given: Mapping[str, Any]) -> Identity:
        return cls(json.loads(json.dumps(given, default=list)), _torchrun(), os.environ.get("SLURM_JOB_ID"))

    @classmethod
    def read(cls, run: Path) -> Identity | None:
        """That of a run; None if there is no such run, or one that was started before runs had an identity."""
        try:
            return cls(**json.loads((run / IDENTITY).read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def restarts(self, earlier: Identity) -> bool:
        """Whether torchrun or Slurm has started this process to take the place of an earlier one."""
        requeued = int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
        by_torchrun = self.torchrun is not None and self.torchrun == earlier.torchrun
        return by_torchrun or (requeued and self.slurm is not None and self.slurm == earlier.slurm)

    def difference(self, earlier: Identity) -> str | None:
        """The first setting that is given otherwise than it was, in words."""
        for name in sorted({*self.given, *earlier.given}):
            now, before = (given.get(name, "not given") for given in (self.given, earlier.given))
            if now != before:
                return f"{name} is {now}, but was {before}"
        return None


def _torchrun() -> str | None:
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name != "none":  # what older versions of torchrun call every run without --rdzv-id
        return name
    started = ""
    with suppress(OSError):
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{platform.node()}, process {os.getppid()}, {started}"


def runs_named(folder: Path, name: str) -> Iterator[Path]:
    """``folder/name-N`` for all numbers that there are, the highest first."""
    numbers = (path.name.removeprefix(f"{name}-") for path in folder.glob(f"{glob.escape(name)}-*"))
    for number in sorted((int(number) for number in numbers if number.isdecimal()), reverse=True):
        yield folder / f"{name}-{number}"


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
