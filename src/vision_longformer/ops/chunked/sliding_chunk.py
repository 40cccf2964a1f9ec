"""Sliding chunk with a hand-written backward: one block at a time, so that no copy of the nine blocks is ever kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..chunks import block_bias, block_sources, from_chunks, selected_blocks, to_chunks
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
    out = _SlidingChunk.apply(
        to_chunks(q * spec.scale, grid, window),
        to_chunks(k[:, global_tokens:], grid, window),
        to_chunks(v[:, global_tokens:], grid, window),
        k[:, :global_tokens].transpose(1, 2).unsqueeze(2),
        v[:, :global_tokens].transpose(1, 2).unsqueeze(2),
        block_bias(bias, spec, blocks, q),
        global_bias,
        source,
        invalid,
    )
    return from_chunks(out, grid, window)


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
        scores = q.new_empty(*q.shape[:4], global_tokens + len(source) * size)
        scores[..., :global_tokens] = q @ global_k.transpose(-1, -2)
        local = scores[..., global_tokens:]
        for block, keys in zip(local.split(size, -1), source, strict=True):
            block.copy_(q @ k.index_select(2, keys).transpose(-1, -2))
        if bias is not None:
            local += bias[:, None]
        if global_bias is not None:
            scores[..., :global_tokens] += global_bias[:, None, None]
        local.masked_fill_(invalid, float("-inf"))
        weights = torch.softmax(scores, -1)
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
        grad_scores = torch.empty_like(weights)
        grad_scores[..., :global_tokens] = grad_out @ global_v.transpose(-1, -2)
        grad_global_v = (weights[..., :global_tokens].transpose(-1, -2) @ grad_out).sum(2, keepdim=True)
        grad_v = torch.zeros_like(v)
        parts = (grad_scores[..., global_tokens:].split(size, -1), weights[..., global_tokens:].split(size, -1))
        for grad_block, block, keys in zip(*parts, source, strict=True):
            grad_block.copy_(grad_out @ v.index_select(2, keys).transpose(-1, -2))
            grad_v.index_add_(2, keys, block.transpose(-1, -2) @ grad_out)
        grad_scores.sub_(delta).mul_(weights)
        grad_q = grad_scores[..., :global_tokens] @ global_k
        grad_global_k = (grad_scores[..., :global_tokens].transpose(-1, -2) @ q).sum(2, keepdim=True)
        grad_k = torch.zeros_like(k)
        for grad_block, keys in zip(grad_scores[..., global_tokens:].split(size, -1), source, strict=True):
            grad_q += grad_block @ k.index_select(2, keys)
            grad_k.index_add_(2, keys, grad_block.transpose(-1, -2) @ q)
        grad_bias = grad_global_bias = None
        if ctx.needs_input_grad[5]:
            heads = (0, 2) if ctx.bias_heads > 1 else (0, 1, 2)
            grad_bias = grad_scores[..., global_tokens:].sum(heads).view(ctx.bias_heads, *grad_scores.shape[3:4], -1)
        if ctx.needs_input_grad[6]:
            grad_global_bias = grad_scores[..., :global_tokens].sum((0, 2, 3))
        return grad_q, grad_k, grad_v, grad_global_k, grad_global_v, grad_bias, grad_global_bias, None, None
