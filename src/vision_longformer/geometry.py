"""Grids of tokens and chunks in plain numbers, without torch; tensors made from them are in ``ops/tables.py``.

A map of tokens is cut into chunks of w×w, padded at the bottom and right to whole chunks. A query sees keys of its own
chunk and the eight around it. Blocks 0..8 are the nine chunks around a query, row by row, 4 being its own. Neighbours
1..8 are the same without 4::

    block      0 1 2     neighbour  1 2 3
               3 4 5                4 · 5
               6 7 8                6 7 8

Unwrapped coordinates: a key of block row d (-1, 0, 1) seen from chunk row c lies at ``(c + d) * w + j``. Its relative
offset to a query, ``query - key``, is in ``-(2w-1) .. 2w-1``, hence bias tables of (4w-1)×(4w-1).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

RULES = ("chunk", "exact", "cyclic", "cyclic_release")
"""Which keys of the nine blocks count.

- ``chunk``: every key inside the map (sliding chunk without padding, the paper's default);
- ``exact``: additionally at most w away along each axis, a (2w+1)² window;
- ``cyclic``: blocks beyond the border wrap around to the other side; with few chunks the same key appears several
  times, each time with its own offset;
- ``cyclic_release``: as ``cyclic``, but zero padding reached by wrapping is attended to, as in the authors' release.
"""

BLOCKS = tuple((row, column) for row in (-1, 0, 1) for column in (-1, 0, 1))
"""Rows and columns of chunks from a query's chunk to each of its nine blocks."""

SELF_BLOCK = BLOCKS.index((0, 0))

NEIGHBOURS = BLOCKS[:SELF_BLOCK] + BLOCKS[SELF_BLOCK + 1 :]
"""Rows and columns of chunks to neighbours 1..8, the first being neighbour 1."""


def is_cyclic(rule: str) -> bool:
    return rule.startswith("cyclic")


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


class Grid(NamedTuple):
    """Height and width of a map of tokens, stored row by row."""

    height: int
    width: int

    @property
    def tokens(self) -> int:
        return self.height * self.width

    def reduced(self, patch: int, *, pad: bool) -> Grid:
        """The grid after patches of ``patch``×``patch``, the rest padded or dropped."""
        extra = patch - 1 if pad else 0
        return Grid((self.height + extra) // patch, (self.width + extra) // patch)

    def chunks(self, window: int) -> Grid:
        """The grid of chunks that covers this grid."""
        return self.reduced(window, pad=True)


class Strip(NamedTuple):
    """Chunk rows of a map of tokens that are computed together.

    ``rows`` are their rows of tokens, ``above`` and ``below`` the rows of the chunk rows beside them, which their
    queries see, too: empty at an edge of the map. A strip that is the ``whole`` map has none.
    """

    rows: range
    above: range
    below: range
    width: int
    whole: bool

    @property
    def grid(self) -> Grid:
        """The grid of the strip's own tokens."""
        return Grid(len(self.rows), self.width)

    @property
    def halo(self) -> tuple[int, int] | None:
        """The number of rows above and below, as local attention takes it."""
        return None if self.whole else (len(self.above), len(self.below))

    @property
    def keys(self) -> int:
        """The number of tokens in the rows above, in the strip, and below."""
        return (len(self.above) + len(self.rows) + len(self.below)) * self.width

    @property
    def own(self) -> slice:
        """The strip's own tokens among those."""
        start = len(self.above) * self.width
        return slice(start, start + self.grid.tokens)

    def divided(self, window: int, rule: str, chunk_rows: int) -> list[Strip]:
        """The strips of ``chunk_rows`` chunk rows that make up this one; rows are counted among those that it sees."""
        if self.whole:
            return strips(self.grid, window, rule, chunk_rows)
        top, height = len(self.above), len(self.rows)
        result = []
        for start in range(0, height, chunk_rows * window):
            stop = min(start + chunk_rows * window, height)
            above = range(start + top - window, start + top) if start else range(top)
            below = range(stop + top, min(stop + window, height if stop < height else height + len(self.below)) + top)
            result.append(Strip(range(start + top, stop + top), above, below, self.width, whole=False))
        return result


def chunk_strip(grid: Grid, window: int, rule: str, first: int, last: int) -> Strip:
    """The chunk rows from ``first`` to before ``last`` of a map; without any, it sees nothing."""
    chunks, nothing = ceil_div(grid.height, window), range(0)

    def rows_of(chunk: int) -> range:
        if not 0 <= chunk < chunks and not is_cyclic(rule):
            return nothing
        start = chunk % chunks * window
        return range(start, min(start + window, grid.height))

    rows, whole = range(min(first * window, grid.height), min(last * window, grid.height)), last - first == chunks
    alone = whole or not rows
    above, below = (nothing, nothing) if alone else (rows_of(first - 1), rows_of(last))
    return Strip(rows, above, below, grid.width, whole)


def strips(grid: Grid, window: int, rule: str, chunk_rows: int) -> list[Strip]:
    """The strips of ``chunk_rows`` chunk rows that make up a map, from top to bottom; the last may have fewer."""
    chunks = ceil_div(grid.height, window)
    starts = range(0, chunks, chunk_rows)
    return [chunk_strip(grid, window, rule, first, min(first + chunk_rows, chunks)) for first in starts]


def even_strips(grid: Grid, window: int, rule: str, count: int) -> list[Strip]:
    """``count`` strips that make up a map, of whole chunk rows and as even as these allow; some may be empty."""
    chunks = ceil_div(grid.height, window)
    ends = [min(chunks, round(index * grid.height / (count * window))) for index in range(count)] + [chunks]
    return [chunk_strip(grid, window, rule, first, last) for first, last in pairwise(ends)]
