"""Local attention by FlexAttention: tokens in chunk order, one sparse block per chunk, the bias as score modification.

A chunk is padded to a power of two, so that a block of the mask is a chunk, and the mask is known from the geometry
without looking at pairs of tokens. Global tokens come first among the keys, in blocks of their own.

On CUDA ``flex_attention`` is compiled; on CPU it runs eagerly, forward only, which serves to check what is computed.
The compiled CUDA kernels, their gradients included, cannot be run without a GPU and are not tested where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..geometry import ceil_div, is_cyclic
from .chunks import from_chunks, to_chunks
from .spec import Implementation, Inputs, LocalSpec, refuse_dilation_per_head
from .tables import may_cache, neighbour_block

if TYPE_CHECKING:  # half a second to import, so only where it is used
    from torch.nn.attention.flex_attention import BlockMask

NOWHERE = -(1 << 20)
"""Row and column of slots that hold no token: too far from everything to be seen."""


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if q.device.type not in ("cpu", "cuda"):
        return f"FlexAttention runs on CUDA, and forward on CPU; here it is on {q.device.type}"
    if q.device.type == "cpu" and q.requires_grad and torch.is_grad_enabled():
        return "FlexAttention has no backward on CPU, and q requires a gradient"
    if q.device.type == "cuda" and (q.dtype == torch.float64 or q.shape[-1] < 16):
        return "the kernels of FlexAttention need a head dimension of at least 16, and less than float64"
    if is_cyclic(spec.rule) and min(spec.chunks) < 3:
        return f"with fewer than 3 chunks along an axis, rule {spec.rule!r} shows a key twice, which a mask cannot"
    return refuse_dilation_per_head(spec)


def _attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
    q, k, v, *_ = inputs
    if q.numel() == 0:
        return torch.empty_like(q)
    global_tokens, size = inputs.global_tokens, block_size(spec.window)
    plan = (_cached_plan if may_cache() else make_plan)(spec, global_tokens, q.device)
    keys, values = (
        torch.cat([_front(x[:, :global_tokens], size), _slots(x[:, global_tokens:], spec)], 2) for x in (k, v)
    )
    tile = min(64, size)  # must divide the blocks of the mask, which the defaults need not
    out = _flex(q.device.type)(
        _slots(q, spec), keys, values,
        score_mod=_score_modification(inputs, spec, plan), block_mask=plan.mask, scale=spec.scale,
        kernel_options={f"BLOCK_{side}": tile for side in ("M", "N", "M1", "N1", "M2", "N2")},
    )  # fmt: skip
    return from_chunks(out.unflatten(2, (-1, size))[..., : spec.window**2, :], spec)


class Plan(NamedTuple):
    """Rows and columns of all query slots and of all key slots, and the mask over them."""

    rows: Tensor
    columns: Tensor
    key_rows: Tensor
    key_columns: Tensor
    mask: BlockMask


def block_size(window: int) -> int:
    """Slots of a chunk: its tokens, padded to a power of two of at least 16."""
    return max(16, 1 << (window**2 - 1).bit_length())


def make_plan(spec: LocalSpec, global_tokens: int, device: torch.device) -> Plan:
    """The positions of all slots, and the block mask: which chunks see which, without a table of token pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    window, chunks, size = spec.window, spec.chunks, block_size(spec.window)
    global_blocks = ceil_div(global_tokens, size)
    chunk_row, chunk_column = torch.arange(chunks.height, device=device), torch.arange(chunks.width, device=device)
    rows, columns = torch.meshgrid(chunk_row, chunk_column, indexing="ij")
    inner = torch.arange(size, device=device)
    held = inner < window * window
    row = torch.where(held, rows.reshape(-1, 1) * window + inner // window, NOWHERE).flatten()
    column = torch.where(held, columns.reshape(-1, 1) * window + inner % window, NOWHERE).flatten()
    near = _near(chunk_row, spec)[:, None, :, None] & _near(chunk_column, spec)[None, :, None, :]
    seen = F.pad(near.reshape(chunks.tokens, chunks.tokens), (global_blocks, 0), value=True)
    front = row.new_full((global_blocks * size,), NOWHERE)
    key_row, key_column = torch.cat([front, row]), torch.cat([front, column])
    mask = BlockMask.from_kv_blocks(
        seen.sum(-1, dtype=torch.int32)[None, None],
        seen.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None, None],
        BLOCK_SIZE=size,
        mask_mod=_mask_modification(spec, global_tokens, row, column, key_row, key_column),
        seq_lengths=(row.numel(), key_row.numel()),
    )
    return Plan(row, column, key_row, key_column, mask)


