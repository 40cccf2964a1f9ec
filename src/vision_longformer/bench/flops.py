"""How much arithmetic a case takes: counted for the tables, estimated to leave out what this machine cannot do."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..geometry import SELF_BLOCK
from ..large.memory import free_memory
from ..ops.tables import axis_window, chunk_tables
from .cases import BATCHED_MATMUL, FORWARD_BACKWARD, FULL_ATTENTION, LARGE_MATMUL, AttentionWorkload, Case

TEMPORARY_BYTES_PER_SECOND = 5e8
"""At which newly allocated temporaries are written and read again, page faults included."""


FREE_PART = 0.85
"""Of the free memory that a model may be expected to take."""


def required_flops(case: Case) -> int | None:
    """Floating-point operations of the matrix products that a result requires, however it is computed; None for models.

    Forward: scores and context of the admitted pairs. Backward: twice that, four products; recomputed scores do not
    count. Padding, masked pairs, softmax and biases never do.
    """
    workload = case.workload
    if not isinstance(workload, AttentionWorkload):
        return None
    if workload.method == LARGE_MATMUL:
        return 2 * workload.side**3
    if workload.method == BATCHED_MATMUL:
        forward = 4 * workload.chunks * workload.window**2 * workload.keys_per_chunk * workload.dim
    else:
        forward = 4 * workload.batch * workload.heads * workload.dim * admitted_pairs(workload)
    return forward * (3 if case.mode == FORWARD_BACKWARD else 1)


def admitted_pairs(workload: AttentionWorkload) -> int:
    """Pairs of a local query and a key it sees, in one map; for random shift the mean over the eight neighbours."""
    tokens, cpu = workload.grid.tokens, torch.device("cpu")
    if workload.method == FULL_ATTENTION:
        return tokens * (tokens + workload.global_tokens)
    if workload.rule == "exact":
        rows, columns = (int(axis_window(length, workload.window, 1, cpu).inside.sum()) for length in workload.grid)
        return rows * columns + tokens * workload.global_tokens
    queries = chunk_tables(workload.grid, workload.window, "chunk", cpu).valid[SELF_BLOCK].sum(-1)
    keys = chunk_tables(workload.grid, workload.window, workload.rule, cpu).valid.sum(-1)
    pairs = (queries * keys).sum(1)
    own, others = int(pairs[SELF_BLOCK]), int(pairs.sum() - pairs[SELF_BLOCK])
    local = own + {"all": others, "self": 0, "random": others // 8}[workload.neighbours]
    return local + tokens * workload.global_tokens


@dataclass(frozen=True)
class Limits:
    """What one run may take on a device that multiplies matrices at ``matmul_flops`` operations per second.

    Estimates need only be right to a factor of two or so; they concern methods whose temporaries are far larger than
    their inputs, or whose arithmetic is quadratic.
    """

    device: torch.device
    matmul_flops: float
    max_bytes: float
    max_seconds: float

    def refusal(self, case: Case) -> str | None:
        """Why a case should not be started; None if it should."""
        memory, seconds = self.temporary_bytes(case), self.seconds(case)
        if memory > self.max_bytes:
            return f"would need about {memory / 1e9:.1f} GB; the limit is {self.max_bytes / 1e9:.1f} GB"
        if seconds > self.max_seconds:
            return f"would take about {seconds:.1f} s a run; the limit is {self.max_seconds:g} s"
        return None

    def refuse_extra(self, expected: float) -> str | None:
        """Why a model that is expected to take so many bytes should not be started; None if it should."""
        free = free_memory(self.device)
        if expected <= FREE_PART * free:
            return None
        limit = f"{FREE_PART:.0%} of the {free / 1e9:.1f} GB that is free"
        return f"would need about {expected / 1e9:.1f} GB, more than {limit}"

    def temporary_bytes(self, case: Case) -> float:
        """Of the scores or copied windows that a method holds at its peak."""
        workload = case.workload
        if not isinstance(workload, AttentionWorkload):
            return 0
        tokens, backward = workload.batch * workload.grid.tokens, case.mode == FORWARD_BACKWARD
        chunk_scores = tokens * workload.heads * workload.keys_per_chunk
        windows = tokens * workload.heads * workload.dim * (2 * workload.window + 1) ** 2
        floats = {
            "masked_dense": _all_pairs(workload) * (5 if backward else 4),
            "flex": _all_pairs(workload) * 8 if self.device.type == "cpu" else 0,  # eager: masks and scores
            "unfold_nn": windows * (4 if backward else 2),
            "unfold_tensor": windows * (4 if backward else 2),
            "sliding_chunk": chunk_scores * (3 if backward else 2),
            "sliding_chunk_autograd": chunk_scores * (6 if backward else 4),
        }
        return 4 * floats.get(workload.method, 0)

    def seconds(self, case: Case) -> float:
        """Of one run: arithmetic of full attention at half the speed of a matrix product, traffic of temporaries."""
        workload = case.workload
        flops, overhead = 0, 0.0
        if isinstance(workload, AttentionWorkload) and workload.method in (FULL_ATTENTION, "masked_dense"):
            flops = 4 * workload.dim * _all_pairs(workload) * (3 if case.mode == FORWARD_BACKWARD else 1)
        if isinstance(workload, AttentionWorkload) and workload.method == "flex" and self.device.type == "cpu":
            overhead = 1.0  # it is traced anew in each run
        traffic = self.temporary_bytes(case) / TEMPORARY_BYTES_PER_SECOND
        return flops / (0.5 * self.matmul_flops) + traffic + overhead


def default_max_bytes(device: torch.device) -> float:
    """A quarter of the memory of the machine or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 4
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 4


def _all_pairs(workload: AttentionWorkload) -> int:
    """Scores of full attention, of all maps and heads."""
    tokens = workload.grid.tokens
    return workload.batch * workload.heads * tokens * (tokens + workload.global_tokens)
