"""Sliding chunk by shifted copies of the map: no index tables, few operators, the same ones for every size.

It is what exported graphs are made of: their size, and the time to write and to load them, grow with the number of
operators whose sizes are symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..chunks import contiguous_copy, pad_map
from ..spec import Implementation, Inputs, LocalSpec, refuse_dilation
from ..tables import table_lookup


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if spec.rule not in ("chunk", "exact") or spec.neighbour_mode != "all":
        return "it has the rules 'chunk' and 'exact' with all neighbours only"
    return refuse_dilation(spec)


def _attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
    q, k, v, bias, global_bias, _ = inputs
    dim, area, count = q.shape[3], spec.window**2, inputs.global_tokens
    queries = _chunks(q * spec.scale, spec)
    k_local, v_local = k[:, count:], v[:, count:]
    around = _surroundings(torch.cat([k_local, v_local, torch.ones_like(k_local[..., :1])], -1), spec)
    scores = queries.unflatten(2, (-1, area)) @ around[..., :dim].transpose(-1, -2)
    added = _chunk_bias(bias, spec, q)
    if added is not None:
        scores = scores + added[:, None]
    outside = around[..., -1].unsqueeze(-2) == 0
    scores = scores.masked_fill(outside, float("-inf")).flatten(2, 3)
    to_global = queries @ contiguous_copy(k[:, :count].permute(0, 2, 3, 1))
    if global_bias is not None:
        to_global = to_global + global_bias[:, None]
    weights = torch.cat([to_global, scores], -1).softmax(-1)
    local = weights[..., count:].unflatten(2, (-1, area)) @ around[..., dim:-1]
    out = local.flatten(2, 3) + weights[..., :count] @ contiguous_copy(v[:, :count].transpose(1, 2))
    return _tokens(out, spec)


def _chunks(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """(B, N, heads, dim) to (B, heads, M·w², dim), chunk after chunk, zeros where a chunk goes beyond the map."""
    window, chunks = spec.window, spec.chunks
    batch, _, heads, dim = tokens.shape
    image = pad_map(tokens.reshape(batch, *spec.grid, heads * dim), 1, *spec.padding)
    split = image.reshape(batch, chunks.height, window, chunks.width, window, heads, dim)
    return contiguous_copy(split.permute(0, 5, 1, 3, 2, 4, 6)).reshape(batch, heads, -1, dim)


def _tokens(chunked: Tensor, spec: LocalSpec) -> Tensor:
    """The inverse of :func:`_chunks`."""
    window, chunks = spec.window, spec.chunks
    batch, heads, _, dim = chunked.shape
    split = chunked.reshape(batch, heads, *chunks, window, window, dim)
    image = contiguous_copy(split.permute(0, 2, 4, 3, 5, 1, 6))
    image = image.reshape(batch, chunks.height * window, chunks.width * window, heads * dim)
    bottom, right = spec.padding
    return pad_map(image, 1, -bottom, -right).reshape(batch, -1, heads, dim)


def _surroundings(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """(B, N, heads, dim) to the 3w×3w tokens around every chunk, (B, heads, M, 9w², dim), zeros beyond the map."""
    window, chunks = spec.window, spec.chunks
    batch, _, heads, dim = tokens.shape
    bottom, right = spec.padding
    image = tokens.reshape(batch, *spec.grid, heads * dim)
    image = F.pad(image, (0, 0, window, right + window, window, bottom + window))
    split = image.reshape(batch, chunks.height + 2, window, chunks.width + 2, window, heads * dim)
    rows = torch.cat([split.narrow(1, shift, chunks.height) for shift in range(3)], 2)
    both = torch.cat([rows.narrow(3, shift, chunks.width) for shift in range(3)], 4)
    apart = contiguous_copy(both.unflatten(5, (heads, dim)).permute(0, 5, 1, 3, 2, 4, 6))
    return apart.reshape(batch, heads, -1, 9 * window * window, dim)


def _chunk_bias(table: Tensor | None, spec: LocalSpec, like: Tensor) -> Tensor | None:
    """What is added to the scores of every chunk, (heads or 1, w², 9w²): the bias, and −∞ beyond an exact window."""
    if table is None and spec.rule != "exact":
        return None
    window = spec.window
    query, key = torch.arange(window, device=like.device), torch.arange(-window, 2 * window, device=like.device)
    offsets = query[:, None] - key
    bias = table_lookup(like.new_zeros(1, 1, 1) if table is None else table, offsets, offsets)
    if spec.rule == "exact":
        near = offsets.abs() <= window
        bias = bias.masked_fill(~(near[..., None, None] & near), float("-inf"))
    return bias.transpose(2, 3).reshape(-1, window * window, 9 * window * window)


SHIFTED_CHUNK = Implementation(_refusal, _attend)
