"""Pure global memory: Vision Longformer without its local attention."""

from __future__ import annotations

from torch import Tensor

from ...geometry import Grid
from ..config import GlobalMemory
from ..position import RelativeBias
from .global_rows import GlobalRows
from .projection import attend


class GlobalMemoryAttention(GlobalRows):
    """Local tokens attend to the global tokens only; global tokens attend to all.

    A relative bias has no offset table here, since no local token sees another.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        options: GlobalMemory,
        *,
        relative: bool,
        global_tokens: int,
        given: bool = False,
        qkv_bias: bool = True,
        scale: float | None = None,
    ) -> None:
        if global_tokens == 0:
            raise ValueError("global_memory attention needs global_tokens of at least 1: they are all the keys it has")
        super().__init__(dim, heads, separate=not options.share_weights, qkv_bias=qkv_bias, scale=scale)
        self.bias = RelativeBias(heads, None, global_tokens, given=given) if relative else None
        self.bias_local_queries = options.bias_local_queries

    def local_rows(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, neighbour: Tensor | None) -> Tensor:
        count = k.shape[1] - grid.tokens
        bias = self.bias.to_global(count) if self.bias is not None and self.bias_local_queries else None
        return attend(q, k[:, :count], v[:, :count], self.scale, None if bias is None else bias[:, None])
