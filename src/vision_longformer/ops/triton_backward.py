"""The backward Triton kernels for queries, keys and values: each gradient is written once, by one program."""

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
from .triton_forward import SIZES, key_tile, tile_scores


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    q, k, v, out, grad_out, grad_q, lse_ptr, delta_ptr, table_ptr, table_stride, global_bias_ptr,
    neighbour_ptr, dilation_ptr,
    scale, height, width, heads, global_tokens, tiles,
    WINDOW: tl.constexpr, RULE: tl.constexpr, NEIGHBOURS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of a chunk, as in the forward kernel.

    Also writes delta (B, heads, N), the product of each output with its gradient, for the kernels that follow.
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
    outputs = load_rows(start_of(out, batch, head), q_token, out.token, q_present, DIM, BLOCK_D)
    grads = load_rows(start_of(grad_out, batch, head), q_token, grad_out.token, q_present, DIM, BLOCK_D)
    delta = tl.sum(outputs.to(tl.float32) * grads.to(tl.float32), 1)
    rows = sample.to(tl.int64) * (height * width) + q_token
    tl.store(delta_ptr + rows, delta, mask=q_present)
    lse = tl.load(lse_ptr + rows, mask=q_present, other=float("inf"))
    k_start, v_start = start_of(k, batch, head), start_of(v, batch, head)
    first, second = surroundings(place, neighbour_ptr, 1, WINDOW, NEIGHBOURS, RULE == "chunk")

    gradient = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
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
        weights = tl.exp2(scores - lse[:, None])
        grad_weights = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta[:, None])
        gradient = tl.dot(grad_scores.to(keys.dtype), keys, gradient, input_precision=PRECISION)
    store_rows(start_of(grad_q, batch, head), q_token, grad_q.token, q_present, gradient * scale, DIM, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    q, k, v, grad_out, grad_k, grad_v, lse_ptr, delta_ptr, table_ptr, table_stride, neighbour_ptr, dilation_ptr,
    scale, height, width, heads, global_tokens, tiles,
    WINDOW: tl.constexpr, RULE: tl.constexpr, NEIGHBOURS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N local keys of a chunk against all queries that see them, scores transposed."""
    PER_CHUNK: tl.constexpr = (WINDOW * WINDOW + BLOCK_N - 1) // BLOCK_N
    tile, sample = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    batch, head = sample // heads, sample % heads
    place = place_of(tile // PER_CHUNK, head, dilation_ptr, height, width, WINDOW)
    own = own_rectangle(place, WINDOW)
    key = (tile % PER_CHUNK) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (tile % PER_CHUNK) * BLOCK_N >= own.count:
        return
    k_row, k_column, k_present = position(key, own, own, "self")
    k_token = place.first + k_row * place.down + k_column * place.right + global_tokens
    k_entry = entry_at(k_row, k_column, WINDOW)
    keys = load_rows(start_of(k, batch, head), k_token, k.token, k_present, DIM, BLOCK_D)
    values = load_rows(start_of(v, batch, head), k_token, v.token, k_present, DIM, BLOCK_D)
    q_start, grad_start = start_of(q, batch, head), start_of(grad_out, batch, head)
    rows = sample.to(tl.int64) * (height * width)
    first, second = surroundings(place, neighbour_ptr, -1, WINDOW, NEIGHBOURS, RULE == "chunk")

    key_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, first.count + second.count, BLOCK_M):
        q_row, q_column, present = position(start + tl.arange(0, BLOCK_M), first, second, NEIGHBOURS)
        token, stored, _ = token_at(q_row, q_column, place, WINDOW, RULE)
        present = present & stored
        queries = load_rows(q_start, token, q.token, present, DIM, BLOCK_D)
        grads = load_rows(grad_start, token, grad_out.token, present, DIM, BLOCK_D)
        lse = tl.load(lse_ptr + rows + token, mask=present, other=float("inf"))
        delta = tl.load(delta_ptr + rows + token, mask=present, other=0.0)
        products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        entry = entry_at(q_row, q_column, WINDOW)[None, :] - k_entry[:, None]
        scores = products * (scale * LOG2E)
        scores = add_table(scores, entry, present[None, :], table_ptr, table_stride, head, WINDOW)
        weights = tl.exp2(scores - lse[None, :])
        value_gradient = tl.dot(weights.to(grads.dtype), grads, value_gradient, input_precision=PRECISION)
        grad_weights = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta[None, :])
        key_gradient = tl.dot(grad_scores.to(queries.dtype), queries, key_gradient, input_precision=PRECISION)
    store_rows(start_of(grad_k, batch, head), k_token, grad_k.token, k_present, key_gradient * scale, DIM, BLOCK_D)
    store_rows(start_of(grad_v, batch, head), k_token, grad_v.token, k_present, value_gradient, DIM, BLOCK_D)
