"""The measuring process: what it answers, that nothing else gets into its answers, and what happens when it dies."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_builders import attention_case

from vision_longformer.bench import worker
from vision_longformer.bench.cases import FORWARD_BACKWARD, FULL_ATTENTION
from vision_longformer.bench.timing import Budget
from vision_longformer.bench.worker import WorkerDied, WorkerError, Workers


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(("default", "kept"), torch.device("cpu"), threads=1) as started:
        yield started


def test_times(workers: Workers) -> None:
    """Three rounds of what can run, in the order of the cases; a failure has its reason."""
    unknown = replace(attention_case().workload, method="unknown")
    cases = [attention_case(FULL_ATTENTION), replace(attention_case(), workload=unknown), attention_case()]
    heard: list[tuple[int, int]] = []
    full, failed, local = workers.time("default", cases, Budget(1e-9, 3, 3, 60.0), lambda *done: heard.append(done))
    assert heard == [(1, 3), (2, 3), (3, 3)]
    for samples in (full, local):
        assert len(samples.seconds) == len(samples.page_faults) == 3
        assert min(samples.seconds) > 0
        assert samples.reason is None
    assert failed.seconds == []
    assert str(failed.reason).startswith("failed: unknown implementation 'unknown'")


def test_refusals(workers: Workers) -> None:
    reasons = workers.refusals([attention_case(), attention_case("unfold_nn"), attention_case(FULL_ATTENTION)])
    assert reasons[::2] == [None, None]
    assert "exact" in str(reasons[1])


def test_memory(workers: Workers) -> None:
    """A map of 128×128: q, k, v and the gradient of the output are there, the gradients of q, k, v and more arise."""
    options = {"height": 128, "width": 128, "dim": 32, "window": 7}
    memory = workers.memory(attention_case("sliding_chunk", FORWARD_BACKWARD, **options))
    tokens, width = 128 * 128, 4 * 2 * 32  # bytes of two heads
    leaves = width * (tokens + 2 * (tokens + 1)) + 4 * 2 * (27**2 + 1)
    assert memory["inputs"] == memory["outputs"] == leaves + width * tokens
    assert leaves < memory["extra"] < 50 * leaves


def test_memory_failures_have_reasons(workers: Workers) -> None:
    unknown = replace(attention_case().workload, method="unknown")
    with pytest.raises(WorkerError, match=r"^memory: failed: unknown implementation 'unknown'"):
        workers.memory(replace(attention_case(), workload=unknown))


def _allocator_settings(workers: Workers, allocator: str) -> dict[str, str]:
    """Settings of the C library's allocator that a worker was started with."""
    process = workers._processes[allocator]._process
    lines = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if line.startswith("MALLOC_"))


KEPT_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "68719476736", "MALLOC_TRIM_THRESHOLD_": "68719476736"}
"""Blocks below 64 GiB are never mapped one by one, and what is free at the top of the heap is not given back."""


def test_each_allocator_has_its_settings(workers: Workers) -> None:
    assert _allocator_settings(workers, "default") == {}
    assert _allocator_settings(workers, "kept") == KEPT_SETTINGS


def test_a_dead_worker_is_replaced(workers: Workers) -> None:
    workers._processes["kept"]._process.kill()
    with pytest.raises(WorkerDied, match=r"^the measuring process was killed, perhaps because it ran out of memory"):
        workers.time("kept", [attention_case()], Budget(1e-9, 2, 2, 60.0))
    (samples,) = workers.time("kept", [attention_case()], Budget(1e-9, 2, 2, 60.0))
    assert len(samples.seconds) == 2
    assert _allocator_settings(workers, "kept") == KEPT_SETTINGS


def _run_in_child(requests: list[dict[str, object]]) -> list[str]:
    """Lines that :func:`worker.main` writes, in a fork of this process with pipes as stdin and stdout."""
    stdin, stdout = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(stdin[0], 0)
            os.dup2(stdout[1], 1)
            for descriptor in (*stdin, *stdout):
                os.close(descriptor)
            worker.sys.stdin, worker.sys.stdout, worker.sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
            worker.main()
        finally:
            os._exit(0)
    os.close(stdin[0])
    os.close(stdout[1])
    with os.fdopen(stdin[1], "w") as pipe:
        pipe.writelines(json.dumps(request) + "\n" for request in requests)
    with os.fdopen(stdout[0]) as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(child, 0)
    return lines


def test_what_libraries_print_is_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the process itself nor in the children that measure memory."""

    def noisy(request: dict[str, object]) -> dict[str, int]:
        os.write(1, b"noise\n")
        return {"extra": 1, "inputs": 2, "outputs": 3}

    monkeypatch.setattr(worker, "_measure_memory", noisy)
    monkeypatch.setattr(worker, "_refusals", noisy)
    lines = _run_in_child([{"do": "memory"}, {"do": "refusals"}])
    answer = {"result": {"extra": 1, "inputs": 2, "outputs": 3}}
    assert [json.loads(line) for line in lines] == [{"ready": True}, answer, answer]


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the request; without any, those that are set."""
    monkeypatch.setattr(worker, "refusal", lambda *case: str(torch.get_num_threads()))
    request = {"do": "refusals", "cases": [attention_case().to_dict()], "device": "cpu"}
    before = str(torch.get_num_threads())
    _, first, second = _run_in_child([{**request, "threads": None}, {**request, "threads": 3}])
    assert json.loads(first) == {"result": [before]}
    assert json.loads(second) == {"result": ["3"]}
