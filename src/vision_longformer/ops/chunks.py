"""Tokens to chunks and back, and what is added to the scores of a chunk: shared by the chunk implementations."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from ..geometry import BLOCKS, SELF_BLOCK, Grid, is_cyclic
from .spec import LocalSpec


def pad_map(image: Tensor, axis: int, bottom: int, right: int) -> Tensor:
    """Zeros below and to the right of a map whose height is ``axis`` and whose width the next axis.

    Without any to add the map is returned as it is; compiled graphs always pad, so as not to depend on the size.
    """
    if not (torch.compiler.is_compiling() or bottom or right):
        return image
    return F.pad(image, (0, 0) * (image.dim() - axis - 2) + (0, right, 0, bottom))


def in_order(x: Tensor) -> Tensor:
    """A contiguous copy. ``contiguous`` would first ask whether one is needed, and tie a graph to the answer."""
    return x.clone(memory_format=torch.contiguous_format)


def tokens_to_map(tokens: Tensor, grid: Grid) -> Tensor:
    """Tokens (B, N, dim) as a map (B, dim, height, width): a view of them, in exported graphs a copy.

    A convolution asks of a view whether its channels come last, and the answer would depend on the number of images.
    """
    image = tokens.transpose(1, 2).unflatten(2, tuple(grid))
    return in_order(image) if torch.compiler.is_exporting() else image


def neighbour_block(neighbour: Tensor) -> Tensor:
    """The block of each neighbour 1..8."""
    return neighbour - (neighbour <= SELF_BLOCK).to(neighbour.dtype)


def axis_blocks(chunks: int, rule: str) -> tuple[int, ...]:
    """Which of the offsets -1, 0, 1 can hold a key at all, for an axis of so many chunks."""
    return (0,) if statically_known_true(chunks <= 1) and not is_cyclic(rule) else (-1, 0, 1)


def present_blocks(chunks: Grid, rule: str) -> list[int]:
    """The blocks that can hold a key for some chunk of the map, in order."""
    rows, columns = axis_blocks(chunks.height, rule), axis_blocks(chunks.width, rule)
    return [index for index, (row, column) in enumerate(BLOCKS) if row in rows and column in columns]


def covers_map(grid: Grid, window: int) -> bool:
    """Whether the nine blocks of every chunk hold the whole map, so that rule ``chunk`` is full attention."""
    return all(statically_known_true(count <= 2) for count in grid.chunks(window))


class ChunkTables(NamedTuple):
    """Index tables of the nine blocks, for a map of M chunks.

    ``source`` (9, M): the chunk that block b of chunk m is; ``valid`` (9, M, w²): whether its keys count.
    """

    source: Tensor
    valid: Tensor


def chunk_tables(grid: Grid, window: int, rule: str, device: torch.device) -> ChunkTables:
    """The tables of :class:`ChunkTables`, kept from call to call in eager mode (of real tensors, not fake ones)."""
    if torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:
        return _chunk_tables(grid, window, rule, device)
    return _cached_chunk_tables(grid, window, rule, device)


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


def block_offsets(window: int, device: torch.device) -> Tensor:
    """Offsets query − key along one axis, (3, w, w): block -1..1, query in its chunk, key in its chunk."""
    inner = torch.arange(window, device=device)
    block = torch.arange(-1, 2, device=device) * window
    return inner[None, :, None] - block[:, None, None] - inner


def map_offsets(length: int, device: torch.device) -> Tensor:
    """Offsets query − key along one axis of a whole map, (length, length)."""
    positions = torch.arange(length, device=device)
    return positions[:, None] - positions


class AxisWindow(NamedTuple):
    """One axis of the ``exact`` rule, for every query position and each of its 2w+1 keys, all (length, 2w+1).

    ``inside``: whether the key is in the map; ``block``: its block offset, -1, 0 or 1 (without dilation).
    """

    inside: Tensor
    block: Tensor


def axis_window(length: int, window: int, dilation: int, device: torch.device) -> AxisWindow:
    """Keys ``-w..w`` steps of ``dilation`` away from each query of one axis."""
    query = torch.arange(length, device=device)[:, None]
    key = query + window_steps(window, device) * dilation
    block = torch.div(key, window, rounding_mode="floor") - torch.div(query, window, rounding_mode="floor")
    return AxisWindow((key >= 0) & (key < length), block)


def window_steps(window: int, device: torch.device) -> Tensor:
    """Steps key − query of a window along one axis, ``-w..w``."""
    return torch.arange(-window, window + 1, device=device)


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


def map_bias(table: Tensor, grid: Grid) -> Tensor:
    """Relative bias of all pairs of tokens of a map, (heads, N, N), from a table (heads, R, C)."""
    rows, columns = map_offsets(grid.height, table.device), map_offsets(grid.width, table.device)
    return table_lookup(table, rows, columns).transpose(2, 3).reshape(-1, grid.tokens, grid.tokens)


def to_chunks(tokens: Tensor, grid: Grid, window: int) -> Tensor:
    """(B, N, heads, dim) to (B, heads, M, w², dim), zero-padded at the bottom and right to whole chunks."""
    chunks = grid.chunks(window)
    bottom, right = chunks.height * window - grid.height, chunks.width * window - grid.width
    image = pad_map(tokens.unflatten(1, tuple(grid)), 1, bottom, right)
    split = image.unflatten(2, (chunks.width, window)).unflatten(1, (chunks.height, window))
    return in_order(split.permute(0, 5, 1, 3, 2, 4, 6)).flatten(4, 5).flatten(2, 3)


def from_chunks(chunked: Tensor, grid: Grid, window: int) -> Tensor:
    """The inverse of :func:`to_chunks`: (B, heads, M, w², dim) to (B, N, heads, dim), padding cropped."""
    chunks = grid.chunks(window)
    split = chunked.unflatten(3, (window, window)).unflatten(2, tuple(chunks))
    image = in_order(split.permute(0, 2, 4, 3, 5, 1, 6)).flatten(3, 4).flatten(1, 2)
    return pad_map(image, 1, grid.height - chunks.height * window, grid.width - chunks.width * window).flatten(1, 2)


def selected_blocks(spec: LocalSpec, neighbour: Tensor | None, device: torch.device) -> Tensor:
    """The blocks whose keys are attended to, as an index tensor into tables of nine."""
    if spec.neighbours == "all":
        return torch.tensor(present_blocks(spec.grid.chunks(spec.window), spec.rule), device=device)
    own = torch.full((1,), SELF_BLOCK, dtype=torch.int64, device=device)
    return own if neighbour is None else torch.cat([own, neighbour_block(neighbour).view(1)])


def block_sources(spec: LocalSpec, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For the selected blocks: their source chunks (n, M) and which keys do not count (M, 1, n·w²)."""
    tables = chunk_tables(spec.grid, spec.window, spec.rule, blocks.device)
    invalid = ~tables.valid.index_select(0, blocks)
    return tables.source.index_select(0, blocks), in_order(invalid.transpose(0, 1)).flatten(1).unsqueeze(1)


def block_bias(table: Tensor | None, spec: LocalSpec, blocks: Tensor, like: Tensor) -> Tensor | None:
    """What is added to the scores of every chunk, (heads or 1, w², n·w²): the bias, and −∞ beyond an exact window."""
    if table is None and spec.rule != "exact":
        return None
    table = like.new_zeros(1, 1, 1) if table is None else table
    offsets = block_offsets(spec.window, like.device)
    bias = table_lookup(table, offsets, offsets)
    if spec.rule == "exact":
        near = offsets.abs() <= spec.window
        bias = bias.masked_fill(~(near[..., None, None, None] & near), float("-inf"))
    nine = bias.permute(0, 1, 4, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4).flatten(1, 2)
    return nine.index_select(1, blocks).transpose(1, 2).flatten(2)
