"""Callbacks, which watch a run: their interface, TensorBoard, curves and pictures in the run directory.

Importing this does not import torch, so commands can subclass :class:`Callback` and still start at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import first_line
from ..files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .run_directory import RunDirectory

logger = logging.getLogger(__name__)

LABEL_COLOUR = "#5f6b7a"

MARKED_POINTS = 30
"""A curve of so many points, or of fewer, has markers."""


class Callback:
    """Watches a run. This one does nothing; subclasses override what they need."""

    def on_summary(self, summary: Mapping[str, str]) -> None:
        """Before anything else: what is trained, on what and where, by names to print."""

    def on_start(self, step: int, total: int, steps_per_epoch: int) -> None:
        """Before the first step. ``step`` of ``total`` steps are done; in a resumed run, that is not 0."""

    def on_step(self, step: int) -> None:
        """After each optimiser step."""

    def on_log(self, values: dict[str, Any]) -> None:
        """After each line of training metrics."""

    def on_eval_progress(self, done: int, total: int) -> None:
        """During an evaluation: samples done, samples in all."""

    def on_evaluate(self, values: dict[str, Any], best: bool) -> None:
        """After an evaluation; ``best`` if it chose a new best checkpoint."""

    def on_end(self) -> None:
        """At the end, however the run ends."""


class CallbackList(Callback):
    """Calls each of ``callbacks`` in turn."""

    def __init__(self, *callbacks: Callback) -> None:
        self._callbacks = callbacks

    def on_summary(self, summary: Mapping[str, str]) -> None:
        for callback in self._callbacks:
            callback.on_summary(summary)

    def on_start(self, step: int, total: int, steps_per_epoch: int) -> None:
        for callback in self._callbacks:
            callback.on_start(step, total, steps_per_epoch)

    def on_step(self, step: int) -> None:
        for callback in self._callbacks:
            callback.on_step(step)

    def on_log(self, values: dict[str, Any]) -> None:
        for callback in self._callbacks:
            callback.on_log(values)

    def on_eval_progress(self, done: int, total: int) -> None:
        for callback in self._callbacks:
            callback.on_eval_progress(done, total)

    def on_evaluate(self, values: dict[str, Any], best: bool) -> None:
        for callback in self._callbacks:
            callback.on_evaluate(values, best)

    def on_end(self) -> None:
        for callback in self._callbacks:
            callback.on_end()


class TensorBoard(Callback):
    """Events for TensorBoard in a folder; events of steps that a resumed run repeats are purged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def installed() -> bool:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            return False
        return True

    def on_start(self, step: int, total: int, steps_per_epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1 if step else None)

    def on_log(self, values: dict[str, Any]) -> None:
        self._write("train", values, values["step"])

    def on_evaluate(self, values: dict[str, Any], best: bool) -> None:
        self._write("evaluation", values["evaluation"], values["step"])

    def _write(self, group: str, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def on_end(self) -> None:
        self._writer.close()


class Pictures(Callback):
    """Draws the curves of ``results`` after each evaluation, and calls ``draw`` when there is a new best model.

    A run that ends early, or is still running, can be looked at like a finished one. Pictures that cannot be drawn are
    reported and do not end the run.
    """

    def __init__(self, run: RunDirectory, results: Sequence[str], draw: Callable[[Path], object]) -> None:
        self._run, self._results, self._draw = run, results, draw

    def on_evaluate(self, values: dict[str, Any], best: bool) -> None:
        try:
            with atomic_write(self._run.path / "curves.png", overwrite=True) as temporary:
                curves(self._run.records(), self._results).savefig(temporary, format="png", dpi=120)
            if best:
                self._draw(self._run.path)
        except Exception as error:  # of fonts, plotting libraries, a single image: none is worth a run
            logger.warning("the pictures of step %d could not be drawn: %s", values["step"], first_line(error))


def curves(records: Sequence[dict[str, Any]], results: Sequence[str]) -> Figure:
    """Loss and evaluation results, in percent, over the steps of a run; values that are null are left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    losses, scores = figure.subplots(1, 2)
    logged = [(line["step"], line["loss"]) for line in records if line.get("loss") is not None]
    marker = "o" if len(logged) <= MARKED_POINTS else None  # one point alone would not be seen
    losses.plot(*zip(*logged, strict=True) if logged else ([], []), color="#1f5fa8", marker=marker, markersize=4)
    losses.set_title("training loss", loc="left", fontsize=11)
    losses.set_ylim(bottom=0)
    evaluated = [(line["step"], line["evaluation"]) for line in records if "evaluation" in line]
    for name in results:
        measured = [(step, values[name]) for step, values in evaluated if values.get(name) is not None]
        if measured:
            best, last = max(value for _, value in measured), measured[-1][1]
            label = f"{name.replace('_', ' ')}: best {best:.1f}, last {last:.1f}"
            scores.plot(*zip(*measured, strict=True), marker="o", markersize=4, label=label)
    scores.set_title("evaluation, %", loc="left", fontsize=11)
    if scores.lines:
        scores.legend(frameon=False)
    for axes in (losses, scores):
        axes.set_xlabel("steps", color=LABEL_COLOUR)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def counted(count: float, noun: str) -> str:
    """``1 step``, ``2,000 steps``."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """As people say it: 48 s, 3 min 20 s, 5 h 12 min, 3 days 4 h."""
    seconds = round(seconds)
    for unit, size, part, smaller in (("days", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // smaller} {part}"
    return f"{seconds} s"
