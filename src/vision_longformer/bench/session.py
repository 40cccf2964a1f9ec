"""Asking the workers: what is measured in turns with what, for how long, and what is left out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .estimates import Estimates, default_memory_limit
from .flops import useful_flops
from .plans import Choices
from .processes import WorkerDied, Workers
from .result import GroupResult, Row
from .tasks import BATCHED_MATMUL, BOTH, FORWARD, LARGE_MATMUL, TRAINING, AttentionWork, Task
from .timing import OUT_OF_TIME, Effort

Tell = Callable[[str, float, float], None]
"""Told what is being done, and how many of how many seconds' worth of it are done."""

MEMORY_SECONDS = 120.0
"""After which a run that measures memory is given up."""


@dataclass
class Turn:
    """Rows of a group that are measured in turns, and their weight in the account of the time."""

    group: GroupResult
    rows: list[Row]

    @property
    def weight(self) -> float:
        tasks = [row.task for row in self.rows]
        areas = [task.work.batch * task.work.height * task.work.width for task in tasks]
        factors = [2 if task.mode in (BOTH, TRAINING) else 1 for task in tasks]
        return sum(factor * (1 + math.sqrt(area) / 56) for factor, area in zip(factors, areas, strict=True))

    @property
    def text(self) -> str:
        task = self.rows[0].task
        return f"{self.group.bench}: {self.group.name}, {task.together}, {task.mode}"


class Session:
    """Fills in rows with the help of the workers, within a budget of time."""

    def __init__(self, workers: Workers, choices: Choices, threads: int | None, budget: float, tell: Tell) -> None:
        self.workers, self.budget, self.done, self._tell = workers, budget, 0.0, tell
        self.quick = choices.quick
        self.rounds, longest = ((2, 15), 0.6) if choices.quick else ((5, 50), 30.0)
        self.common = {"device": str(choices.device), "threads": threads}
        tell("starting", 0, budget)
        memory = default_memory_limit(choices.device)
        self.estimates = Estimates(choices.device, self._matmul_flops(), memory, longest)

    def measure(self, groups: list[GroupResult], seconds: float, worth: float) -> Iterator[GroupResult]:
        """The groups of one benchmark, one after the other, with their rows filled in; in the progress they count as
        ``worth`` seconds."""
        turns = [Turn(group, rows) for group in groups for rows in _together(group)]
        whole = left = sum(turn.weight for turn in turns)
        end = time.monotonic() + seconds
        for group in groups:
            for turn in (turn for turn in turns if turn.group is group):
                share = max(0.0, end - time.monotonic()) * turn.weight / left
                self._fill(turn, share, worth * turn.weight / whole)
                left -= turn.weight
                self.done += worth * turn.weight / whole
            group.compute_speedups()
            yield group

    def _fill(self, turn: Turn, seconds: float, worth: float) -> None:
        """Measure rows in turns, with each allocator, then their memory; this adds ``worth`` to the progress."""
        rows = self._can_run(turn.rows)
        rows.sort(key=lambda row: self.estimates.seconds(row.task))
        part, start = 1 / (len(self.workers.allocators) + 1), time.monotonic()
        effort = Effort(seconds * part, *self.rounds, limit=1.5 * seconds * part, strict=self.quick)
        for index, allocator in enumerate(self.workers.allocators):

            def tell(done: int, of: int, before: int = index) -> None:
                self._say(turn, worth * part * (before + done / of))

            self._time(rows, allocator, effort, tell)
        for index, row in enumerate(row for row in rows if row.time and _has_memory(row.task)):
            self._say(turn, worth * (1 - part + part * index / len(rows)))
            self._memory(row, start + 1.3 * seconds)

    def _can_run(self, rows: list[Row]) -> list[Row]:
        """Those that are neither refused nor too much for the machine; the others get the reason."""
        answer = self._ask("default", {"questions": [row.task.to_dict() for row in rows]})
        refusals = [answer] * len(rows) if isinstance(answer, str) else answer
        for row, refusal in zip(rows, refusals, strict=True):
            row.flops = useful_flops(row.task)
            reason = refusal or self.estimates.objection(row.task)
            if reason is not None:
                row.add_reason(reason)
        return [row for row in rows if not row.reasons]

    def _say(self, turn: Turn, worth: float) -> None:
        self._tell(turn.text, self.done + worth, self.budget)

    def _time(self, rows: list[Row], allocator: str, effort: Effort, tell: Callable[[int, int], None]) -> None:
        if effort.strict and effort.limit <= 0:
            for row in rows:
                row.add_reason(OUT_OF_TIME)
            return
        tasks = [row.task.to_dict() for row in rows]
        answer = self._ask(allocator, {"tasks": tasks, "effort": effort._asdict()}, tell)
        if isinstance(answer, str):
            answer = [{"seconds": [], "page_faults": [], "reason": answer}] * len(rows)
        for row, samples in zip(rows, answer, strict=True):
            if samples["seconds"]:
                row.add_time(allocator, samples["seconds"], samples["page_faults"])
            if samples["reason"]:
                row.add_reason(samples["reason"])

    def _memory(self, row: Row, end: float) -> None:
        if self.quick and time.monotonic() > end:
            row.add_reason(f"memory: {OUT_OF_TIME}")
            return
        answer = self._ask("default", {"task": row.task.to_dict(), "limit": MEMORY_SECONDS})
        if isinstance(answer, str) or "reason" in answer:
            row.add_reason(answer if isinstance(answer, str) else answer["reason"])
        else:
            row.memory = answer

    def _ask(self, allocator: str, request: dict[str, Any], tell: Callable[[int, int], None] = lambda *_: None) -> Any:
        """A worker's answer, or a sentence if it failed."""
        try:
            answer = self.workers.ask(allocator, {**request, **self.common}, tell)
        except WorkerDied as death:
            return str(death)
        return answer["failed"] if isinstance(answer, dict) and "failed" in answer else answer

    def _matmul_flops(self) -> float:
        """Operations per second of a matrix product, for the estimates."""
        work = AttentionWork(LARGE_MATMUL, 1, 1, side=1024)
        row = Row(Task("", LARGE_MATMUL, FORWARD, "", ("", ""), 1, work), flops=2 * work.side**3)
        self._time([row], "default", Effort(1.0, 2, 5, 10.0), lambda done, of: None)
        speed = row.flops_per_second("default")
        if speed is None:
            raise ValueError(f"cannot measure here: {'; '.join(row.reasons)}")
        return speed


def _together(group: GroupResult) -> list[list[Row]]:
    """The rows by what is measured in turns."""
    sets: dict[tuple[str, str], list[Row]] = {}
    for row in group.rows:
        sets.setdefault((row.task.together, row.task.mode), []).append(row)
    return list(sets.values())


def _has_memory(task: Task) -> bool:
    """Whether its memory says anything: matrix products have theirs in place."""
    return not (isinstance(task.work, AttentionWork) and task.work.method in (BATCHED_MATMUL, LARGE_MATMUL))
