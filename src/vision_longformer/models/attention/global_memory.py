"""Pure global memory: Vision Longformer without its local attention."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ...geometry import Grid
from ...ops.longformer import attend
from ...ops.partial_softmax import PartInputs, attend_part
from ..config import GlobalMemory
from ..position import RelativeBias
from .base import Neighbours, Summary, SummaryAttention, merge_rows


class GlobalMemoryAttention(SummaryAttention):
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
        """In the order of ``ops/longformer.py``, for the same reasons."""
        global_tokens = tokens.shape[1] - grid.tokens
        q, k, v = self.project(tokens)
        global_q, local_q = q.split((global_tokens, grid.tokens), 1)
        mask = None if self.bias is None else self.bias.from_global(global_tokens, grid)
        inputs = global_q, k, v
        if self.qkv_global is not None:
            inputs = self.project_apart(self.qkv_global, tokens[:, :global_tokens], tokens)
        global_rows = attend(*inputs, self.scale, mask)
        local_rows = self._local_rows(local_q, k[:, :global_tokens], v[:, :global_tokens])
        return merge_rows(global_rows, local_rows, self.proj, self.proj_global)

    def _local_rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of queries of local tokens, keys and values of global ones."""
        bias = self.bias.to_global(k.shape[1]) if self.bias is not None and self.bias_local_queries else None
        return attend(q, k, v, self.scale, None if bias is None else bias[:, None])

    def summarise(self, global_tokens: Tensor, parts: Iterable[Tensor], grid: Grid) -> Summary:
        """Keys and values of the global tokens as local ones see them, and their own rows, which see all parts."""
        qkv, count, bias = self.qkv_global or self.qkv, global_tokens.shape[1], self.bias
        inputs = self.project_apart(qkv, global_tokens, global_tokens)
        rows = attend_part(PartInputs(*inputs, self.scale, None if bias is None else bias.among_global(count)))
        to_local = None if bias is None else bias.to_local(count)
        for part in parts:
            k, v = self.project_keys_values(qkv, part)
            rows = attend_part(PartInputs(inputs[0], k, v, self.scale, to_local), rows)
        return *self.project_keys_values(self.qkv, global_tokens), rows.out.to(global_tokens.dtype)

    def attend_local(self, tokens: Tensor, summary: Summary) -> Tensor:
        k, v, _ = summary
        return self.merge(self._local_rows(self.project_queries(self.qkv, tokens), k, v))

    def attend_global(self, tokens: Tensor, summary: Summary) -> Tensor:
        *_, rows = summary
        return (self.proj_global or self.proj)(rows.flatten(2))
