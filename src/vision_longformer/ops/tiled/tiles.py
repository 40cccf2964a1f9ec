"""How a map falls into classes of chunks whose keys lie alike, and how rows of chunks are laid out as streams.

Along an axis, chunks whose keys lie alike relative to them form a class: the first chunk, the inner ones, the last ones
at a border. A class of the map is a pair of axis classes, and what is added to the scores of its chunks is made once.
Keys come in pieces, each a range of blocks along both axes: one piece for all neighbours or none, two for the own chunk
and one neighbour. A stream holds the tokens of a row of chunks column by column, so that the keys of every chunk are a
slice of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...geometry import NEIGHBOURS, ceil_div, is_cyclic
from ..chunks import pad_map
from ..spec import LocalSpec

KEY_MULTIPLE = 8
"""Of this many keys is every piece, the surplus masked: matrix products with odd sizes are slower by more than that."""


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


class ChunkClass(NamedTuple):
    """Chunks with the same classes of rows and of columns; their tokens are taken column by column."""

    rows: AxisClass
    columns: AxisClass
    spec: LocalSpec

    @property
    def shape(self) -> tuple[int, int]:
        """Of the scores of a chunk: queries and keys."""
        return self.rows.length * self.columns.length, sum(self.key_counts())

    def key_counts(self) -> list[int]:
        """How many keys of each piece have scores."""
        return [_padded(len(rows.counts) * len(columns.counts)) for rows, columns in self.pieces()]

    def pieces(self) -> Iterator[tuple[KeyRange, KeyRange]]:
        return zip(self.rows.keys, self.columns.keys, strict=True)

    def bias(self, table: Tensor) -> Tensor:
        """What is added to the scores of each chunk, (heads, queries, keys), from a table of :func:`entry_table`."""
        return table.index_select(1, _entries(self, table.device)).view(-1, *self.shape)

    def add_to_table(self, grads: Tensor, table: Tensor) -> None:
        """The adjoint of :meth:`bias`: add gradients (heads, queries, keys) to the entries of a table."""
        table.index_add_(1, _entries(self, table.device), grads.flatten(1))


class PieceSlice(NamedTuple):
    """The keys of a chunk in one piece: which rows of keys they are among, from where, and how many."""

    rows: int
    start: int
    size: int


class RowClass(NamedTuple):
    """Rows of chunks with the same class, and the classes of their columns from left to right."""

    rows: AxisClass
    chunks: tuple[ChunkClass, ...]

    def key_rows(self) -> list[tuple[int, int]]:
        """Start and number of the rows of keys that the first row of chunks sees, for each piece that has its own."""
        return list(dict.fromkeys((keys.start, len(keys.counts)) for keys in self.rows.keys))

    def slices(self) -> Iterator[tuple[int, list[PieceSlice]]]:
        """The class and the keys of each chunk from left to right, among the tokens of all columns."""
        key_rows = self.key_rows()
        for index, chunks in enumerate(self.chunks):
            for shift in range(0, chunks.columns.chunks * chunks.spec.window, chunks.spec.window):
                pieces = []
                for (rows, columns), size in zip(chunks.pieces(), chunks.key_counts(), strict=True):
                    tall = len(rows.counts)
                    start = (columns.start + shift) * tall if size else 0  # a piece without keys is outside the map
                    pieces.append(PieceSlice(key_rows.index((rows.start, tall)), start, size))
                yield index, pieces


def _padded(keys: int) -> int:
    return ceil_div(keys, KEY_MULTIPLE) * KEY_MULTIPLE


def entry_table(bias: Tensor | None, heads: int, window: int, like: Tensor) -> Tensor:
    """Biases of all offsets and, last, −∞ for keys that do not count: (heads, (4w-1)² + 1) of the type of ``like``."""
    table = like.new_zeros(heads, (4 * window - 1) ** 2 + 1)
    if bias is not None:
        table[:, :-1] = bias.flatten(1)
    table[:, -1] = float("-inf")
    return table


@lru_cache(maxsize=64)
def _entries(chunks: ChunkClass, device: torch.device) -> Tensor:
    """The entry of the table for each query and key of a chunk, flat."""
    window, side = chunks.spec.window, 4 * chunks.spec.window - 1
    parts = []
    for piece in chunks.pieces():
        (rows, rows_seen), (columns, columns_seen) = (
            _axis_offsets(axis.length, keys, chunks.spec, device)
            for axis, keys in zip((chunks.rows, chunks.columns), piece, strict=True)
        )
        entries = (rows[:, None] + 2 * window - 1) * side + columns[:, None, :, None] + 2 * window - 1
        seen = rows_seen[:, None] & columns_seen[:, None, :, None]
        part = entries.masked_fill(~seen, side * side).flatten(2).flatten(0, 1)
        parts.append(F.pad(part, (0, -part.shape[1] % KEY_MULTIPLE), value=side * side))
    return torch.cat(parts, 1).flatten()


def _axis_offsets(queries: int, keys: KeyRange, spec: LocalSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Along one axis: the offsets query − key, and which of the keys each query sees, both (queries, keys)."""
    positions = torch.arange(keys.offset, keys.offset + len(keys.counts), device=device)
    offsets = torch.arange(queries, device=device)[:, None] - positions
    counts = torch.tensor(keys.counts, dtype=torch.bool, device=device).expand(offsets.shape)
    return offsets, counts & (offsets.abs() <= spec.window) if spec.rule == "exact" else counts


