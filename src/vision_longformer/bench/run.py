"""A benchmark from beginning to end: shares out the time, asks the workers and fills in the rows of the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from .cases import (
    BATCHED_MATMUL,
    FORWARD,
    FORWARD_BACKWARD,
    LARGE_MATMUL,
    TRAINING_STEP,
    AttentionWorkload,
    Case,
    Group,
)
from .flops import Limits, default_max_bytes, required_flops
from .plans import BENCHMARKS, Options, default_budget
from .results import GroupResult, Result, Row, machine_facts
from .timing import OUT_OF_TIME, Budget, Samples
from .worker import ALLOCATORS, RoundProgress, WorkerError, Workers

MIN_PACE = 0.2
"""What is left of a benchmark's time, at the least, when those before it and the start took too long."""

Progress = Callable[[str, float, float], None]
"""Called with what is being done, and how many of how many seconds' worth of it are done."""


def run(
    what: str,
    plans: dict[str, list[Group]],
    options: Options,
    *,
    threads: int | None = None,
    budget: float | None = None,
    progress: Progress = lambda text, done, total: None,
) -> Iterator[Result]:
    """Measure what :func:`~.plans.plan` made of the options.

    Yields the same result again and again, as far as it is, and at the end complete.

    ``threads``: None for torch's own. ``budget``: seconds in all, None for what the benchmarks are meant to take.
    """
    budgets = {name: default_budget(name, options.quick) for name in plans}
    if budget is not None:
        budgets = {name: seconds * budget / sum(budgets.values()) for name, seconds in budgets.items()}
    total = sum(budgets.values())
    large = any(BENCHMARKS[name].large for name in plans)
    allocators = tuple(ALLOCATORS) if options.device.type == "cpu" and not large else ("default",)
    chosen = {name: value for name, value in asdict(options).items() if name != "device"}
    result = Result(
        what,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine_facts(options.device, threads),
        {**chosen, "allocators": allocators, "budget": total},
    )
    end = time.monotonic() + total
    with Workers(allocators, options.device, threads) as workers:
        runner = Runner(workers, options, total, progress, min_rounds=3 if large else 5)
        for name, groups in plans.items():
            pace = (end - time.monotonic()) / sum(budgets.values())
            planned = budgets.pop(name)
            seconds = planned * min(1.0, max(MIN_PACE, pace))
            for group in runner.measure([GroupResult.of(group) for group in groups], seconds, planned):
                if not any(group is known for known in result.groups):
                    result.groups.append(group)
                yield result
    result.complete = True
    yield result


