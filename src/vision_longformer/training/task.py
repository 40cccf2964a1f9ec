"""What the training loop asks of the thing that is trained, and what it tells those who watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

Tell = Callable[[int, int], None]
"""Told how many of how many samples are done."""


class TrainingError(ValueError):
    """A run that cannot go on; its last checkpoint is intact."""


class Task(Protocol):
    """A model with its data. Batches are whatever the task makes of them; the loop does not look inside."""

    batches_per_epoch: int
    score: str
    """The result of :meth:`evaluate` by which the best checkpoint is chosen."""

    @property
    def model(self) -> nn.Module: ...

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """This process's batches of an epoch from number ``start`` on; the same whenever they are asked for."""

    def loss(self, model: nn.Module, batch: Any, place: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The batch's loss, and values to log; ``place`` numbers the forward passes of the run."""

    def evaluate(self, tell: Tell) -> dict[str, float]:
        """Results of the model as it is, the same in every process."""

    def save(self, path: Path) -> None:
        """Write the model as it is, for use after training, in place of an earlier one."""


class Observer:
    """Watches a run; this one says nothing."""

    def start(self, step: int, total: int, per_epoch: int) -> None: ...

    def step(self, step: int) -> None: ...

    def logged(self, values: dict[str, Any]) -> None: ...

    def evaluating(self, done: int, total: int) -> None: ...

    def evaluated(self, values: dict[str, Any], best: bool) -> None: ...

    def close(self) -> None: ...
