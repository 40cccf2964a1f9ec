"""Which tasks are not worth starting: those that would fill the memory or take forever.

The estimates need only be right to a factor of two or so; they concern methods whose temporaries are far larger than
their inputs, or whose arithmetic is quadratic.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from .flops import block_keys
from .tasks import BOTH, FULL_ATTENTION, AttentionWork, Task

BYTES_PER_SECOND = 5e8
"""At which fresh temporaries are written and read again, page faults included."""


@dataclass(frozen=True)
class Estimates:
    """For a device that multiplies at ``matmul_flops`` operations per second; the limits are those of a single run."""

    device: torch.device
    matmul_flops: float
    memory_limit: float
    seconds_limit: float

    def objection(self, task: Task) -> str | None:
        """Why a task should not be started; None if it should."""
        memory, seconds = self.temporary_bytes(task), self.seconds(task)
        if memory > self.memory_limit:
            return f"would need about {memory / 1e9:.1f} GB; the limit is {self.memory_limit / 1e9:.1f} GB"
        if seconds > self.seconds_limit:
            return f"would take about {seconds:.1f} s a run; the limit is {self.seconds_limit:g} s"
        return None

    def temporary_bytes(self, task: Task) -> float:
        """Of the scores or copied windows that a method holds at its peak."""
        work = task.work
        if not isinstance(work, AttentionWork):
            return 0
        tokens, both = work.batch * work.grid.tokens, task.mode == BOTH
        chunk_scores = tokens * work.heads * block_keys(work)
        windows = tokens * work.heads * work.dim * (2 * work.window + 1) ** 2
        floats = {
            "masked_dense": _pairs(work) * (5 if both else 4),
            "flex": _pairs(work) * 8 if self.device.type == "cpu" else 0,  # eager: masks and scores of all pairs
            "unfold_nn": windows * (4 if both else 2),
            "unfold_tensor": windows * (4 if both else 2),
            "sliding_chunk": chunk_scores * (3 if both else 2),
            "sliding_chunk_autograd": chunk_scores * (6 if both else 4),
        }
        return 4 * floats.get(work.method, 0)

    def seconds(self, task: Task) -> float:
        """Of one run: arithmetic of full attention at half the speed of a matrix product, traffic of temporaries."""
        work = task.work
        flops, overhead = 0, 0.0
        if isinstance(work, AttentionWork) and work.method in (FULL_ATTENTION, "masked_dense"):
            flops = 4 * work.dim * _pairs(work) * (3 if task.mode == BOTH else 1)
        if isinstance(work, AttentionWork) and work.method == "flex" and self.device.type == "cpu":
            overhead = 1.0  # it is traced anew in each run
        return flops / (0.5 * self.matmul_flops) + self.temporary_bytes(task) / BYTES_PER_SECOND + overhead


def default_memory_limit(device: torch.device) -> float:
    """A quarter of the memory of the machine or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 4
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 4


def _pairs(work: AttentionWork) -> int:
    """Scores of full attention."""
    tokens = work.grid.tokens
    return work.batch * work.heads * tokens * (tokens + work.global_tokens)
