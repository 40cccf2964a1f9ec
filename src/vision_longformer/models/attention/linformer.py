"""Linformer: keys and values projected along the sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...geometry import Grid
from ..config import Linformer
from .base import Attention, Neighbours, attend


class LinformerAttention(Attention):
    """All tokens attend to ``features`` mixtures of the tokens; the mixing is trained for one number of tokens.

    On another map, keys and values are first resized to the trained map, which the paper names as possible and leaves
    open. :meth:`set_grid` folds that resize into the projection, which can then be trained at the new size.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        options: Linformer,
        grid: Grid,
        global_tokens: int,
        *,
        qkv_bias: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__(dim, heads, qkv_bias=qkv_bias, scale=scale)
        self.grid, self.global_tokens = grid, global_tokens
        self.project_keys = self._draw(options.features)
        self.project_values = None if options.share_kv else self._draw(options.features)

    def _draw(self, features: int) -> nn.Parameter:
        bound = features**-0.5
        return nn.Parameter(torch.empty(self.global_tokens + self.grid.tokens, features).uniform_(-bound, bound))

    def forward(self, tokens: Tensor, grid: Grid, neighbours: Neighbours = "all") -> Tensor:
        if tokens.shape[1] != self.global_tokens + grid.tokens:
            raise ValueError(
                f"linformer was made for {self.global_tokens} global tokens, not {tokens.shape[1] - grid.tokens}"
            )
        q, k, v = self.project(tokens)
        values = self.project_keys if self.project_values is None else self.project_values
        k, v = self._mix(k, self.project_keys, grid), self._mix(v, values, grid)
        return self.merge(attend(q, k, v, self.scale))

    def _mix(self, tokens: Tensor, projection: Tensor, grid: Grid) -> Tensor:
        """(B, tokens, heads, head_dim) to (B, features, heads, head_dim)."""
        if grid != self.grid:
            local = resize_tokens(tokens[:, self.global_tokens :].flatten(2).transpose(1, 2), grid, self.grid)
            local = local.transpose(1, 2).unflatten(2, tokens.shape[2:])
            tokens = torch.cat([tokens[:, : self.global_tokens], local], 1)
        return torch.einsum("bnhd,nk->bkhd", tokens, projection.to(tokens.dtype))

    def set_grid(self, grid: Grid) -> None:
        """Make the projections for another map, computing on it what the resize did."""
        self.project_keys = self._refit(self.project_keys, grid)
        if self.project_values is not None:
            self.project_values = self._refit(self.project_values, grid)
        self.grid = grid

    def _refit(self, projection: nn.Parameter, grid: Grid) -> nn.Parameter:
        return nn.Parameter(resize_projection(projection.detach(), self.grid, grid))


def resize_tokens(maps: Tensor, old: Grid, new: Grid) -> Tensor:
    """Maps (..., old tokens) to (..., new tokens), bilinear, averaged where the new map is smaller."""
    image = maps.unflatten(-1, tuple(old)).to(torch.promote_types(maps.dtype, torch.float32))
    return F.interpolate(image, size=tuple(new), mode="bilinear", antialias=True).flatten(-2).to(maps.dtype)


def resize_projection(projection: Tensor, old: Grid, new: Grid) -> Tensor:
    """A projection (G + old tokens, features) for a map ``new``: the adjoint of resizing ``new`` maps to ``old``."""
    if old == new:
        return projection.clone()
    global_tokens = projection.shape[0] - old.tokens
    with torch.enable_grad():
        probe = projection.new_zeros(1, projection.shape[1], new.tokens, requires_grad=True)
        resized = resize_tokens(probe, new, old)
        (local,) = torch.autograd.grad(resized, probe, projection[global_tokens:].t()[None])
    return torch.cat([projection[:global_tokens], local[0].t()])
