"""Which positions of one axis of a map see which: a map is cut into rectangles of queries, each with its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import Grid, axis_blocks


class Strip(NamedTuple):
    """Neighbouring positions along an axis, ``own``, and all positions that they may see, in ascending order."""

    own: range
    seen: tuple[int, ...]

    @property
    def inner(self) -> range:
        """Where the own positions are among those seen."""
        start = self.seen.index(self.own.start)
        return range(start, start + len(self.own))


def chunk_strips(length: int, window: int, rule: str, neighbours: str) -> list[Strip]:
    """A strip per chunk; it sees itself and the chunks beside it, around the border if the rule is cyclic.

    The chunks that a strip sees, put together as a map of their own, are neighbours there as they are in the whole map:
    ascending order keeps the last chunk, the only one that may be smaller, at the end.
    """
    chunks = -(-length // window)
    near = axis_blocks(chunks, rule) if neighbours == "all" else (0,)
    inside = {chunk: range(chunk * window, min((chunk + 1) * window, length)) for chunk in range(chunks)}
    strips = []
    for chunk in range(chunks):
        around = {chunk + step for step in near}
        seen = around & inside.keys() if rule in ("chunk", "exact") else {other % chunks for other in around}
        strips.append(Strip(inside[chunk], tuple(position for other in sorted(seen) for position in inside[other])))
    return strips


def whole_strips(length: int, own: int) -> list[Strip]:
    """Strips of ``own`` positions that see the whole axis."""
    everything = range(length)
    return [Strip(everything[start : start + own], tuple(everything)) for start in range(0, length, own)]


def tokens_at(rows: Sequence[int], columns: Sequence[int], grid: Grid, device: torch.device) -> Tensor:
    """The numbers of the tokens in these rows and columns of a map, row by row."""
    starts = torch.tensor(rows, device=device)[:, None] * grid.width
    return (starts + torch.tensor(columns, device=device)).flatten()