def map_classes(spec: LocalSpec, neighbour: Tensor | None) -> list[RowClass]:
    """The classes that make up the map."""
    reach: tuple[tuple[tuple[int, int], ...], ...] = (((-1, 1),),) * 2
    if spec.neighbour_mode != "all":
        reach = (((0, 0),),) * 2
    if neighbour is not None:
        row, column = NEIGHBOURS[int(neighbour) - 1]
        reach = (((0, 0), (row, row)), ((0, 0), (column, column)))
    rows = _axis_classes(spec.grid.height, spec.window, spec.rule, reach[0], spec.halo)
    columns = _axis_classes(spec.grid.width, spec.window, spec.rule, reach[1], None)
    return [RowClass(row, tuple(ChunkClass(row, column, spec) for column in columns)) for row in rows]


@lru_cache(maxsize=256)
def _axis_classes(
    length: int, window: int, rule: str, pieces: tuple[tuple[int, int], ...], halo: tuple[int, int] | None
) -> tuple[AxisClass, ...]:
    classes: list[AxisClass] = []
    for chunk in range(ceil_div(length, window)):
        start = chunk * window
        keys = tuple(_key_range(chunk, first, last, length, window, rule, halo) for first, last in pieces)
        size = min(window, length - start)
        if classes and _continues(classes[-1], size, keys, window):
            classes[-1] = classes[-1]._replace(chunks=classes[-1].chunks + 1)
        else:
            classes.append(AxisClass(start, 1, size, keys))
    return tuple(classes)


def _continues(before: AxisClass, size: int, keys: tuple[KeyRange, ...], window: int) -> bool:
    shift = before.chunks * window
    return size == before.length and keys == tuple(key._replace(start=key.start + shift) for key in before.keys)


def _key_range(
    chunk: int, first: int, last: int, length: int, window: int, rule: str, halo: tuple[int, int] | None
) -> KeyRange:
    """Keys of blocks ``first..last`` of a chunk; the key axis of cyclic rules has one more chunk at both ends."""
    low, high = (chunk + first) * window, (chunk + last + 1) * window
    if not is_cyclic(rule):
        above, below = halo or (0, 0)
        low, high = max(-above, low), min(length + below, high)
        return KeyRange(low + above, low - chunk * window, (True,) * (high - low))
    counts = tuple(_wrapped_counts(position, length, window, rule, halo) for position in range(low, high))
    return KeyRange(low + window, low - chunk * window, counts)


def _wrapped_counts(position: int, length: int, window: int, rule: str, halo: tuple[int, int] | None) -> bool:
    """Whether a key of a cyclic rule counts, at an unwrapped position of the axis."""
    total = ceil_div(length, window) * window
    if halo is not None:
        above, below = halo
        return 0 <= position < length or -window <= position < above - window or total <= position < total + below
    return position % total < length or (rule == "cyclic_release" and not 0 <= position < total)


