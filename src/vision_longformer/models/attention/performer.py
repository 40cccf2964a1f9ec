"""Performer: softmax attention approximated by positive orthogonal random features (FAVOR+)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry import Grid, ceil_div
from ..config import Performer
from .base import Attention, Neighbours, without_autocast


class PerformerAttention(Attention):
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
            q, k = self._maps(q.to(dtype), k.to(dtype))
            context = torch.einsum("bnhf,bnhd->bhfd", k, v.to(dtype))
            norm = torch.einsum("bnhf,bhf->bnh", q, k.sum(1))
            out = torch.einsum("bnhf,bhfd->bnhd", q, context) / norm[..., None]
        return self.merge(out.to(v.dtype))

    def _maps(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Feature maps of queries and keys, (B, tokens, heads, features)."""
        if self.kernel == "linear":
            return q.softmax(-1), k.softmax(1)
        normaliser = q.shape[-1] ** -0.25
        q, k = q * normaliser, k * normaliser
        features = self.features.to(q.dtype)
        if self.kernel == "relu":
            return (q @ features.t()).relu() + 1e-3, (k @ features.t()).relu() + 1e-3
        return self._positive(q, features, (-1,)), self._positive(k, features, self._key_axes())

    def _key_axes(self) -> tuple[int, ...]:
        return (1, 2, 3) if self.stabiliser == "image" else (0, 1, 2, 3)

    @staticmethod
    def _positive(x: Tensor, features: Tensor, axes: tuple[int, ...]) -> Tensor:
        """exp of the random projections less half the squared norm, stabilised by the maximum over ``axes``."""
        projected = x @ features.t()
        half_norm = x.square().sum(-1, keepdim=True) / 2
        peak = projected.amax(axes, keepdim=True)
        return features.shape[0] ** -0.5 * ((projected - half_norm - peak).exp() + 1e-4)


def orthogonal_features(count: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """``count`` random directions in blocks of ``dim`` orthogonal ones, each with the length of a Gaussian vector."""
    device = generator.device if generator is not None else None
    blocks = ceil_div(count, dim)
    gaussian = torch.randn(blocks, dim, dim, generator=generator, device=device, dtype=torch.float32)
    q, r = torch.linalg.qr(gaussian)
    directions = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).flatten(0, 1)[:count]
    lengths = torch.randn(count, dim, generator=generator, device=device, dtype=torch.float32).norm(dim=1)
    return directions * lengths[:, None]
