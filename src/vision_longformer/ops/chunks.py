"""Tokens to chunks and back, and what is added to the scores of a chunk: shared by the chunk implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import (
    SELF_BLOCK,
    Grid,
    block_offsets,
    chunk_tables,
    in_order,
    neighbour_block,
    pad_map,
    present_blocks,
    table_lookup,
)
from .spec import LocalSpec


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
