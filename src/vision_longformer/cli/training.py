"""What the training commands share: running to the end or to a signal.

A training run on the terminal: a live bar where there is one, a line per evaluation everywhere.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..training.task import Observer
from .output import log_lines

if TYPE_CHECKING:
    from ..training.run import Kind, Trained

QUICK_START = "quickstart"


def run_training(
    kind: Kind[Any, Any],
    recipe: str | None,
    resume: str | None,
    output: str | None,
    changes: Mapping[str, Any],
    command: str,
    score: str,
) -> Trained | None:
    """Train or go on, told on the terminal; None in processes other than the first. ``score`` is what is shown."""
    from ..training.loop import Interrupted

    pass

    if resume is not None and (changes or output or recipe):
        raise ValueError("--resume goes on with a run as it was; it takes no recipe, settings or other options")
    first = int(os.environ.get("RANK", 0)) == 0
    observer = TrainingProgress(score)
    try:
        with log_lines():
            if resume is not None:
                trained = kind.resume(resume, observer)
            else:
                trained = kind.train(recipe or QUICK_START, output, observer, **changes)
    except Interrupted as interruption:
        if first:
            print(f"{interruption}; go on by: {command} --resume {interruption.run}", file=sys.stderr)
        raise SystemExit(128 + interruption.number) from None
    return trained if first else None


QUIET_SECONDS = 30
"""Without a terminal, the longest time between two lines."""


class TrainingProgress(Observer):
    """Writes to stderr. ``name`` is the result that is shown, such as "top1", a percentage."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def start(self, step: int, total: int, per_epoch: int) -> None:
        self._total, self._per_epoch, self._started, self._first = total, per_epoch, time.monotonic(), step
        self._values, self._told = "", time.monotonic()
        self._bar.start()
        self._training = self._bar.add_task("training", total=total, completed=step, values="")
        self._evaluating = self._bar.add_task("evaluating", total=None, visible=False, values="")
        if step:
            self._console.print(f"going on at step {step} of {total}")

    def step(self, step: int) -> None:
        self._bar.update(self._training, completed=step)

    def logged(self, values: dict[str, Any]) -> None:
        accuracy = f"  accuracy {values['accuracy']:.1f}%" if "accuracy" in values else ""
        self._values = f"loss {values['loss']:.3f}{accuracy}  {values['images_per_second']:.0f} images/s"
        self._bar.update(self._training, values=self._values)
        if not self._console.is_terminal and time.monotonic() - self._told > QUIET_SECONDS:
            self._line(f"step {values['step']} of {self._total}  {self._values}  {self._left(values['step'])}")

    def evaluating(self, done: int, total: int) -> None:
        self._bar.update(self._evaluating, completed=done, total=total, visible=done < total)

    def evaluated(self, values: dict[str, Any], best: bool) -> None:
        epochs = -(-self._total // self._per_epoch)
        result = f"{self._name} {values['evaluation'][self._name]:.2f}%{' (best)' if best else ''}"
        self._line(f"epoch {values['epoch']} of {epochs}  {self._values}  {result}  {self._left(values['step'])}")

    def close(self) -> None:
        self._bar.stop()

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
        self._told = time.monotonic()

    def _left(self, step: int) -> str:
        seconds = (time.monotonic() - self._started) / max(1, step - self._first) * (self._total - step)
        return f"{duration(seconds)} left" if step < self._total else "done"


def duration(seconds: float) -> str:
    """As people say it: 48 s, 3 min 20 s, 5 h 12 min, 3 days 4 h."""
    for unit, size, part, smaller in (("days", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {part}"
    return f"{seconds:.0f} s"
