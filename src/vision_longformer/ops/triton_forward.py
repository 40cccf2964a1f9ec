"""The forward Triton kernel. Imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_device import (
    LOG2E,
    add_table,
    entry_at,
    load_rows,
    own_rectangle,
    place_of,
    position,
    start_of,
    store_rows,
    surroundings,
    token_at,
)

SIZES = ["height", "width", "heads", "global_tokens", "tiles"]


@triton.jit
def key_tile(
    index, global_tokens, place, first, second, WINDOW: tl.constexpr, RULE: tl.constexpr, NEIGHBOURS: tl.constexpr
):
    """The index-th keys a chunk sees, global ones first: token, whether stored, local and counting, global; entry."""
    row, column, local = position(index - global_tokens, first, second, NEIGHBOURS)
    token, stored, counts = token_at(row, column, place, WINDOW, RULE)
    is_global = index < global_tokens
    token = tl.where(is_global, index, token + global_tokens)
    return token, is_global | (local & stored), local & counts, is_global, entry_at(row, column, WINDOW)


@triton.jit
def tile_scores(
    products, q_entry, k_entry, index, local, is_global, head, global_tokens, table_ptr, table_stride,
    global_bias_ptr, scale, WINDOW: tl.constexpr,
):  # fmt: skip
    """Scores (queries, keys), −∞ where the key is not seen."""
    scores = products * (scale * LOG2E)
    entry = q_entry[:, None] - k_entry[None, :]
    scores = add_table(scores, entry, local[None, :], table_ptr, table_stride, head, WINDOW)
    if global_bias_ptr is not None:
        added = tl.load(global_bias_ptr + head * global_tokens + index, mask=is_global, other=0.0)
        scores += added.to(tl.float32)[None, :] * LOG2E
    return tl.where((local | is_global)[None, :], scores, float("-inf"))


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, out, lse_ptr, table_ptr, table_stride, global_bias_ptr, neighbour_ptr, dilation_ptr,
    scale, height, width, heads, global_tokens, tiles,
    WINDOW: tl.constexpr, RULE: tl.constexpr, NEIGHBOURS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of a chunk against all their keys, by an online softmax.

    ``q``, ``k``, ``v``, ``out`` are views; log-sum-exp (B, heads, N) is in units of log 2.
    """
    PER_CHUNK: tl.constexpr = (WINDOW * WINDOW + BLOCK_M - 1) // BLOCK_M
    tile, sample = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    batch, head = sample // heads, sample % heads
    place = place_of(tile // PER_CHUNK, head, dilation_ptr, height, width, WINDOW)
    own = own_rectangle(place, WINDOW)
    query = (tile % PER_CHUNK) * BLOCK_M + tl.arange(0, BLOCK_M)
    if (tile % PER_CHUNK) * BLOCK_M >= own.count:
        return
    q_row, q_column, q_present = position(query, own, own, "self")
    q_token = place.first + q_row * place.down + q_column * place.right
    q_entry = entry_at(q_row, q_column, WINDOW)
    queries = load_rows(start_of(q, batch, head), q_token, q.token, q_present, DIM, BLOCK_D)
    k_start, v_start = start_of(k, batch, head), start_of(v, batch, head)
    first, second = surroundings(place, neighbour_ptr, 1, WINDOW, NEIGHBOURS, RULE == "chunk")

    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    weighted = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, global_tokens + first.count + second.count, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        token, stored, local, is_global, k_entry = key_tile(
            index, global_tokens, place, first, second, WINDOW, RULE, NEIGHBOURS
        )
        keys = load_rows(k_start, token, k.token, stored, DIM, BLOCK_D)
        values = load_rows(v_start, token, v.token, stored, DIM, BLOCK_D)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = tile_scores(
            products, q_entry, k_entry, index, local, is_global, head, global_tokens, table_ptr, table_stride,
            global_bias_ptr, scale, WINDOW,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(highest - shift)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision=PRECISION)
        highest = higher
    store_rows(start_of(out, batch, head), q_token, out.token, q_present, weighted / total[:, None], DIM, BLOCK_D)
    tl.store(lse_ptr + sample.to(tl.int64) * (height * width) + q_token, highest + tl.log2(total), mask=q_present)
