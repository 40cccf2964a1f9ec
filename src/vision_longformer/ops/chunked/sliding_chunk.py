"""Sliding chunk, the paper's fastest form: the blocks around every chunk by index, then batched matrix products.

``sliding_chunk`` has a hand-written backward and works on one block at a time, so that no copy of the nine blocks is
ever kept. ``sliding_chunk_autograd`` gathers all blocks and leaves the gradients, of any order, to autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...geometry import SELF_BLOCK
from ..chunks import contiguous_copy, from_chunks, to_chunks
from ..operator import arithmetic_dtype
from ..spec import Implementation, Inputs, LocalSpec, refuse_dilation, refuse_halo
from ..tables import block_offsets, chunk_tables, neighbour_block, present_blocks, table_lookup


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    return refuse_dilation(spec) or refuse_halo(spec)


def _attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
    q, k, v, bias, global_bias, neighbour = inputs
    global_tokens = inputs.global_tokens(spec)
    blocks = _selected_blocks(spec, neighbour, q.device)
    source, invalid = _block_sources(spec, blocks)
    out = _SlidingChunk.apply(
        to_chunks(q * spec.scale, spec),
        to_chunks(k[:, global_tokens:], spec),
        to_chunks(v[:, global_tokens:], spec),
        k[:, :global_tokens].transpose(1, 2).unsqueeze(2),
        v[:, :global_tokens].transpose(1, 2).unsqueeze(2),
        _block_bias(bias, spec, blocks, q),
        global_bias,
        source,
        invalid,
    )
    return from_chunks(out, spec)


class _SlidingChunk(torch.autograd.Function):
    """Chunked q, k, v (B, heads, M, w², dim), global keys and values (B, heads, 1, G, dim) to chunked outputs.

    The softmax runs over [G global keys, n·w² keys of the blocks]. ``bias`` is (heads or 1, w², n·w²), ``source``
    (n, M), ``invalid`` (M, 1, n·w²).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, global_k: Tensor, global_v: Tensor, bias: Tensor | None,
        global_bias: Tensor | None, source: Tensor, invalid: Tensor,
    ) -> Tensor:  # fmt: skip
        global_tokens, size = global_k.shape[3], k.shape[3]
        scores = q.new_empty(*q.shape[:4], global_tokens + len(source) * size, dtype=arithmetic_dtype(q))
        scores[..., :global_tokens] = q @ global_k.transpose(-1, -2)
        local = scores[..., global_tokens:]
        for block, keys in zip(local.split(size, -1), source, strict=True):
            block.copy_(q @ k.index_select(2, keys).transpose(-1, -2))
        if bias is not None:
            local += bias[:, None]
        if global_bias is not None:
            scores[..., :global_tokens] += global_bias[:, None, None]
        local.masked_fill_(invalid, float("-inf"))
        weights = torch.softmax(scores, -1).to(q.dtype)
        out = weights[..., :global_tokens] @ global_v
        for block, keys in zip(weights[..., global_tokens:].split(size, -1), source, strict=True):
            out += block @ v.index_select(2, keys)
        ctx.save_for_backward(q, k, v, global_k, global_v, weights, out, source)
        ctx.bias_heads = None if bias is None else bias.shape[0]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("sliding_chunk has first derivatives only; for more, use 'sliding_chunk_autograd'")
        q, k, v, global_k, global_v, weights, out, source = ctx.saved_tensors
        grad_out = grads[0]
        global_tokens, size = global_k.shape[3], k.shape[3]
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_scores = torch.empty_like(weights, dtype=arithmetic_dtype(q))
        grad_scores[..., :global_tokens] = grad_out @ global_v.transpose(-1, -2)
        grad_global_v = (weights[..., :global_tokens].transpose(-1, -2) @ grad_out).sum(2, keepdim=True)
        grad_v = torch.zeros_like(v)
        parts = (grad_scores[..., global_tokens:].split(size, -1), weights[..., global_tokens:].split(size, -1))
        for grad_block, block, keys in zip(*parts, source, strict=True):
            grad_block.copy_(grad_out @ v.index_select(2, keys).transpose(-1, -2))
            grad_v.index_add_(2, keys, block.transpose(-1, -2) @ grad_out)
        grad_scores.sub_(delta).mul_(weights)
        grad_bias = grad_global_bias = None
        if ctx.needs_input_grad[5]:
            heads = (0, 2) if ctx.bias_heads > 1 else (0, 1, 2)
            grad_bias = grad_scores[..., global_tokens:].sum(heads).view(ctx.bias_heads, *grad_scores.shape[3:4], -1)
        if ctx.needs_input_grad[6]:
            grad_global_bias = grad_scores[..., :global_tokens].sum((0, 2, 3))
        grad_scores = grad_scores.to(q.dtype)
        grad_q = grad_scores[..., :global_tokens] @ global_k
        grad_global_k = (grad_scores[..., :global_tokens].transpose(-1, -2) @ q).sum(2, keepdim=True)
        grad_k = torch.zeros_like(k)
        for grad_block, keys in zip(grad_scores[..., global_tokens:].split(size, -1), source, strict=True):
            grad_q += grad_block @ k.index_select(2, keys)
            grad_k.index_add_(2, keys, grad_block.transpose(-1, -2) @ q)
        return grad_q, grad_k, grad_v, grad_global_k, grad_global_v, grad_bias, grad_global_bias, None, None


