"""How the time is shared out and rows are filled in, with workers that answer as told and a clock of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import pytest
import torch
from bench_builders import Clock

from vision_longformer.bench import flops as flops_module
from vision_longformer.bench import run as run_module
from vision_longformer.bench.cases import (
    BATCHED_MATMUL,
    FORWARD,
    FORWARD_BACKWARD,
    INFERENCE,
    LARGE_MATMUL,
    AttentionWorkload,
    Case,
    Group,
    ModelWorkload,
)
from vision_longformer.bench.plans import Options
from vision_longformer.bench.results import Result
from vision_longformer.bench.run import run
from vision_longformer.bench.timing import OUT_OF_TIME, Budget, Samples
from vision_longformer.bench.worker import WorkerError


class FakeWorkers:
    """Every run takes a second on the clock, a request ``seconds_per_request``; 1024³ products are 1e9 a second."""

    clock: Clock
    seconds_per_request = 10.0
    refused: dict[str, str]
    failing: dict[tuple[str, str], str]
    requests: list[tuple[str, list[str], Budget | None]]

    def __init__(self, allocators: tuple[str, ...], device: torch.device, threads: int | None) -> None:
        self.allocators = allocators

    def __enter__(self) -> FakeWorkers:
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def refusals(self, cases: Sequence[Case]) -> list[str | None]:
        self._fail("refusals", cases)
        return [self.refused.get(case.variant) for case in cases]

    def time(
        self,
        allocator: str,
        cases: Sequence[Case],
        budget: Budget,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Samples]:
        if cases[0].point == "":  # speed of a matrix product, before all else
            return [Samples([1.0, 1.0], [0, 0])]
        self.requests.append((allocator, [case.variant for case in cases], budget))
        progress(1, 2)
        self._fail(allocator, cases)
        self.clock.advance(self.seconds_per_request)
        return [Samples([1.0, 3.0], [0, 0]) for _ in cases]

    def memory(self, case: Case) -> dict[str, int]:
        self.requests.append(("memory", [case.variant], None))
        self._fail("memory", [case])
        return {"extra": 5, "inputs": 3, "outputs": 2}

    def _fail(self, request: str, cases: Sequence[Case]) -> None:
        for case in cases:
            if (request, case.variant) in self.failing:
                raise WorkerError(self.failing[request, case.variant])


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorkers]:
    class Workers(FakeWorkers):
        clock = Clock()
        refused: dict[str, str] = {}  # noqa: RUF012
        failing: dict[tuple[str, str], str] = {}  # noqa: RUF012
        requests: list[tuple[str, list[str], Budget | None]] = []  # noqa: RUF012

    monkeypatch.setattr(run_module, "Workers", Workers)
    monkeypatch.setattr(run_module.time, "monotonic", Workers.clock)
    return Workers


def _case(variant: str, mode: str = FORWARD, side: int = 56, round_key: str = "a") -> Case:
    workload = AttentionWorkload(variant, side, side)
    return Case(round_key, variant, mode, round_key, (round_key, "tiled"), side * side, workload)


def _group(*cases: Case, name: str = "figure") -> Group:
    return Group("rules", name, "about", "lines", "call", cases)


def _run(*groups: Group, quick: bool = False, budget: float = 90.0, **options: object) -> Result:
    *_, last = run("rules", {"rules": list(groups)}, Options(quick=quick), threads=1, budget=budget, **options)
    return last


def test_rows_are_filled_in(workers: type[FakeWorkers]) -> None:
    """Times with both allocators, then memory, which matrix products have none of to speak of."""
    made = _run(_group(_case("tiled"), _case(LARGE_MATMUL), _case(BATCHED_MATMUL)))
    assert made.complete
    assert made.settings["budget"] == 90
    assert made.settings["allocators"] == ("default", "kept")
    assert made.machine["threads"] == 1
    tiled, large, batched = made.groups[0].rows
    for own in (tiled, large, batched):
        assert {name: time["median"] for name, time in own.time.items()} == {"default": 2.0, "kept": 2.0}
        assert own.time["default"]["speedup"] == 1
        assert own.reasons == []
    assert tiled.memory == {"extra": 5, "inputs": 3, "outputs": 2}
    assert large.memory is None
    assert batched.memory is None
    assert large.flops == 2 * 2048**3
    names = [(name, variants) for name, variants, _ in workers.requests]
    everything = ["tiled", LARGE_MATMUL, BATCHED_MATMUL]
    assert names == [("default", everything), ("kept", everything), ("memory", ["tiled"])]


def test_rows_are_timed_with_those_of_their_round_key_and_mode(workers: type[FakeWorkers]) -> None:
    _run(
        _group(
            _case("tiled"),
            _case("flex", FORWARD_BACKWARD),
            _case("gathered_chunk"),
            _case("unfold_nn", side=28, round_key="b"),
        )
    )
    assert [variants for name, variants, _ in workers.requests if name == "default"] == [
        ["tiled", "gathered_chunk"],
        ["flex"],
        ["unfold_nn"],
    ]


def test_time_is_shared_by_weight(workers: type[FakeWorkers]) -> None:
    """A map of 56×56 weighs 1 + 1, twice that with backward; so 90 s are 30 and 60, in thirds for allocators and
    memory. The first takes 20, so that the second has 70."""
    _run(_group(_case("tiled"), _case("tiled", FORWARD_BACKWARD)))
    budgets = [budget for name, _, budget in workers.requests if name == "default"]
    assert budgets[0] == Budget(pytest.approx(10), 5, 50, pytest.approx(15), False)
    assert budgets[1] == Budget(pytest.approx(70 / 3), 5, 50, pytest.approx(35), False)


def test_benchmarks_that_are_late_are_shortened(workers: type[FakeWorkers]) -> None:
    """Quick budgets of rules and windows are equal: 50 s of 100 each. The first takes 80 instead, so that the second
    has 20, two fifths; what is left is never less than a fifth."""
    plans = {name: [_group(_case("tiled"), name=name)] for name in ("rules", "windows")}
    workers.seconds_per_request = 40.0
    *_, made = run("all", plans, Options(quick=True), budget=100.0)
    budgets = [budget.seconds for name, _, budget in workers.requests if name == "default" and budget]
    assert budgets == [pytest.approx(50 / 3), pytest.approx(20 / 3)]
    assert [group.name for group in made.groups] == ["rules", "windows"]
    workers.requests.clear()
    workers.seconds_per_request = 400.0
    list(run("all", plans, Options(quick=True), budget=100.0))
    budgets = [budget.seconds for name, _, budget in workers.requests if name == "default" and budget]
    assert budgets == [pytest.approx(50 / 3), pytest.approx(10 / 3)]


def test_results_come_as_they_are_measured(workers: type[FakeWorkers]) -> None:
    """Two rounds of the first group, one of the second."""
    groups = [
        _group(_case("tiled"), _case("tiled", round_key="b"), name="first"),
        _group(_case("tiled"), name="second"),
    ]
    seen = [
        ([sum(bool(row.time) for row in group.rows) for group in made.groups], made.complete)
        for made in run("rules", {"rules": groups}, Options(), budget=90.0)
    ]
    assert seen == [([1], False), ([2], False), ([2, 1], False), ([2, 1], True)]


def test_quick_runs_are_strict(workers: type[FakeWorkers]) -> None:
    """Two to fifteen rounds; what would begin after the time is not started, memory neither. The weights are 2 and
    2 · (1 + 8/56), so that the first has 42 s."""
    workers.seconds_per_request = 70.0
    made = _run(_group(_case("tiled"), _case("gathered_chunk", FORWARD_BACKWARD, side=8)), quick=True)
    budgets = [budget for name, _, budget in workers.requests if name == "default"]
    assert budgets == [Budget(pytest.approx(14), 2, 15, pytest.approx(21), True)]
    tiled, late = made.groups[0].rows
    assert tiled.reasons == [f"memory: {OUT_OF_TIME}"]
    assert late.time == {}
    assert late.reasons == [OUT_OF_TIME]


def test_images_that_would_not_fit_are_not_tried(workers: type[FakeWorkers], monkeypatch: pytest.MonkeyPatch) -> None:
    """5 bytes for an image of 8×8 are 2e10 for one of 512,000×512,000; 2e10 of 2.2e10 free bytes are too many."""
    monkeypatch.setattr(flops_module, "free_memory", lambda device: 2.2e10)
    cases = []
    for side in (8, 512_000):
        point = f"{side}"
        cases.append(Case(point, "m", INFERENCE, point, (point, "m"), side**2, ModelWorkload("m", side, side)))
    group = Group("large", "images", "about", "lines", "pixel", tuple(cases))
    *_, made = run("large", {"large": [group]}, Options(), budget=90.0)
    small, large = made.groups[0].rows
    assert (small.memory or {})["extra"] == 5
    assert large.reasons == ["would need about 20.5 GB, more than 85% of the 22.0 GB that is free"]
    assert large.time == {}
    assert made.settings["allocators"] == ("default",)
    assert {budget.min_rounds for _, _, budget in workers.requests if budget} == {3}


def test_what_cannot_run_is_left_out(workers: type[FakeWorkers]) -> None:
    """Refused by the implementation, or too much for the machine: 1e6 queries at 2·1024³ operations a second."""
    workers.refused = {"flex": "it cannot"}
    made = _run(_group(_case("tiled"), _case("flex"), _case("full_sdpa", side=1000)))
    tiled, flex, full = made.groups[0].rows
    assert tiled.reasons == []
    assert flex.reasons == ["it cannot"]
    assert "a run; the limit is 30 s" in full.reasons[0]
    assert all(variants == ["tiled"] for _, variants, _ in workers.requests)


def test_failures_of_workers_are_reasons(workers: type[FakeWorkers]) -> None:
    workers.failing = {("kept", "tiled"): "the measuring process ended with 1", ("memory", "flex"): "memory: too much"}
    made = _run(_group(_case("tiled"), _case("flex", FORWARD_BACKWARD)))
    tiled, flex = made.groups[0].rows
    assert tiled.reasons == ["the measuring process ended with 1"]
    assert list(tiled.time) == ["default"]
    assert flex.reasons == ["memory: too much"]
    assert flex.memory is None


def test_progress_is_counted_in_planned_seconds(workers: type[FakeWorkers]) -> None:
    """30 of 90 s for the first, in thirds; half of the rounds of an allocator are half of a third."""
    heard: list[tuple[str, float, float]] = []
    _run(_group(_case("tiled"), _case("tiled", FORWARD_BACKWARD)), progress=lambda *args: heard.append(args))
    assert [(text, round(done, 6), total) for text, done, total in heard] == [
        ("starting", 0, 90),
        ("rules: figure, a, forward", 5, 90),
        ("rules: figure, a, forward", 15, 90),
        ("rules: figure, a, forward", 20, 90),
        ("rules: figure, a, forward+backward", 40, 90),
        ("rules: figure, a, forward+backward", 60, 90),
        ("rules: figure, a, forward+backward", 70, 90),
    ]
