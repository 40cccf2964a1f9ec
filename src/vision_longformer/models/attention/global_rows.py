"""What Vision Longformer and the pure global memory share: projections, and global tokens that attend to all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...geometry import Grid
from ..position import RelativeBias
from .projection import Projections, attend, split_linear


class GlobalRows(Projections):
    """Global tokens attend to all tokens; how local tokens attend is the subclass's :meth:`local_rows`.

    With separate weights the global rows use ``qkv_global`` and ``proj_global``; the local rows see global keys through
    the local weights.

    Global rows come before local ones, so that backward, in the reverse order, has the gradients of all keys and values
    from the local rows first and adds those of the global rows in place. Queries are split, not sliced twice: their
    gradient is one concatenation instead of two maps of zeros to be filled and added.
    """

    bias: RelativeBias | None

    def __init__(self, dim: int, heads: int, *, separate: bool, qkv_bias: bool, scale: float | None) -> None:
        super().__init__(dim, heads, qkv_bias=qkv_bias, scale=scale)
        self.qkv_global = nn.Linear(dim, 3 * dim, bias=qkv_bias) if separate else None
        self.proj_global = nn.Linear(dim, dim) if separate else None

    def local_rows(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, neighbour: Tensor | None) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor, grid: Grid, neighbour: Tensor | None = None) -> Tensor:
        count = tokens.shape[1] - grid.tokens
        q, k, v = self.project(tokens)
        if count == 0:
            return self.merge(self.local_rows(q, k, v, grid, neighbour))
        global_q, local_q = q.split((count, grid.tokens), 1)
        mask = None if self.bias is None else self.bias.from_global(count, grid)
        if self.qkv_global is None or self.proj_global is None:
            rows = attend(global_q, k, v, self.scale, mask)
            return self.merge(torch.cat([rows, self.local_rows(local_q, k, v, grid, neighbour)], 1))
        query, key_value = split_linear(self.qkv_global, tokens.shape[2])
        (global_q,) = self.split(F.linear(tokens[:, :count], *query), 1)
        global_k, global_v = self.split(F.linear(tokens, *key_value), 2)
        rows = self.proj_global(attend(global_q, global_k, global_v, self.scale, mask).flatten(2))
        return torch.cat([rows, self.merge(self.local_rows(local_q, k, v, grid, neighbour))], 1)
