"""Exact windows of (2w+1)² keys, one per token: simple, and with any dilation.

``unfold_nn`` copies all windows out by ``nn.functional.unfold``. For ``unfold_tensor`` they are views of the padded map
by ``Tensor.unfold``, copied only where they are multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec import Implementation, Inputs, LocalSpec, refuse_dilation_per_head, refuse_halo
from ..tables import axis_window, in_chosen_block, table_lookup, window_steps


def _refusal_copied(spec: LocalSpec, q: Tensor) -> str | None:
    return _refusal(spec, q) or refuse_halo(spec)


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if spec.rule != "exact":
        return "unfold slides one window per token, so the rule must be 'exact'"
    return refuse_dilation_per_head(spec)


def _attend_copied(inputs: Inputs, spec: LocalSpec) -> Tensor:
    q, k, v, *_ = inputs
    global_tokens = inputs.global_tokens(spec)
    weights = _weights(inputs, torch.einsum("bnhd,bhdkn->bhnk", q, _copied_windows(k[:, global_tokens:], spec)), spec)
    windows = _copied_windows(v[:, global_tokens:], spec)
    out = torch.einsum("bhnk,bhdkn->bnhd", weights[..., global_tokens:], windows)
    return out + _from_global(weights, v, global_tokens)


def _copied_windows(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """(B, N, heads, dim) to (B, heads, dim, (2w+1)², N)."""
    heads, dim = tokens.shape[2:]
    image = tokens.permute(0, 2, 3, 1).flatten(1, 2).unflatten(2, tuple(spec.grid))
    size, dilation = 2 * spec.window + 1, spec.common_dilation
    columns = F.unfold(image, size, dilation=dilation, padding=spec.window * dilation)
    return columns.unflatten(1, (heads, dim, size * size))


def _attend_viewed(inputs: Inputs, spec: LocalSpec) -> Tensor:
    q, k, v, *_ = inputs
    global_tokens, size = inputs.global_tokens(spec), 2 * spec.window + 1
    image = q.unflatten(1, tuple(spec.grid))
    products = torch.einsum("bxyhd,bxyhdij->bhxyij", image, _viewed_windows(k[:, global_tokens:], spec))
    weights = _weights(inputs, products.flatten(4, 5).flatten(2, 3), spec)
    local = weights[..., global_tokens:].unflatten(3, (size, size)).unflatten(2, tuple(spec.grid))
    windows = _viewed_windows(v[:, global_tokens:], spec)
    out = torch.einsum("bhxyij,bxyhdij->bxyhd", local, windows).flatten(1, 2)
    return out + _from_global(weights, v, global_tokens)


def _viewed_windows(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """(B, K, heads, dim) to a view (B, height, width, heads, dim, 2w+1, 2w+1)."""
    dilation, (above, below) = spec.common_dilation, spec.halo or (0, 0)
    reach = spec.window * dilation
    image = tokens.unflatten(1, tuple(spec.key_grid))
    image = F.pad(image, (0, 0, 0, 0, reach, reach, reach - above, reach - below))
    spans = image.unfold(1, 2 * reach + 1, 1).unfold(2, 2 * reach + 1, 1)
    return spans[..., ::dilation, ::dilation]


def _weights(inputs: Inputs, to_window: Tensor, spec: LocalSpec) -> Tensor:
    """Softmax weights (B, heads, N, G + (2w+1)²), from the products of queries with the keys of their windows."""
    q, k, _, bias, global_bias, neighbour = inputs
    to_window = to_window * spec.scale
    to_global = torch.einsum("bnhd,bkhd->bhnk", q, k[:, : inputs.global_tokens(spec)]) * spec.scale
    if global_bias is not None:
        to_global = to_global + global_bias[:, None]
    if bias is not None:
        offsets = -window_steps(spec.window, q.device)  # in steps of the dilation
        to_window = to_window + table_lookup(bias, offsets, offsets).flatten(1)[:, None]
    seen = _seen(spec, neighbour, q.device)
    return torch.cat([to_global, to_window.masked_fill(~seen, float("-inf"))], -1).softmax(-1).to(q.dtype)


def _seen(spec: LocalSpec, neighbour: Tensor | None, device: torch.device) -> Tensor:
    """Which keys of its window each token sees, boolean (N, (2w+1)²)."""
    steps = spec.window, spec.common_dilation, device
    rows = axis_window(spec.grid.height, *steps, spec.halo or (0, 0))
    columns = axis_window(spec.grid.width, *steps)
    seen = rows.inside[:, None, :, None] & columns.inside[None, :, None, :]
    if spec.neighbour_mode != "all":
        seen = seen & in_chosen_block(rows.block[:, None, :, None], columns.block[None, :, None, :], neighbour)
    return seen.flatten(2, 3).flatten(0, 1)


def _from_global(weights: Tensor, v: Tensor, global_tokens: int) -> Tensor:
    """The global values weighted, (B, N, heads, dim)."""
    return torch.einsum("bhnk,bkhd->bnhd", weights[..., :global_tokens], v[:, :global_tokens])


UNFOLD_NN = Implementation(_refusal_copied, _attend_copied)
UNFOLD_TENSOR = Implementation(_refusal, _attend_viewed)