def _attend_autograd(inputs: Inputs, spec: LocalSpec) -> Tensor:
    q, k, v, bias, global_bias, neighbour = inputs
    global_tokens = inputs.global_tokens(spec)
    blocks = _selected_blocks(spec, neighbour, q.device)
    source, invalid = _block_sources(spec, blocks)
    queries = to_chunks(q * spec.scale, spec)
    scores = queries @ _gather(k[:, global_tokens:], source, spec).transpose(-1, -2)
    added = _block_bias(bias, spec, blocks, q)
    if added is not None:
        scores = scores + added[:, None]
    scores = scores.masked_fill(invalid, float("-inf"))
    to_global = _to_all(queries, k[:, :global_tokens].permute(0, 2, 3, 1))
    if global_bias is not None:
        to_global = to_global + global_bias[:, None, None]
    weights = torch.cat([to_global, scores], -1).softmax(-1).to(v.dtype)
    out = weights[..., global_tokens:] @ _gather(v[:, global_tokens:], source, spec)
    out = out + _to_all(weights[..., :global_tokens], v[:, :global_tokens].transpose(1, 2))
    return from_chunks(out, spec)


def _to_all(chunked: Tensor, matrix: Tensor) -> Tensor:
    """Rows of all chunks (B, heads, M, w², n) times one matrix (B, heads, n, m), without broadcasting it."""
    return (chunked.flatten(2, 3) @ contiguous_copy(matrix)).unflatten(2, (-1, chunked.shape[3]))


def _gather(tokens: Tensor, source: Tensor, spec: LocalSpec) -> Tensor:
    """Keys or values of the selected blocks of every chunk, (B, heads, M, n·w², dim)."""
    gathered = to_chunks(tokens, spec).index_select(2, contiguous_copy(source.t()).flatten())
    return gathered.unflatten(2, (-1, source.shape[0])).flatten(3, 4)


def _selected_blocks(spec: LocalSpec, neighbour: Tensor | None, device: torch.device) -> Tensor:
    """The n blocks whose keys are attended to, as an index tensor into tables of nine."""
    if spec.neighbour_mode == "all":
        return torch.tensor(present_blocks(spec.chunks, spec.rule), device=device)
    own = torch.full((1,), SELF_BLOCK, dtype=torch.int64, device=device)
    return own if neighbour is None else torch.cat([own, neighbour_block(neighbour).view(1)])


def _block_sources(spec: LocalSpec, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For the selected blocks: their source chunks (n, M) and which keys do not count (M, 1, n·w²)."""
    tables = chunk_tables(spec.grid, spec.window, spec.rule, blocks.device)
    invalid = ~tables.valid.index_select(0, blocks)
    return tables.source.index_select(0, blocks), contiguous_copy(invalid.transpose(0, 1)).flatten(1).unsqueeze(1)


def _block_bias(table: Tensor | None, spec: LocalSpec, blocks: Tensor, like: Tensor) -> Tensor | None:
    """What is added to the scores of every chunk, (heads or 1, w², n·w²): the bias, and −∞ beyond an exact window."""
    if table is None and spec.rule != "exact":
        return None
    table = like.new_zeros(1, 1, 1) if table is None else table
    offsets = block_offsets(spec.window, like.device)
    bias = table_lookup(table, offsets, offsets)
    if spec.rule == "exact":
        near = offsets.abs() <= spec.window
        bias = bias.masked_fill(~(near[..., None, None, None] & near), float("-inf"))
    nine = bias.permute(0, 1, 4, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4).flatten(1, 2)
    return nine.index_select(1, blocks).transpose(1, 2).flatten(2)


SLIDING_CHUNK = Implementation(_refusal, _attend)
SLIDING_CHUNK_AUTOGRAD = Implementation(_refusal, _attend_autograd)
