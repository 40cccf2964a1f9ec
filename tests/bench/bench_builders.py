"""Cases, rows and results with stated times, for tests of everything that comes after measuring."""

from __future__ import annotations

from vision_longformer.bench.cases import FORWARD, AttentionWorkload, Case
from vision_longformer.bench.results import GroupResult, Result, Row
from vision_longformer.bench.timing import Samples

SECONDS = {"default": [0.2, 0.4, 0.3], "kept": [0.1, 0.2, 0.15]}
"""Of the baseline: medians 0.3 and 0.15, quartiles of the first 0.25 and 0.35."""


def attention_case(
    variant: str = "sliding_chunk", mode: str = FORWARD, point: str = "6×9", units: int = 54, **options: int
) -> Case:
    """A call on a map of 6×9 tokens, compared with ``sliding_chunk`` at the same point."""
    size = {"height": 6, "width": 9, "window": 2, "heads": 2, "dim": 4, "side": 32} | options
    return Case(point, variant, mode, point, (point, "sliding_chunk"), units, AttentionWorkload(variant, **size))


def row(variant: str = "sliding_chunk", factor: float = 1.0, **options: object) -> Row:
    """A row of 1000 operations whose times and memory are ``factor`` times those of the baseline."""
    made = Row(attention_case(variant, **options), flops=1000)
    for allocator, seconds in SECONDS.items():
        made.add_samples(allocator, Samples([factor * x for x in seconds], [3, 1, 2]))
    made.memory = {"inputs": 100, "outputs": 50, "extra": int(200 * factor)}
    return made


def result(*rows: Row, style: str = "lines", unit: str = "call") -> Result:
    group = GroupResult("attention", "a group", "about it", style, unit, list(rows))
    group.compute_speedups()
    machine = {"cpu": "a cpu", "cores": 2, "threads": 2, "torch": "2.8", "device": "cpu", "load_at_start": 0.0}
    return Result("attention", "2026-01-01T00:00:00", machine, {}, [group], True)


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
