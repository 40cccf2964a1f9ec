"""Linformer: keys and values projected along the sequence."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...geometry import Grid
from ...ops.longformer import attend
from ..config import Linformer
from .base import Neighbours, Summary, SummaryAttention


class LinformerAttention(SummaryAttention):
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
        self._check_global_tokens(tokens.shape[1] - grid.tokens)
        q, k, v = self.project(tokens)
        return self.merge(attend(q, *self._mix_both(k, v, grid), self.scale))

    def summarise(self, global_tokens: Tensor, parts: Iterable[Tensor], grid: Grid) -> Summary:
        """Mixed keys and values. The resize to the trained map is linear: each part adds its share to the result."""
        self._check_global_tokens(global_tokens.shape[1])
        dtype = torch.promote_types(global_tokens.dtype, torch.float32)
        of_rows, of_columns = (
            resize_projection(torch.eye(own, dtype=dtype, device=global_tokens.device), Grid(own, 1), Grid(given, 1))
            for own, given in zip(self.grid, grid, strict=True)
        )
        start, sums = 0, [global_tokens.new_zeros(1, dtype=dtype)] * 2
        for part in parts:
            stop = start + part.shape[1] // grid.width
            for index, local in enumerate(self.project_keys_values(self.qkv, part)):
                rows = local.unflatten(1, (stop - start, grid.width)).to(dtype)
                narrow = torch.einsum("brchd,cw->brwhd", rows, of_columns)
                sums[index] = sums[index] + torch.einsum("brwhd,rt->btwhd", narrow, of_rows[start:stop])
            start = stop
        both = zip(self.project_keys_values(self.qkv, global_tokens), sums, strict=True)
        k, v = (torch.cat([of_global, local.flatten(1, 2).to(of_global.dtype)], 1) for of_global, local in both)
        return self._mix_both(k, v, self.grid)

    def attend_local(self, tokens: Tensor, summary: Summary) -> Tensor:
        k, v = summary
        return self.merge(attend(self.project_queries(self.qkv, tokens), k, v, self.scale))

    def _check_global_tokens(self, count: int) -> None:
        if count != self.global_tokens:
            raise ValueError(f"linformer was made for {self.global_tokens} global tokens, not {count}")

    def _mix_both(self, k: Tensor, v: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        values = self.project_keys if self.project_values is None else self.project_values
        return self._mix(k, self.project_keys, grid), self._mix(v, values, grid)

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
