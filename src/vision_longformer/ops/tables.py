"""Index arithmetic as tensors: which chunks and keys a query sees, relative offsets, and bias looked up by offset.

Everything separates into rows and columns, so each table is built by broadcasting two small tables, one per axis.
Nothing loops over tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..geometry import BLOCKS, NEIGHBOURS, SELF_BLOCK, Grid, is_cyclic


def may_cache() -> bool:
    """Whether tensors made now may serve later calls: not those of a graph being traced, nor fake ones."""
    return not torch.compiler.is_compiling() and type(torch.empty(0)) is Tensor


# Blocks


def neighbour_block(neighbour: Tensor) -> Tensor:
    """The block of each neighbour 1..8."""
    return neighbour - (neighbour <= SELF_BLOCK).to(neighbour.dtype)


def in_chosen_block(rows: Tensor, columns: Tensor, neighbour: Tensor | None) -> Tensor:
    """Whether keys whose blocks are ``rows`` and ``columns`` (-1, 0, 1) away are in the own chunk or the neighbour."""
    chosen = (rows == 0) & (columns == 0)
    if neighbour is not None:
        row, column = torch.tensor(NEIGHBOURS, device=rows.device)[neighbour - 1]
        chosen = chosen | ((rows == row) & (columns == column))
    return chosen


def axis_blocks(chunks: int, rule: str) -> tuple[int, ...]:
    """Which of the offsets -1, 0, 1 can hold a key at all, for an axis of so many chunks."""
    return (0,) if statically_known_true(chunks <= 1) and not is_cyclic(rule) else (-1, 0, 1)


def present_blocks(chunks: Grid, rule: str) -> list[int]:
    """The blocks that can hold a key for some chunk of the map, in order."""
    rows, columns = axis_blocks(chunks.height, rule), axis_blocks(chunks.width, rule)
    return [index for index, (row, column) in enumerate(BLOCKS) if row in rows and column in columns]


def covers_map(grid: Grid, window: int, halo: tuple[int, int] = (0, 0)) -> bool:
    """Whether the nine blocks of every chunk hold the whole map, so that rule ``chunk`` is full attention.

    ``halo`` are rows of keys above and below the map, of another chunk row each.
    """
    rows, columns = grid.chunks(window)
    return all(statically_known_true(count <= 2) for count in (*(rows + (side > 0) for side in halo), columns))


class ChunkTables(NamedTuple):
    """Index tables of the nine blocks, for a map of M chunks.

    ``source`` (9, M): the chunk that block b of chunk m is; ``valid`` (9, M, w²): whether its keys count.
    """

    source: Tensor
    valid: Tensor


def chunk_tables(grid: Grid, window: int, rule: str, device: torch.device) -> ChunkTables:
    return (_cached_chunk_tables if may_cache() else _chunk_tables)(grid, window, rule, device)


def _chunk_tables(grid: Grid, window: int, rule: str, device: torch.device) -> ChunkTables:
    chunks = grid.chunks(window)
    rows, row_valid = _axis_tables(grid.height, chunks.height, window, rule, device)
    columns, column_valid = _axis_tables(grid.width, chunks.width, window, rule, device)
    source = rows[:, None, :, None] * chunks.width + columns[None, :, None, :]
    valid = row_valid[:, None, :, None, :, None] & column_valid[None, :, None, :, None, :]
    return ChunkTables(source.reshape(9, -1), valid.reshape(9, chunks.tokens, window * window))


_cached_chunk_tables = lru_cache(maxsize=64)(_chunk_tables)


def _axis_tables(length: int, chunks: int, window: int, rule: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per axis: the source chunk (3, chunks) of each block and the validity (3, chunks, w) of its keys."""
    unwrapped = torch.arange(-1, 2, device=device)[:, None] + torch.arange(chunks, device=device)
    before, after = unwrapped < 0, unwrapped >= chunks
    source = unwrapped + chunks * (before.long() - after.long())
    inside = source[..., None] * window + torch.arange(window, device=device) < length
    wrapped = (before | after)[..., None]
    if rule == "cyclic":
        return source, inside
    if rule == "cyclic_release":
        return source, inside | wrapped
    return source, inside & ~wrapped


# Windows of the exact rule


class AxisWindow(NamedTuple):
    """One axis of the ``exact`` rule, for every query position and each of its 2w+1 keys, all (length, 2w+1).

    ``inside``: whether the key is in the map; ``block``: its block offset, -1, 0 or 1 (without dilation).
    """

    inside: Tensor
    block: Tensor


def axis_window(
    length: int, window: int, dilation: int, device: torch.device, halo: tuple[int, int] = (0, 0)
) -> AxisWindow:
    """Keys ``-w..w`` steps of ``dilation`` away from each query of one axis; ``halo``: keys before and after it."""
    query = torch.arange(length, device=device)[:, None]
    key = query + window_steps(window, device) * dilation
    block = torch.div(key, window, rounding_mode="floor") - torch.div(query, window, rounding_mode="floor")
    return AxisWindow((key >= -halo[0]) & (key < length + halo[1]), block)


def window_steps(window: int, device: torch.device) -> Tensor:
    """Steps key − query of a window along one axis, ``-w..w``."""
    return torch.arange(-window, window + 1, device=device)


# Offsets and bias


def block_offsets(window: int, device: torch.device) -> Tensor:
    """Offsets query − key along one axis, (3, w, w): block -1..1, query in its chunk, key in its chunk."""
    inner = torch.arange(window, device=device)
    block = torch.arange(-1, 2, device=device) * window
    return inner[None, :, None] - block[:, None, None] - inner


def map_offsets(length: int, device: torch.device, halo: tuple[int, int] = (0, 0)) -> Tensor:
    """Offsets query − key along one axis of a whole map, (length, keys); ``halo``: keys before and after it."""
    return torch.arange(length, device=device)[:, None] - torch.arange(-halo[0], length + halo[1], device=device)


def table_lookup(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Entries of an offset-centred ``table`` (heads, R, C) for all pairs of row and column offsets.

    Offsets beyond the table take its nearest entry, so that a table serves any map size.
    Returns (heads, *rows.shape, *columns.shape).
    """
    height, width = table.shape[1:]
    row_index = (rows + height // 2).clamp(0, height - 1).flatten()
    column_index = (columns + width // 2).clamp(0, width - 1).flatten()
    entries = table.index_select(1, row_index).index_select(2, column_index)
    return entries.view(-1, *rows.shape, *columns.shape)


def map_bias(table: Tensor, grid: Grid, halo: tuple[int, int] = (0, 0)) -> Tensor:
    """Relative bias of all pairs of tokens of a map, (heads, N, N), from a table (heads, R, C).

    ``halo`` are rows of more keys above and below the map.
    """
    rows, columns = map_offsets(grid.height, table.device, halo), map_offsets(grid.width, table.device)
    return table_lookup(table, rows, columns).transpose(2, 3).flatten(3, 4).flatten(1, 2)
