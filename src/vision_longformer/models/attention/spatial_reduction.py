"""Spatial reduction attention (SRA): keys and values from a smaller map."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...geometry import Grid
from ...ops.chunks import pad_map, tokens_to_map
from ...ops.longformer import attend
from .base import Neighbours, Summary, SummaryAttention


class SpatialReductionAttention(SummaryAttention):
    """All tokens attend to the global tokens and to a map reduced ``ratio``-fold by a strided convolution.

    The reduced map is normalised per image and channel over its positions. A map smaller than the ratio is padded to
    it; a reduced map of 1×1, which has no spread to divide by, is left as it is.
    """

    def __init__(self, dim: int, heads: int, ratio: int, *, qkv_bias: bool = True, scale: float | None = None) -> None:
        super().__init__(dim, heads, qkv_bias=qkv_bias, scale=scale)
        self.reduce = nn.Conv2d(dim, dim, ratio, stride=ratio, bias=False)

    def forward(self, tokens: Tensor, grid: Grid, neighbours: Neighbours = "all") -> Tensor:
        count = tokens.shape[1] - grid.tokens
        reduced = self._normalised(self._reduced(tokens[:, count:], grid))
        return self.attend_local(tokens, self._keys(tokens[:, :count], reduced))

    def summarise(self, global_tokens: Tensor, parts: Iterable[Tensor], grid: Grid) -> Summary:
        """Keys and values. Each part but the last must have a multiple of ``ratio`` rows."""
        grids = ((part, Grid(part.shape[1] // grid.width, grid.width)) for part in parts)
        least = min(self.reduce.stride[0], grid.height)  # the convolution leaves out rows that do not fill its kernel
        reduced = [self._reduced(part, rows) for part, rows in grids if rows.height >= least]
        return self._keys(global_tokens, self._normalised(torch.cat(reduced, 2)))

    def attend_local(self, tokens: Tensor, summary: Summary) -> Tensor:
        k, v = summary
        return self.merge(attend(self.project_queries(self.qkv, tokens), k, v, self.scale))

    def _keys(self, global_tokens: Tensor, reduced: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.cat([global_tokens, reduced.flatten(2).transpose(1, 2).to(global_tokens.dtype)], 1)
        return self.project_keys_values(self.qkv, tokens)

    def _reduced(self, local: Tensor, grid: Grid) -> Tensor:
        image = tokens_to_map(local, grid)
        ratio = self.reduce.stride[0]
        image = pad_map(image, 2, max(0, ratio - grid.height), max(0, ratio - grid.width))
        return self.reduce(image)

    @staticmethod
    def _normalised(image: Tensor) -> Tensor:
        if image.shape[2] * image.shape[3] > 1:
            image = F.instance_norm(image)
        return image
