"""Checkpoints of a run: everything to resume from in one file, the same however the model is distributed.

One process writes what all have; any number of processes reads it. The latest two are kept, should one be damaged.

Randomness has no state (see :mod:`~vision_longformer.data.randomness`), so weights, optimiser and counters are all
there is.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError, first_line
from ..files import atomic_write
from .ema import WeightAverage
from .recipe import TrainSettings

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """How far a run is.

    - ``step``: steps done; ``evaluated``: the step last evaluated.
    - ``best``: the best score; ``best_step``: its step; ``stale``: evaluations of this phase since then.
    - ``sums``: of what is not yet logged.
    """

    step: int = 0
    evaluated: int = 0
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def at_end(self, settings: TrainSettings, total: int) -> bool:
        """Whether no step is left: all ``total`` are done, or the settings' patience has run out."""
        return self.step >= total or (settings.patience is not None and self.stale >= settings.patience)


KEPT = 2
"""Checkpoints in a run directory."""

DAMAGED = "damaged.pt"
"""The name that a damaged checkpoint is given, out of the way."""


class Checkpointer:
    """Writes and reads the checkpoints of a run in ``folder``, which keeps the latest two.

    All processes call :meth:`save` and :meth:`restore`; the main process writes.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        accelerator: Accelerator,
    ) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer
        self._average, self._accelerator = average, accelerator

    def latest(self) -> Path | None:
        return latest_checkpoint(self._folder)

    def latest_intact(self) -> Path | None:
        """The newest checkpoint that is not damaged; None if there is none at all. Main process only.

        A newer one that is damaged is renamed, so that it is not taken for the latest again.
        """
        damages: dict[Path, str] = {}
        for path in sorted(self._folder.glob("step_*.pt"), reverse=True):
            damage = _damage(path)
            if damage is None:
                for other, what in damages.items():
                    logger.warning("%s is damaged (%s): falling back to %s", other, what, path.name)
                    other.replace(self._folder / DAMAGED)
                return path
            damages[path] = damage
        if damages:
            raise CheckpointError(f"no checkpoint in {self._folder} is intact; the run cannot be resumed")
        return None

    def save(self, counters: Counters) -> None:
        """Write the checkpoint of a step; when it is safe on the disk, remove all but it and the one before it."""
        state = self._state(counters)
        if self._accelerator.is_main_process:
            path = self._folder / f"step_{counters.step:09d}.pt"
            with atomic_write(path, overwrite=True) as temporary, temporary.open("wb") as file:
                torch.save(state, file)
            for old in sorted(self._folder.glob("step_*.pt"))[:-KEPT]:
                old.unlink()
        self._accelerator.wait_for_everyone()

    def restore(self, path: Path) -> Counters:
        """Load a checkpoint, into one process or a share of it into each of several."""
        state = load_state(path)
        options = StateDictOptions(full_state_dict=True, strict=True)
        if state["optimizer"]["state"]:  # SGD without momentum has none, which torch does not load
            set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"], options=options)
        set_model_state_dict(self._model, state["model"], options=options)
        if self._average is not None:
            self._average.load(state["average"])
        if self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(state["scaler"])
        return Counters(**state["counters"])

    def _state(self, counters: Counters) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, moments = get_state_dict(self._model, self._optimizer, options=options)
        average, scaler = self._average, self._accelerator.scaler
        return {
            "model": weights,
            "optimizer": moments,
            "average": None if average is None else {name: _gathered(value) for name, value in average.values.items()},
            "scaler": None if scaler is None else scaler.state_dict(),
            "counters": asdict(counters),
        }


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's file; None if every byte is as it was written, which torch does not check."""
    try:
        with ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # damaged files raise nearly anything
        return first_line(error)
    return None if broken is None else f"the checksum of {broken} is wrong"


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder."""
    return max(folder.glob("step_*.pt"), default=None)


def load_state(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, on the CPU."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise nearly anything
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}); the run cannot be resumed") from error


def load_counters(path: Path) -> Counters:
    """How far a run was at a checkpoint."""
    return Counters(**load_state(path)["counters"])


def _gathered(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
