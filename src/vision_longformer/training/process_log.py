"""What each process of a run leaves in the run directory: a log, and signs of life by which others know of a hang."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path
from traceback import format_exception
from types import TracebackType

from .callbacks import Callback, duration

PACKAGE = logging.getLogger(__package__.partition(".")[0])
logger = logging.getLogger(__name__)

BEATS = 20
"""Signs of life within the time that processes wait for one another."""

MISSED_BEATS = 4
"""After which a process is called silent."""


class ProcessLog(Callback):
    """A context in which what the package logs is added to ``folder/rankN.log``, with the error that ends it.

    Meanwhile the file's time is kept up to date: a process that is stopped, or whose machine is gone, shows by a time
    that stays behind. ``announce`` is for NCCL, which ends a process that has waited too long without an exception:
    then the log says it before.
    """

    def __init__(self, folder: Path, rank: int, count: int, timeout: float, *, announce: bool = False) -> None:
        self.timeout = timeout
        self._folder, self._rank, self._count, self._announce = folder, rank, count, announce
        self._path = log_path(folder, rank)
        self._step, self._advanced_at = 0, time.monotonic()
        self._ended = threading.Event()

    def __enter__(self) -> ProcessLog:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._handler = _LogFile(self._path)
        self._level = PACKAGE.level
        PACKAGE.addHandler(self._handler)
        PACKAGE.setLevel(logging.DEBUG)
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        logger.debug(
            "started as process %d of %d on %s, process id %d%s",
            *(self._rank, self._count, platform.node(), os.getpid()),
            f", restart {restarts} of torchrun" if restarts else "",
        )
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if error is None:
            logger.debug("finished after step %d", self._step)
        elif isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith(PACKAGE.name):
            logger.debug("ended: %s", error)  # which explains itself
        else:
            logger.debug("ended by %s", "".join(format_exception(error)).rstrip())
        PACKAGE.setLevel(self._level)
        PACKAGE.removeHandler(self._handler)
        with suppress(OSError):
            self._handler.close()

    def on_start(self, step: int, total: int, steps_per_epoch: int) -> None:
        self._advance(step)
        logger.debug("%s %d of %d", "resuming from step" if step else "starting at step", step, total)

    def on_step(self, step: int) -> None:
        self._advance(step)

    def on_eval_progress(self, done: int, total: int) -> None:
        self._advance(self._step)

    def _advance(self, step: int) -> None:
        self._step, self._advanced_at = step, time.monotonic()

    def _beat(self) -> None:
        while not self._ended.wait(self.timeout / BEATS):
            with suppress(OSError):
                os.utime(self._path)
            if self._announce and time.monotonic() - self._advanced_at > self.timeout:
                logger.error("nothing has happened since step %d: %s", self._step, self.describe_silent())
                return

    def describe_silent(self) -> str:
        """Which processes show no sign of life, in words."""
        return describe_silent(self._folder, self._count, self.timeout)


class _LogFile(logging.FileHandler):
    """Lines with their time; those for which there is no space are lost, and the run is not."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Of a full disk others tell."""


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def describe_silent(folder: Path, count: int, timeout: float) -> str:
    """Which of ``count`` processes with logs in ``folder`` show no sign of life, in words.

    Times of files are compared with one another only, since a clock of a file server may differ from ours.
    """
    times = {rank: log_path(folder, rank).stat().st_mtime for rank in range(count) if log_path(folder, rank).exists()}
    latest = max(times.values(), default=0.0)
    silent = [rank for rank, at in times.items() if latest - at > MISSED_BEATS * timeout / BEATS]
    if not silent:
        return f"all processes show signs of life; their logs are {folder}/rank*.log"
    seconds = latest - min(times[rank] for rank in silent)
    names = f"process {silent[0]} has" if len(silent) == 1 else f"processes {', '.join(map(str, silent))} have"
    return f"{names} shown no sign of life for {duration(seconds)}; the log is {log_path(folder, silent[0])}"
