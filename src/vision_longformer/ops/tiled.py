"""Memory-lean local attention in PyTorch alone: tiles of chunk rows, the backward recomputes the scores.

Chunks are taken class by class (see ``tiles.py``), a few rows at a time, so that their gathered keys stay in the cache
and no temporary grows with the map. Arithmetic is in float32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .opaque import opaque
from .spec import LocalSpec, refuse_dilation
from .tiles import ChunkClass, fold_key_map, key_map, map_classes

FORWARD_TILE, BACKWARD_TILE = 1 << 19, 1 << 20
"""Elements of temporaries at a time: a few MB, what the caches hold."""


def refusal(spec: LocalSpec, q: Tensor) -> str | None:
    return refuse_dilation(spec)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    spec: LocalSpec,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kind = torch.promote_types(q.dtype, torch.float32)
    heads, dim, global_tokens = q.shape[2], q.shape[3], k.shape[1] - spec.grid.tokens
    queries = q.unflatten(1, tuple(spec.grid))
    keys, values = (key_map(x[:, global_tokens:], spec) for x in (k, v))
    out, lse = torch.empty_like(queries, memory_format=torch.contiguous_format), q.new_empty(*q.shape[:3], dtype=kind)
    lse_map = lse.unflatten(1, tuple(spec.grid))[..., None]
    scratch = q.new_empty(0, dtype=kind)
    for chunks in map_classes(spec, neighbour, global_tokens):
        added = chunks.bias(bias, global_bias, spec, q.shape[2], scratch)
        for images, rows in chunks.tiles(len(q), heads * chunks.key_count * dim * 2, FORWARD_TILE):
            tile = chunks.queries(queries, images, rows)
            shape = (*tile.shape[:4], chunks.key_count, dim)
            scratch, (tile_k, tile_v) = _buffers(scratch, shape, shape)
            for tokens, image, buffer in ((k, keys, tile_k), (v, values, tile_v)):
                buffer[..., :global_tokens, :] = tokens[images, :global_tokens].transpose(1, 2)[:, None, None]
                chunks.gather(image, images, rows, buffer)
            packed = tile.to(kind).flatten(4, 5).flatten(0, 2)
            result, tile_lse = _attend(packed, tile_k.flatten(0, 2), tile_v.flatten(0, 2), added, spec.scale)
            tile_out = chunks.queries(out, images, rows)
            tile_out.copy_(result.view(tile_out.shape))
            chunks.queries(lse_map, images, rows).copy_(tile_lse.reshape(*tile_out.shape[:6], 1))
    return out.flatten(1, 2), lse


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of (n, heads, queries or keys, dim) and its log-sum-exp (n, heads, queries)."""
    if q.device.type == "cpu":
        mask = None if bias is None else bias[None]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    scores = (q * scale) @ k.transpose(-1, -2)
    if bias is not None:
        scores += bias
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(lse).exp_() @ v, lse[..., 0]


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None,
    neighbour: Tensor | None, out: Tensor, lse: Tensor, spec: LocalSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kind, global_tokens = lse.dtype, k.shape[1] - spec.grid.tokens
    delta = (grad.to(kind) * out).sum(-1)
    maps = [x.unflatten(1, tuple(spec.grid)) for x in (q, grad, lse[..., None], delta[..., None])]
    keys, values = (key_map(x[:, global_tokens:], spec) for x in (k, v))
    grad_q = torch.empty_like(maps[0], memory_format=torch.contiguous_format)
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=kind) for x in (keys, values))
    grad_globals = [x.new_zeros(x[:, :global_tokens].transpose(1, 2).shape, dtype=kind) for x in (k, v)]
    grad_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=kind)
    grad_global_bias = None if global_bias is None else global_bias.new_zeros(global_bias.shape, dtype=kind)
    scratch = q.new_empty(0, dtype=kind)
    for chunks in map_classes(spec, neighbour, global_tokens):
        added = chunks.bias(bias, global_bias, spec, q.shape[2], scratch)
        count, size = chunks.query_count, chunks.key_count
        summed = q.new_zeros(q.shape[2], count, size, dtype=kind)
        for images, rows in chunks.tiles(len(q), q.shape[2] * size * (4 * q.shape[3] + 2 * count), BACKWARD_TILE):
            views = [chunks.queries(x, images, rows) for x in maps]
            lead = views[0].shape[:4]
            key_shape, score_shape = (*lead, size, q.shape[3]), (*lead, count, size)
            shapes = (key_shape, key_shape, key_shape, key_shape, score_shape, score_shape)
            scratch, (tile_k, tile_v, tile_dk, tile_dv, scores, grads) = _buffers(scratch, *shapes)
            for tokens, image, buffer in ((k, keys, tile_k), (v, values, tile_v)):
                buffer[..., :global_tokens, :] = tokens[images, :global_tokens].transpose(1, 2)[:, None, None]
                chunks.gather(image, images, rows, buffer)
            packed = [x.to(kind).flatten(4, 5).flatten(0, 3) for x in views]
            flat = [x.flatten(0, 3) for x in (tile_k, tile_v, tile_dk, tile_dv, scores, grads)]
            tile_dq = _tile_gradients(packed, flat, added, spec.scale)
            chunks.queries(grad_q, images, rows).copy_(tile_dq.view(views[0].shape))
            for buffer, total, image in ((tile_dk, grad_globals[0], grad_k), (tile_dv, grad_globals[1], grad_v)):
                total[images] += buffer[..., :global_tokens, :].sum((1, 2))
                chunks.scatter(buffer, images, rows, image)
            if bias is not None or global_bias is not None:
                summed += grads.flatten(0, 2).sum(0)
        if grad_bias is not None:
            _add_table_gradient(chunks, summed, grad_bias)
        if grad_global_bias is not None:
            grad_global_bias += summed[..., :global_tokens].sum(1)
    locals_ = [fold_key_map(image, spec) for image in (grad_k, grad_v)]
    full = [torch.cat([g.transpose(1, 2), x], 1).to(q.dtype) for g, x in zip(grad_globals, locals_, strict=True)]
    biases = [q.new_empty(0) if g is None else g.to(q.dtype) for g in (grad_bias, grad_global_bias)]
    return grad_q.flatten(1, 2), full[0], full[1], biases[0], biases[1]