def key_map(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """Local keys (B, K, heads, dim) as the map the ranges refer to: itself, or padded and wrapped for cyclic rules."""
    image, window = tokens.unflatten(1, tuple(spec.key_grid)), spec.window
    if not is_cyclic(spec.rule):
        return image
    bottom, right = spec.padding
    image = pad_map(image, 1, 0, right)
    if spec.halo is None:
        image = _wrap(pad_map(image, 1, bottom, 0), 1, window)
    else:
        above, below = spec.halo
        parts = image.split((above, spec.grid.height, below), 1)
        missing = (window - above, bottom, window - below)
        image = torch.cat([pad_map(part, 1, rows, 0) for part, rows in zip(parts, missing, strict=True)], 1)
    return _wrap(image, 2, window)


def _wrap(image: Tensor, axis: int, window: int) -> Tensor:
    """The map with its last chunks before its first along an axis, and its first after its last."""
    size = image.shape[axis]
    return torch.cat([image.narrow(axis, size - window, window), image, image.narrow(axis, 0, window)], axis)


def fold_key_map(image: Tensor, spec: LocalSpec) -> Tensor:
    """The adjoint of :func:`key_map` for cyclic rules: gradients of the map to gradients of the tokens."""
    height, width = spec.grid
    image = _unwrap(image, 2, spec.window)[:, :, :width]
    if spec.halo is None:
        return _unwrap(image, 1, spec.window)[:, :height].flatten(1, 2)
    above, own, below = image.split((spec.window, image.shape[1] - 2 * spec.window, spec.window), 1)
    return torch.cat([above[:, : spec.halo[0]], own[:, :height], below[:, : spec.halo[1]]], 1).flatten(1, 2)


def _unwrap(image: Tensor, axis: int, window: int) -> Tensor:
    """The adjoint of :func:`_wrap`."""
    before, inner, after = image.split((window, image.shape[axis] - 2 * window, window), axis)
    inner.narrow(axis, inner.shape[axis] - window, window).add_(before)
    inner.narrow(axis, 0, window).add_(after)
    return inner


APART = 3
"""Rows of chunks so far apart share no keys, so that gradients of theirs can be kept side by side."""


class Scratch:
    """Buffers by name, used again and again: new pages cost as much as arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A contiguous buffer with the content of its last use."""
        size = torch.Size(shape).numel()
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self._like.new_empty(size)
        return self._buffers[name][:size].view(shape)


class Strips(NamedTuple):
    """``rows`` rows of chunks of a class from the ``first``, each :data:`APART`, in some images, for all heads.

    A stream of theirs is (n, tokens, dim), n = images × rows × heads.
    """

    images: slice
    first: int
    rows: int
    window: int

    def load(self, image: Tensor, start: int, tall: int, buffers: Scratch, name: str, spare: int = 0) -> Tensor:
        """The stream of ``tall`` rows of a map (B, height, width, heads, dim), the first row's from ``start``.

        It ends with ``spare`` tokens of zeros.
        """
        strips = self._view(image, start, tall)
        n, tokens = strips.shape[:3].numel(), strips.shape[3:5].numel()
        stream = buffers.take(name, n, tokens + spare, image.shape[-1])
        stream[:, :tokens].view(strips.shape).copy_(strips)
        stream[:, tokens:] = 0
        return stream

    def store(self, stream: Tensor, image: Tensor, start: int, tall: int) -> None:
        """The inverse of :meth:`load`."""
        strips = self._view(image, start, tall)
        strips.copy_(stream[:, : strips.shape[3:5].numel()].view(strips.shape))

    def _view(self, image: Tensor, start: int, tall: int) -> Tensor:
        """Shape (images, rows of chunks, heads, width, tall, dim)."""
        top, step = start + self.first * self.window, APART * self.window
        part = image[self.images, top : top + (self.rows - 1) * step + tall]
        return part.unfold(1, tall, step).permute(0, 1, 3, 2, 5, 4)

    def spread(self, tokens: Tensor) -> Tensor:
        """Global tokens (B, G, heads, dim) for each strip, (n, G, dim)."""
        return tokens[self.images].transpose(1, 2)[:, None].expand(-1, self.rows, -1, -1, -1).flatten(0, 2)

    def collect(self, grads: Tensor, tokens: Tensor) -> None:
        """The adjoint of :meth:`spread`: add gradients (n, G, dim) to those of the tokens."""
        tokens[self.images] += grads.unflatten(0, (-1, self.rows, tokens.shape[2])).sum(1).transpose(1, 2)


def row_strips(rows: AxisClass, window: int, batch: int, per_row: int, budget: int) -> Iterator[Strips]:
    """All rows of chunks of a class in all images, as many at a time as a ``budget`` of elements holds."""
    for start in range(min(APART, rows.chunks)):
        firsts = range(start, rows.chunks, APART)
        count = _share(len(firsts), budget // per_row)
        images = _share(batch, budget // (per_row * count)) if count == len(firsts) else 1
        for image in range(0, batch, images):
            for first in range(0, len(firsts), count):
                rest = min(count, len(firsts) - first)
                yield Strips(slice(image, image + images), firsts[first], rest, window)


def _share(items: int, most: int) -> int:
    """How many items at a time, at ``most`` so many if that is any, so that all times are about equal."""
    times = max(1, ceil_div(items, max(1, most)))
    return max(1, ceil_div(items, times))
