"""Device functions of the Triton kernels: places, tiles, loads and scores. Imports triton.

An outer tile holds BLOCK_M tokens of one chunk: queries, or in the key-gradient kernel keys. What they see, or are seen
from, is a square of 3×3 chunks, or of their own, and perhaps a second one, a neighbour. Inner tiles hold BLOCK_N tokens
of a square, row by row.

Positions are rows and columns of a map. A dilation of d makes d×d interleaved maps of one, and the rest of the code
works on each of them as on a map of its own. Rows and columns may lie outside the map: there is nothing there, or for
the cyclic rules what is found by wrapping around, or the halo of a band.

Rows of q, k, v and their like are tuples of slices, of SLICE columns each, one after the other padded with zeros to
BLOCK_D: a product of rows takes a slice at a time, and with it registers for no more operands than that.

Raw scores are ``q·k + bias / scale``. Times ``scale * log2(e)`` they are in units of log 2, because exp2 is the
hardware's exponential; log-sum-exps are in units of log 2, too.
"""

# mypy: disable-error-code="assignment"
# Triton's tuples grow; mypy's do not.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class View(NamedTuple):
    """A tensor (B, tokens, heads, dim) by its strides; the last axis is dense."""

    data: Any
    batch: Any
    token: Any
    head: Any


class Map(NamedTuple):
    """The map of queries, how many more rows of keys lie above and below it, and how far apart the log-sum-exps of one
    head and the next are.
    """

    height: Any
    width: Any
    above: Any
    below: Any
    lse_stride: Any


class GlobalRows(NamedTuple):
    """The rows of global queries in backward: views of all tokens, their log-sum-exps (B, heads, G) a stride apart,
    and their bias (heads, G, G + 1), perhaps None.
    """

    q: Any
    out: Any
    grad_out: Any
    lse: Any
    lse_stride: Any
    bias: Any


class Place(NamedTuple):
    """The first row and column of a chunk, the size of its map, and the token of position (row, column):
    ``first + row * down + column * right``.
    """

    top: Any
    left: Any
    height: Any
    width: Any
    first: Any
    down: Any
    right: Any


@triton.jit
def place_of(chunk, head, area, dilation_ptr, WINDOW: tl.constexpr):
    """The place of the chunk-th chunk of a head; beyond the last one a place outside its map."""
    step = 1
    if dilation_ptr is not None:
        step = tl.load(dilation_ptr + head)
    across = step * tl.cdiv(tl.cdiv(area.width, step), WINDOW)
    row, column = chunk // across, chunk % across
    first_row, first_column = row % step, column % step
    return Place(
        row // step * WINDOW, column // step * WINDOW,
        tl.cdiv(area.height - first_row, step), tl.cdiv(area.width - first_column, step),
        first_row * area.width + first_column, area.width * step, step,
    )  # fmt: skip


@triton.jit
def moved_up(place, rows):
    """The place so many rows above."""
    return Place(
        place.top - rows, place.left, place.height, place.width, place.first, place.down, place.right
    )  # fmt: skip


@triton.jit
def is_interior(place, above, below, WINDOW: tl.constexpr):
    """Whether the 3×3 chunks around a place are whole, so that nothing wraps and nothing is missing."""
    end = place.height + tl.where(place.height % WINDOW == 0, below, 0)
    rows = ((place.top >= WINDOW) | (above == WINDOW)) & (place.top + 2 * WINDOW <= end)
    return rows & (place.left >= WINDOW) & (place.left + 2 * WINDOW <= place.width)


