"""Pairs and operations counted by hand on small maps; estimates and limits at stated sizes."""

from __future__ import annotations

import pytest
import torch
from bench_builders import attention_case

from vision_longformer.bench.cases import (
    BATCHED_MATMUL,
    FORWARD,
    FORWARD_BACKWARD,
    FULL_ATTENTION,
    INFERENCE,
    LARGE_MATMUL,
    AttentionWorkload,
    Case,
    ModelWorkload,
    Workload,
)
from vision_longformer.bench.flops import Limits, admitted_pairs, required_flops
from vision_longformer.ops import IMPLEMENTATIONS

CPU = torch.device("cpu")


def _case(workload: Workload, mode: str = FORWARD) -> Case:
    return Case("", "", mode, "", ("", ""), 1, workload)


@pytest.mark.parametrize(
    ("height", "width", "rule", "expected"),
    [
        # Along an axis of 4, two chunks of 2: all see all, 16. Of 6: 2·4 + 2·6 + 2·4 = 28.
        (4, 6, "chunk", 16 * 28),
        # Chunks of 2, 2 and 1: 2·4 + 2·5 + 1·3 = 21.
        (5, 6, "chunk", 21 * 28),
        # Windows of 5 that end at the border: 3 + 4 + 5 + 4 + 3 = 19; 3 + 4 + 5 + 5 + 4 + 3 = 24.
        (5, 6, "exact", 19 * 24),
        # Three of four chunks around a ring: 8·6 = 48; all of three: 6·6.
        (8, 6, "cyclic", 48 * 36),
    ],
)
def test_admitted_pairs(height: int, width: int, rule: str, expected: int) -> None:
    workload = AttentionWorkload("tiled", height, width, window=2, rule=rule, global_tokens=3)
    assert admitted_pairs(workload) == expected + 3 * height * width


def test_admitted_pairs_of_random_shift() -> None:
    """Six chunks of four tokens: 96 pairs within chunks; of the 352 with neighbours an eighth on average."""

    def pairs(neighbours: str) -> int:
        return admitted_pairs(AttentionWorkload("tiled", 4, 6, window=2, neighbours=neighbours, global_tokens=0))

    assert (pairs("all"), pairs("self"), pairs("random")) == (448, 96, 96 + 44)


def test_required_flops() -> None:
    def flops(method: str, mode: str = FORWARD) -> int | None:
        return required_flops(_case(AttentionWorkload(method, 4, 4, batch=2, window=2, side=10, dim=8), mode))

    every_pair = 2 * 2 * (2 * 3 * 8) * 16 * 17  # two products; multiply and add; maps, heads, dim; all see all
    assert flops("tiled") == flops(FULL_ATTENTION) == every_pair
    assert flops("tiled", FORWARD_BACKWARD) == 3 * every_pair
    assert flops(LARGE_MATMUL) == flops(LARGE_MATMUL, FORWARD_BACKWARD) == 2 * 10**3
    assert flops(BATCHED_MATMUL) == 2 * 2 * (2 * 3 * 4) * 4 * 37 * 8  # four chunks of four queries and 9·4 + 1 keys
    assert required_flops(_case(ModelWorkload("resnet50", 8, 8), INFERENCE)) is None


@pytest.mark.parametrize("method", list(IMPLEMENTATIONS))
def test_cases_that_are_too_large_are_not_started(method: str) -> None:
    limits = Limits(CPU, matmul_flops=1e11, max_bytes=1e10, max_seconds=30.0)
    large = _case(AttentionWorkload(method, 400, 400, rule="exact", window=8), FORWARD_BACKWARD)
    assert (limits.refusal(large) is None) == (method not in ("masked_dense", "flex", "unfold_nn", "unfold_tensor"))
    assert limits.refusal(attention_case(method)) is None


def test_memory_limit() -> None:
    """Four maps of scores of 3 heads, 10,000 queries and 10,001 keys in float32: 4.8 GB."""
    case = _case(AttentionWorkload("masked_dense", 100, 100))
    assert Limits(CPU, 1e11, 5e9, 30.0).temporary_bytes(case) == 4 * 4 * 3 * 10_000 * 10_001
    assert Limits(CPU, 1e11, 4.5e9, 30.0).refusal(case) == "would need about 4.8 GB; the limit is 4.5 GB"
    assert Limits(CPU, 1e11, 5e9, 30.0).refusal(case) is None


def test_time_limit() -> None:
    """Full attention of 160,000 queries and keys: 4·3·32·160,000·160,001 operations at half of 1e11 a second."""
    case = _case(AttentionWorkload(FULL_ATTENTION, 400, 400))
    assert Limits(CPU, 1e11, 1e10, 30.0).seconds(case) == pytest.approx(196.6, abs=0.1)
    assert Limits(CPU, 1e11, 1e10, 30.0).refusal(case) == "would take about 196.6 s a run; the limit is 30 s"
    assert Limits(CPU, 1e11, 1e10, 1e4).refusal(case) is None
    both = _case(case.workload, FORWARD_BACKWARD)
    assert Limits(CPU, 1e11, 1e10, 30.0).seconds(both) == pytest.approx(3 * 196.6, abs=0.3)
