"""Device functions of the Triton kernels: chunks, the rectangles they see, loads and scores. Imports triton.

Positions are rows and columns of a map. A dilation of d makes d×d interleaved maps of one, and the rest of the code
works on each of them as on a map of its own. Rows and columns may lie outside the map: there is nothing there, or for
the cyclic rules what is found by wrapping around. Rule ``exact`` is rule ``chunk`` with a table that is −∞ far away.

Scores are in units of log 2, because exp2 is the hardware's exponential; so are tables and log-sum-exps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..operator import LOG2E as _LOG2E

LOG2E = tl.constexpr(_LOG2E)


class View(NamedTuple):
    """A tensor (B, tokens, heads, dim) by its strides; the last axis is dense."""

    data: Any
    batch: Any
    token: Any
    head: Any


class Place(NamedTuple):
    """A chunk, the size of its map, and the token of position (r, c): ``first + r * down + c * right``."""

    chunk_row: Any
    chunk_column: Any
    height: Any
    width: Any
    first: Any
    down: Any
    right: Any


class Rectangle(NamedTuple):
    """``count`` positions from (top, left), ``width`` in a row; ``inverse`` is 1 / width."""

    top: Any
    left: Any
    width: Any
    inverse: Any
    count: Any


@triton.jit
def place_of(chunk, head, dilation_ptr, height, width, WINDOW: tl.constexpr):
    """The place of the chunk-th chunk of a head; beyond the last one a place outside its map."""
    step = 1
    if dilation_ptr is not None:
        step = tl.load(dilation_ptr + head)
    across = step * tl.cdiv(tl.cdiv(width, step), WINDOW)
    row, column = chunk // across, chunk % across
    first_row, first_column = row % step, column % step
    return Place(
        row // step, column // step, tl.cdiv(height - first_row, step), tl.cdiv(width - first_column, step),
        first_row * width + first_column, width * step, step,
    )  # fmt: skip


@triton.jit
def rectangle(chunk_row, chunk_column, place, WINDOW: tl.constexpr, SPAN: tl.constexpr, CLIP: tl.constexpr):
    """The positions of SPAN×SPAN chunks; CLIP: those inside the map."""
    top, left = chunk_row * WINDOW, chunk_column * WINDOW
    bottom, right = top + SPAN * WINDOW, left + SPAN * WINDOW
    if CLIP:
        top, left = tl.maximum(top, 0), tl.maximum(left, 0)
        bottom, right = tl.minimum(bottom, place.height), tl.minimum(right, place.width)
    count = tl.maximum(bottom - top, 0) * tl.maximum(right - left, 0)
    width = tl.maximum(right - left, 1)
    return Rectangle(top, left, width, 1.0 / width, count)


@triton.jit
def own_rectangle(place, WINDOW: tl.constexpr):
    """The positions of the chunk itself."""
    return rectangle(place.chunk_row, place.chunk_column, place, WINDOW, 1, True)


@triton.jit
def surroundings(
    place, neighbour_ptr, DIRECTION: tl.constexpr, WINDOW: tl.constexpr, NEIGHBOURS: tl.constexpr, CLIP: tl.constexpr
):
    """The two rectangles (the second empty but for ``one``) a chunk sees, or for DIRECTION -1 is seen from."""
    row, column = place.chunk_row, place.chunk_column
    if NEIGHBOURS == "all":
        first = rectangle(row - 1, column - 1, place, WINDOW, 3, CLIP)
    else:
        first = rectangle(row, column, place, WINDOW, 1, CLIP)
    if NEIGHBOURS == "one":
        neighbour = tl.minimum(tl.maximum(tl.load(neighbour_ptr).to(tl.int32), 1), 8)
        block = tl.where(neighbour <= 4, neighbour - 1, neighbour)
        row += (block // 3 - 1) * DIRECTION
        column += (block % 3 - 1) * DIRECTION
        second = rectangle(row, column, place, WINDOW, 1, CLIP)
    else:
        second = Rectangle(0, 0, 1, 1.0, 0)
    return first, second


@triton.jit
def position(index, first, second, NEIGHBOURS: tl.constexpr):
    """Row, column and presence of the index-th position of two rectangles; the first one's start if not present."""
    count = first.count
    if NEIGHBOURS == "one":
        count += second.count
    present = (index >= 0) & (index < count)
    index = tl.where(present, index, 0)
    top, left, width, inverse = first.top, first.left, first.width, first.inverse
    if NEIGHBOURS == "one":
        later = index >= first.count
        index = tl.where(later, index - first.count, index)
        top, left = tl.where(later, second.top, top), tl.where(later, second.left, left)
        width, inverse = tl.where(later, second.width, width), tl.where(later, second.inverse, inverse)
    # Exact while index is below a million, and several times cheaper than an integer division by a variable.
    row = ((index + 0.5) * inverse).to(tl.int32)
    return top + row, left + index - row * width, present


@triton.jit
def token_at(row, column, place, WINDOW: tl.constexpr, RULE: tl.constexpr):
    """The token of a position, whether it is stored, and whether it counts as a key (zero padding may)."""
    if RULE == "chunk":
        real_row, real_column = row, column
        stored = (row >= 0) & (row < place.height) & (column >= 0) & (column < place.width)
        counts = stored
    else:
        period, column_period = tl.cdiv(place.height, WINDOW) * WINDOW, tl.cdiv(place.width, WINDOW) * WINDOW
        real_row, real_column = wrapped(row, period), wrapped(column, column_period)
        inside, column_inside = real_row < place.height, real_column < place.width
        stored = inside & column_inside
        counts = stored
        if RULE == "cyclic_release":
            counts = (inside | (real_row != row)) & (column_inside | (real_column != column))
    return place.first + real_row * place.down + real_column * place.right, stored, counts


@triton.jit
def wrapped(coordinate, period):
    """A coordinate at most one period outside, moved inside."""
    coordinate = tl.where(coordinate < 0, coordinate + period, coordinate)
    return tl.where(coordinate >= period, coordinate - period, coordinate)


@triton.jit
def entry_at(row, column, WINDOW: tl.constexpr):
    """Differences of these, query − key, index a bias table from its centre."""
    return row * (4 * WINDOW - 1) + column


@triton.jit
def start_of(view, batch, head):
    """Pointer to the first row of one head of one sample."""
    return view.data + batch.to(tl.int64) * view.batch + head * view.head


@triton.jit
def load_rows(pointer, token, stride, present, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of DIM numbers, zero where not present, padded with zeros to BLOCK_D."""
    axis = tl.arange(0, BLOCK_D)
    mask = present[:, None]
    if DIM != BLOCK_D:
        mask = mask & (axis < DIM)[None, :]
    return tl.load(pointer + token[:, None] * stride + axis[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, token, stride, present, rows, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    axis = tl.arange(0, BLOCK_D)
    mask = present[:, None] & (axis < DIM)[None, :]
    tl.store(pointer + token[:, None] * stride + axis[None, :], rows.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def add_table(scores, entry, mask, table_ptr, table_stride, head, WINDOW: tl.constexpr):
    """Scores, plus the entries of this head's table if there is one; where masked nothing is added."""
    if table_ptr is not None:
        SIDE: tl.constexpr = 4 * WINDOW - 1
        centre = table_ptr + head * table_stride + SIDE * SIDE // 2
        scores += tl.load(centre + entry, mask=mask, other=0.0)
    return scores
