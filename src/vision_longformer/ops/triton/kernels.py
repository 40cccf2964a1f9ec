"""The Triton kernels: bias tiles, forward, gradients of queries and of keys and values, and sums. Imports triton.

The relative bias is expanded once per call to tiles in the order of the scores (see ``device.py``), which are what the
product of queries and keys starts from. Chunks with all their neighbours inside the map need no mask; others have one.

Each result is written once, by one program. Sums over many chunks, the gradients of the bias, are made along with the
gradients of queries: each program sums a fixed share in a fixed order into a buffer of its own, and the buffers are
added up afterwards. So there are no atomics, and results are the same from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..operator import LOG2E as _LOG2E
from .device import (
    chunk_positions,
    from_stored,
    is_interior,
    key_at,
    load_products,
    load_rows,
    load_weighted,
    moved_up,
    place_of,
    products,
    query_at,
    row_products,
    scaled,
    square_position,
    start_of,
    store_rows,
    stored_position,
    to_stored,
    weighted_sums,
    zero_rows,
)

LOG2E = tl.constexpr(_LOG2E)


@triton.jit
def bias_tiles_kernel(
    table_ptr, tiles_ptr, neighbour_ptr, inverse_scale, inner_tiles, outer_tiles, heads,
    WINDOW: tl.constexpr, EXACT: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: a tile of what raw scores start from, (orientations, heads, outer, inner tiles, elements), float32.

    Rows of the first orientation are queries, of the second, if there is one, keys. −∞ stands where no pair is.
    """
    SIDE: tl.constexpr = 3 * WINDOW if NEIGHBOURS == "all" else WINDOW
    TILES: tl.constexpr = (SIDE * SIDE + BLOCK_N - 1) // BLOCK_N
    tile, outer = tl.program_id(0) % inner_tiles, tl.program_id(0) // inner_tiles % outer_tiles
    head = tl.program_id(0) // (inner_tiles * outer_tiles) % heads
    sign = tl.where(tl.program_id(0) < inner_tiles * outer_tiles * heads, 1, -1)
    m, n = stored_position(BLOCK_M, BLOCK_N)
    outer_index = outer * BLOCK_M + m
    row, column = square_position(tile, n, neighbour_ptr, sign, WINDOW, NEIGHBOURS, BLOCK_N)
    down, right = (outer_index // WINDOW - row) * sign, (outer_index % WINDOW - column) * sign
    present = tile % TILES * BLOCK_N + n < SIDE * SIDE
    bias = tl.zeros((BLOCK_M * BLOCK_N,), tl.float32)
    if table_ptr is not None:
        WIDTH: tl.constexpr = 4 * WINDOW - 1
        entry = head * (WIDTH * WIDTH) + (down + 2 * WINDOW - 1) * WIDTH + right + 2 * WINDOW - 1
        mask = present & (outer_index < WINDOW * WINDOW)
        bias = tl.load(table_ptr + entry, mask=mask, other=0.0).to(tl.float32) * inverse_scale
    if EXACT:
        present = present & (tl.abs(down) <= WINDOW) & (tl.abs(right) <= WINDOW)
    cells = tl.program_id(0).to(tl.int64) * (BLOCK_M * BLOCK_N) + tl.arange(0, BLOCK_M * BLOCK_N)
    tl.store(tiles_ptr + cells, tl.where(present, bias, float("-inf")))


@triton.jit
def inner_tile(
    tile, place, area, neighbour_ptr, WINDOW: tl.constexpr, RULE: tl.constexpr, BAND: tl.constexpr,
    NEIGHBOURS: tl.constexpr, BLOCK_N: tl.constexpr, SIGN: tl.constexpr, INTERIOR: tl.constexpr,
):  # fmt: skip
    """Tokens of an inner tile: keys (SIGN 1) or queries (SIGN -1); whether they are stored, and whether they count."""
    down, right = square_position(tile, tl.arange(0, BLOCK_N), neighbour_ptr, SIGN, WINDOW, NEIGHBOURS, BLOCK_N)
    row, column = place.top + down, place.left + right
    if INTERIOR:
        corner = place.first + place.top * place.down + place.left * place.right
        if BAND and SIGN == 1:
            corner += area.above * place.down
        always = tl.full((BLOCK_N,), 1, tl.int1)
        return corner + (down * place.down + right * place.right), always, always
    if SIGN == 1:
        return key_at(row, column, place, area, WINDOW, RULE, BAND)
    token, stored = query_at(row, column, place, WINDOW, RULE, BAND)
    return token, stored, stored


@triton.jit
def tile_range(place, area, WINDOW: tl.constexpr, RULE: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK_N: tl.constexpr,
               SIGN: tl.constexpr, TILES: tl.constexpr, INTERIOR: tl.constexpr):  # fmt: skip
    """The inner tiles that have rows inside the map, or in the halo of keys."""
    if INTERIOR or NEIGHBOURS != "all" or RULE != "chunk":
        return 0, TILES
    above, end = 0, place.height
    if SIGN == 1:
        above = area.above
        end = tl.where(area.below > 0, tl.cdiv(end, WINDOW) * WINDOW + area.below, end)
    begin = tl.maximum(WINDOW - place.top - above, 0) * (3 * WINDOW) // BLOCK_N
    return begin, tl.cdiv(tl.minimum(end - place.top + WINDOW, 3 * WINDOW) * (3 * WINDOW), BLOCK_N)


@triton.jit
def score_tile(tiles_ptr, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What the raw scores of a tile start from."""
    elements = tl.arange(0, BLOCK_M * BLOCK_N)
    return from_stored(tl.load(tiles_ptr + tile * (BLOCK_M * BLOCK_N) + elements), BLOCK_M, BLOCK_N)


@triton.jit
def score_keys(
    tile, queries, k, token, stored, counts, batch, head, tiles_ptr,
    DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr,
    INTERIOR: tl.constexpr,
):  # fmt: skip
    """Keys of an inner tile, and the raw scores of an outer tile of queries, −∞ where no key counts."""
    scores = score_tile(tiles_ptr, tile, BLOCK_M, BLOCK_N)
    keys, scores = load_products(
        queries, start_of(k, batch, head), token, k.token, stored, scores, DIM, SLICE, PRECISION, INTERIOR
    )
    if not INTERIOR:
        scores = tl.where(counts[None, :], scores, float("-inf"))
    return keys, scores


@triton.jit
def online_softmax(scores, values, factor, highest, total, weighted, PRECISION: tl.constexpr):
    """Takes more raw scores (queries, keys) and their values into a running softmax."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher) * factor
    weights = tl.exp2(scores * factor - shift[:, None])
    shrink = tl.exp2(highest * factor - shift)
    total = total * shrink + tl.sum(weights, 1)
    return higher, total, weighted_sums(weights, values, scaled(weighted, shrink[:, None]), PRECISION)


@triton.jit
def attend_local(
    queries, k, v, batch, head, place, area, tiles_ptr, neighbour_ptr, factor, global_tokens, highest, total, weighted,
    WINDOW: tl.constexpr, RULE: tl.constexpr, BAND: tl.constexpr, NEIGHBOURS: tl.constexpr, TILES: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr, INTERIOR: tl.constexpr,
):  # fmt: skip
    """The running softmax over all local keys of an outer tile."""
    begin, end = tile_range(place, area, WINDOW, RULE, NEIGHBOURS, BLOCK_N, 1, TILES, INTERIOR)
    for tile in tl.range(begin, end, disable_licm=not INTERIOR or queries[0].dtype == tl.float32):
        token, stored, counts = inner_tile(
            tile, place, area, neighbour_ptr, WINDOW, RULE, BAND, NEIGHBOURS, BLOCK_N, 1, INTERIOR
        )
        token += global_tokens
        values = load_rows(start_of(v, batch, head), token, v.token, stored, DIM, BLOCK_D, SLICE, INTERIOR)
        _, scores = score_keys(
            tile, queries, k, token, stored, counts, batch, head, tiles_ptr,
            DIM, PRECISION, BLOCK_M, BLOCK_N, SLICE, INTERIOR,
        )  # fmt: skip
        highest, total, weighted = online_softmax(scores, values, factor, highest, total, weighted, PRECISION)
    return highest, total, weighted


@triton.jit(do_not_specialize=["global_tokens", "chunks", "heads"])
def forward_kernel(
    q, k, v, out, lse_ptr, tiles_ptr, tiles_stride, global_bias_ptr, neighbour_ptr, dilation_ptr, area,
    scale, heads, global_tokens, chunks,
    WINDOW: tl.constexpr, RULE: tl.constexpr, BAND: tl.constexpr, NEIGHBOURS: tl.constexpr, TILES: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of a chunk against all their keys.

    ``q``, ``k``, ``v``, ``out`` are views; the log-sum-exp is (B, heads, N).
    """
    PARTS: tl.constexpr = (WINDOW * WINDOW + BLOCK_M - 1) // BLOCK_M
    part, chunk = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % chunks
    sample = tl.program_id(0) // (PARTS * chunks)
    batch, head = sample // heads, sample % heads
    place = place_of(chunk, head, area, dilation_ptr, WINDOW)
    row, column, present = chunk_positions(part, place, WINDOW, BLOCK_M)
    present = present & (row < place.height) & (column < place.width)
    token = place.first + row * place.down + column * place.right
    queries = load_rows(start_of(q, batch, head), token, q.token, present, DIM, BLOCK_D, SLICE)
    factor = scale * LOG2E

    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    weighted = zero_rows(BLOCK_M, BLOCK_D, SLICE)
    for start in tl.range(0, global_tokens, BLOCK_G, disable_licm=queries[0].dtype == tl.float32):
        key = start + tl.arange(0, BLOCK_G)
        is_key = key < global_tokens
        keys = load_rows(start_of(k, batch, head), key, k.token, is_key, DIM, BLOCK_D, SLICE)
        values = load_rows(start_of(v, batch, head), key, v.token, is_key, DIM, BLOCK_D, SLICE)
        scores = products(queries, keys, tl.zeros((BLOCK_M, BLOCK_G), tl.float32), PRECISION)
        scores += global_scores(global_bias_ptr, key, head, global_tokens, scale)[None, :]
        highest, total, weighted = online_softmax(scores, values, factor, highest, total, weighted, PRECISION)
    tiles_ptr += head * tiles_stride + part * (TILES * BLOCK_M * BLOCK_N)
    if is_interior(place, area.above, area.below, WINDOW):
        highest, total, weighted = attend_local(
            queries, k, v, batch, head, place, area, tiles_ptr, neighbour_ptr, factor, global_tokens,
            highest, total, weighted,
            WINDOW, RULE, BAND, NEIGHBOURS, TILES, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, SLICE, True,
        )  # fmt: skip
    else:
        highest, total, weighted = attend_local(
            queries, k, v, batch, head, place, area, tiles_ptr, neighbour_ptr, factor, global_tokens,
            highest, total, weighted,
            WINDOW, RULE, BAND, NEIGHBOURS, TILES, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, SLICE, False,
        )  # fmt: skip
    store_rows(start_of(out, batch, head), token, out.token, present, weighted, 1 / total[:, None], DIM, SLICE)
    rows = sample.to(tl.int64) * area.lse_stride + token
    tl.store(lse_ptr + rows, highest * factor + tl.log2(total), mask=present)


@triton.jit
def global_scores(global_bias_ptr, key, head, global_tokens, scale):
    """What is added to the raw scores of global keys: their bias, −∞ beyond the last one."""
    added = tl.zeros(key.shape, tl.float32)
    if global_bias_ptr is not None:
        bias = tl.load(global_bias_ptr + head * global_tokens + key, mask=key < global_tokens, other=0.0)
        added += bias.to(tl.float32) / scale
    return tl.where(key < global_tokens, added, float("-inf"))


@triton.jit
def from_global_scores(global_rows, query, key, head, global_tokens, scale):
    """What is added to the raw scores of global queries: their bias. Local keys are those from G on."""
    added = tl.zeros((query + key).shape, tl.float32)
    if global_rows.bias is not None:
        entry = (head * global_tokens + query) * (global_tokens + 1) + tl.minimum(key, global_tokens)
        added += tl.load(global_rows.bias + entry, mask=query < global_tokens, other=0.0).to(tl.float32) / scale
    return added


@triton.jit
def load_global_queries(
    global_rows, query, batch, head, heads, global_tokens,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Global queries, their output gradients, log-sum-exps, and products of outputs with their gradients.

    Beyond the last one there are zeros, and log-sum-exps of ∞, so that no weight is left.
    """
    present = query < global_tokens
    q, out, grad_out = global_rows.q, global_rows.out, global_rows.grad_out
    queries = load_rows(start_of(q, batch, head), query, q.token, present, DIM, BLOCK_D, SLICE)
    outputs = load_rows(start_of(out, batch, head), query, out.token, present, DIM, BLOCK_D, SLICE)
    grads = load_rows(start_of(grad_out, batch, head), query, grad_out.token, present, DIM, BLOCK_D, SLICE)
    lse_ptr = global_rows.lse + (batch * heads + head).to(tl.int64) * global_rows.lse_stride
    lse = tl.load(lse_ptr + query, mask=present, other=float("inf"))
    return queries, grads, lse, row_products(outputs, grads)


@triton.jit
def weights_of(scores, factor, lse, CLAMP: tl.constexpr = False):
    """Weights from raw scores and log-sum-exps; CLAMP: none is above 1."""
    exponents = scores * factor - lse
    if CLAMP:
        exponents = tl.minimum(exponents, 0.0)
    return tl.exp2(exponents)


@triton.jit
def score_gradients(scores, factor, lse, grad_weights, delta):
    """Weights from raw scores and log-sum-exps, and gradients of scores."""
    weights = weights_of(scores, factor, lse)
    return weights, weights * (grad_weights - delta)


@triton.jit
def differentiate_queries(
    queries, grads, lse, delta, k, v, batch, head, place, area, tiles_ptr, partial_ptr, neighbour_ptr,
    factor, global_tokens, gradient,
    WINDOW: tl.constexpr, RULE: tl.constexpr, BAND: tl.constexpr, NEIGHBOURS: tl.constexpr, TILES: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr, INTERIOR: tl.constexpr,
):  # fmt: skip
    """Adds the parts of all local keys to the gradient of queries, and score gradients to the partial sums."""
    begin, end = tile_range(place, area, WINDOW, RULE, NEIGHBOURS, BLOCK_N, 1, TILES, INTERIOR)
    for tile in tl.range(begin, end, disable_licm=not INTERIOR or queries[0].dtype == tl.float32):
        token, stored, counts = inner_tile(
            tile, place, area, neighbour_ptr, WINDOW, RULE, BAND, NEIGHBOURS, BLOCK_N, 1, INTERIOR
        )
        token += global_tokens
        if len(queries) == 1:  # nothing to take in turn; in the other order 16 bits spill on sm_86 and sm_89
            keys = load_rows(start_of(k, batch, head), token, k.token, stored, DIM, BLOCK_D, SLICE, INTERIOR)
            values = load_rows(start_of(v, batch, head), token, v.token, stored, DIM, BLOCK_D, SLICE, INTERIOR)
            scores = products(queries, keys, score_tile(tiles_ptr, tile, BLOCK_M, BLOCK_N), PRECISION)
            if not INTERIOR:
                scores = tl.where(counts[None, :], scores, float("-inf"))
            grad_weights = products(grads, values, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
        else:
            keys, scores = score_keys(
                tile, queries, k, token, stored, counts, batch, head, tiles_ptr,
                DIM, PRECISION, BLOCK_M, BLOCK_N, SLICE, INTERIOR,
            )  # fmt: skip
            grad_weights = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            _, grad_weights = load_products(
                grads, start_of(v, batch, head), token, v.token, stored, grad_weights, DIM, SLICE, PRECISION, INTERIOR
            )
        _, grad_scores = score_gradients(scores, factor, lse[:, None], grad_weights, delta[:, None])
        if partial_ptr is not None:
            cells = partial_ptr + tile * (BLOCK_M * BLOCK_N) + tl.arange(0, BLOCK_M * BLOCK_N)
            tl.store(cells, tl.load(cells) + to_stored(grad_scores, BLOCK_M, BLOCK_N))
        gradient = weighted_sums(grad_scores, keys, gradient, PRECISION)
    return gradient


@triton.jit(do_not_specialize=["heads", "global_tokens", "chunks", "items", "splits"])
def query_gradient_kernel(
    q, k, v, out, grad_out, grad_q, lse_ptr, delta_ptr, tiles_ptr, tiles_stride, partial_ptr, global_bias_ptr,
    neighbour_ptr, dilation_ptr, area, scale, heads, global_tokens, chunks, items, splits,
    WINDOW: tl.constexpr, RULE: tl.constexpr, BAND: tl.constexpr, NEIGHBOURS: tl.constexpr, TILES: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries at the same places of one in ``splits`` of the batch's chunks, one after the other.

    Writes delta (B, heads, N), the product of each output with its gradient, and sums of score gradients over its
    chunks, (programs, inner tiles, elements), float32.
    """
    PARTS: tl.constexpr = (WINDOW * WINDOW + BLOCK_M - 1) // BLOCK_M
    part, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % heads
    begin, end, step = tl.program_id(0) // (PARTS * heads), items, splits
    if q.data.dtype.element_ty != tl.float32:  # chunks side by side: of every splits-th one, 16 bits spill
        share = tl.cdiv(items, splits)
        begin, end, step = begin * share, tl.minimum(begin * share + share, items), 1
    tiles_ptr += head * tiles_stride + part * (TILES * BLOCK_M * BLOCK_N)
    if partial_ptr is not None:
        partial_ptr += tl.program_id(0).to(tl.int64) * (TILES * BLOCK_M * BLOCK_N)
    factor = scale * LOG2E
    for item in tl.range(begin, end, step, disable_licm=True):
        batch, chunk = item // chunks, item % chunks
        place = place_of(chunk, head, area, dilation_ptr, WINDOW)
        row, column, present = chunk_positions(part, place, WINDOW, BLOCK_M)
        present = present & (row < place.height) & (column < place.width)
        token = place.first + row * place.down + column * place.right
        outputs = load_rows(start_of(out, batch, head), token, out.token, present, DIM, BLOCK_D, SLICE)
        grads = load_rows(start_of(grad_out, batch, head), token, grad_out.token, present, DIM, BLOCK_D, SLICE)
        delta = row_products(outputs, grads)
        rows = (batch * heads + head).to(tl.int64) * area.lse_stride + token
        tl.store(delta_ptr + rows, delta, mask=present)
        queries = load_rows(start_of(q, batch, head), token, q.token, present, DIM, BLOCK_D, SLICE)  # outputs are gone
        lse = tl.load(lse_ptr + rows, mask=present, other=float("inf"))

        gradient = zero_rows(BLOCK_M, BLOCK_D, SLICE)
        for start in tl.range(0, global_tokens, BLOCK_G, disable_licm=queries[0].dtype == tl.float32):
            key = start + tl.arange(0, BLOCK_G)
            is_key = key < global_tokens
            nothing = tl.zeros((BLOCK_M, BLOCK_G), tl.float32)
            _, grad_weights = load_products(
                grads, start_of(v, batch, head), key, v.token, is_key, nothing, DIM, SLICE, PRECISION, False
            )
            keys, scores = load_products(
                queries, start_of(k, batch, head), key, k.token, is_key, nothing, DIM, SLICE, PRECISION, False
            )
            scores += global_scores(global_bias_ptr, key, head, global_tokens, scale)[None, :]
            _, grad_scores = score_gradients(scores, factor, lse[:, None], grad_weights, delta[:, None])
            gradient = weighted_sums(grad_scores, keys, gradient, PRECISION)
        if is_interior(place, area.above, area.below, WINDOW):
            gradient = differentiate_queries(
                queries, grads, lse, delta, k, v, batch, head, place, area, tiles_ptr, partial_ptr, neighbour_ptr,
                factor, global_tokens, gradient,
                WINDOW, RULE, BAND, NEIGHBOURS, TILES, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, SLICE, True,
            )  # fmt: skip
        else:
            gradient = differentiate_queries(
                queries, grads, lse, delta, k, v, batch, head, place, area, tiles_ptr, partial_ptr, neighbour_ptr,
                factor, global_tokens, gradient,
                WINDOW, RULE, BAND, NEIGHBOURS, TILES, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, SLICE, False,
            )  # fmt: skip
        store_rows(start_of(grad_q, batch, head), token, grad_q.token, present, gradient, scale, DIM, SLICE)


@triton.jit
def differentiate_keys(
    keys, values, q, grad_out, lse_ptr, delta_ptr, batch, head, place, area, tiles_ptr, neighbour_ptr, factor,
    key_gradient, value_gradient,
    WINDOW: tl.constexpr, RULE: tl.constexpr, BAND: tl.constexpr, NEIGHBOURS: tl.constexpr, TILES: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr, INTERIOR: tl.constexpr,
):  # fmt: skip
    """Adds the parts of all local queries to the gradients of an outer tile of keys and values, scores transposed.

    Queries that are not there are zero, and so are their output gradients: whatever finite weight they have, they add
    nothing.
    """
    q_start, grad_start = start_of(q, batch, head), start_of(grad_out, batch, head)
    begin, end = tile_range(place, area, WINDOW, RULE, NEIGHBOURS, BLOCK_N, -1, TILES, INTERIOR)
    for tile in tl.range(begin, end, disable_licm=not INTERIOR or keys[0].dtype == tl.float32):
        token, stored, _ = inner_tile(
            tile, place, area, neighbour_ptr, WINDOW, RULE, BAND, NEIGHBOURS, BLOCK_N, -1, INTERIOR
        )
        nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if len(keys) == 1:  # as for queries: in the other order 16 bits spill on sm_80
            queries = load_rows(q_start, token, q.token, stored, DIM, BLOCK_D, SLICE, INTERIOR)
            grads = load_rows(grad_start, token, grad_out.token, stored, DIM, BLOCK_D, SLICE, INTERIOR)
            lse = tl.load(lse_ptr + token, mask=stored, other=0.0)
            delta = tl.load(delta_ptr + token, mask=stored, other=0.0)
            scores = products(keys, queries, score_tile(tiles_ptr, tile, BLOCK_M, BLOCK_N), PRECISION)
            grad_weights = products(values, grads, nothing, PRECISION)
            weights = weights_of(scores, factor, lse[None, :], not INTERIOR)
            grad_scores = weights * (grad_weights - delta[None, :])
            value_gradient = weighted_sums(weights, grads, value_gradient, PRECISION)
        else:
            scores = score_tile(tiles_ptr, tile, BLOCK_M, BLOCK_N)
            queries, scores = load_products(
                keys, q_start, token, q.token, stored, scores, DIM, SLICE, PRECISION, INTERIOR
            )
            lse = tl.load(lse_ptr + token, mask=stored, other=0.0)
            delta = tl.load(delta_ptr + token, mask=stored, other=0.0)
            weights = weights_of(scores, factor, lse[None, :], not INTERIOR)
            _, grad_weights, value_gradient = load_weighted(
                weights, values, grad_start, token, grad_out.token, stored, nothing,
                value_gradient, DIM, SLICE, PRECISION, INTERIOR,
            )  # fmt: skip
            grad_scores = weights * (grad_weights - delta[None, :])
        key_gradient = weighted_sums(grad_scores, queries, key_gradient, PRECISION)
    return key_gradient, value_gradient


@triton.jit(do_not_specialize=["heads", "global_tokens", "chunks"])
def key_gradient_kernel(
    q, k, v, grad_out, grad_k, grad_v, lse_ptr, delta_ptr, tiles_ptr, tiles_stride, neighbour_ptr, dilation_ptr, area,
    scale, heads, global_tokens, chunks, global_rows,
    WINDOW: tl.constexpr, RULE: tl.constexpr, BAND: tl.constexpr, NEIGHBOURS: tl.constexpr, TILES: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M local keys of a chunk, halo included, against all queries that see them.

    With ``global_rows`` those include global queries.
    """
    PARTS: tl.constexpr = (WINDOW * WINDOW + BLOCK_M - 1) // BLOCK_M
    part, chunk = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % chunks
    sample = tl.program_id(0) // (PARTS * chunks)
    batch, head = sample // heads, sample % heads
    place = place_of(chunk, head, area, dilation_ptr, WINDOW)
    if BAND:
        place = moved_up(place, tl.where(area.above > 0, WINDOW, 0))
    row, column, present = chunk_positions(part, place, WINDOW, BLOCK_M)
    token, stored, _ = key_at(row, column, place, area, WINDOW, RULE, BAND)
    present = present & stored
    token += global_tokens
    keys = load_rows(start_of(k, batch, head), token, k.token, present, DIM, BLOCK_D, SLICE)
    values = load_rows(start_of(v, batch, head), token, v.token, present, DIM, BLOCK_D, SLICE)
    key_gradient = zero_rows(BLOCK_M, BLOCK_D, SLICE)
    value_gradient = zero_rows(BLOCK_M, BLOCK_D, SLICE)
    if global_rows is not None:
        for start in tl.range(0, global_tokens, BLOCK_G, disable_licm=keys[0].dtype == tl.float32):
            query = start + tl.arange(0, BLOCK_G)
            queries, grads, lse, delta = load_global_queries(
                global_rows, query, batch, head, heads, global_tokens, DIM, BLOCK_D, SLICE
            )
            scores = products(keys, queries, tl.zeros((BLOCK_M, BLOCK_G), tl.float32), PRECISION)
            scores += from_global_scores(global_rows, query, global_tokens, head, global_tokens, scale)[None, :]
            grad_weights = products(values, grads, tl.zeros((BLOCK_M, BLOCK_G), tl.float32), PRECISION)
            weights, grad_scores = score_gradients(scores, scale * LOG2E, lse[None, :], grad_weights, delta[None, :])
            value_gradient = weighted_sums(weights, grads, value_gradient, PRECISION)
            key_gradient = weighted_sums(grad_scores, queries, key_gradient, PRECISION)
    tiles_ptr += head * tiles_stride + part * (TILES * BLOCK_M * BLOCK_N)
    lse_ptr += sample.to(tl.int64) * area.lse_stride
    delta_ptr += sample.to(tl.int64) * area.lse_stride
    if is_interior(place, 0, 0, WINDOW):
        key_gradient, value_gradient = differentiate_keys(
            keys, values, q, grad_out, lse_ptr, delta_ptr, batch, head, place, area, tiles_ptr, neighbour_ptr,
            scale * LOG2E, key_gradient, value_gradient,
            WINDOW, RULE, BAND, NEIGHBOURS, TILES, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, SLICE, True,
        )  # fmt: skip
    else:
        key_gradient, value_gradient = differentiate_keys(
            keys, values, q, grad_out, lse_ptr, delta_ptr, batch, head, place, area, tiles_ptr, neighbour_ptr,
            scale * LOG2E, key_gradient, value_gradient,
            WINDOW, RULE, BAND, NEIGHBOURS, TILES, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, SLICE, False,
        )  # fmt: skip
    store_rows(start_of(grad_k, batch, head), token, grad_k.token, present, key_gradient, scale, DIM, SLICE)
    store_rows(start_of(grad_v, batch, head), token, grad_v.token, present, value_gradient, 1, DIM, SLICE)


@triton.jit
def bias_gradient_kernel(
    sums_ptr, table_ptr, neighbour_ptr, outer_tiles,
    WINDOW: tl.constexpr, NEIGHBOURS: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program: one row of the table of a head, each entry summed over the w² queries that may have such a key."""
    SIDE: tl.constexpr = 3 * WINDOW if NEIGHBOURS == "all" else WINDOW
    SQUARES: tl.constexpr = 2 if NEIGHBOURS == "one" else 1
    WIDTH: tl.constexpr = 4 * WINDOW - 1
    entry_row, head = tl.program_id(0) % WIDTH, tl.program_id(0) // WIDTH
    entry = tl.arange(0, BLOCK_W)
    total = tl.zeros((BLOCK_W,), tl.float32)
    for index in range(WINDOW * WINDOW):
        m, part = index % BLOCK_M, index // BLOCK_M
        for square in tl.static_range(SQUARES):
            first: tl.constexpr = square * (TILES // SQUARES)
            top, left = square_position(first, 0, neighbour_ptr, 1, WINDOW, NEIGHBOURS, BLOCK_N)
            row = tl.broadcast_to(index // WINDOW - (entry_row - 2 * WINDOW + 1) - top, (BLOCK_W,))
            column = index % WINDOW - (entry - 2 * WINDOW + 1) - left
            present = (row >= 0) & (row < SIDE) & (column >= 0) & (column < SIDE) & (entry < WIDTH)
            tile = (head * outer_tiles + part) * TILES + first + (row * SIDE + column) // BLOCK_N
            n = (row * SIDE + column) % BLOCK_N
            element = n // 8 * (8 * BLOCK_M) + m // 16 * 128 + m % 8 * 16 + n % 8 // 2 * 4 + m // 8 % 2 * 2 + n % 2
            total += tl.load(sums_ptr + tile * (BLOCK_M * BLOCK_N) + element, mask=present, other=0.0)
    tl.store(table_ptr + tl.program_id(0) * WIDTH + entry, total, mask=entry < WIDTH)
