"""What the mechanisms share: projections to heads and back."""

from __future__ import annotations

from collections.abc import Iterable
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
        q, k, v = self.project_packed(tokens).unbind(2)
        return q, k, v

    def project_packed(self, tokens: Tensor) -> Tensor:
        """Queries, keys and values of all tokens as one tensor, (B, tokens, 3, heads, head_dim)."""
        return self.qkv(tokens).unflatten(2, (3, self.heads, -1))

    def project_apart(self, qkv: nn.Linear, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of some tokens (B, n, dim), keys and values of others (B, m, dim), by their parts of ``qkv``."""
        return self.project_queries(qkv, queries), *self.project_keys_values(qkv, keys)

    def project_queries(self, qkv: nn.Linear, queries: Tensor) -> Tensor:
        """Queries of tokens (B, n, dim) by their part of ``qkv``."""
        dim, bias = qkv.in_features, qkv.bias
        (q,) = self._split(F.linear(queries, qkv.weight[:dim], None if bias is None else bias[:dim]), 1)
        return q

    def project_keys_values(self, qkv: nn.Linear, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens (B, n, dim) by their part of ``qkv``."""
        dim, bias = qkv.in_features, qkv.bias
        k, v = self._split(F.linear(keys, qkv.weight[dim:], None if bias is None else bias[dim:]), 2)
        return k, v

    def _split(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, tokens, parts·dim) to ``parts`` views of (B, tokens, heads, head_dim)."""
        return projected.unflatten(2, (parts, self.heads, -1)).unbind(2)

    def merge(self, heads: Tensor) -> Tensor:
        """(B, tokens, heads, head_dim) through the output projection to (B, tokens, dim)."""
        return self.proj(heads.flatten(2))

    def set_grid(self, grid: Grid) -> None:
        """Fit parameters that are made for one map to another. Most mechanisms have none."""


Summary: TypeAlias = tuple[Tensor, ...]
"""What tokens see of a whole map, in the form of each mechanism."""


class SummaryAttention(Attention):
    """Base of mechanisms in which local tokens see few keys, made of the whole map, and so can be computed in two
    passes over it: one makes the summary, the other attends to it."""

    def summarise(self, global_tokens: Tensor, parts: Iterable[Tensor], grid: Grid) -> Summary:
        """Of the global tokens (B, G, dim) and the local ones of a map, which come in parts (B, n, dim): whole rows,
        from top to bottom."""
        raise NotImplementedError

    def attend_local(self, tokens: Tensor, summary: Summary) -> Tensor:
        """What attention makes of some local tokens, (B, n, dim) to the same shape."""
        raise NotImplementedError

    def attend_global(self, tokens: Tensor, summary: Summary) -> Tensor:
        """What attention makes of the global tokens, by default as of local ones."""
        return self.attend_local(tokens, summary)


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
