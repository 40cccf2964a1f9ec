"""Exact windows by ``Tensor.unfold``: windows are views of the padded map, copied only where they are multiplied."""

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
    image = q.unflatten(1, tuple(spec.grid))
    to_window = torch.einsum("bxyhd,bxyhdij->bhxyij", image, _windows(k[:, global_tokens:], spec))
    to_window = to_window.flatten(4, 5).flatten(2, 3)
    to_global = torch.einsum("bnhd,bkhd->bhnk", q, k[:, :global_tokens])
    local_bias = None if bias is None else window_bias(bias, spec)
    seen = window_mask(spec, neighbour, q.device)
    weights = combine(to_global, to_window, global_bias, local_bias, seen, spec.scale)
    size = 2 * spec.window + 1
    local = weights[..., global_tokens:].unflatten(3, (size, size)).unflatten(2, tuple(spec.grid))
    out = torch.einsum("bhxyij,bxyhdij->bxyhd", local, _windows(v[:, global_tokens:], spec)).flatten(1, 2)
    return out + torch.einsum("bhnk,bkhd->bnhd", weights[..., :global_tokens], v[:, :global_tokens])


def _windows(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """(B, N, heads, dim) to a view (B, height, width, heads, dim, 2w+1, 2w+1)."""
    reach = spec.window * spec.dilation
    image = F.pad(tokens.unflatten(1, tuple(spec.grid)), (0, 0, 0, 0, reach, reach, reach, reach))
    spans = image.unfold(1, 2 * reach + 1, 1).unfold(2, 2 * reach + 1, 1)
    return spans[..., :: spec.dilation, :: spec.dilation]