class Runner:
    """Fills in rows with the help of the workers. Progress is counted in planned seconds, ``total`` of them."""

    def __init__(
        self, workers: Workers, options: Options, total: float, progress: Progress, min_rounds: int = 5
    ) -> None:
        self._workers, self._progress, self._total, self._done = workers, progress, total, 0.0
        self._quick = options.quick
        self._rounds, max_seconds = ((2, 15), 0.6) if options.quick else ((min_rounds, 50), 30.0)
        progress("starting", 0, total)
        max_bytes = default_max_bytes(options.device)
        self._limits = Limits(options.device, self._matmul_flops(), max_bytes, max_seconds)

    def measure(self, groups: list[GroupResult], seconds: float, planned: float) -> Iterator[GroupResult]:
        """The groups of one benchmark, one after the other, each again whenever more of its rows are filled in."""
        groups_blocks = [(group, _blocks(group)) for group in groups]
        whole = left = sum(block.weight for _, blocks in groups_blocks for block in blocks)
        end = time.monotonic() + seconds
        for group, blocks in groups_blocks:
            for block in blocks:
                share = max(0.0, end - time.monotonic()) * block.weight / left
                self._fill(group, block, share, planned * block.weight / whole)
                left -= block.weight
                self._done += planned * block.weight / whole
                group.compute_speedups()
                yield group

    def _fill(self, group: GroupResult, block: Block, seconds: float, planned: float) -> None:
        """Times with each allocator, then memory; each of these gets an equal part of the time."""
        rows = self._startable(group, block.rows)
        if not rows:
            return
        rows.sort(key=lambda row: self._limits.seconds(row.case))
        part, start = 1 / (len(self._workers.allocators) + 1), time.monotonic()
        budget = Budget(seconds * part, *self._rounds, limit=1.5 * seconds * part, strict=self._quick)

        def report(parts: float) -> None:
            self._progress(block.text, self._done + planned * part * parts, self._total)

        for index, allocator in enumerate(self._workers.allocators):

            def round_done(done: int, total: int, index: int = index) -> None:
                report(index + done / total)

            self._time(rows, allocator, budget, round_done)
        measurable = [row for row in rows if row.time and not _in_place(row.case)]
        for index, row in enumerate(measurable):
            report(len(self._workers.allocators) + index / len(rows))
            self._measure_memory(row, start + 1.3 * seconds)

    def _startable(self, group: GroupResult, rows: list[Row]) -> list[Row]:
        """Those that are neither refused nor too much for the machine; the others get the reason."""
        refusals: Sequence[str | None]
        try:
            refusals = self._workers.refusals([row.case for row in rows])
        except WorkerError as error:
            refusals = [str(error)] * len(rows)
        for row, refusal in zip(rows, refusals, strict=True):
            row.flops = required_flops(row.case)
            reason = refusal or self._limits.refusal(row.case)
            if reason is None and group.unit == "pixel":
                reason = self._limits.refuse_extra(group.expected_extra(row))
            if reason is not None:
                row.add_reason(reason)
        return [row for row in rows if not row.reasons]

    def _time(self, rows: list[Row], allocator: str, budget: Budget, progress: RoundProgress) -> None:
        if budget.strict and budget.limit <= 0:
            samples = [Samples(reason=OUT_OF_TIME) for _ in rows]
        else:
            try:
                samples = self._workers.time(allocator, [row.case for row in rows], budget, progress)
            except WorkerError as error:
                samples = [Samples(reason=str(error)) for _ in rows]
        for row, own in zip(rows, samples, strict=True):
            row.add_samples(allocator, own)

    def _measure_memory(self, row: Row, end: float) -> None:
        if self._quick and time.monotonic() > end:
            row.add_reason(f"memory: {OUT_OF_TIME}")
            return
        try:
            row.memory = self._workers.memory(row.case)
        except WorkerError as error:
            row.add_reason(str(error))

    def _matmul_flops(self) -> float:
        """Operations per second of a matrix product, for the limits."""
        workload = AttentionWorkload(LARGE_MATMUL, 1, 1, side=1024)
        case = Case("", LARGE_MATMUL, FORWARD, "", ("", ""), 1, workload)
        row = Row(case, flops=required_flops(case))
        self._time([row], "default", Budget(1.0, 2, 5, 10.0), lambda done, total: None)
        speed = row.flops_per_second("default")
        if speed is None:
            raise ValueError(f"cannot measure here: {'; '.join(row.reasons)}")
        return speed


@dataclass
class Block:
    """Rows that are timed in the same rounds, with what progress calls them."""

    text: str
    rows: list[Row]

    @property
    def weight(self) -> float:
        """Its part in the sharing of the time: more for larger maps and for backward passes; in proportion to the side
        of a map, of which much is overhead, and to the area of a large image."""
        return sum(_weight(row.case) for row in self.rows)


def _weight(case: Case) -> float:
    side = math.sqrt(case.workload.batch * case.workload.height * case.workload.width)
    return (2 if case.mode in (FORWARD_BACKWARD, TRAINING_STEP) else 1) * (1 + side / 56 * max(1.0, side / 1024))


def _blocks(group: GroupResult) -> list[Block]:
    blocks: dict[tuple[str, str], Block] = {}
    for row in group.rows:
        key = (row.case.round_key, row.case.mode)
        text = f"{group.bench}: {group.name}, {row.case.round_key}, {row.case.mode}"
        blocks.setdefault(key, Block(text, [])).rows.append(row)
    return list(blocks.values())


def _in_place(case: Case) -> bool:
    """Matrix products write into preallocated results: their memory says nothing."""
    return isinstance(case.workload, AttentionWorkload) and case.workload.method in (BATCHED_MATMUL, LARGE_MATMUL)
