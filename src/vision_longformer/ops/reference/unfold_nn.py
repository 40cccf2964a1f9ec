"""Exact windows by ``nn.functional.unfold``: the window of every token is copied out. Simple, slow, dilatable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec import LocalSpec
from .windows import ONLY_EXACT, combine, window_bias, window_mask


def refusal(spec: LocalSpec, q: Tensor) -> str | None:
    return None if spec.rule == "exact" else ONLY_EXACT


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    spec: LocalSpec,
) -> Tensor:  # fmt: skip
    """Shapes as in :func:`~vision_longformer.ops.local_attention`."""
    global_tokens = k.shape[1] - spec.grid.tokens
    to_window = torch.einsum("bnhd,bhdkn->bhnk", q, _windows(k[:, global_tokens:], spec))
    to_global = torch.einsum("bnhd,bkhd->bhnk", q, k[:, :global_tokens])
    local_bias = None if bias is None else window_bias(bias, spec)
    seen = window_mask(spec, neighbour, q.device)
    weights = combine(to_global, to_window, global_bias, local_bias, seen, spec.scale)
    out = torch.einsum("bhnk,bhdkn->bnhd", weights[..., global_tokens:], _windows(v[:, global_tokens:], spec))
    return out + torch.einsum("bhnk,bkhd->bnhd", weights[..., :global_tokens], v[:, :global_tokens])


def _windows(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """(B, N, heads, dim) to (B, heads, dim, (2w+1)², N)."""
    heads, dim = tokens.shape[2:]
    image = tokens.permute(0, 2, 3, 1).flatten(1, 2).unflatten(2, tuple(spec.grid))
    size = 2 * spec.window + 1
    columns = F.unfold(image, size, dilation=spec.dilation, padding=spec.window * spec.dilation)
    return columns.unflatten(1, (heads, dim, size * size))
