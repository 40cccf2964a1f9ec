"""The projections around every attention: tokens to heads and back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Projections(nn.Module):
    """Base of the mechanisms: ``qkv`` before and ``proj`` after, heads in the layout (B, tokens, heads, head_dim)."""

    def __init__(self, dim: int, heads: int, *, qkv_bias: bool, scale: float | None) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}")
        self.heads = heads
        self.scale = (dim // heads) ** -0.5 if scale is None else scale
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def split(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, tokens, parts·dim) to ``parts`` views of (B, tokens, heads, head_dim)."""
        return projected.unflatten(2, (parts, self.heads, -1)).unbind(2)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all tokens."""
        q, k, v = self.split(self.qkv(tokens), 3)
        return q, k, v

    def merge(self, heads: Tensor) -> Tensor:
        """(B, tokens, heads, head_dim) through the output projection to (B, tokens, dim)."""
        return self.proj(heads.flatten(2))


def split_linear(linear: nn.Linear, rows: int) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Weight and bias of the first ``rows`` outputs, and of the others: for inputs that need only one of them."""
    bias = linear.bias
    first = (linear.weight[:rows], None if bias is None else bias[:rows])
    return first, (linear.weight[rows:], None if bias is None else bias[rows:])


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Full precision inside an autocast region; devices that know no autocast need nothing."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Softmax attention in the layout (B, tokens, heads, head_dim); ``mask`` (heads, queries, keys) is added."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask.to(q.dtype)[None]
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(1, 2)
