"""Full attention, with relative bias at any map size."""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry import Grid
from ...ops.longformer import attend
from ...ops.tables import map_bias
from ..position import RelativeBias
from .base import Attention, Neighbours


class FullAttention(Attention):
    """Every token attends to every token. Its relative bias serves any map: far offsets take the nearest entry."""

    def __init__(
        self,
        dim: int,
        heads: int,
        grid: Grid,
        *,
        relative: bool,
        global_tokens: int,
        given: bool = False,
        qkv_bias: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__(dim, heads, qkv_bias=qkv_bias, scale=scale)
        shape = (2 * grid.height - 1, 2 * grid.width - 1)
        self.bias = RelativeBias(heads, shape, global_tokens, given=given) if relative else None

    def forward(self, tokens: Tensor, grid: Grid, neighbours: Neighbours = "all") -> Tensor:
        q, k, v = self.project(tokens)
        mask = None if self.bias is None else self._mask(self.bias, tokens.shape[1] - grid.tokens, grid)
        return self.merge(attend(q, k, v, self.scale, mask))

    @staticmethod
    def _mask(bias: RelativeBias, global_tokens: int, grid: Grid) -> Tensor:
        local = map_bias(bias.table, grid)
        to_global = bias.to_global(global_tokens)
        if to_global is None:
            return local
        local = torch.cat([to_global[:, None].expand(-1, grid.tokens, -1), local], -1)
        return torch.cat([bias.from_global(global_tokens, grid), local], 1)

    def set_grid(self, grid: Grid) -> None:
        """Make the bias table for another map."""
        if self.bias is not None:
            self.bias.set_shape((2 * grid.height - 1, 2 * grid.width - 1))
