"""Rounds on a clock that only runnables advance: their order, how many fit the budget, what is left out."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from bench_builders import Clock

from vision_longformer.bench import timing
from vision_longformer.bench.cases import Runnable
from vision_longformer.bench.timing import OUT_OF_TIME, Budget, Samples, affordable, round_count, summary
from vision_longformer.bench.timing import time_interleaved as time_on_device

CPU = torch.device("cpu")


class Bench:
    """Runnables that take the given seconds on the clock; ``calls`` are the indices in the order they ran."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        self.calls: list[int] = []
        self.runnables = {index: Runnable(self._call(clock, index, own), 0, 0) for index, own in enumerate(seconds)}

    def _call(self, clock: Clock, index: int, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.calls.append(index)
            clock.advance(seconds)

        return run

    def time(self, budget: Budget, baselines: tuple[int, ...] = ()) -> dict[int, list[float]]:
        samples = time_on_device(self.runnables, budget, CPU, baselines=baselines)
        return {index: [round(seconds, 6) for seconds in own.seconds] for index, own in samples.items()}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", made)
    return made


def test_rounds_are_interleaved_in_shuffled_order(clock: Clock) -> None:
    """One warm-up each (above 2% of 40 s): 7 s; then (40 - 7) // 7 = 4 rounds. The orders are those of Python's
    shuffle with seed 0, beginning with the fastest first."""
    bench = Bench(clock, 4.0, 1.0, 2.0)
    samples = bench.time(Budget(40, 2, 5, 60))
    assert bench.calls[:3] == [0, 1, 2]
    assert [bench.calls[start : start + 3] for start in range(3, 15, 3)] == [[1, 0, 2], [2, 0, 1], [2, 0, 1], [2, 1, 0]]
    assert len(bench.calls) == 15
    assert samples == {0: [4.0] * 4, 1: [1.0] * 4, 2: [2.0] * 4}


def test_progress_counts_rounds(clock: Clock) -> None:
    heard: list[tuple[int, int]] = []
    time_on_device(Bench(clock, 1.0).runnables, Budget(4, 1, 9, 10), CPU, lambda *done: heard.append(done))
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_what_is_quick_is_warmed_up_twice(clock: Clock) -> None:
    bench = Bench(clock, 0.1, 0.3)
    samples = bench.time(Budget(10, 2, 3, 20))
    assert bench.calls[:3] == [0, 0, 1]
    assert samples == {0: [0.1] * 3, 1: [0.3] * 3}


def test_the_slowest_are_timed_once_if_time_does_not_suffice(clock: Clock) -> None:
    """After 13 s of warm-ups 7 are left, where 2 rounds of the first two take 6; the slowest keeps its warm-up."""
    bench = Bench(clock, 1.0, 2.0, 10.0)
    samples = bench.time(Budget(18, 2, 5, 20))
    assert samples == {0: [1.0, 1.0], 1: [2.0, 2.0], 2: [10.0]}
    bench = Bench(clock, 1.0, 2.0, 10.0)
    assert bench.time(Budget(18, 2, 5, 20), baselines=(2,)) == {0: [1.0], 1: [2.0], 2: [10.0]}


def test_rounds_end_at_the_limit(clock: Clock) -> None:
    """Runs that become slower than their warm-up: after the round that passes 20 s there is no other."""
    calls = []

    def run() -> None:
        calls.append(clock.now)
        clock.advance(1.0 if len(calls) == 1 else 9.0)

    samples = time_on_device({0: Runnable(run, 0, 0)}, Budget(10, 2, 9, 20), CPU)
    assert len(samples[0].seconds) == 3


def test_strict_budget_starts_nothing_beyond_the_limit(clock: Clock) -> None:
    """The second would begin after 5 s where 4 are the limit; otherwise it is timed once."""
    strict = time_on_device(Bench(clock, 5.0, 1.0).runnables, Budget(3, 2, 2, 4, strict=True), CPU)
    assert strict[1] == Samples(reason=OUT_OF_TIME)
    assert strict[0].seconds == [5.0]
    lenient = Bench(clock, 5.0, 1.0).time(Budget(3, 2, 2, 4))
    assert lenient == {0: [5.0], 1: [1.0]}


def test_failures_are_reasons(clock: Clock) -> None:
    def fail() -> None:
        raise RuntimeError("not enough memory\nat all")

    runnables = {0: Runnable(fail, 0, 0), 1: Bench(clock, 1.0).runnables[0]}
    samples = time_on_device(runnables, Budget(5, 2, 2, 10), CPU)
    assert samples[0] == Samples(reason="failed: not enough memory")
    assert samples[1].seconds == [1.0, 1.0]


def test_gpu_is_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run until the device is synchronised: 2 s of each call, not the 5 that were still going on before."""
    pending = [5.0]

    def synchronize(device: torch.device) -> None:
        clock.advance(sum(pending))
        pending.clear()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    runnables = {0: Runnable(lambda: pending.append(2.0), 0, 0)}
    assert time_on_device(runnables, Budget(10, 3, 3, 20), torch.device("cuda"))[0].seconds == [2.0] * 3


def test_page_faults_are_counted() -> None:
    """A hundred new pages are a hundred faults."""

    def touch() -> None:
        with mmap.mmap(-1, 100 * mmap.PAGESIZE) as memory:
            for start in range(0, len(memory), mmap.PAGESIZE):
                memory[start] = 1

    (samples,) = time_on_device({0: Runnable(touch, 0, 0)}, Budget(0.1, 3, 3, 10), CPU).values()
    assert len(samples.page_faults) == len(samples.seconds) == 3
    assert all(100 <= faults < 200 for faults in samples.page_faults)


def test_affordable() -> None:
    took = {0: 1.0, 1: 5.0, 2: 0.1}
    assert affordable(took, 30.0, 3, ()) == [2, 0, 1]
    assert affordable(took, 4.0, 3, ()) == [2, 0]
    assert affordable(took, 4.0, 3, {1}) == [2, 1]
    assert affordable({0: 50.0}, 1.0, 3, ()) == [0]


def test_round_count() -> None:
    budget = Budget(seconds=10, min_rounds=3, max_rounds=20, limit=20)
    assert round_count(1.0, 10, budget) == 10
    assert round_count(0.01, 10, budget) == 20
    assert round_count(9.0, 10, budget) == 3
    assert round_count(0.0, 10, budget) == 20


def test_summary() -> None:
    assert summary([9.0, 1.0, 2.0, 3.0]) == {"median": 2.5, "q1": 1.75, "q3": 4.5, "best": 1.0}
    assert summary([2.0]) == {"median": 2.0, "q1": 2.0, "q3": 2.0, "best": 2.0}
