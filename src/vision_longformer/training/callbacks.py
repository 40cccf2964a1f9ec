"""Those who watch a run beside the terminal: several at once, and TensorBoard.

Pictures that a run leaves in its directory: how it goes, after each evaluation, and what its best model does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..files import written_whole
from .run_directory import RunDirectory
from .task import Observer


class Observers(Observer):
    """Passes everything on to each of ``observers``."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def start(self, step: int, total: int, per_epoch: int) -> None:
        for observer in self._observers:
            observer.start(step, total, per_epoch)

    def step(self, step: int) -> None:
        for observer in self._observers:
            observer.step(step)

    def logged(self, values: dict[str, Any]) -> None:
        for observer in self._observers:
            observer.logged(values)

    def evaluating(self, done: int, total: int) -> None:
        for observer in self._observers:
            observer.evaluating(done, total)

    def evaluated(self, values: dict[str, Any], best: bool) -> None:
        for observer in self._observers:
            observer.evaluated(values, best)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()


class TensorBoard(Observer):
    """Events for TensorBoard in a folder; those of steps that are taken again after a resumption are purged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def installed() -> bool:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            return False
        return True

    def start(self, step: int, total: int, per_epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1 if step else None)

    def logged(self, values: dict[str, Any]) -> None:
        self._write("train", values, values["step"])

    def evaluated(self, values: dict[str, Any], best: bool) -> None:
        self._write("evaluation", values["evaluation"], values["step"])

    def _write(self, group: str, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


QUIET = "#5f6b7a"


class Pictures(Observer):
    """Draws the curves of ``results`` after each evaluation, and calls ``draw`` when there is a new best model.

    A run that ends early, or is still going on, can be looked at like a finished one.
    """

    def __init__(self, run: RunDirectory, results: Sequence[str], draw: Callable[[Path], object]) -> None:
        self._run, self._results, self._draw = run, results, draw

    def evaluated(self, values: dict[str, Any], best: bool) -> None:
        with written_whole(self._run.path / "curves.png", overwrite=True) as temporary:
            curves(self._run.records(), self._results).savefig(temporary, format="png", dpi=120)
        if best:
            self._draw(self._run.path)


def curves(records: Sequence[dict[str, Any]], results: Sequence[str]) -> Figure:
    """Loss and evaluation results, in percent, over the steps of a run."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    losses, scores = figure.subplots(1, 2)
    logged = [(line["step"], line["loss"]) for line in records if "loss" in line]
    losses.plot(*zip(*logged, strict=True) if logged else ([], []), color="#1f5fa8")
    losses.set_title("training loss", loc="left", fontsize=11)
    losses.set_ylim(bottom=0)
    evaluated = [(line["step"], line["evaluation"]) for line in records if "evaluation" in line]
    for name in results:
        measured = [(step, values[name]) for step, values in evaluated if name in values]
        if measured:
            label = f"{name.replace('_', ' ')}: {measured[-1][1]:.1f}"
            scores.plot(*zip(*measured, strict=True), marker="o", markersize=4, label=label)
    scores.set_title("evaluation, %", loc="left", fontsize=11)
    scores.legend(frameon=False)
    for axes in (losses, scores):
        axes.set_xlabel("steps", color=QUIET)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