def _tile_gradients(queries: list[Tensor], buffers: list[Tensor], bias: Tensor | None, scale: float) -> Tensor:
    """Gradients of a tile: of keys, values and scores into the buffers; those of the queries are returned.

    ``queries``: q, gradient, log-sum-exp, delta, all (n, queries, dim or 1). ``buffers``: k, v and their gradients
    (n, keys, dim), scores and their gradients (n, queries, keys).
    """
    q, grad, lse, delta = queries
    k, v, grad_k, grad_v, scores, grads = buffers
    if bias is None:
        scores.copy_((-lse).expand_as(scores))
    else:
        torch.sub(bias, lse.unflatten(0, (-1, len(bias))), out=scores.unflatten(0, (-1, len(bias))))
    scores.baddbmm_(q, k.transpose(1, 2), alpha=scale).exp_()
    torch.bmm(grad, v.transpose(1, 2), out=grads)
    torch.bmm(scores.transpose(1, 2), grad, out=grad_v)
    grads.sub_(delta).mul_(scores)
    torch.bmm(grads.transpose(1, 2), q, out=grad_k)
    grad_k.mul_(scale)
    return torch.bmm(grads, k).mul_(scale)


def _add_table_gradient(chunks: ChunkClass, summed: Tensor, table: Tensor) -> None:
    """Sum score gradients (heads, queries, keys) of a class into the entries of the offset table they came from."""
    for piece in chunks.pieces:
        rows, columns = (
            x + size // 2 for x, size in zip(chunks.offsets(piece, table.device), table.shape[1:], strict=True)
        )
        index = (rows[:, None, :, None] * table.shape[2] + columns[:, None]).flatten()
        table.view(len(table), -1).index_add_(1, index, summed[..., piece.keys].flatten(1))


def _buffers(scratch: Tensor, *shapes: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Contiguous buffers cut from ``scratch``, renewed if too small: fresh pages cost as much as arithmetic."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if scratch.numel() < sum(sizes):
        scratch = scratch.new_empty(sum(sizes))
    parts = scratch[: sum(sizes)].split(sizes)
    return scratch, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


attend = opaque("tiled", _forward, _backward)
