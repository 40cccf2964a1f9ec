"""Times of several jobs, taken in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import gc
import random
import resource
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from .attention_jobs import Job


class Effort(NamedTuple):
    """How long to measure: about ``seconds``, with ``least`` to ``most`` rounds, but hardly beyond ``limit``.

    ``strict``: rather than beyond the limit, jobs are not started at all; otherwise each is timed once at least.
    """

    seconds: float
    least: int
    most: int
    limit: float
    strict: bool = False


@dataclass
class Samples:
    """Seconds and page faults of one job, round by round; ``reason`` if there are none.

    A job that is too slow for the time has one round, its warm-up.
    """

    seconds: list[float] = field(default_factory=list)
    page_faults: list[int] = field(default_factory=list)
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


OUT_OF_TIME = "the time budget was used up"


def measure(
    jobs: Mapping[int, Job],
    effort: Effort,
    device: torch.device,
    tell: Callable[[int, int], None] = lambda done, total: None,
    baselines: Collection[int] = (),
) -> dict[int, Samples]:
    """Warm up, then run all jobs once per round, in an order shuffled anew each round, so that no job always finds the
    caches as the same other job left them. A job that fails is left out of the rounds, with its error as the reason;
    so are the slowest, unless they are ``baselines``, if the time does not suffice.
    """
    start = time.perf_counter()
    samples = {name: Samples() for name in jobs}
    warm: dict[int, tuple[float, int]] = {}
    for name, job in jobs.items():
        if effort.strict and time.perf_counter() - start > effort.limit:
            samples[name].reason = OUT_OF_TIME
            continue
        try:
            warm[name] = _warm_up(job, effort, device)
        except Exception as error:
            samples[name].reason = f"failed: {first_line(error)}"
    elapsed = time.perf_counter() - start
    order = affordable({name: run[0] for name, run in warm.items()}, effort.limit - elapsed, effort.least, baselines)
    for name in warm.keys() - set(order):
        samples[name] = Samples([warm[name][0]], [warm[name][1]])
    rounds = plan_rounds(sum(warm[name][0] for name in order), effort.seconds - elapsed, effort)
    shuffle = random.Random(0).shuffle
    gc.collect()
    for done in range(rounds):
        if done and time.perf_counter() - start > effort.limit:
            break
        shuffle(order)
        for name in order:
            seconds, faults = _run_once(jobs[name], device)
            samples[name].seconds.append(seconds)
            samples[name].page_faults.append(faults)
        tell(done + 1, rounds)
    return samples


def affordable(took: Mapping[int, float], seconds: float, rounds: int, baselines: Collection[int]) -> list[int]:
    """Jobs of which ``rounds`` rounds fit into ``seconds``: the slowest are left out, but never the fastest nor the
    baselines, on which all ratios rest."""
    names = sorted(took, key=lambda name: took[name])
    for name in reversed(names[1:]):
        if rounds * sum(took[name] for name in names) <= seconds:
            break
        if name not in baselines:
            names.remove(name)
    return names


def plan_rounds(seconds_per_round: float, seconds: float, effort: Effort) -> int:
    """As many rounds as fit into ``seconds``, within the bounds."""
    fitting = int(seconds / seconds_per_round) if seconds_per_round > 0 else effort.most
    return min(effort.most, max(effort.least, fitting))


def _warm_up(job: Job, effort: Effort, device: torch.device) -> tuple[float, int]:
    """Run until caches and threads are there: twice, or once if that takes a noticeable part of the time."""
    first = _run_once(job, device)
    return first if first[0] > 0.02 * effort.seconds else _run_once(job, device)


def _run_once(job: Job, device: torch.device) -> tuple[float, int]:
    synchronise(device)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    job.run()
    synchronise(device)
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, quartiles and the best of some times."""
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return {"median": statistics.median(seconds), "q1": quartiles[0], "q3": quartiles[2], "best": min(seconds)}
