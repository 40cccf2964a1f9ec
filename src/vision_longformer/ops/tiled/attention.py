"""Memory-lean local attention in PyTorch alone: strips of chunk rows, the backward recomputes the scores.

No temporary grows with the height of the map. Arithmetic is in float32 at least, and in powers of two, which are faster
(see ``tiled_scores.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry import is_cyclic
from ..operator import opaque
from ..spec import LocalSpec, refuse_dilation
from .scores import LOG2_E, Inputs, Tile, add_products, add_weighted, product, weighted_sum
from .tiles import fold_key_map, key_map

SAFE = 2.0**100
"""Sums of weights between its inverse and itself have lost nothing to overflow or underflow."""


def refusal(spec: LocalSpec, q: Tensor) -> str | None:
    return refuse_dilation(spec)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    spec: LocalSpec,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inputs = Inputs(q, k, v, bias, global_bias, neighbour, spec)
    out, lse = q.new_empty(q.shape), inputs.table.new_empty(q.shape[:3])
    out_map, lse_map = (x.unflatten(1, tuple(spec.grid)) for x in (out, lse[..., None]))
    for row in inputs.classes:
        for tile in inputs.tiles(row):
            shift = tile.q.new_zeros(()).expand(*tile.q.shape[:2], 1)
            result, total = _attend(tile, shift)
            if not ((total > 1 / SAFE) & (total < SAFE)).all():
                shift = _peaks(tile, shift)
                result, total = _attend(tile, shift)
            tile.store(result.div_(total), out_map)
            tile.store(total.log2_().add_(shift).div_(LOG2_E), lse_map)
    return out, lse


def _attend(tile: Tile, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of weighted values (n, queries, dim) and of the weights (n, queries, 1), which are 2^(score − shift)."""
    results, totals = [], []
    for _, pieces, scores in tile.scores(shift):
        totals.append(scores.whole.exp2_().sum(-1, keepdim=True))
        results.append(weighted_sum(scores, tile.v, pieces))
    weights = tile.global_scores().sub_(shift).exp2_()
    total = torch.cat(totals, 1).add_(weights.sum(-1, keepdim=True))
    return torch.cat(results, 1).baddbmm_(weights, tile.global_v), total


def _peaks(tile: Tile, zeros: Tensor) -> Tensor:
    """The largest score of each query, (n, queries, 1)."""
    peaks = torch.cat([scores.whole.amax(-1, keepdim=True) for *_, scores in tile.scores(zeros)], 1)
    return torch.cat([tile.global_scores(), peaks], -1).amax(-1, keepdim=True)


class _Gradients:
    """Sums of the gradients of all inputs, as maps and in float32 at least, like :class:`Inputs`."""

    def __init__(self, q: Tensor, k: Tensor, inputs: Inputs, spec: LocalSpec) -> None:
        self.global_tokens, self.spec = k.shape[1] - spec.grid.tokens, spec
        self.q = q.new_empty(q.shape)
        self.k, self.v = (k.new_zeros(k.shape, dtype=inputs.table.dtype) for _ in range(2))
        self.queries = self.q.unflatten(1, tuple(spec.grid))
        self.keys, self.values = (key_map(x[:, self.global_tokens :], spec) for x in (self.k, self.v))
        self.table, self.global_bias = torch.zeros_like(inputs.table), torch.zeros_like(inputs.global_bias)

    def add(self, tile: Tile, grad: Tensor, lse: Tensor, delta: Tensor, sums: list[Tensor]) -> None:
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
            add_products(grads, g, tile.v, pieces, 1)
            grads.whole.mul_(weights.whole.exp2_())
            add_weighted(grad_v, pieces, weights, g, 1)
            add_weighted(grad_k, pieces, grads, q, self.spec.scale)
            grad_q.append(weighted_sum(grads, tile.k, pieces))
            if sums:
                sums[index].view(-1).addmv_(grads.whole.view(len(ones), -1).t(), ones)
        tile.store_keys(grad_k, self.keys)
        tile.store_keys(grad_v, self.values)
        grad_q_stream = torch.cat(grad_q, 1) + self._add_global(tile, grad, lse, delta)
        tile.store(grad_q_stream.mul_(self.spec.scale), self.queries)

    def _add_global(self, tile: Tile, grad: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Those of the global keys of a tile; returns its unscaled gradients of the queries."""
        weights = tile.global_scores().sub_(lse).exp2_()
        grads = product(grad, tile.global_v.transpose(1, 2)).sub_(delta).mul_(weights)
        grad_k = product(grads.transpose(1, 2), tile.q).mul_(self.spec.scale)
        tile.strips.collect(grad_k, self.k[:, : self.global_tokens])
        tile.strips.collect(product(weights.transpose(1, 2), grad), self.v[:, : self.global_tokens])
        self.global_bias += tile.by_head(grads).sum((0, 2))
        return product(grads, tile.global_k)

    def fold(self) -> None:
        """Give tokens the gradients of their copies in the maps of cyclic rules."""
        if is_cyclic(self.spec.rule):
            self.k[:, self.global_tokens :] = fold_key_map(self.keys, self.spec)
            self.v[:, self.global_tokens :] = fold_key_map(self.values, self.spec)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None,
    neighbour: Tensor | None, out: Tensor, lse: Tensor, spec: LocalSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = Inputs(q, k, v, bias, global_bias, neighbour, spec)
    total = _Gradients(q, k, inputs, spec)
    grad_map, out_map, lse_map = (x.unflatten(1, tuple(spec.grid)) for x in (grad, out, lse[..., None]))
    for row in inputs.classes:
        sums = [] if bias is None else [lse.new_zeros(inputs.heads, *chunks.shape) for chunks in row.chunks]
        for tile in inputs.tiles(row):
            tile_grad, tile_lse = tile.load(grad_map, "grad"), tile.load(lse_map, "lse").mul_(LOG2_E)
            delta = tile.load(out_map, "out").mul_(tile_grad).sum(-1, keepdim=True)
            total.add(tile, tile_grad, tile_lse, delta, sums)
        for chunks, summed in zip(row.chunks, sums, strict=bias is not None):
            chunks.add_to_table(summed, total.table)
    total.fold()
    grad_bias = q.new_empty(0) if bias is None else total.table[:, :-1].reshape(bias.shape).to(q.dtype)
    grad_global_bias = q.new_empty(0) if global_bias is None else total.global_bias.to(q.dtype)
    return total.q, total.k.to(q.dtype), total.v.to(q.dtype), grad_bias, grad_global_bias


attend = opaque("tiled", _forward, _backward)
