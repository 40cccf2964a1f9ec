"""How much arithmetic a task asks for, whatever a method does on top of it."""

from __future__ import annotations

import torch

from ..geometry import SELF_BLOCK
from ..ops.chunks import axis_window, chunk_tables
from .tasks import BATCHED_MATMUL, BOTH, FULL_ATTENTION, LARGE_MATMUL, AttentionWork, Task


def useful_flops(task: Task) -> int | None:
    """Floating-point operations of the matrix products of a call; None for models.

    Forward: scores and context of the admitted pairs. Backward: twice that, four products; recomputed scores do not
    count. Padding, masked pairs, softmax and biases never do.
    """
    work = task.work
    if not isinstance(work, AttentionWork):
        return None
    if work.method == LARGE_MATMUL:
        return 2 * work.side**3
    if work.method == BATCHED_MATMUL:
        forward = 4 * batched_products(work) * work.window**2 * block_keys(work) * work.dim
    else:
        forward = 4 * work.batch * work.heads * work.dim * admitted_pairs(work)
    return forward * (3 if task.mode == BOTH else 1)


def admitted_pairs(work: AttentionWork) -> int:
    """Pairs of a local query and a key it sees, in one map; for random shift the mean over the eight neighbours."""
    tokens, cpu = work.grid.tokens, torch.device("cpu")
    if work.method == FULL_ATTENTION:
        return tokens * (tokens + work.global_tokens)
    if work.rule == "exact":
        rows, columns = (int(axis_window(length, work.window, 1, cpu).inside.sum()) for length in work.grid)
        return rows * columns + tokens * work.global_tokens
    queries = chunk_tables(work.grid, work.window, "chunk", cpu).valid[SELF_BLOCK].sum(-1)
    keys = chunk_tables(work.grid, work.window, work.rule, cpu).valid.sum(-1)
    blocks = (queries * keys).sum(1)
    own, others = int(blocks[SELF_BLOCK]), int(blocks.sum() - blocks[SELF_BLOCK])
    local = own + {"all": others, "self": 0, "random": others // 8}[work.neighbours]
    return local + tokens * work.global_tokens


def block_keys(work: AttentionWork) -> int:
    """Keys of an interior chunk."""
    return 9 * work.window**2 + work.global_tokens


def batched_products(work: AttentionWork) -> int:
    """How many chunks there are to multiply."""
    return work.batch * work.heads * work.grid.chunks(work.window).tokens
