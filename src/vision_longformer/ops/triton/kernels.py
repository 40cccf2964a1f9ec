"""The Triton kernels: forward, and gradients of queries, keys and values, global keys, bias. Imports triton.

The first three write each result once, by one program. Global keys and the bias table have sums over many queries: each
program sums a fixed share of them in a fixed order and writes its partial sums, which torch adds up. So there are no
atomics, and results are the same from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import (
    LOG2E,
    Place,
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


@triton.jit(do_not_specialize=[*SIZES, "splits", "share", "tokens"])
def global_gradient_kernel(
    q, k, v, grad_out, key_ptr, value_ptr, bias_gradient_ptr, lse_ptr, delta_ptr, global_bias_ptr,
    scale, tokens, heads, global_tokens, tiles, share,
    DIM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N global keys against ``share`` queries.

    Writes partial sums, float32: of keys and values (splits, B·heads, G, dim), of the bias (splits, B·heads, G).
    """
    tile, split_sample = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    samples = tl.num_programs(0) // tiles // tl.cdiv(tokens, share)
    split, sample = split_sample // samples, split_sample % samples
    batch, head = sample // heads, sample % heads
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    present = key < global_tokens
    keys = load_rows(start_of(k, batch, head), key, k.token, present, DIM, BLOCK_D)
    values = load_rows(start_of(v, batch, head), key, v.token, present, DIM, BLOCK_D)
    added = tl.zeros((BLOCK_N,), tl.float32)
    if global_bias_ptr is not None:
        added = tl.load(global_bias_ptr + head * global_tokens + key, mask=present, other=0.0).to(tl.float32)
    q_start, grad_start = start_of(q, batch, head), start_of(grad_out, batch, head)
    rows = sample.to(tl.int64) * tokens

    key_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    value_gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    bias_gradient = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, tokens), BLOCK_M):
        token = start + tl.arange(0, BLOCK_M)
        inside = token < tokens
        queries = load_rows(q_start, token, q.token, inside, DIM, BLOCK_D)
        grads = load_rows(grad_start, token, grad_out.token, inside, DIM, BLOCK_D)
        lse = tl.load(lse_ptr + rows + token, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + rows + token, mask=inside, other=0.0)
        products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        weights = tl.exp2((products * scale + added[:, None]) * LOG2E - lse[None, :])
        value_gradient = tl.dot(weights.to(grads.dtype), grads, value_gradient, input_precision=PRECISION)
        grad_weights = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta[None, :])
        key_gradient = tl.dot(grad_scores.to(queries.dtype), queries, key_gradient, input_precision=PRECISION)
        bias_gradient += tl.sum(grad_scores, 1)
    place = split_sample.to(tl.int64) * global_tokens + key
    axis = tl.arange(0, BLOCK_D)
    cells, mask = place[:, None] * DIM + axis[None, :], present[:, None] & (axis < DIM)[None, :]
    tl.store(key_ptr + cells, key_gradient * scale, mask=mask)
    tl.store(value_ptr + cells, value_gradient, mask=mask)
    tl.store(bias_gradient_ptr + place, bias_gradient, mask=present)


@triton.jit(do_not_specialize=[*SIZES, "batches", "chunks", "share"])
def bias_gradient_kernel(
    q, k, v, grad_out, partial_ptr, lse_ptr, delta_ptr, table_ptr, table_stride, neighbour_ptr, dilation_ptr,
    scale, height, width, heads, global_tokens, batches, chunks, share,
    WINDOW: tl.constexpr, RULE: tl.constexpr, NEIGHBOURS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, KEY_TILES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries × BLOCK_N keys at fixed places of a chunk, over ``share`` chunks of the batch.

    Writes partial sums (splits, heads, w², 3w, 3w), float32: query in its chunk, key in the nine chunks around it.
    """
    PER_CHUNK: tl.constexpr = (WINDOW * WINDOW + BLOCK_M - 1) // BLOCK_M
    pair, split_head = tl.program_id(0) % (PER_CHUNK * KEY_TILES), tl.program_id(0) // (PER_CHUNK * KEY_TILES)
    split, head = split_head // heads, split_head % heads
    query = (pair // KEY_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    key = (pair % KEY_TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    centre = Place(0, 0, height, width, 0, width, 1)
    first, second = surroundings(centre, neighbour_ptr, 1, WINDOW, NEIGHBOURS, False)
    row, column, present = position(key, first, second, NEIGHBOURS)
    q_present = query < WINDOW * WINDOW
    q_row, q_column = tl.where(q_present, query // WINDOW, 0), tl.where(q_present, query % WINDOW, 0)
    entry = entry_at(q_row, q_column, WINDOW)[:, None] - entry_at(row, column, WINDOW)[None, :]
    added = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    added = add_table(added, entry, present[None, :], table_ptr, table_stride, head, WINDOW)

    gradient = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for item in range(split * share, tl.minimum((split + 1) * share, batches * chunks)):
        batch = item // chunks
        place = place_of(item % chunks, head, dilation_ptr, height, width, WINDOW)
        top, left = place.chunk_row * WINDOW, place.chunk_column * WINDOW
        token, inside, _ = token_at(top + q_row, left + q_column, place, WINDOW, "chunk")
        inside = inside & q_present
        k_token, stored, counts = token_at(top + row, left + column, place, WINDOW, RULE)
        stored, k_token = stored & present, k_token + global_tokens
        queries = load_rows(start_of(q, batch, head), token, q.token, inside, DIM, BLOCK_D)
        keys = load_rows(start_of(k, batch, head), k_token, k.token, stored, DIM, BLOCK_D)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = products * (scale * LOG2E) + added
        rows = (batch * heads + head).to(tl.int64) * (height * width) + token
        lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + rows, mask=inside, other=0.0)
        grads = load_rows(start_of(grad_out, batch, head), token, grad_out.token, inside, DIM, BLOCK_D)
        values = load_rows(start_of(v, batch, head), k_token, v.token, stored, DIM, BLOCK_D)
        grad_weights = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
        weights = tl.where((counts & present)[None, :], tl.exp2(scores - lse[:, None]), 0.0)
        gradient += weights * (grad_weights - delta[:, None])
    cell = (row + WINDOW) * (3 * WINDOW) + column + WINDOW
    cells = (split_head * (WINDOW * WINDOW) + query).to(tl.int64)[:, None] * (9 * WINDOW * WINDOW) + cell[None, :]
    tl.store(partial_ptr + cells, gradient, mask=q_present[:, None] & present[None, :])
