"""Memory-lean local attention in PyTorch alone: a few rows of chunks at a time, scores recomputed by the backward.

No temporary grows with the height of the map. Arithmetic is in float32 at least, and in powers of two. Batched products
take the chunks of one column in all the rows at a time, so that their scores stay in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry import is_cyclic
from ..operator import LOG2E, Gradients, arithmetic_dtype, empty_results, register
from ..spec import Implementation, Inputs, LocalSpec, refuse_dilation
from .tiles import (
    KEY_MULTIPLE,
    PieceSlice,
    RowClass,
    Scratch,
    Strips,
    entry_table,
    fold_key_map,
    key_map,
    map_classes,
    row_strips,
)

TILE = 3 << 17
"""Elements of scores at a time: 1.5 MB, enough for the products to outweigh their calls, and what caches hold."""

SAFE = 2.0**100
"""Sums of weights between its inverse and itself have lost nothing to overflow or underflow."""


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    return refuse_dilation(spec)


def _forward(inputs: Inputs, spec: LocalSpec) -> tuple[Tensor, Tensor]:
    maps = _Maps(inputs, spec)
    out, lse = empty_results(inputs.q)
    out_map, lse_map = out.unflatten(1, tuple(spec.grid)), _lse_map(lse, spec)
    for row in maps.classes:
        for tile in maps.tiles(row):
            shift = tile.q.new_zeros(()).expand(*tile.q.shape[:2], 1)
            result, total = _attend_tile(tile, shift)
            if not ((total > 1 / SAFE) & (total < SAFE)).all():
                shift = _peaks(tile, shift)
                result, total = _attend_tile(tile, shift)
            tile.store(result.div_(total), out_map)
            tile.store(total.log2_().add_(shift).div_(LOG2E), lse_map)
    return out, lse


def _attend_tile(tile: _Tile, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of weighted values (n, queries, dim) and of the weights (n, queries, 1), which are 2^(score − shift)."""
    results, totals = [], []
    for _, pieces, scores in tile.scores(shift):
        totals.append(scores.whole.exp2_().sum(-1, keepdim=True))
        results.append(_weighted_sum(scores, tile.v, pieces))
    weights = tile.global_scores().sub_(shift).exp2_()
    total = torch.cat(totals, 1).add_(weights.sum(-1, keepdim=True))
    return torch.cat(results, 1).baddbmm_(weights, tile.global_v), total


def _peaks(tile: _Tile, zeros: Tensor) -> Tensor:
    """The largest score of each query, (n, queries, 1)."""
    peaks = torch.cat([scores.whole.amax(-1, keepdim=True) for *_, scores in tile.scores(zeros)], 1)
    return torch.cat([tile.global_scores(), peaks], -1).amax(-1, keepdim=True)


def _backward(
    grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, spec: LocalSpec, needs_bias: bool, needs_global_bias: bool
) -> Gradients:
    maps = _Maps(inputs, spec)
    total = _GradientMaps(inputs, maps, spec)
    grad_map, out_map = (x.unflatten(1, tuple(spec.grid)) for x in (grad, out))
    lse_map = _lse_map(lse, spec)
    for row in maps.classes:
        sums = [lse.new_zeros(maps.heads, *chunks.shape) for chunks in row.chunks] if needs_bias else []
        for tile in maps.tiles(row):
            tile_grad, tile_lse = tile.load(grad_map, "grad"), tile.load(lse_map, "lse").mul_(LOG2E)
            delta = tile.load(out_map, "out").mul_(tile_grad).sum(-1, keepdim=True)
            total.add(tile, tile_grad, tile_lse, delta, sums)
        for chunks, summed in zip(row.chunks, sums, strict=needs_bias):
            chunks.add_to_table(summed, total.table)
    total.fold()
    side = 4 * spec.window - 1
    grad_bias = total.table[:, :-1].unflatten(1, (side, side)) if needs_bias else None
    return total.q, total.k, total.v, grad_bias, total.global_bias if needs_global_bias else None


def _lse_map(lse: Tensor, spec: LocalSpec) -> Tensor:
    """(B, heads, N) as a map (B, height, width, heads, 1)."""
    return lse.transpose(1, 2).unflatten(1, tuple(spec.grid)).unsqueeze(-1)


