"""Vision Longformer: local attention plus global memory."""

from __future__ import annotations

from torch import Tensor

from ...errors import check_choice
from ...geometry import Grid
from ...ops import IMPLEMENTATIONS, local_attention
from ..config import Longformer
from ..position import RelativeBias
from .global_rows import GlobalRows


class LongformerAttention(GlobalRows):
    """Local tokens attend to the tokens near them and to all global tokens; global tokens attend to all.

    ``neighbours`` and ``eval_neighbours`` say what local tokens see in training and in evaluation: ``"all"`` or
    ``"self"``; a neighbour passed to ``forward`` overrides them (random shift).
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
        separate = not options.share_weights and (global_tokens > 0 or given)
        super().__init__(dim, heads, separate=separate, qkv_bias=qkv_bias, scale=scale)
        side = 4 * options.window - 1
        self.bias = RelativeBias(heads, (side, side), global_tokens, given=given) if relative else None
        self.window, self.rule = options.window, options.rule
        self.neighbours = self.eval_neighbours = "all"
        self.implementation = "auto"

    def set_implementation(self, name: str) -> None:
        """Compute the local attention by a named implementation, or by the best one (``"auto"``)."""
        check_choice("implementation", name, ("auto", *IMPLEMENTATIONS))
        self.implementation = name

    def local_rows(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, neighbour: Tensor | None) -> Tensor:
        neighbours = self.neighbours if self.training else self.eval_neighbours
        return local_attention(
            q,
            k,
            v,
            grid,
            window=self.window,
            rule=self.rule,
            neighbours=neighbours if neighbour is None else neighbour,
            bias=None if self.bias is None else self.bias.table,
            global_bias=None if self.bias is None else self.bias.to_global(k.shape[1] - grid.tokens),
            scale=self.scale,
            implementation=self.implementation,
        )
