"""Running a plan from beginning to end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone

from .benches import default_budget
from .machine import machine_facts
from .plans import Choices
from .processes import ALLOCATORS, Workers
from .result import GroupResult, Result
from .session import Session, Tell
from .tasks import Group

LEAST_PACE = 0.2
"""What is left of a benchmark's time, at the least, when those before it and the start took too long."""


def run(
    what: str,
    plans: dict[str, list[Group]],
    choices: Choices,
    *,
    threads: int | None = None,
    budget: float | None = None,
    tell: Tell = lambda text, done, total: None,
) -> Iterator[Result]:
    """Measure what :func:`~.benches.plan` made of the choices.

    Yields the same result after each group, as far as it is, and at the end complete.

    ``threads``: None for torch's own. ``budget``: seconds in all, None for what the benchmarks are meant to take.
    """
    budgets = {name: default_budget(name, choices.quick) for name in plans}
    if budget is not None:
        budgets = {name: seconds * budget / sum(budgets.values()) for name, seconds in budgets.items()}
    allocators = tuple(ALLOCATORS) if choices.device.type == "cpu" else ("default",)
    chosen = {name: value for name, value in asdict(choices).items() if name != "device"}
    result = Result(
        what,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine_facts(choices.device, threads),
        {**chosen, "allocators": allocators, "budget": sum(budgets.values())},
    )
    end = time.monotonic() + sum(budgets.values())
    with Workers(allocators) as workers:
        session = Session(workers, choices, threads, sum(budgets.values()), tell)
        for name, groups in plans.items():
            pace = (end - time.monotonic()) / sum(budgets.values())
            worth = budgets.pop(name)
            seconds = worth * min(1.0, max(LEAST_PACE, pace))
            for group in session.measure([GroupResult.of(group) for group in groups], seconds, worth):
                result.groups.append(group)
                yield result
    result.complete = True
    yield result