@lru_cache(maxsize=64)
def _cached_plan(spec: LocalSpec, global_tokens: int, device: torch.device) -> Plan:
    with torch.inference_mode(False):  # the tables may be needed by a backward later
        return make_plan(spec, global_tokens, device)


def _near(chunk: Tensor, spec: LocalSpec) -> Tensor:
    """Which chunks of an axis hold keys of which, (chunks, chunks)."""
    reach = spec.common_dilation if spec.neighbour_mode == "all" else int(spec.neighbour_mode == "one")
    apart = (chunk[:, None] - chunk).abs()
    if is_cyclic(spec.rule):
        apart = torch.minimum(apart, chunk.numel() - apart)
    return apart <= reach


def _mask_modification(
    spec: LocalSpec, global_tokens: int, rows: Tensor, columns: Tensor, key_rows: Tensor, key_columns: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = _axis(rows[query], key_rows[key], spec.grid.height, spec)
        column = _axis(columns[query], key_columns[key], spec.grid.width, spec)
        local = row.seen & column.seen
        if spec.neighbour_mode == "self":
            local = local & (row.block == 0) & (column.block == 0)
        return (key < global_tokens) | local

    return seen


class _Axis(NamedTuple):
    """One axis of a pair of query and key: offset query − key in steps, block of the key, whether it is seen."""

    offset: Tensor
    block: Tensor
    seen: Tensor


def _axis(query: Tensor, key: Tensor, length: int, spec: LocalSpec) -> _Axis:
    window, dilation, counts = spec.window, spec.common_dilation, key < length
    if is_cyclic(spec.rule):
        period = ceil_div(length, window) * window
        apart = torch.div(key, window, rounding_mode="floor") - torch.div(query, window, rounding_mode="floor")
        last = period // window - 1
        moved = torch.where(apart == last, -period, torch.where(apart == -last, period, 0))
        if spec.rule == "cyclic_release":
            counts = counts | (moved != 0)
        key = torch.where(key == NOWHERE, key, key + moved)
    distance = query - key
    block = torch.div(key, window, rounding_mode="floor") - torch.div(query, window, rounding_mode="floor")
    near = block.abs() <= 1
    if spec.rule == "exact":
        near = (distance.abs() <= window * dilation) & (distance % dilation == 0)
    offset = torch.div(distance, dilation, rounding_mode="floor")
    return _Axis(offset, block, near & counts & (key != NOWHERE) & (query != NOWHERE))


def _score_modification(inputs: Inputs, spec: LocalSpec, plan: Plan) -> Callable[..., Tensor] | None:
    """What is added to the scores; for neighbour mode ``one`` also −∞ on the blocks of the mask not wanted now."""
    _, _, _, bias, global_bias, neighbour = inputs
    if bias is None and global_bias is None and neighbour is None:
        return None
    global_tokens = inputs.global_tokens
    centre, last = 2 * spec.window - 1, max(global_tokens - 1, 0)
    wanted = None if neighbour is None else neighbour_block(neighbour)

    def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = _axis(plan.rows[query], plan.key_rows[key], spec.grid.height, spec)
        column = _axis(plan.columns[query], plan.key_columns[key], spec.grid.width, spec)
        is_global = key < global_tokens
        if bias is not None:
            entry = [(x.offset + centre).clamp(0, 2 * centre) for x in (row, column)]
            score = score + torch.where(is_global, 0.0, bias[head, entry[0], entry[1]])
        if global_bias is not None and global_tokens:
            score = score + torch.where(is_global, global_bias[head, key.clamp(0, last)], 0.0)
        if wanted is not None:
            own = (row.block == 0) & (column.block == 0)
            chosen = (row.block == wanted // 3 - 1) & (column.block == wanted % 3 - 1)
            score = torch.where(is_global | own | chosen, score, float("-inf"))
        return score

    return modify


def _slots(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """(B, N, heads, dim) to (B, heads, slots, dim) in chunk order, chunks padded to blocks."""
    return F.pad(to_chunks(tokens, spec), (0, 0, 0, block_size(spec.window) - spec.window**2)).flatten(2, 3)


def _front(tokens: Tensor, size: int) -> Tensor:
    """Global tokens (B, G, heads, dim) to (B, heads, slots, dim), padded to whole blocks."""
    return F.pad(tokens.transpose(1, 2), (0, 0, 0, -tokens.shape[1] % size))


def _flex(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    function: Callable[..., Any] = flex_attention
    return _compiled() if device == "cuda" and not torch.compiler.is_compiling() else function


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


FLEX = Implementation(_refusal, _attend)
