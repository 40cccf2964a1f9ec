"""What training a run has cost: processor time, time and memory, also of a run that was interrupted."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .callbacks import Callback

COST = "cost.jsonl"
"""A line in the run directory for each line of training metrics: what the steps since the one before have cost."""


class Cost(NamedTuple):
    """Of all steps of a run, evaluations left out: seconds of all processors and of the clock, and peak memory.

    ``peak_bytes`` is what training took at its highest over what there was before its first step, such as the data; on
    a GPU all that torch allocated.
    """

    processor_seconds: float
    seconds: float
    peak_bytes: int


class CostMeter(Callback):
    """Measures the steps of a run in ``folder``, its directory; of steps that a resumed run repeats the last count."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / COST

    def on_start(self, step: int, total: int, steps_per_epoch: int) -> None:
        self._total, self._first = total, step
        self._before = start_peak()
        self._spent = [0.0, 0.0]
        self._clocks = _clocks()

    def on_step(self, step: int) -> None:
        now = _clocks()
        self._spent = [spent + end - start for spent, end, start in zip(self._spent, now, self._clocks, strict=True)]
        self._clocks = now

    def on_log(self, values: dict[str, Any]) -> None:
        line = {
            "first": self._first,
            "last": values["step"],
            "total": self._total,
            "processor_seconds": round(self._spent[0], 4),
            "seconds": round(self._spent[1], 4),
            "peak_bytes": self._peak(),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._first, self._spent = values["step"], [0.0, 0.0]
        self._clocks = _clocks()

    def on_evaluate(self, values: dict[str, Any], best: bool) -> None:
        self._clocks = _clocks()

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else max(0, peak() - self._before)


def _clocks() -> tuple[float, float]:
    """Of all processors, and of the wall."""
    return time.process_time(), time.monotonic()


def read_cost(folder: Path) -> Cost:
    """The cost of a run; steps that were done but not logged before a crash cost what others do."""
    lines: dict[int, dict[str, Any]] = {}
    for text in (folder / COST).read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # cut off by a crash
            continue
        lines[line["last"]], total = line, line["total"]
    measured = sum(line["last"] - line["first"] for line in lines.values())
    processor, clock = (
        sum(line[name] for line in lines.values()) * total / measured for name in ("processor_seconds", "seconds")
    )
    return Cost(processor, clock, max(line["peak_bytes"] for line in lines.values()))


# Memory of this process


def start_peak() -> int:
    """Begin a new peak where the system can (Linux); returns the memory of now, elsewhere the peak up to now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak()


def peak() -> int:
    """The most bytes of memory that this process had since the last :func:`start_peak`."""
    if Path("/proc/self/status").exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
