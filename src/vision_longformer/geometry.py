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
