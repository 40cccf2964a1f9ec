"""What the training commands share: a run to its end or to a signal, with a progress bar and a line per evaluation."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..geometry import ceil_div
from ..training.callbacks import Callback, counted, duration
from .output import QUIET_SECONDS, log_lines, print_line, print_table

if TYPE_CHECKING:
    from ..training.estimate import Estimate
    from ..training.run import TrainedRun
    from ..training.task import TrainingTask


AUTO = "auto"
"""What --resume takes in place of a directory: the run that the same command has started before, if any."""


def run_training(
    task_type: type[TrainingTask],
    recipe: str | None,
    resume: str | None,
    output: str | None,
    changes: Mapping[str, Any],
    command: str,
) -> TrainedRun | None:
    """Train or resume with progress on the terminal; None in processes other than the first."""
    from ..training import run
    from ..training.loop import Interrupted

    others = [f"--{name.replace('_', '-')}" for name in changes if name != "epochs"]
    if resume not in (None, AUTO) and (others or output or recipe):
        refused = ", ".join([*([recipe] if recipe else []), *(["--output"] if output else []), *others])
        raise ValueError(f"--resume continues a run as it was started; only --epochs may be added; leave out {refused}")
    first = int(os.environ.get("RANK", 0)) == 0
    callback = TrainingProgress(task_type.best_metric)
    try:
        with log_lines(logging.INFO if first else logging.ERROR):
            if resume not in (None, AUTO):
                trained = run.resume(task_type, resume, epochs=changes.get("epochs"), callback=callback)
            else:
                name = recipe or task_type.recipe_type.default_name(changes)
                trained = run.train(task_type, name, output=output, resume=resume == AUTO, callback=callback, **changes)
    except Interrupted as interruption:
        if first:
            print(f"{interruption}; resume with: {command} --resume {interruption.run}", file=sys.stderr)
        raise SystemExit(128 + interruption.number) from None
    return trained if first else None


def print_skipped(results: Mapping[str, float], check: str) -> None:
    """How many images a run could not read by its last evaluation, if any; ``check`` is the command that lists them."""
    counts = {"training": results.get("skipped_in_training", 0), "evaluation": results.get("skipped", 0)}
    parts = [f"{counted(int(count), 'image')} in {part}" for part, count in counts.items() if count]
    if parts:
        print_line(f"skipped as unreadable: {' and '.join(parts)}; '{check}' lists them")


def print_plan(
    task_type: type[TrainingTask], recipe: str | None, changes: Mapping[str, Any], estimate: Callable[[Any], Estimate]
) -> None:
    """A dry run: all settings, the schedule, and what a task's ``estimate`` says of time and memory."""
    from ..training.recipe import resolve, to_yaml

    recipe_type = task_type.recipe_type
    resolved = resolve(recipe_type, recipe or recipe_type.default_name(changes), task_type.derive, **changes)
    print_line(to_yaml(resolved).rstrip())
    plan = estimate(resolved)
    print_table("Schedule", ("epoch", "learning rate"), [(f"{at:.3g}", f"{rate:.3g}") for at, rate in plan.rates])
    rows = [
        ("data", plan.data),
        ("optimiser steps", f"{plan.steps:,}"),
        ("one image, forward and backward", f"{1000 * plan.trial.seconds:,.0f} ms"),
        ("one image, reading and augmenting", f"{1000 * plan.trial.reading_seconds:.3g} ms"),
        ("whole run with its evaluations", duration(plan.seconds)),
        ("memory of weights, gradients and optimiser", f"{plan.fixed_bytes / 1e6:,.0f} MB"),
        ("memory of one image's activations", f"{plan.trial.activation_bytes / 1e6:,.1f} MB"),
        (f"memory of a process with {counted(plan.images, 'image')} at a time", f"{plan.bytes / 1e9:,.2f} GB"),
    ]
    if not plan.trial.reading_seconds:
        del rows[3]
    print_table("Estimated from a trial step on this machine", ("", ""), rows)


class TrainingProgress(Callback):
    """Writes progress to stderr. ``name`` is the result to print, such as "top1", a percentage."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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

    def on_summary(self, summary: Mapping[str, str]) -> None:
        width = max(map(len, summary))
        for name, text in summary.items():
            self._console.print(f"{name:{width}}  {text}", soft_wrap=True)

    def on_start(self, step: int, total: int, steps_per_epoch: int) -> None:
        self._total, self._per_epoch, self._started, self._first = total, steps_per_epoch, time.monotonic(), step
        self._values, self._printed_at = "", time.monotonic()
        self._bar.start()
        self._training = self._bar.add_task("training", total=total, completed=step, values="")
        self._evaluating = self._bar.add_task("evaluating", total=None, visible=False, values="")
        if step == total:
            self._console.print(f"already finished, after step {step}; --epochs N trains it further, to N epochs")
        elif step:
            self._console.print(f"resuming from step {step} of {total}")

    def on_step(self, step: int) -> None:
        self._bar.update(self._training, completed=step)

    def on_log(self, values: dict[str, Any]) -> None:
        accuracy = f"  accuracy {values['accuracy']:.1f}%" if "accuracy" in values else ""
        self._values = f"loss {values['loss']:.3f}{accuracy}  {_speed(values)}"
        self._bar.update(self._training, values=self._values)
        if not self._console.is_terminal and time.monotonic() - self._printed_at > QUIET_SECONDS:
            self._line(f"step {values['step']} of {self._total}  {self._values}  {self._left(values['step'])}")

    def on_eval_progress(self, done: int, total: int) -> None:
        self._bar.update(self._evaluating, completed=done, total=total, visible=done < total)

    def on_evaluate(self, values: dict[str, Any], best: bool) -> None:
        epochs = ceil_div(self._total, self._per_epoch)
        result = f"{self._name} {values['evaluation'][self._name]:.2f}%{' (best)' if best else ''}"
        self._line(f"epoch {values['epoch']} of {epochs}  {self._values}  {result}  {self._left(values['step'])}")

    def on_end(self) -> None:
        self._bar.stop()

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
        self._printed_at = time.monotonic()

    def _left(self, step: int) -> str:
        seconds = (time.monotonic() - self._started) / max(1, step - self._first) * (self._total - step)
        return f"{duration(seconds)} left" if step < self._total else "done"


def _speed(values: Mapping[str, Any]) -> str:
    """Images per second, or seconds per step where that would be less than one."""
    speed = values["images_per_second"]
    return f"{speed:.0f} images/s" if speed >= 1 else f"{values['seconds_per_step']:.1f} s/step"