class _Maps:
    """What the forward and the backward are given, as maps (B, height, width, heads, dim) and in powers of two."""

    def __init__(self, inputs: Inputs, spec: LocalSpec) -> None:
        q, k, v, bias, global_bias, neighbour = inputs
        like = q.new_empty(0, dtype=arithmetic_dtype(q))
        global_tokens, self.heads = inputs.global_tokens(spec), q.shape[2]
        self.queries = q.unflatten(1, tuple(spec.grid))
        self.keys, self.values = (key_map(x[:, global_tokens:], spec) for x in (k, v))
        self.global_keys, self.global_values = (x[:, :global_tokens].to(like.dtype) for x in (k, v))
        self.table = entry_table(bias, self.heads, spec.window, like).mul_(LOG2E)
        self.global_bias = like.new_zeros(self.heads, global_tokens)
        if global_bias is not None:
            self.global_bias += global_bias * LOG2E
        self.scale, self.scratch = spec.scale * LOG2E, Scratch(like)
        self.classes, self.window = map_classes(spec, neighbour), spec.window

    def tiles(self, row: RowClass) -> Iterator[_Tile]:
        """All rows of chunks of a class, a few at a time."""
        biases, slices = [chunks.bias(self.table) for chunks in row.chunks], list(row.slices())
        per_row = max(bias.numel() for bias in biases)
        for strips in row_strips(row.rows, self.window, len(self.queries), per_row, TILE):
            yield _Tile(self, row, biases, slices, strips)


