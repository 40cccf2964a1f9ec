"""Pure global memory: Vision Longformer without its local attention."""

from __future__ import annotations

from torch import Tensor, nn

from ...geometry import Grid
from ..config import GlobalMemory
from ..position import RelativeBias
from .base import Attention, Neighbours, attend, merge_rows


class GlobalMemoryAttention(Attention):
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
        super().__init__(dim, heads, qkv_bias=qkv_bias, scale=scale)
        separate = not options.share_weights
        self.qkv_global = nn.Linear(dim, 3 * dim, bias=qkv_bias) if separate else None
        self.proj_global = nn.Linear(dim, dim) if separate else None
        self.bias = RelativeBias(heads, None, global_tokens, given=given) if relative else None
        self.bias_local_queries = options.bias_local_queries

    def forward(self, tokens: Tensor, grid: Grid, neighbours: Neighbours = "all") -> Tensor:
        """In the order of :class:`LongformerAttention`, for the same reasons."""
        global_tokens = tokens.shape[1] - grid.tokens
        q, k, v = self.project(tokens)
        global_q, local_q = q.split((global_tokens, grid.tokens), 1)
        mask = None if self.bias is None else self.bias.from_global(global_tokens, grid)
        inputs = global_q, k, v
        if self.qkv_global is not None:
            inputs = self.project_apart(self.qkv_global, tokens[:, :global_tokens], tokens)
        global_rows = attend(*inputs, self.scale, mask)
        bias = self.bias.to_global(global_tokens) if self.bias is not None and self.bias_local_queries else None
        mask = None if bias is None else bias[:, None]
        local_rows = attend(local_q, k[:, :global_tokens], v[:, :global_tokens], self.scale, mask)
        return merge_rows(global_rows, local_rows, self.proj, self.proj_global)
