"""The transformer block: attention and MLP, each behind a LayerNorm, with drop path."""

from __future__ import annotations

from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from ..geometry import Grid


class Block(nn.Module):
    """``x + attn(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, dim: int, attn: nn.Module, *, mlp_ratio: float, drop: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=drop)
        self.drop = nn.Dropout(drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, tokens: Tensor, grid: Grid, neighbour: Tensor | None = None) -> Tensor:
        """``neighbour`` is what random shift drew for this block, if its attention is local."""
        normed = self.norm1(tokens)
        attended = self.attn(normed, grid) if neighbour is None else self.attn(normed, grid, neighbour)
        tokens = tokens + self.drop_path(self.drop(attended))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))
