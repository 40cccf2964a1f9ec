"""What the mechanisms share: projections to heads and back, and softmax attention between heads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...geometry import Grid

Neighbours: TypeAlias = str | Tensor
"""Chunks that a local token sees beside its own: ``"all"`` eight, none (``"self"``), or one of 1..8 as a 0-d tensor."""


class Attention(nn.Module):
    """Base of the mechanisms: ``qkv`` before and ``proj`` after, heads in the layout (B, tokens, heads, head_dim).

    Every mechanism has ``forward(tokens, grid, neighbours="all")``, from (B, G + N, dim), global tokens first, to the
    same shape. N is the number of cells of ``grid``. Only local attention depends on ``neighbours``.
    """

    def __init__(self, dim: int, heads: int, *, qkv_bias: bool, scale: float | None) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}")
        self.heads = heads
        self.scale = (dim // heads) ** -0.5 if scale is None else scale
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all tokens, each (B, tokens, heads, head_dim)."""
        q, k, v = self._split(self.qkv(tokens), 3)
        return q, k, v

    def project_apart(self, qkv: nn.Linear, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of some tokens (B, n, dim), keys and values of others (B, m, dim), by their parts of ``qkv``."""
        dim, bias = qkv.in_features, qkv.bias
        (q,) = self._split(F.linear(queries, qkv.weight[:dim], None if bias is None else bias[:dim]), 1)
        k, v = self._split(F.linear(keys, qkv.weight[dim:], None if bias is None else bias[dim:]), 2)
        return q, k, v

    def _split(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, tokens, parts·dim) to ``parts`` views of (B, tokens, heads, head_dim)."""
        return projected.unflatten(2, (parts, self.heads, -1)).unbind(2)

    def merge(self, heads: Tensor) -> Tensor:
        """(B, tokens, heads, head_dim) through the output projection to (B, tokens, dim)."""
        return self.proj(heads.flatten(2))

    def set_grid(self, grid: Grid) -> None:
        """Fit parameters that are made for one map to another. Most mechanisms have none."""


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Softmax attention in the layout (B, tokens, heads, head_dim); ``mask`` (heads, queries, keys) is added."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask.to(q.dtype)[None]
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(1, 2)


def merge_rows(global_rows: Tensor, local_rows: Tensor, proj: nn.Linear, proj_global: nn.Linear | None) -> Tensor:
    """Rows of global and of local tokens, (B, n, heads, head_dim) each, through one output projection or two."""
    if proj_global is None:
        return proj(torch.cat([global_rows, local_rows], 1).flatten(2))
    return torch.cat([proj_global(global_rows.flatten(2)), proj(local_rows.flatten(2))], 1)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Full precision inside an autocast region; devices that know no autocast need nothing."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
