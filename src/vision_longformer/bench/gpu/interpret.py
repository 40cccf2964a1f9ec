"""The work of single programs of each kernel, counted while Triton's interpreter runs them.

The interpreter is chosen when triton is first imported, hence a process of its own: :func:`count_work` starts one that
runs this module.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .layer import Layer, intercepted

SAMPLES = 4
"""Programs of each launch that are run; of those the one with most products counts, that of an interior chunk."""


SECTOR = 32
"""Bytes that caches move at once."""

CACHED_SECTORS = 512
"""What a program finds again in the first-level cache: 16 KB, about what blocks leave of it for each (an estimate)."""

Site = tuple[int, ...]
"""A place in the source: the lines of all functions on the way to it."""


@dataclass
class Work:
    """Of one program: multiply-adds of its products by their shape, bytes it moves between the caches.

    A shape is as ``"64x32x16"``, M×N×K. What was read lately is found in the first-level cache; stores pass through it.
    ``calls``: how many places in the source load, store, multiply or exponentiate that often, by how often.
    ``scores``: of the place that computes most often, in the innermost loop; ``macs_per_score``: of products there.
    """

    kernel: str
    macs: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    calls: dict[int, int] = field(default_factory=dict)
    scores: int = 0
    macs_per_score: float = 0.0


def count_work(layer: Layer, capability: int) -> list[Work]:
    """Of every launch of a forward and a backward pass on a chip of some capability, such as 90, in order."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if layer.dtype == "bfloat16":  # the interpreter lacks it, and the work is the same
        layer = replace(layer, dtype="float16")
    command, asked = [sys.executable, "-m", __name__], json.dumps([asdict(layer), capability])
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"Triton's interpreter failed: {done.stderr.strip()[-2000:]}")
    works = [Work(**work) for work in json.loads(done.stdout.splitlines()[-1])]
    for work in works:
        work.calls = {int(times): places for times, places in work.calls.items()}
    return works


class Counted:
    """Replaces the operations of Triton's interpreter that are counted by ones that count."""

    def __init__(self, builder: Any) -> None:
        self.start("")
        for name in ("dot", "exp2", "masked_load", "masked_store"):
            original = getattr(builder, f"create_{name}")
            setattr(builder, f"create_{name}", self._counting(getattr(self, name), original))

    @staticmethod
    def _counting(count: Any, original: Any) -> Any:
        def run(*arguments: Any) -> Any:
            count(*arguments)
            return original(*arguments)

        return run

    def start(self, kernel: str) -> None:
        self.work = Work(kernel)
        self.cached: dict[int, None] = {}
        self.calls: Counter[Site] = Counter()
        self.macs: Counter[Site] = Counter()
        self.scores: Counter[Site] = Counter()

    def finish(self) -> Work:
        self.work.calls = dict(Counter(self.calls.values()))
        most = max((self.calls[site] for site in self.scores), default=0)
        macs, scores = (
            sum(amount for site, amount in amounts.items() if self.calls[site] == most)
            for amounts in (self.macs, self.scores)
        )
        self.work.scores, self.work.macs_per_score = scores, macs / scores if scores else 0.0
        return self.work

    def dot(self, left: Any, right: Any, total: Any, precision: Any, *_: Any) -> None:
        passes = 3 if left.data.itemsize == 4 and "x3" in str(precision).lower() else 1
        (m, k), n = left.data.shape, right.data.shape[1]
        shape = f"{m}x{n}x{k}"
        self.work.macs[shape] = self.work.macs.get(shape, 0) + m * n * k * passes
        self.macs[self._called()] += m * n * k * passes

    def exp2(self, x: Any) -> None:
        if x.data.ndim == 2:
            self.scores[self._called()] += x.data.size

    def masked_load(self, pointers: Any, mask: Any, *_: Any) -> None:
        for sector in _sectors(pointers, mask):
            if sector in self.cached:
                del self.cached[sector]
            else:
                self.work.bytes += SECTOR
            self.cached[sector] = None  # the newest comes last
        for sector in list(self.cached)[: max(0, len(self.cached) - CACHED_SECTORS)]:
            del self.cached[sector]
        self._called()

    def masked_store(self, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
        for sector in _sectors(pointers, mask):
            self.cached.pop(sector, None)
            self.work.bytes += SECTOR
        self._called()

    def _called(self) -> Site:
        """Remember from where."""
        frame, lines = inspect.currentframe(), []
        while frame is not None:
            lines.append(frame.f_lineno)
            frame = frame.f_back
        site = tuple(lines)
        self.calls[site] += 1
        return site


def _sectors(pointers: Any, mask: Any) -> list[int]:
    return sorted(set((pointers.data[mask.data] // SECTOR).tolist()))


def _count(layer: Layer, capability: int) -> list[Work]:
    """In this process, where Triton interprets."""
    import triton.language as tl
    from triton.runtime import interpreter

    globals()["tl"] = tl  # the interpreter looks for it beside what it runs
    builder = interpreter.interpreter_builder
    counted, found = Counted(builder), []

    def sample(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        function, works = kernel.rewrite(), []
        chosen = set(random.Random(0).sample(range(programs), min(SAMPLES, programs)))

        def run_if_chosen(**named: Any) -> None:
            if builder.grid_idx[0] in chosen:
                counted.start(kernel.__name__)
                function(**named)
                works.append(counted.finish())

        run_if_chosen.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        run_if_chosen.__annotations__ = function.__annotations__
        interpreter.GridExecutor(run_if_chosen, kernel.arg_names, (programs,))(*arguments, **options)
        found.append(max(works, key=lambda work: (sum(work.macs.values()), work.bytes)))

    with intercepted(sample, capability):
        layer.run()
    return found


if __name__ == "__main__":
    asked_layer, asked_capability = json.load(sys.stdin)
    print(json.dumps([asdict(work) for work in _count(Layer(**asked_layer), asked_capability)]))
