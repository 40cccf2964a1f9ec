"""One E-ViT stage: patch embedding, global tokens, position, blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import FullAttention, LinformerAttention, LongformerAttention, build_attention
from ..config import ModelConfig
from ..geometry import Grid
from ..position import AbsolutePosition, AbsolutePosition1d, small_normal
from .block import Block
from .patch_embed import PatchEmbed


class Stage(nn.Module):
    """A map in, tokens and their grid out; a stage knows nothing of its neighbours.

    Its global tokens are its own, or the projection of those ``carried`` on from the stage before; tokens ``given`` by
    the caller join them.
    """

    def __init__(self, config: ModelConfig, index: int, grid: Grid, drop_path: list[float]) -> None:
        super().__init__()
        stage = config.stages[index]
        previous = config.stages[index - 1] if index else None
        in_chans = previous.dim if previous else config.in_chans
        pad = config.patch_remainder == "pad"
        self.patch_embed = PatchEmbed(in_chans, stage.dim, stage.patch, norm=config.norm_embed, pad=pad)
        carried = config.carry_global_tokens and previous is not None
        self.carry = nn.Linear(in_chans, stage.dim) if carried else None
        own = stage.global_tokens if not carried else 0
        self.global_tokens = small_normal(own, stage.dim) if own else None
        self.given = nn.Linear(config.given_token_dim, stage.dim) if config.given_token_dim else None
        self.position: AbsolutePosition | AbsolutePosition1d | None = None
        if stage.position == "absolute":
            self.position = AbsolutePosition(stage.dim, grid, stage.global_tokens)
        elif stage.position == "absolute_1d":
            self.position = AbsolutePosition1d(stage.dim, grid, stage.global_tokens)
        self.drop = nn.Dropout(config.drop_rate)
        self.blocks = nn.ModuleList()
        for rate in drop_path:
            given = self.given is not None
            attn = build_attention(stage, grid, qkv_bias=config.qkv_bias, given=given, scale=config.qk_scale)
            if isinstance(attn, LongformerAttention):
                attn.neighbours = "self" if config.neighbours == "self" else "all"
                attn.eval_neighbours = config.eval_neighbours
            self.blocks.append(
                Block(stage.dim, attn, mlp_ratio=config.mlp_ratio, drop=config.drop_rate, drop_path=rate)
            )
        self.is_local = stage.attention.kind == "longformer"
        self.grad_checkpointing = False

    def forward(
        self,
        image: Tensor,
        carried: Tensor | None = None,
        given: Tensor | None = None,
        neighbours: Tensor | None = None,
    ) -> tuple[Tensor, Grid]:
        """(B, C, H, W) to tokens (B, G + N, dim), global first, and the grid of the N local ones.

        ``neighbours`` (depth,) is what random shift drew for the blocks.
        """
        tokens, grid = self.patch_embed(image)
        tokens = self.drop(torch.cat([*self._global_rows(tokens, carried, given), self._placed(tokens, grid)], 1))
        for index, block in enumerate(self.blocks):
            neighbour = neighbours[index] if neighbours is not None and self.is_local else None
            if self.grad_checkpointing and self.training:
                tokens = checkpoint(block, tokens, grid, neighbour, use_reentrant=False)
            else:
                tokens = block(tokens, grid, neighbour)
        return tokens, grid

    def _placed(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens if self.position is None else tokens + self.position(grid).to(tokens.dtype)

    def _global_rows(self, tokens: Tensor, carried: Tensor | None, given: Tensor | None) -> list[Tensor]:
        """The global tokens that precede the local ones, as a list of (B, n, dim)."""
        rows = []
        if self.carry is not None and carried is not None:
            rows.append(self.carry(carried))
        elif self.global_tokens is not None:
            rows.append(self.global_tokens.to(tokens.dtype).expand(tokens.shape[0], -1, -1))
        if rows and self.position is not None and self.position.global_tokens is not None:
            rows[0] = rows[0] + self.position.global_tokens.to(tokens.dtype)
        if given is not None and self.given is not None:
            rows.append(self.given(given).to(tokens.dtype))
        return rows

    def set_grid(self, grid: Grid) -> None:
        """Make everything that depends on the size of the map for another one."""
        for module in self.modules():
            if isinstance(module, (AbsolutePosition, AbsolutePosition1d, FullAttention, LinformerAttention)):
                module.set_grid(grid)
