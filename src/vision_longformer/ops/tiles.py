"""How a map falls into classes of chunks with key rectangles of one shape, so that most of it needs no mask.

Along an axis, chunks whose keys lie alike relative to them form a class: the first chunk, the inner ones, the last ones
at a border. A class of the map is a pair of axis classes. Keys come in pieces, each a range of blocks along both axes:
one piece for all neighbours or none, two for the own chunk and one neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import BLOCKS, is_cyclic, neighbour_block, pad_map, table_lookup
from .spec import LocalSpec


class KeyRange(NamedTuple):
    """Keys of one piece along one axis, for the first chunk of a class.

    ``start`` on the key axis, ``offset`` of the first key to the first query, ``counts`` which of the keys count.
    """

    start: int
    offset: int
    counts: tuple[bool, ...]


class AxisClass(NamedTuple):
    """``chunks`` consecutive chunks from query ``start``, each of ``length`` queries, and their keys per piece."""

    start: int
    chunks: int
    length: int
    keys: tuple[KeyRange, ...]


class Piece(NamedTuple):
    """A key rectangle of a class: its ranges along rows and columns, and where its keys stand among the class's."""

    rows: KeyRange
    columns: KeyRange
    keys: slice


class ChunkClass:
    """A class of chunks: ``rows.length``×``columns.length`` queries each, and G global keys and the pieces' keys."""

    def __init__(self, rows: AxisClass, columns: AxisClass, global_tokens: int, window: int) -> None:
        self.rows, self.columns, self.window = rows, columns, window
        self.query_count, self.key_count = rows.length * columns.length, global_tokens
        self.pieces: list[Piece] = []
        for row, column in zip(rows.keys, columns.keys, strict=True):
            count = len(row.counts) * len(column.counts)
            if count:
                self.pieces.append(Piece(row, column, slice(self.key_count, self.key_count + count)))
                self.key_count += count

    def tiles(self, batch: int, per_chunk: int, budget: int) -> Iterator[tuple[slice, slice]]:
        """Ranges of images and of chunk rows, as many as a ``budget`` of elements holds."""
        per_row = self.columns.chunks * per_chunk
        rows = max(1, min(self.rows.chunks, budget // per_row))
        images = max(1, min(batch, budget // (per_row * rows))) if rows == self.rows.chunks else 1
        for image in range(0, batch, images):
            for row in range(0, self.rows.chunks, rows):
                yield slice(image, min(batch, image + images)), slice(row, min(self.rows.chunks, row + rows))

    def queries(self, image: Tensor, images: slice, rows: slice) -> Tensor:
        """The queries of a tile in a map (B, height, width, heads, dim), as a view (b, r, c, heads, y, x, dim)."""
        count, tall, wide = rows.stop - rows.start, self.rows.length, self.columns.length
        top, left = self.rows.start + rows.start * self.window, self.columns.start
        part = image[images, top : top + count * tall, left : left + self.columns.chunks * wide]
        return part.unflatten(2, (-1, wide)).unflatten(1, (count, tall)).permute(0, 1, 3, 5, 2, 4, 6)

    def gather(self, image: Tensor, images: slice, rows: slice, into: Tensor) -> None:
        """The local keys of a tile from a key map into their places in (b, r, c, heads, keys, dim)."""
        for piece in self.pieces:
            part = self._rectangle(image, piece, images, rows)
            tall, wide = len(piece.rows.counts), len(piece.columns.counts)
            windows = part.unfold(1, tall, self.window).unfold(2, wide, self.window)
            into[..., piece.keys, :].unflatten(4, (tall, wide)).copy_(windows.permute(0, 1, 2, 3, 5, 6, 4))

    def scatter(self, grads: Tensor, images: slice, rows: slice, image: Tensor) -> None:
        """Add key gradients (b, r, c, heads, keys, dim) to a key map: the adjoint of :meth:`gather`.

        Rectangles of neighbouring chunks overlap, but their blocks don't: one addition per block serves all chunks.
        """
        count = rows.stop - rows.start
        for piece in self.pieces:
            part = self._rectangle(image, piece, images, rows)
            tall, wide = len(piece.rows.counts), len(piece.columns.counts)
            windows = grads[..., piece.keys, :].unflatten(4, (tall, wide)).permute(0, 1, 4, 2, 5, 3, 6)
            for top, height in _steps(tall, count, self.window):
                for left, width in _steps(wide, self.columns.chunks, self.window):
                    block = part[:, top : top + count * height, left : left + self.columns.chunks * width]
                    block = block.unflatten(2, (-1, width)).unflatten(1, (count, height))
                    block.add_(windows[:, :, top : top + height, :, left : left + width])

    def _rectangle(self, image: Tensor, piece: Piece, images: slice, rows: slice) -> Tensor:
        """The part of a key map that the chunks of a tile reach in one piece."""
        top, left = piece.rows.start + rows.start * self.window, piece.columns.start
        bottom = top + (rows.stop - rows.start - 1) * self.window + len(piece.rows.counts)
        right = left + (self.columns.chunks - 1) * self.window + len(piece.columns.counts)
        return image[images, top:bottom, left:right]

    def offsets(self, piece: Piece, device: torch.device) -> tuple[Tensor, Tensor]:
        """Offsets query − key along rows (y, keys) and along columns (x, keys)."""
        row, column = (
            torch.arange(axis.length, device=device)[:, None]
            - torch.arange(keys.offset, keys.offset + len(keys.counts), device=device)
            for axis, keys in ((self.rows, piece.rows), (self.columns, piece.columns))
        )
        return row, column

    def bias(
        self, table: Tensor | None, global_bias: Tensor | None, spec: LocalSpec, heads: int, like: Tensor
    ) -> Tensor | None:
        """What is added to the scores of each chunk, (heads, queries, keys) of the type of ``like``, if anything."""
        holes = any(not all(piece.rows.counts + piece.columns.counts) for piece in self.pieces)
        if table is None and global_bias is None and spec.rule != "exact" and not holes:
            return None
        total = like.new_zeros(heads, self.query_count, self.key_count)
        if global_bias is not None:
            total[..., : global_bias.shape[1]] = global_bias[:, None]
        for piece in self.pieces:
            rows, columns = self.offsets(piece, like.device)
            part = total[..., piece.keys]
            if table is not None:
                part.copy_(table_lookup(table, rows, columns).transpose(2, 3).flatten(3).flatten(1, 2))
            if spec.rule == "exact" or holes:
                seen = (
                    _axis_seen(rows, piece.rows, spec)[:, None, :, None]
                    & _axis_seen(columns, piece.columns, spec)[:, None]
                )
                part.masked_fill_(~seen.flatten(2).flatten(0, 1), float("-inf"))
        return total


def _axis_seen(offsets: Tensor, keys: KeyRange, spec: LocalSpec) -> Tensor:
    counts = torch.tensor(keys.counts, device=offsets.device).expand(offsets.shape)
    return counts & (offsets.abs() <= spec.window) if spec.rule == "exact" else counts


def _steps(length: int, chunks: int, window: int) -> list[tuple[int, int]]:
    """Start and size of the blocks of a key range: all of it for one chunk, else block by block."""
    return [(0, length)] if chunks == 1 else [(start, window) for start in range(0, length, window)]


def map_classes(spec: LocalSpec, neighbour: Tensor | None, global_tokens: int) -> list[ChunkClass]:
    """The classes that make up the map."""
    reach: tuple[tuple[tuple[int, int], ...], ...] = (((-1, 1),),) * 2
    if spec.neighbours != "all":
        reach = (((0, 0),),) * 2
    if neighbour is not None:
        row, column = BLOCKS[int(neighbour_block(neighbour))]
        reach = (((0, 0), (row, row)), ((0, 0), (column, column)))
    rows, columns = (
        _axis_classes(length, spec.window, spec.rule, pieces) for length, pieces in zip(spec.grid, reach, strict=True)
    )
    return [ChunkClass(row, column, global_tokens, spec.window) for row in rows for column in columns]


@lru_cache(maxsize=256)
def _axis_classes(length: int, window: int, rule: str, pieces: tuple[tuple[int, int], ...]) -> tuple[AxisClass, ...]:
    classes: list[AxisClass] = []
    for chunk in range(-(-length // window)):
        start = chunk * window
        keys = tuple(_key_range(chunk, first, last, length, window, rule) for first, last in pieces)
        size = min(window, length - start)
        if classes and _continues(classes[-1], size, keys, window):
            classes[-1] = classes[-1]._replace(chunks=classes[-1].chunks + 1)
        else:
            classes.append(AxisClass(start, 1, size, keys))
    return tuple(classes)


def _continues(before: AxisClass, size: int, keys: tuple[KeyRange, ...], window: int) -> bool:
    shift = before.chunks * window
    return size == before.length and keys == tuple(key._replace(start=key.start + shift) for key in before.keys)


def _key_range(chunk: int, first: int, last: int, length: int, window: int, rule: str) -> KeyRange:
    """Keys of blocks ``first..last`` of a chunk; the key axis of cyclic rules has one more chunk at both ends."""
    low, high = (chunk + first) * window, (chunk + last + 1) * window
    if not is_cyclic(rule):
        low, high = max(0, low), min(length, high)
        return KeyRange(low, low - chunk * window, (True,) * (high - low))
    total = -(-length // window) * window
    wrapped_counts = rule == "cyclic_release"
    counts = tuple(
        position % total < length or (wrapped_counts and not 0 <= position < total) for position in range(low, high)
    )
    return KeyRange(low + window, low - chunk * window, counts)


def key_map(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """Local keys (B, N, heads, dim) as the map the ranges refer to: itself, or padded and wrapped for cyclic rules."""
    image = tokens.unflatten(1, tuple(spec.grid))
    if not is_cyclic(spec.rule):
        return image
    window, chunks = spec.window, spec.grid.chunks(spec.window)
    bottom, right = chunks.height * window - spec.grid.height, chunks.width * window - spec.grid.width
    image = pad_map(image, 1, bottom, right)
    for axis in (1, 2):
        size = image.shape[axis]
        image = torch.cat([image.narrow(axis, size - window, window), image, image.narrow(axis, 0, window)], axis)
    return image


def fold_key_map(image: Tensor, spec: LocalSpec) -> Tensor:
    """The adjoint of :func:`key_map`: gradients of the map to gradients of the tokens."""
    if is_cyclic(spec.rule):
        window = spec.window
        for axis in (1, 2):
            inner = image.narrow(axis, window, image.shape[axis] - 2 * window)
            inner.narrow(axis, inner.shape[axis] - window, window).add_(image.narrow(axis, 0, window))
            inner.narrow(axis, 0, window).add_(image.narrow(axis, image.shape[axis] - window, window))
            image = inner
        image = image[:, : spec.grid.height, : spec.grid.width]
    return image.flatten(1, 2)
