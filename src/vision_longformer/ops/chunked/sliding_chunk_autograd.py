"""Sliding chunk with autograd: the blocks of every chunk are gathered, then two batched matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import block_bias, block_sources, from_chunks, in_order, selected_blocks, to_chunks
from ..spec import LocalSpec, refuse_dilation


def refusal(spec: LocalSpec, q: Tensor) -> str | None:
    return refuse_dilation(spec)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    spec: LocalSpec,
) -> Tensor:  # fmt: skip
    """Shapes as in :func:`~vision_longformer.ops.local_attention`."""
    grid, window, global_tokens = spec.grid, spec.window, k.shape[1] - spec.grid.tokens
    blocks = selected_blocks(spec, neighbour, q.device)
    source, invalid = block_sources(spec, blocks)
    queries = to_chunks(q * spec.scale, grid, window)
    scores = queries @ _gather(k[:, global_tokens:], source, spec).transpose(-1, -2)
    added = block_bias(bias, spec, blocks, q)
    if added is not None:
        scores = scores + added[:, None]
    scores = scores.masked_fill(invalid, float("-inf"))
    to_global = _to_all(queries, k[:, :global_tokens].permute(0, 2, 3, 1))
    if global_bias is not None:
        to_global = to_global + global_bias[:, None, None]
    weights = torch.cat([to_global, scores], -1).softmax(-1)
    out = weights[..., global_tokens:] @ _gather(v[:, global_tokens:], source, spec)
    out = out + _to_all(weights[..., :global_tokens], v[:, :global_tokens].transpose(1, 2))
    return from_chunks(out, grid, window)


def _to_all(chunked: Tensor, matrix: Tensor) -> Tensor:
    """Rows of all chunks (B, heads, M, w², n) times one matrix (B, heads, n, m), without broadcasting it."""
    return (chunked.flatten(2, 3) @ in_order(matrix)).unflatten(2, (-1, chunked.shape[3]))


def _gather(tokens: Tensor, source: Tensor, spec: LocalSpec) -> Tensor:
    """Keys or values of the selected blocks of every chunk, (B, heads, M, n·w², dim)."""
    chunked = to_chunks(tokens, spec.grid, spec.window)
    gathered = chunked.index_select(2, in_order(source.t()).flatten())
    return gathered.unflatten(2, (-1, source.shape[0])).flatten(3, 4)
