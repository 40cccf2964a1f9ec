"""Times of several runnables in interleaved rounds, so that whatever else the machine does falls on all alike."""

from __future__ import annotations

import gc
import random
import resource
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..errors import first_line
from .cases import Runnable

OUT_OF_TIME = "the time budget was used up"


class Budget(NamedTuple):
    """How long to measure: about ``seconds``, ``min_rounds`` to ``max_rounds`` rounds, but hardly beyond ``limit``.

    ``strict``: runnables that would begin beyond the limit are not started at all; otherwise each is timed at least
    once.
    """

    seconds: float
    min_rounds: int
    max_rounds: int
    limit: float
    strict: bool = False


class Run(NamedTuple):
    """What one call took."""

    seconds: float
    page_faults: int


@dataclass
class Samples:
    """Seconds and page faults of one runnable, round by round; ``reason`` if there are none.

    A runnable that is too slow for the budget has one round, its warm-up.
    """

    seconds: list[float] = field(default_factory=list)
    page_faults: list[int] = field(default_factory=list)
    reason: str | None = None

    def add(self, run: Run) -> None:
        self.seconds.append(run.seconds)
        self.page_faults.append(run.page_faults)


def time_interleaved(
    runnables: Mapping[int, Runnable],
    budget: Budget,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
    baselines: Collection[int] = (),
) -> dict[int, Samples]:
    """Warm up, then run everything once per round, in an order shuffled anew each round, so that nothing always finds
    the caches as the same other runnable left them.

    What fails is left out of the rounds, with its error as the reason; so are the slowest, unless they are
    ``baselines``, if the time does not suffice. ``progress`` is called with the rounds done and their total.
    """
    start = time.perf_counter()
    samples = {index: Samples() for index in runnables}
    warm_ups: dict[int, Run] = {}
    for index, runnable in runnables.items():
        if budget.strict and time.perf_counter() - start > budget.limit:
            samples[index].reason = OUT_OF_TIME
            continue
        try:
            warm_ups[index] = _warm_up(runnable, budget, device)
        except Exception as error:
            samples[index].reason = f"failed: {first_line(error)}"
    elapsed = time.perf_counter() - start
    took = {index: run.seconds for index, run in warm_ups.items()}
    order = affordable(took, budget.limit - elapsed, budget.min_rounds, baselines)
    for index in warm_ups.keys() - set(order):
        samples[index].add(warm_ups[index])
    rounds = round_count(sum(took[index] for index in order), budget.seconds - elapsed, budget)
    shuffle = random.Random(0).shuffle
    gc.collect()
    for done in range(rounds):
        if done and time.perf_counter() - start > budget.limit:
            break
        shuffle(order)
        for index in order:
            samples[index].add(_run_once(runnables[index], device))
        progress(done + 1, rounds)
    return samples


def affordable(took: Mapping[int, float], seconds: float, rounds: int, baselines: Collection[int]) -> list[int]:
    """Those of which ``rounds`` rounds fit into ``seconds``, fastest first: the slowest are left out, but never the
    fastest nor the baselines, on which all ratios rest."""
    order = sorted(took, key=lambda index: took[index])
    for slowest in reversed(order[1:]):
        if rounds * sum(took[index] for index in order) <= seconds:
            break
        if slowest not in baselines:
            order.remove(slowest)
    return order


def round_count(seconds_per_round: float, seconds: float, budget: Budget) -> int:
    """As many rounds as fit into ``seconds``, within the bounds of the budget."""
    fitting = int(seconds / seconds_per_round) if seconds_per_round > 0 else budget.max_rounds
    return min(budget.max_rounds, max(budget.min_rounds, fitting))


def _warm_up(runnable: Runnable, budget: Budget, device: torch.device) -> Run:
    """Run until caches and threads are there: twice, or once if that takes a noticeable part of the time."""
    first = _run_once(runnable, device)
    return first if first.seconds > 0.02 * budget.seconds else _run_once(runnable, device)


def _run_once(runnable: Runnable, device: torch.device) -> Run:
    synchronize(device)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    runnable.run()
    synchronize(device)
    seconds = time.perf_counter() - start
    return Run(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, quartiles and the best of some times."""
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return {"median": statistics.median(seconds), "q1": quartiles[0], "q3": quartiles[2], "best": min(seconds)}
