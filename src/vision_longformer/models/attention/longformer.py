"""Vision Longformer: local attention plus global memory."""

from __future__ import annotations

from torch import Tensor, nn

from ...errors import check_choice
from ...geometry import Grid
from ...ops import IMPLEMENTATIONS, local_attention
from ..config import Longformer
from ..position import RelativeBias
from .base import Attention, Neighbours, attend, merge_rows


class LongformerAttention(Attention):
    """Local tokens attend to the tokens near them and to all global tokens; global tokens attend to all.

    With separate weights the global rows use ``qkv_global`` and ``proj_global``; the local rows see global keys through
    the local weights.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        options: Longformer,
        *,
        relative: bool,
        global_tokens: int,
        given: bool = False,
        qkv_bias: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__(dim, heads, qkv_bias=qkv_bias, scale=scale)
        separate = not options.share_weights and (global_tokens > 0 or given)
        self.qkv_global = nn.Linear(dim, 3 * dim, bias=qkv_bias) if separate else None
        self.proj_global = nn.Linear(dim, dim) if separate else None
        side = 4 * options.window - 1
        self.bias = RelativeBias(heads, (side, side), global_tokens, given=given) if relative else None
        self.window, self.rule = options.window, options.rule
        self.implementation = "auto"

    def set_implementation(self, name: str) -> None:
        """Compute the local attention by a named implementation, or by the best one (``"auto"``)."""
        check_choice("implementation", name, ("auto", *IMPLEMENTATIONS))
        self.implementation = name

    def forward(self, tokens: Tensor, grid: Grid, neighbours: Neighbours = "all") -> Tensor:
        """Global rows come before local ones, so that backward has the gradients of all keys and values from the local
        rows first and adds those of the few global rows in place. Queries are split, not sliced twice: their gradient
        is one concatenation instead of two maps of zeros to be filled and added.
        """
        global_tokens = tokens.shape[1] - grid.tokens
        q, k, v = self.project(tokens)
        if global_tokens == 0:
            return self.merge(self._attend_locally(q, k, v, grid, neighbours))
        global_q, local_q = q.split((global_tokens, grid.tokens), 1)
        mask = None if self.bias is None else self.bias.from_global(global_tokens, grid)
        inputs = global_q, k, v
        if self.qkv_global is not None:
            inputs = self.project_apart(self.qkv_global, tokens[:, :global_tokens], tokens)
        global_rows = attend(*inputs, self.scale, mask)
        local_rows = self._attend_locally(local_q, k, v, grid, neighbours)
        return merge_rows(global_rows, local_rows, self.proj, self.proj_global)

    def _attend_locally(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, neighbours: Neighbours) -> Tensor:
        return local_attention(
            q,
            k,
            v,
            grid,
            window=self.window,
            rule=self.rule,
            neighbours=neighbours,
            bias=None if self.bias is None else self.bias.table,
            global_bias=None if self.bias is None else self.bias.to_global(k.shape[1] - grid.tokens),
            scale=self.scale,
            implementation=self.implementation,
        )
