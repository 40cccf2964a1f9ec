"""The oracle: full attention with everything outside the window masked. Plain, quadratic, for checking the others."""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry import ceil_div, is_cyclic
from ..chunks import pad_map
from ..spec import Implementation, Inputs, LocalSpec, refuse_dilation_per_head
from ..tables import in_chosen_block, table_lookup


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    return refuse_dilation_per_head(spec)


def _attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
    q, k, v, bias, global_bias, neighbour = inputs
    global_tokens = inputs.global_tokens(spec)
    rows = _Axis(spec.grid.height, spec, q.device, spec.halo)
    columns = _Axis(spec.grid.width, spec, q.device)
    seen = _seen(rows, columns, neighbour, spec)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, _images(k[:, global_tokens:], rows, columns, spec)) * spec.scale
    if bias is not None:
        pairs = table_lookup(bias, rows.offset, columns.offset)
        scores = scores + pairs.transpose(2, 3).reshape(-1, *seen.shape)
    scores = scores.masked_fill(~seen, float("-inf"))
    to_global = torch.einsum("bqhd,bkhd->bhqk", q, k[:, :global_tokens]) * spec.scale
    if global_bias is not None:
        to_global = to_global + global_bias[:, None]
    weights = torch.cat([to_global, scores], -1).softmax(-1).to(v.dtype)
    values = torch.cat([v[:, :global_tokens], _images(v[:, global_tokens:], rows, columns, spec)], 1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values)


class _Axis:
    """One axis: queries 0..n-1 against keys in unwrapped coordinates, all tables (n, keys).

    The keys are the axis itself, or it between the two sides of a halo, or for the cyclic rules it padded to whole
    chunks and repeated before and after.
    """

    def __init__(self, length: int, spec: LocalSpec, device: torch.device, halo: tuple[int, int] | None = None) -> None:
        window, dilation = spec.window, spec.common_dilation
        cyclic, padded = is_cyclic(spec.rule) and halo is None, ceil_div(length, window) * window
        self.padding, self.copies = (padded - length, 3) if cyclic else (0, 1)
        query = torch.arange(length, device=device)[:, None]
        stored = torch.arange(length + self.padding, device=device)
        copy = torch.arange(self.copies, device=device)[:, None] - self.copies // 2
        key, counts = (copy * padded + stored).flatten(), stored < length
        if halo is not None:
            above, below = (torch.arange(count, device=device) for count in halo)
            key = torch.cat([above - window, key, below + padded])
            counts = torch.ones_like(key, dtype=torch.bool)
        distance = query - key
        self.block = key.div(window, rounding_mode="floor") - query.div(window, rounding_mode="floor")
        self.offset = distance.div(dilation, rounding_mode="floor")
        near = self.block.abs() <= 1
        if spec.rule == "exact":
            near = (distance.abs() <= window * dilation) & (distance % dilation == 0)
        if spec.rule == "cyclic_release":
            counts = counts | (copy != 0)
        self.seen = near & counts.expand(self.copies, -1).flatten()


def _seen(rows: _Axis, columns: _Axis, neighbour: Tensor | None, spec: LocalSpec) -> Tensor:
    """Which keys (second axis) each query sees, boolean (N, keys)."""
    seen = rows.seen[:, None, :, None] & columns.seen[None, :, None, :]
    if spec.neighbour_mode != "all":
        seen = seen & in_chosen_block(rows.block[:, None, :, None], columns.block[None, :, None, :], neighbour)
    return seen.flatten(2, 3).flatten(0, 1)


def _images(tokens: Tensor, rows: _Axis, columns: _Axis, spec: LocalSpec) -> Tensor:
    """The key map (B, K, heads, dim) padded and repeated as the axes say."""
    image = pad_map(tokens.unflatten(1, tuple(spec.key_grid)), 1, rows.padding, columns.padding)
    return image.repeat(1, rows.copies, columns.copies, 1, 1).flatten(1, 2)


MASKED_DENSE = Implementation(_refusal, _attend)
