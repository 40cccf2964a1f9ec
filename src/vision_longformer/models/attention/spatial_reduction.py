"""Spatial reduction attention (SRA): keys and values from a smaller map."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...geometry import Grid
from ...ops.chunks import pad_map, tokens_to_map
from .base import Attention, Neighbours, attend


class SpatialReductionAttention(Attention):
    """All tokens attend to the global tokens and to a map reduced ``ratio``-fold by a strided convolution.

    The reduced map is normalised per image and channel over its positions. A map smaller than the ratio is padded to
    it; a reduced map of 1×1, which has no spread to divide by, is left as it is.
    """

    def __init__(self, dim: int, heads: int, ratio: int, *, qkv_bias: bool = True, scale: float | None = None) -> None:
        super().__init__(dim, heads, qkv_bias=qkv_bias, scale=scale)
        self.reduce = nn.Conv2d(dim, dim, ratio, stride=ratio, bias=False)

    def forward(self, tokens: Tensor, grid: Grid, neighbours: Neighbours = "all") -> Tensor:
        count = tokens.shape[1] - grid.tokens
        reduced = torch.cat([tokens[:, :count], self._reduced(tokens[:, count:], grid)], 1)
        q, k, v = self.project_apart(self.qkv, tokens, reduced)
        return self.merge(attend(q, k, v, self.scale))

    def _reduced(self, local: Tensor, grid: Grid) -> Tensor:
        image = tokens_to_map(local, grid)
        ratio = self.reduce.stride[0]
        image = pad_map(image, 2, max(0, ratio - grid.height), max(0, ratio - grid.width))
        image = self.reduce(image)
        if image.shape[2] * image.shape[3] > 1:
            image = F.instance_norm(image)
        return image.flatten(2).transpose(1, 2).to(local.dtype)