class _GradientMaps:
    """Sums of the gradients of all inputs, as maps and in float32 at least, like :class:`_Maps`."""

    def __init__(self, inputs: Inputs, maps: _Maps, spec: LocalSpec) -> None:
        q, k = inputs.q, inputs.k
        self.global_tokens, self.spec = inputs.global_tokens(spec), spec
        self.q = q.new_empty(q.shape)
        self.k, self.v = (k.new_zeros(k.shape, dtype=maps.table.dtype) for _ in range(2))
        self.queries = self.q.unflatten(1, tuple(spec.grid))
        self.keys, self.values = (key_map(x[:, self.global_tokens :], spec) for x in (self.k, self.v))
        self.table, self.global_bias = torch.zeros_like(maps.table), torch.zeros_like(maps.global_bias)

    def add(self, tile: _Tile, grad: Tensor, lse: Tensor, delta: Tensor, sums: list[Tensor]) -> None:
        """Those of a tile, from streams of the output's gradient, the log-sum-exp and delta.

        Gradients of what is added to the scores go to ``sums``, one for each class of chunks, or none if not asked for.
        """
        grad_k, grad_v = tile.load_keys(self.keys, "grad_k"), tile.load_keys(self.values, "grad_v")
        grad_q, buffers = [], tile.buffers("grads")
        ones = grad.new_ones(len(grad) // len(self.table))
        streams = (tile.split(x) for x in (tile.q, grad, delta.neg()))
        for (index, pieces, weights), q, g, start in zip(tile.scores(lse), *streams, strict=True):
            grads = buffers[index]
            grads.whole.copy_(start.expand_as(grads.whole))
            _add_products(grads, g, tile.v, pieces, 1)
            grads.whole.mul_(weights.whole.exp2_())
            _add_weighted(grad_v, pieces, weights, g, 1)
            _add_weighted(grad_k, pieces, grads, q, self.spec.scale)
            grad_q.append(_weighted_sum(grads, tile.k, pieces))
            if sums:
                sums[index].view(-1).addmv_(grads.whole.view(len(ones), -1).t(), ones)
        tile.store_keys(grad_k, self.keys)
        tile.store_keys(grad_v, self.values)
        grad_q_stream = torch.cat(grad_q, 1) + self._add_global(tile, grad, lse, delta)
        tile.store(grad_q_stream.mul_(self.spec.scale), self.queries)

    def _add_global(self, tile: _Tile, grad: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Those of the global keys of a tile; returns its unscaled gradients of the queries."""
        weights = tile.global_scores().sub_(lse).exp2_()
        grads = _product(grad, tile.global_v.transpose(1, 2)).sub_(delta).mul_(weights)
        grad_k = _product(grads.transpose(1, 2), tile.q).mul_(self.spec.scale)
        tile.strips.collect(grad_k, self.k[:, : self.global_tokens])
        tile.strips.collect(_product(weights.transpose(1, 2), grad), self.v[:, : self.global_tokens])
        self.global_bias += tile.by_head(grads).sum((0, 2))
        return _product(grads, tile.global_k)

    def fold(self) -> None:
        """Give tokens the gradients of their copies in the maps of cyclic rules."""
        if is_cyclic(self.spec.rule):
            self.k[:, self.global_tokens :] = fold_key_map(self.keys, self.spec)
            self.v[:, self.global_tokens :] = fold_key_map(self.values, self.spec)


class _Scores(NamedTuple):
    """Room for the scores of chunks of one class: (n, queries, keys), and views of it for the keys of each piece."""

    whole: Tensor
    pieces: tuple[Tensor, ...]


class _Tile:
    """Streams of some rows of chunks of one class: ``q`` and, for each of the class's rows of keys, ``k`` and ``v``."""

    def __init__(
        self, maps: _Maps, row: RowClass, biases: list[Tensor], slices: list[tuple[int, list[PieceSlice]]],
        strips: Strips,
    ) -> None:  # fmt: skip
        self.maps, self.row, self.biases, self.slices, self.strips = maps, row, biases, slices, strips
        self.q = self.load(maps.queries, "q")
        self.k, self.v = self.load_keys(maps.keys, "k"), self.load_keys(maps.values, "v")
        self.global_k, self.global_v = strips.spread(maps.global_keys), strips.spread(maps.global_values)

    def load(self, image: Tensor, name: str) -> Tensor:
        """The stream of the queries' positions in a map."""
        return self.strips.load(image, self.row.rows.start, self.row.rows.length, self.maps.scratch, name)

    def store(self, stream: Tensor, image: Tensor) -> None:
        """The inverse of :meth:`load`."""
        self.strips.store(stream, image, self.row.rows.start, self.row.rows.length)

    def load_keys(self, image: Tensor, name: str) -> list[Tensor]:
        """The streams of the keys' positions in a map."""
        return [
            self.strips.load(image, *rows, self.maps.scratch, f"{name}{index}", KEY_MULTIPLE)
            for index, rows in enumerate(self.row.key_rows())
        ]

    def store_keys(self, streams: list[Tensor], image: Tensor) -> None:
        """The inverse of :meth:`load_keys`."""
        for stream, rows in zip(streams, self.row.key_rows(), strict=True):
            self.strips.store(stream, image, *rows)

    def by_head(self, x: Tensor) -> Tensor:
        """(n, …) as (images × rows, heads, …)."""
        return x.unflatten(0, (-1, self.maps.heads))

    def split(self, stream: Tensor) -> tuple[Tensor, ...]:
        """A stream of queries (…, queries, dim) chunk by chunk."""
        sizes = [chunks.shape[0] for chunks in self.row.chunks]
        return stream.split([sizes[index] for index, _ in self.slices], -2)

    def buffers(self, name: str) -> list[_Scores]:
        """Room for scores of each class of chunks, the same memory for all."""
        wholes = [self.maps.scratch.take(name, len(self.q), *chunks.shape) for chunks in self.row.chunks]
        sizes = [chunks.key_counts() for chunks in self.row.chunks]
        return [_Scores(whole, whole.split(size, 2)) for whole, size in zip(wholes, sizes, strict=True)]

    def global_scores(self) -> Tensor:
        """Scores of the global keys, (n, queries, G)."""
        scores = _product(self.q, self.global_k.transpose(1, 2)).mul_(self.maps.scale)
        self.by_head(scores).add_(self.maps.global_bias[:, None])
        return scores

    def scores(self, less: Tensor) -> Iterator[tuple[int, list[PieceSlice], _Scores]]:
        """The class, the keys and the scores of each chunk from left to right.

        From the scores of each query its entry of ``less`` (n, queries, 1) is taken. They last until the next ones.
        """
        buffers = self.buffers("scores")
        by_head = [self.by_head(x.whole) for x in buffers]
        starts = self.split(self.by_head(less))
        for (index, pieces), q, start in zip(self.slices, self.split(self.q), starts, strict=True):
            torch.sub(self.biases[index], start, out=by_head[index])
            _add_products(buffers[index], q, self.k, pieces, self.maps.scale)
            yield index, pieces, buffers[index]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product in the type of its factors also under autocast, which leaves ``out`` alone."""
    return torch.bmm(a, b, out=a.new_empty(*a.shape[:2], b.shape[2]))


def _slice(streams: list[Tensor], piece: PieceSlice) -> Tensor:
    """The keys of a chunk in one piece, (n, keys, dim)."""
    return streams[piece.rows].narrow(1, piece.start, piece.size)


def _add_products(into: _Scores, rows: Tensor, streams: list[Tensor], pieces: list[PieceSlice], scale: float) -> None:
    """Add the products of ``rows`` (n, queries, dim) with the keys of a chunk."""
    for part, piece in zip(into.pieces, pieces, strict=True):
        part.baddbmm_(rows, _slice(streams, piece).transpose(1, 2), alpha=scale)


def _weighted_sum(weights: _Scores, streams: list[Tensor], pieces: list[PieceSlice]) -> Tensor:
    """Weighted sums of the keys of a chunk, (n, queries, dim)."""
    parts = zip(weights.pieces, pieces, strict=True)
    first, *rest = (_product(part, _slice(streams, piece)) for part, piece in parts)
    return sum(rest, first)


def _add_weighted(
    streams: list[Tensor], pieces: list[PieceSlice], weights: _Scores, rows: Tensor, scale: float
) -> None:
    """Add weighted sums of ``rows`` (n, queries, dim) to the keys of a chunk."""
    for part, piece in zip(weights.pieces, pieces, strict=True):
        _slice(streams, piece).baddbmm_(part.transpose(1, 2), rows, alpha=scale)


TILED = Implementation(_refusal, register("tiled", _forward, _backward))
