"""The Triton kernels of global tokens: their rows, by a split over keys, and their gradients, by one over all tokens.

Imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import load_rows, products, scaled, start_of, store_rows, weighted_sums, zero_rows
from .kernels import LOG2E, from_global_scores, global_scores, load_global_queries, online_softmax, score_gradients


@triton.jit(do_not_specialize=["heads", "global_tokens", "tokens", "shares", "share"])
def global_rows_kernel(
    global_rows, k, v, parts_ptr, lse_parts_ptr, scale, heads, global_tokens, tokens, shares, share,
    DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_G global queries of a head against ``share`` of all keys, as if there were no others.

    Writes their outputs (B, heads, G, shares, DIM) and log-sum-exps (B, heads, G, shares), float32.
    """
    tiles = tl.cdiv(global_tokens, BLOCK_G)
    part, tile = tl.program_id(0) % shares, tl.program_id(0) // shares % tiles
    sample = tl.program_id(0) // (shares * tiles)
    batch, head = sample // heads, sample % heads
    query = tile * BLOCK_G + tl.arange(0, BLOCK_G)
    present = query < global_tokens
    q = global_rows.q
    queries = load_rows(start_of(q, batch, head), query, q.token, present, DIM, BLOCK_D, SLICE)
    factor = scale * LOG2E

    highest = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    weighted = zero_rows(BLOCK_G, BLOCK_D, SLICE)
    end = tl.minimum((part + 1) * share, tokens)
    for start in range(part * share, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        keys = load_rows(start_of(k, batch, head), key, k.token, key < end, DIM, BLOCK_D, SLICE)
        values = load_rows(start_of(v, batch, head), key, v.token, key < end, DIM, BLOCK_D, SLICE)
        scores = products(queries, keys, tl.zeros((BLOCK_G, BLOCK_N), tl.float32), PRECISION)
        scores += from_global_scores(global_rows, query[:, None], key[None, :], head, global_tokens, scale)
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
        highest, total, weighted = online_softmax(scores, values, factor, highest, total, weighted, PRECISION)
    cell = (sample.to(tl.int64) * global_tokens + query) * shares + part
    store_rows(parts_ptr, cell, DIM, present, weighted, 1 / total[:, None], DIM, SLICE)
    tl.store(lse_parts_ptr + cell, highest * factor + tl.log2(total), mask=present)


@triton.jit(do_not_specialize=["heads", "global_tokens", "shares"])
def merge_shares_kernel(
    parts_ptr, lse_parts_ptr, out, lse_ptr, lse_stride, heads, global_tokens, shares,
    DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: the output and log-sum-exp of a global query from those of all shares of the keys."""
    sample, query = tl.program_id(0) // global_tokens, tl.program_id(0) % global_tokens
    part = tl.arange(0, BLOCK_S)
    cell = tl.program_id(0).to(tl.int64) * shares + part
    lse = tl.load(lse_parts_ptr + cell, mask=part < shares, other=float("-inf"))
    highest = tl.max(lse, 0)
    weights = tl.exp2(lse - highest)
    total = tl.sum(weights, 0)
    (rows,) = load_rows(parts_ptr, cell, DIM, part < shares, DIM, BLOCK_D, BLOCK_D)
    merged = tl.sum(rows * weights[:, None], 0) / total
    axis = tl.arange(0, BLOCK_D)
    row = start_of(out, sample // heads, sample % heads) + query * out.token
    tl.store(row + axis, merged.to(out.data.dtype.element_ty), mask=axis < DIM)
    tl.store(lse_ptr + sample.to(tl.int64) * lse_stride + query, highest + tl.log2(total))


@triton.jit(do_not_specialize=["samples", "heads", "global_tokens", "tokens", "shares", "share"])
def global_sums_kernel(
    global_rows, q, k, v, grad_out, lse_ptr, delta_ptr, lse_stride, global_bias_ptr, sums_ptr, bias_sums_ptr,
    scale, samples, heads, global_tokens, tokens, shares, share,
    DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """One program: what ``share`` of the local tokens add to the gradients of BLOCK_G global tokens of a head.

    ``q`` and ``grad_out`` are views of local tokens, ``k`` and ``v`` of all. Writes sums for keys, values and, with
    ``global_rows``, queries, (2 or 3, B, heads, shares, G, DIM), and for their biases, (1 or 2, B, heads, shares, G).
    """
    tiles = tl.cdiv(global_tokens, BLOCK_G)
    part, tile = tl.program_id(0) % shares, tl.program_id(0) // shares % tiles
    sample = tl.program_id(0) // (shares * tiles)
    batch, head = sample // heads, sample % heads
    token = tile * BLOCK_G + tl.arange(0, BLOCK_G)
    present, nothing = token < global_tokens, tl.zeros((BLOCK_G, BLOCK_N), tl.float32)
    first = sample.to(tl.int64) * lse_stride
    cell = (sample.to(tl.int64) * shares + part) * global_tokens + token
    step = samples.to(tl.int64) * shares * global_tokens

    key_gradient, value_gradient = zero_rows(BLOCK_G, BLOCK_D, SLICE), zero_rows(BLOCK_G, BLOCK_D, SLICE)
    bias_gradient = tl.zeros((BLOCK_G,), tl.float32)
    end = tl.minimum((part + 1) * share, tokens)
    keys = load_rows(start_of(k, batch, head), token, k.token, present, DIM, BLOCK_D, SLICE)
    values = load_rows(start_of(v, batch, head), token, v.token, present, DIM, BLOCK_D, SLICE)
    added = global_scores(global_bias_ptr, token, head, global_tokens, scale)
    for start in tl.range(part * share, end, BLOCK_N, disable_licm=True):
        local = start + tl.arange(0, BLOCK_N)
        queries = load_rows(start_of(q, batch, head), local, q.token, local < end, DIM, BLOCK_D, SLICE)
        grads = load_rows(start_of(grad_out, batch, head), local, grad_out.token, local < end, DIM, BLOCK_D, SLICE)
        lse = tl.load(lse_ptr + first + local, mask=local < end, other=float("inf"))
        delta = tl.load(delta_ptr + first + local, mask=local < end, other=0.0)
        scores = products(keys, queries, nothing, PRECISION) + added[:, None]
        grad_weights = products(values, grads, nothing, PRECISION)
        weights, grad_scores = score_gradients(scores, scale * LOG2E, lse[None, :], grad_weights, delta[None, :])
        value_gradient = weighted_sums(weights, grads, value_gradient, PRECISION)
        key_gradient = weighted_sums(grad_scores, queries, key_gradient, PRECISION)
        bias_gradient += tl.sum(grad_scores, 1)
    store_rows(sums_ptr, cell, DIM, present, key_gradient, scale, DIM, SLICE)
    store_rows(sums_ptr, cell + step, DIM, present, value_gradient, 1, DIM, SLICE)
    tl.store(bias_sums_ptr + cell, bias_gradient, mask=present)

    if global_rows is not None:
        queries, grads, lse, delta = load_global_queries(
            global_rows, token, batch, head, heads, global_tokens, DIM, BLOCK_D, SLICE
        )
        gradient = zero_rows(BLOCK_G, BLOCK_D, SLICE)
        bias_gradient = tl.zeros((BLOCK_G,), tl.float32)
        added = from_global_scores(global_rows, token, global_tokens, head, global_tokens, scale)
        for start in tl.range(part * share, end, BLOCK_N, disable_licm=True):
            local = start + tl.arange(0, BLOCK_N)
            key = global_tokens + local
            local_keys = load_rows(start_of(k, batch, head), key, k.token, local < end, DIM, BLOCK_D, SLICE)
            local_values = load_rows(start_of(v, batch, head), key, v.token, local < end, DIM, BLOCK_D, SLICE)
            scores = products(queries, local_keys, nothing, PRECISION) + added[:, None]
            scores = tl.where((local < end)[None, :], scores, float("-inf"))
            grad_weights = products(grads, local_values, nothing, PRECISION)
            _, grad_scores = score_gradients(scores, scale * LOG2E, lse[:, None], grad_weights, delta[:, None])
            gradient = weighted_sums(grad_scores, local_keys, gradient, PRECISION)
            bias_gradient += tl.sum(grad_scores, 1)
        store_rows(sums_ptr, cell + 2 * step, DIM, present, gradient, scale, DIM, SLICE)
        tl.store(bias_sums_ptr + step + cell, bias_gradient, mask=present)


@triton.jit(do_not_specialize=["samples", "heads", "global_tokens"])
def global_gradient_kernel(
    global_rows, k, v, grad_q, grad_k, grad_v, sums_ptr, bias_sums_ptr, bias_ptr, scale, samples, heads, global_tokens,
    DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: the gradients of BLOCK_G global tokens of a head.

    Adds the pairs of global tokens to what pairs with local ones gave: ``sums_ptr`` (3, B, heads, G, DIM), of keys,
    values and queries. Writes the gradients of their bias, (B, heads, G, G + 1), with those for local keys from
    ``bias_sums_ptr`` (B, heads, G).
    """
    tiles = tl.cdiv(global_tokens, BLOCK_G)
    tile, sample = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    batch, head = sample // heads, sample % heads
    token = tile * BLOCK_G + tl.arange(0, BLOCK_G)
    present, k_start, v_start = token < global_tokens, start_of(k, batch, head), start_of(v, batch, head)
    cell = sample.to(tl.int64) * global_tokens + token
    step = samples.to(tl.int64) * global_tokens
    nothing = tl.zeros((BLOCK_G, BLOCK_G), tl.float32)
    keys = load_rows(k_start, token, k.token, present, DIM, BLOCK_D, SLICE)
    values = load_rows(v_start, token, v.token, present, DIM, BLOCK_D, SLICE)
    key_gradient = scaled(load_rows(sums_ptr, cell, DIM, present, DIM, BLOCK_D, SLICE), 1 / scale)
    value_gradient = load_rows(sums_ptr, cell + step, DIM, present, DIM, BLOCK_D, SLICE)
    for start in tl.range(0, global_tokens, BLOCK_G, disable_licm=True):
        other = start + tl.arange(0, BLOCK_G)
        other_queries, other_grads, other_lse, other_delta = load_global_queries(
            global_rows, other, batch, head, heads, global_tokens, DIM, BLOCK_D, SLICE
        )
        scores = products(keys, other_queries, nothing, PRECISION)
        scores += from_global_scores(global_rows, other[None, :], token[:, None], head, global_tokens, scale)
        scores = tl.where(present[:, None], scores, float("-inf"))
        grad_weights = products(values, other_grads, nothing, PRECISION)
        weights, grad_scores = score_gradients(
            scores, scale * LOG2E, other_lse[None, :], grad_weights, other_delta[None, :]
        )
        value_gradient = weighted_sums(weights, other_grads, value_gradient, PRECISION)
        key_gradient = weighted_sums(grad_scores, other_queries, key_gradient, PRECISION)
    store_rows(start_of(grad_k, batch, head), token, grad_k.token, present, key_gradient, scale, DIM, SLICE)
    store_rows(start_of(grad_v, batch, head), token, grad_v.token, present, value_gradient, 1, DIM, SLICE)

    queries, grads, lse, delta = load_global_queries(
        global_rows, token, batch, head, heads, global_tokens, DIM, BLOCK_D, SLICE
    )
    gradient = scaled(load_rows(sums_ptr, cell + 2 * step, DIM, present, DIM, BLOCK_D, SLICE), 1 / scale)
    for start in tl.range(0, global_tokens, BLOCK_G, disable_licm=True):
        other = start + tl.arange(0, BLOCK_G)
        is_other = other < global_tokens
        other_keys = load_rows(k_start, other, k.token, is_other, DIM, BLOCK_D, SLICE)
        other_values = load_rows(v_start, other, v.token, is_other, DIM, BLOCK_D, SLICE)
        scores = products(queries, other_keys, nothing, PRECISION)
        scores += from_global_scores(global_rows, token[:, None], other[None, :], head, global_tokens, scale)
        scores = tl.where(is_other[None, :], scores, float("-inf"))
        grad_weights = products(grads, other_values, nothing, PRECISION)
        _, grad_scores = score_gradients(scores, scale * LOG2E, lse[:, None], grad_weights, delta[:, None])
        gradient = weighted_sums(grad_scores, other_keys, gradient, PRECISION)
        entry = bias_ptr + cell[:, None] * (global_tokens + 1) + other[None, :]
        tl.store(entry, grad_scores, mask=present[:, None] & is_other[None, :])
    store_rows(start_of(grad_q, batch, head), token, grad_q.token, present, gradient, scale, DIM, SLICE)
    local = tl.load(bias_sums_ptr + cell, mask=present)
    tl.store(bias_ptr + cell * (global_tokens + 1) + global_tokens, local, mask=present)
