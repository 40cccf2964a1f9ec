"""Performer: softmax attention approximated by positive orthogonal random features (FAVOR+)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry import Grid, ceil_div
from ..config import Performer
from .base import Neighbours, Summary, SummaryAttention, without_autocast

RELU_OFFSET, SOFTMAX_OFFSET = 1e-3, 1e-4
"""Added to features, which keeps sums of them from 0."""


class PerformerAttention(SummaryAttention):
    """Linear attention between feature maps of queries and keys.

    Kernels: ``softmax`` (random features of the softmax), ``relu`` (random projection, then ReLU), ``linear`` (softmax
    of queries over channels and of keys over tokens, no random features).

    Features are computed in float32 at least. :meth:`redraw` draws new ones from an explicit generator.
    """

    features: Tensor

    def __init__(self, dim: int, heads: int, options: Performer, *, qkv_bias: bool = True) -> None:
        super().__init__(dim, heads, qkv_bias=qkv_bias, scale=None)
        head_dim = dim // heads
        self.kernel, self.stabiliser = options.kernel, options.stabiliser
        self.register_buffer("features", orthogonal_features(options.count_features(head_dim), head_dim))

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features."""
        self.features.copy_(orthogonal_features(self.features.shape[0], self.features.shape[1], generator))

    def forward(self, tokens: Tensor, grid: Grid, neighbours: Neighbours = "all") -> Tensor:
        q, k, v = self.project(tokens)
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        with without_autocast(tokens.device):
            k = self._map_keys(k.to(dtype))
            summary = torch.einsum("bnhf,bnhd->bhfd", k, v.to(dtype)), k.sum(1)
            out = self._attend(q.to(dtype), *summary)
        return self.merge(out.to(v.dtype))

    def summarise(self, global_tokens: Tensor, parts: Iterable[Tensor], grid: Grid) -> Summary:
        """Sums of the keys' features: with values (B, heads, features, head_dim), and alone (B, heads, features)."""
        sums = None
        for tokens in chain([global_tokens], parts):
            if tokens.shape[1]:
                part = self._sum_keys(*self.project_keys_values(self.qkv, tokens))
                sums = part if sums is None else sums.merge(part)
        assert sums is not None
        if self.kernel == "linear":
            return sums.context / sums.total[..., None], torch.ones_like(sums.total)
        if self.kernel == "relu":
            return sums.context, sums.total
        factor = self.features.shape[0] ** -0.5
        context = sums.context + SOFTMAX_OFFSET * sums.values[:, :, None]
        return factor * context, factor * (sums.total + SOFTMAX_OFFSET * sums.number)

    def attend_local(self, tokens: Tensor, summary: Summary) -> Tensor:
        context, total = summary
        q = self.project_queries(self.qkv, tokens)
        return self.merge(self._attend(q.to(context.dtype), context, total).to(q.dtype))

    def _attend(self, q: Tensor, context: Tensor, total: Tensor) -> Tensor:
        """Rows (B, n, heads, head_dim) of queries of that shape."""
        q = self._map_queries(q)
        norm = torch.einsum("bnhf,bhf->bnh", q, total)
        return torch.einsum("bnhf,bhfd->bnhd", q, context) / norm[..., None]

    def _sum_keys(self, k: Tensor, v: Tensor) -> _KeySums:
        """Of some tokens, (B, n, heads, head_dim) each."""
        dtype = torch.promote_types(k.dtype, torch.float32)
        k, v = k.to(dtype), v.to(dtype)
        if self.kernel == "relu":
            weights, peak = self._map_keys(k), k.new_zeros(())
        elif self.kernel == "linear":
            peak = k.amax(1, keepdim=True)
            weights = (k - peak).exp()
        else:
            projected, half_norm = self._project(k * k.shape[-1] ** -0.25)
            peak = projected.amax(self._key_axes(), keepdim=True)
            weights = (projected - half_norm - peak).exp()
        context = torch.einsum("bnhf,bnhd->bhfd", weights, v)
        peak = peak.expand(weights[:, :1].shape)[:, 0]
        return _KeySums(peak, weights.sum(1), context, v.sum(1), v.shape[1])

    def _map_queries(self, q: Tensor) -> Tensor:
        """Features of queries, (B, tokens, heads, features)."""
        return q.softmax(-1) if self.kernel == "linear" else self._random_features(q, (-1,))

    def _map_keys(self, k: Tensor) -> Tensor:
        """Features of keys, (B, tokens, heads, features)."""
        return k.softmax(1) if self.kernel == "linear" else self._random_features(k, self._key_axes())

    def _random_features(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Of the softmax: exp of projections less half the squared norm, stabilised by the maximum over ``axes``."""
        projected, half_norm = self._project(x * x.shape[-1] ** -0.25)
        if self.kernel == "relu":
            return projected.relu() + RELU_OFFSET
        peak = projected.amax(axes, keepdim=True)
        return self.features.shape[0] ** -0.5 * ((projected - half_norm - peak).exp() + SOFTMAX_OFFSET)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Random projections (..., features), and half the squared norm (..., 1)."""
        return x @ self.features.to(x.dtype).t(), x.square().sum(-1, keepdim=True) / 2

    def _key_axes(self) -> tuple[int, ...]:
        return (1, 2, 3) if self.stabiliser == "image" else (0, 1, 2, 3)


class _KeySums(NamedTuple):
    """Sums over ``number`` keys of their weights, which are exp(score - ``peak``): alone, ``total``, and with values,
    ``context`` (B, heads, features, head_dim); and of the ``values`` alone (B, heads, head_dim).

    ``peak`` and ``total`` are (B, heads, features).
    """

    peak: Tensor
    total: Tensor
    context: Tensor
    values: Tensor
    number: int

    def merge(self, other: _KeySums) -> _KeySums:
        """The sums over the keys of both."""
        peak = torch.maximum(self.peak, other.peak)
        mine, others = ((part.peak - peak).exp() for part in (self, other))
        total = self.total * mine + other.total * others
        context = self.context * mine[..., None] + other.context * others[..., None]
        return _KeySums(peak, total, context, self.values + other.values, self.number + other.number)


def orthogonal_features(count: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """``count`` random directions in blocks of ``dim`` orthogonal ones, each with the length of a Gaussian vector."""
    device = generator.device if generator is not None else None
    blocks = ceil_div(count, dim)
    gaussian = torch.randn(blocks, dim, dim, generator=generator, device=device, dtype=torch.float32)
    q, r = torch.linalg.qr(gaussian)
    directions = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).flatten(0, 1)[:count]
    lengths = torch.randn(count, dim, generator=generator, device=device, dtype=torch.float32).norm(dim=1)
    return directions * lengths[:, None]