@triton.jit
def chunk_positions(part, place, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of the part-th BLOCK tokens of a chunk, and whether they are in it at all."""
    index = part * BLOCK + tl.arange(0, BLOCK)
    return place.top + index // WINDOW, place.left + index % WINDOW, index < WINDOW * WINDOW


@triton.jit
def square_position(
    tile, n, neighbour_ptr, sign, WINDOW: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Row and column of an inner tile's n-th token from the chunk's first; what is left after the last repeats it.

    Tiles of the neighbour come after those of the own chunk. ``sign`` is 1 for what is seen, -1 for who sees.
    """
    SIDE: tl.constexpr = 3 * WINDOW if NEIGHBOURS == "all" else WINDOW
    top, left = 0, 0
    if NEIGHBOURS == "all":
        top, left = -WINDOW, -WINDOW
    if NEIGHBOURS == "one":
        TILES: tl.constexpr = (SIDE * SIDE + BLOCK - 1) // BLOCK
        neighbour = tl.minimum(tl.maximum(tl.load(neighbour_ptr).to(tl.int32), 1), 8)
        block = tl.where(neighbour <= 4, neighbour - 1, neighbour)
        away = tl.where(tile >= TILES, sign * WINDOW, 0)
        top, left = (block // 3 - 1) * away, (block % 3 - 1) * away
        tile = tl.where(tile >= TILES, tile - TILES, tile)
    index = tl.minimum(tile * BLOCK + n, SIDE * SIDE - 1)
    return top + index // SIDE, left + index % SIDE


@triton.jit
def key_at(row, column, place, area, WINDOW: tl.constexpr, RULE: tl.constexpr, BAND: tl.constexpr):
    """The local key of a position, whether it is stored, and whether it counts (zero padding may).

    Keys of a band's halo lie before and after those of its own rows, and are the first of their chunks.
    """
    if BAND:
        bottom = tl.cdiv(place.height, WINDOW) * WINDOW
        real_row = row + tl.where(row < 0, WINDOW, area.above)
        real_row -= tl.where(row >= bottom, bottom - place.height, 0)
        row_stored = tl.where(row < 0, row + WINDOW < area.above, row < place.height)
        row_stored = row_stored | ((row >= bottom) & (row < bottom + area.below))
        row_counts = row_stored
    else:
        real_row, row_stored, row_counts = on_axis(row, place.height, WINDOW, RULE)
    real_column, column_stored, column_counts = on_axis(column, place.width, WINDOW, RULE)
    token = place.first + real_row * place.down + real_column * place.right
    return token, row_stored & column_stored, row_counts & column_counts


@triton.jit
def on_axis(coordinate, size, WINDOW: tl.constexpr, RULE: tl.constexpr):
    """Where a row or column of a key is on its map, whether it is stored, and whether it counts."""
    if RULE == "chunk":
        stored = (coordinate >= 0) & (coordinate < size)
        return coordinate, stored, stored
    real = wrapped(coordinate, tl.cdiv(size, WINDOW) * WINDOW)
    stored = real < size
    if RULE == "cyclic_release":
        return real, stored, stored | (real != coordinate)
    return real, stored, stored


@triton.jit
def query_at(row, column, place, WINDOW: tl.constexpr, RULE: tl.constexpr, BAND: tl.constexpr):
    """The query of a position, and whether there is one."""
    if RULE != "chunk":
        column = wrapped(column, tl.cdiv(place.width, WINDOW) * WINDOW)
        if not BAND:
            row = wrapped(row, tl.cdiv(place.height, WINDOW) * WINDOW)
    inside = (row >= 0) & (row < place.height) & (column >= 0) & (column < place.width)
    return place.first + row * place.down + column * place.right, inside


@triton.jit
def wrapped(coordinate, period):
    """A coordinate at most one period outside, moved inside."""
    coordinate = tl.where(coordinate < 0, coordinate + period, coordinate)
    return tl.where(coordinate >= period, coordinate - period, coordinate)


@triton.jit
def start_of(view, batch, head):
    """Pointer to the first row of one head of one sample."""
    return view.data + batch.to(tl.int64) * view.batch + head.to(tl.int64) * view.head


@triton.jit
def load_rows(
    pointer, token, stride, present, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Rows of DIM numbers in slices, zero where not present; WHOLE: all are present."""
    rows = ()
    for i in tl.static_range(BLOCK_D // SLICE):
        rows += (load_slice(pointer, token, stride, present, i, DIM, SLICE, WHOLE),)
    return rows


@triton.jit
def load_slice(
    pointer, token, stride, present, i: tl.constexpr, DIM: tl.constexpr, SLICE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """The i-th slice of rows, as :func:`load_rows`."""
    axis = i * SLICE + tl.arange(0, SLICE)
    cells = token[:, None] * stride + axis[None, :]
    if WHOLE and (i + 1) * SLICE <= DIM:
        return tl.load(pointer + cells)
    if WHOLE:
        return tl.load(pointer + cells, mask=(axis < DIM)[None, :], other=0.0)
    return tl.load(pointer + cells, mask=(axis < DIM)[None, :] & present[:, None], other=0.0)


@triton.jit
def store_rows(pointer, token, stride, present, rows, factor, DIM: tl.constexpr, SLICE: tl.constexpr):
    """Stores rows times a factor, as :func:`scaled`."""
    for i in tl.static_range(len(rows)):
        axis = i * SLICE + tl.arange(0, SLICE)
        mask = present[:, None] & (axis < DIM)[None, :]
        cells = pointer + token[:, None] * stride + axis[None, :]
        tl.store(cells, (rows[i] * factor).to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def scaled(rows, factor):
    """Rows times a factor: a number, or one for each row, (rows, 1)."""
    new = ()
    for i in tl.static_range(len(rows)):
        new += (rows[i] * factor,)
    return new


@triton.jit
def zero_rows(BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr):
    """BLOCK rows of zeros in slices, float32."""
    rows = ()
    for _ in tl.static_range(0, BLOCK_D, SLICE):
        rows += (tl.zeros((BLOCK, SLICE), tl.float32),)
    return rows


@triton.jit
def products(left, right, total, PRECISION: tl.constexpr):
    """Products of all rows of ``left`` with all of ``right``, added to ``total``."""
    for i in tl.static_range(len(left)):
        total = tl.dot(left[i], tl.trans(right[i]), total, input_precision=PRECISION)
    return total


@triton.jit
def load_products(
    left, pointer, token, stride, present, total, DIM: tl.constexpr, SLICE: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """:func:`load_rows` and their :func:`products`, slice after slice: each one's operands are gone before the next."""
    rows = ()
    for i in tl.static_range(len(left)):
        rows += (load_slice(pointer, token, stride, present, i, DIM, SLICE, WHOLE),)
        total = tl.dot(left[i], tl.trans(rows[i]), total, input_precision=PRECISION)
    return rows, total


@triton.jit
def weighted_sums(weights, rows, totals, PRECISION: tl.constexpr):
    """Sums of rows by weights (sums, rows), added to ``totals``."""
    added = ()
    for i in tl.static_range(len(rows)):
        added += (tl.dot(weights.to(rows[i].dtype), rows[i], totals[i], input_precision=PRECISION),)
    return added


@triton.jit
def load_weighted(
    weights, left, pointer, token, stride, present, total, totals, DIM: tl.constexpr, SLICE: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """:func:`load_products` with :func:`weighted_sums` of the same rows, slice after slice."""
    rows, added = (), ()
    for i in tl.static_range(len(left)):
        rows += (load_slice(pointer, token, stride, present, i, DIM, SLICE, WHOLE),)
        total = tl.dot(left[i], tl.trans(rows[i]), total, input_precision=PRECISION)
        added += (tl.dot(weights.to(rows[i].dtype), rows[i], totals[i], input_precision=PRECISION),)
    return rows, total, added


@triton.jit
def row_products(left, right):
    """The product of each row of ``left`` with that of ``right``, float32."""
    total = tl.sum(left[0].to(tl.float32) * right[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(left)):
        total += tl.sum(left[i].to(tl.float32) * right[i].to(tl.float32), 1)
    return total


# Score tiles are stored in the order in which the threads of a block hold the results of a product: eight columns after
# eight columns; among them the rows of each warp; among those lanes, with two rows and two columns each. So they come
# and go by wide loads and stores, without a detour through shared memory.


@triton.jit
def stored_position(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row and column of each element of a stored score tile."""
    index = tl.arange(0, BLOCK_M * BLOCK_N)
    column = index // (8 * BLOCK_M) * 8 + index // 4 % 4 * 2 + index % 2
    row = index // 128 % (BLOCK_M // 16) * 16 + index // 2 % 2 * 8 + index // 16 % 8
    return row, column


@triton.jit
def from_stored(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A score tile (BLOCK_M, BLOCK_N) from its elements as they are stored."""
    parts = tl.reshape(tile, (BLOCK_N // 8, BLOCK_M // 16, 8, 4, 2, 2))
    return tl.reshape(tl.permute(parts, (1, 4, 2, 0, 3, 5)), (BLOCK_M, BLOCK_N))


@triton.jit
def to_stored(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The elements of a score tile (BLOCK_M, BLOCK_N) as they are stored."""
    parts = tl.reshape(tile, (BLOCK_M // 16, 2, 8, BLOCK_N // 8, 4, 2))
    return tl.reshape(tl.permute(parts, (3, 0, 2, 4, 1, 5)), (BLOCK_M * BLOCK_N,))
