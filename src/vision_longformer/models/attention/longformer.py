"""Vision Longformer: local attention plus global memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...errors import check_choice
from ...geometry import Grid, Strip
from ...ops import IMPLEMENTATIONS, local_attention, longformer_attention
from ...ops.longformer import attend
from ...ops.partial_softmax import PartInputs
from ..config import Longformer
from ..position import RelativeBias
from .base import Attention, Neighbours, merge_rows


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
        global_tokens = tokens.shape[1] - grid.tokens
        if self.qkv_global is not None and global_tokens:
            return self._attend_apart(self.qkv_global, tokens, grid, neighbours)
        rows = longformer_attention(
            self.project_packed(tokens),
            grid,
            window=self.window,
            rule=self.rule,
            neighbours=neighbours,
            bias=None if self.bias is None else self.bias.table,
            global_bias=None if self.bias is None else self.bias.to_global(global_tokens),
            from_global_bias=None if self.bias is None else self.bias.of_global(global_tokens),
            scale=self.scale,
            implementation=self.implementation,
        )
        return self.merge(rows)

    def _attend_apart(self, qkv_global: nn.Linear, tokens: Tensor, grid: Grid, neighbours: Neighbours) -> Tensor:
        """With separate weights; in the order of ``ops/longformer.py``, for the same reasons."""
        global_tokens = tokens.shape[1] - grid.tokens
        q, k, v = self.project(tokens)
        mask = None if self.bias is None else self.bias.from_global(global_tokens, grid)
        inputs = self.project_apart(qkv_global, tokens[:, :global_tokens], tokens)
        global_rows = attend(*inputs, self.scale, mask)
        local_rows = self._attend_locally(q[:, global_tokens:], k, v, grid, neighbours)
        return merge_rows(global_rows, local_rows, self.proj, self.proj_global)

    # In strips

    def forward_strip(
        self, tokens: Tensor, strip: Strip, neighbours: Neighbours = "all"
    ) -> tuple[Tensor, PartInputs | None]:
        """The rows of a strip's own tokens, (B, n, dim), from the global tokens and those of the rows that it sees.

        ``tokens`` is (B, G + ``strip.keys``, dim). With global tokens, also what their rows need of the strip: its keys
        and values, over which the softmax goes on.
        """
        count = tokens.shape[1] - strip.keys
        own = tokens[:, count:][:, strip.own]
        q, k, v = self.project_apart(self.qkv, own, tokens)
        keys, values, halo = self._pad_halo(k, v, count, strip)
        rows = self.merge(self._attend_locally(q, keys, values, strip.grid, neighbours, halo))
        if count == 0:
            return rows, None
        if self.qkv_global is None:
            k, v = (x[:, count:][:, strip.own] for x in (k, v))
            inputs = self.project_queries(self.qkv, tokens[:, :count]), k, v
        else:
            inputs = self.project_apart(self.qkv_global, tokens[:, :count], own)
        return rows, PartInputs(*inputs, self.scale, None if self.bias is None else self.bias.to_local(count))

    def among_global(self, tokens: Tensor) -> PartInputs:
        """What the rows of global tokens (B, G, dim) need of themselves."""
        inputs = self.project_apart(self.qkv_global or self.qkv, tokens, tokens)
        return PartInputs(*inputs, self.scale, None if self.bias is None else self.bias.among_global(tokens.shape[1]))

    def merge_global(self, rows: Tensor) -> Tensor:
        """Rows of global tokens (B, G, heads, head_dim) through their output projection."""
        return (self.proj_global or self.proj)(rows.flatten(2))

    def _pad_halo(
        self, k: Tensor, v: Tensor, count: int, strip: Strip
    ) -> tuple[Tensor, Tensor, tuple[int, int] | None]:
        """Keys, values and halo of a strip, with the padding that rule ``cyclic_release`` sees above the first one."""
        missing = self.window - len(strip.above)
        if self.rule != "cyclic_release" or strip.whole or missing == 0:
            return k, v, strip.halo
        start, zeros = count + strip.own.start, k.new_zeros(k.shape[0], missing * strip.width, *k.shape[2:])
        k, v = (torch.cat([x[:, :start], zeros, x[:, start:]], 1) for x in (k, v))
        return k, v, (self.window, len(strip.below))

    def _attend_locally(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        neighbours: Neighbours,
        halo: tuple[int, int] | None = None,
    ) -> Tensor:
        global_tokens = k.shape[1] - grid.tokens - sum(halo or ()) * grid.width
        return local_attention(
            q,
            k,
            v,
            grid,
            window=self.window,
            rule=self.rule,
            neighbours=neighbours,
            bias=None if self.bias is None else self.bias.table,
            global_bias=None if self.bias is None else self.bias.to_global(global_tokens),
            scale=self.scale,
            halo=halo,
            implementation=self.implementation,
        )
