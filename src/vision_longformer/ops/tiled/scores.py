"""The scores of local attention in PyTorch alone, a few rows of chunks at a time.

Tokens of these rows are laid out as streams (see ``strips.py``), in which the keys of a chunk are a slice. Batched
products take the chunks of one column in all the rows at a time, so that their scores stay in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import e, log2
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import LocalSpec
from .tiles import KEY_MULTIPLE, PieceSlice, RowClass, Scratch, Strips, entry_table, key_map, map_classes, row_strips

TILE = 3 << 17
"""Elements of scores at a time: 1.5 MB, enough for the products to outweigh their calls, and what caches hold."""

LOG2_E = log2(e)


class Inputs:
    """What the forward and the backward are given, as maps (B, height, width, heads, dim) and in powers of two."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None,
        neighbour: Tensor | None, spec: LocalSpec,
    ) -> None:  # fmt: skip
        like = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
        global_tokens, self.heads = k.shape[1] - spec.grid.tokens, q.shape[2]
        self.queries = q.unflatten(1, tuple(spec.grid))
        self.keys, self.values = (key_map(x[:, global_tokens:], spec) for x in (k, v))
        self.global_keys, self.global_values = (x[:, :global_tokens].to(like.dtype) for x in (k, v))
        self.table = entry_table(bias, self.heads, spec.window, like).mul_(LOG2_E)
        self.global_bias = like.new_zeros(self.heads, global_tokens)
        if global_bias is not None:
            self.global_bias += global_bias * LOG2_E
        self.scale, self.scratch = spec.scale * LOG2_E, Scratch(like)
        self.classes, self.window = map_classes(spec, neighbour), spec.window

    def tiles(self, row: RowClass) -> Iterator[Tile]:
        """All rows of chunks of a class, a few at a time."""
        biases, slices = [chunks.bias(self.table) for chunks in row.chunks], list(row.slices())
        per_row = max(bias.numel() for bias in biases)
        for strips in row_strips(row.rows, self.window, len(self.queries), per_row, TILE):
            yield Tile(self, row, biases, slices, strips)


class Scores(NamedTuple):
    """Room for the scores of chunks of one class: (n, queries, keys), and views of it for the keys of each piece."""

    whole: Tensor
    pieces: tuple[Tensor, ...]


class Tile:
    """Streams of some rows of chunks of one class: ``q`` and, for each of the class's rows of keys, ``k`` and ``v``."""

    def __init__(
        self, inputs: Inputs, row: RowClass, biases: list[Tensor], slices: list[tuple[int, list[PieceSlice]]],
        strips: Strips,
    ) -> None:  # fmt: skip
        self.inputs, self.row, self.biases, self.slices, self.strips = inputs, row, biases, slices, strips
        self.q = self.load(inputs.queries, "q")
        self.k, self.v = self.load_keys(inputs.keys, "k"), self.load_keys(inputs.values, "v")
        self.global_k, self.global_v = strips.spread(inputs.global_keys), strips.spread(inputs.global_values)

    def load(self, image: Tensor, name: str) -> Tensor:
        """The stream of the queries' places in a map."""
        return self.strips.load(image, self.row.rows.start, self.row.rows.length, self.inputs.scratch, name)

    def store(self, stream: Tensor, image: Tensor) -> None:
        """The inverse of :meth:`load`."""
        self.strips.store(stream, image, self.row.rows.start, self.row.rows.length)

    def load_keys(self, image: Tensor, name: str) -> list[Tensor]:
        """The streams of the keys' places in a map."""
        return [
            self.strips.load(image, *rows, self.inputs.scratch, f"{name}{index}", KEY_MULTIPLE)
            for index, rows in enumerate(self.row.key_rows())
        ]

    def store_keys(self, streams: list[Tensor], image: Tensor) -> None:
        """The inverse of :meth:`load_keys`."""
        for stream, rows in zip(streams, self.row.key_rows(), strict=True):
            self.strips.store(stream, image, *rows)

    def by_head(self, x: Tensor) -> Tensor:
        """(n, …) as (images × rows, heads, …)."""
        return x.unflatten(0, (-1, self.inputs.heads))

    def split(self, stream: Tensor) -> tuple[Tensor, ...]:
        """A stream of queries (…, queries, dim) chunk by chunk."""
        sizes = [chunks.shape[0] for chunks in self.row.chunks]
        return stream.split([sizes[index] for index, _ in self.slices], -2)

    def buffers(self, name: str) -> list[Scores]:
        """Room for scores of each class of chunks, the same memory for all."""
        wholes = [self.inputs.scratch.take(name, len(self.q), *chunks.shape) for chunks in self.row.chunks]
        sizes = [chunks.key_counts() for chunks in self.row.chunks]
        return [Scores(whole, whole.split(size, 2)) for whole, size in zip(wholes, sizes, strict=True)]

    def global_scores(self) -> Tensor:
        """Scores of the global keys, (n, queries, G)."""
        scores = product(self.q, self.global_k.transpose(1, 2)).mul_(self.inputs.scale)
        self.by_head(scores).add_(self.inputs.global_bias[:, None])
        return scores

    def scores(self, less: Tensor) -> Iterator[tuple[int, list[PieceSlice], Scores]]:
        """The class, the keys and the scores of each chunk from left to right.

        From the scores of each query its entry of ``less`` (n, queries, 1) is taken. They last until the next ones.
        """
        buffers = self.buffers("scores")
        by_head = [self.by_head(x.whole) for x in buffers]
        starts = self.split(self.by_head(less))
        for (index, pieces), q, start in zip(self.slices, self.split(self.q), starts, strict=True):
            torch.sub(self.biases[index], start, out=by_head[index])
            add_products(buffers[index], q, self.k, pieces, self.inputs.scale)
            yield index, pieces, buffers[index]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product in the type of its factors also under autocast, which leaves ``out`` alone."""
    return torch.bmm(a, b, out=a.new_empty(*a.shape[:2], b.shape[2]))


def _slice(streams: list[Tensor], piece: PieceSlice) -> Tensor:
    """The keys of a chunk in one piece, (n, keys, dim)."""
    return streams[piece.rows].narrow(1, piece.start, piece.size)


def add_products(into: Scores, rows: Tensor, streams: list[Tensor], pieces: list[PieceSlice], scale: float) -> None:
    """Add the products of ``rows`` (n, queries, dim) with the keys of a chunk."""
    for part, piece in zip(into.pieces, pieces, strict=True):
        part.baddbmm_(rows, _slice(streams, piece).transpose(1, 2), alpha=scale)


def weighted_sum(weights: Scores, streams: list[Tensor], pieces: list[PieceSlice]) -> Tensor:
    """Weighted sums of the keys of a chunk, (n, queries, dim)."""
    parts = zip(weights.pieces, pieces, strict=True)
    first, *rest = (product(part, _slice(streams, piece)) for part, piece in parts)
    return sum(rest, first)


def add_weighted(streams: list[Tensor], pieces: list[PieceSlice], weights: Scores, rows: Tensor, scale: float) -> None:
    """Add weighted sums of ``rows`` (n, queries, dim) to the keys of a chunk."""
    for part, piece in zip(weights.pieces, pieces, strict=True):
        _slice(streams, piece).baddbmm_(part.transpose(1, 2), rows, alpha=scale)
