"""Those who watch a run beside the terminal: several at once, and TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
