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

from ..geometry import Grid, is_cyclic
from .chunks import from_chunks, neighbour_block, to_chunks
from .spec import LocalSpec

if TYPE_CHECKING:  # half a second to import, so only where it is used
    from torch.nn.attention.flex_attention import BlockMask

NOWHERE = -(1 << 20)
"""Row and column of slots that hold no token: too far from everything to be seen."""


def refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if q.device.type not in ("cpu", "cuda"):
        return f"FlexAttention runs on CUDA, and forward on CPU; here it is on {q.device.type}"
    if q.device.type == "cpu" and q.requires_grad and torch.is_grad_enabled():
        return "FlexAttention has no backward on CPU, and q requires a gradient"
    if q.device.type == "cuda" and (q.dtype == torch.float64 or q.shape[-1] < 16):
        return "the kernels of FlexAttention need a head dimension of at least 16, and less than float64"
    if is_cyclic(spec.rule) and min(spec.grid.chunks(spec.window)) < 3:
        return f"with fewer than 3 chunks along an axis, rule {spec.rule!r} shows a key twice, which a mask cannot"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    spec: LocalSpec,
) -> Tensor:  # fmt: skip
    """Shapes as in :func:`~vision_longformer.ops.local_attention`."""
    if q.numel() == 0:
        return torch.empty_like(q)
    global_tokens, size = k.shape[1] - spec.grid.tokens, block_size(spec.window)
    layout = Layout(spec.grid, spec.window, spec.rule, spec.neighbours, spec.dilation, global_tokens, q.device)
    plan = _plan(layout) if torch.compiler.is_compiling() else _cached_plan(layout)
    keys, values = (
        torch.cat([_front(x[:, :global_tokens], size), _slots(x[:, global_tokens:], spec)], 2) for x in (k, v)
    )
    tile = min(64, size)  # must divide the blocks of the mask, which the defaults need not
    out = _flex(q.device.type)(
        _slots(q, spec), keys, values,
        score_mod=_score_modification(layout, plan, bias, global_bias, neighbour),
        block_mask=plan.mask, scale=spec.scale,
        kernel_options={f"BLOCK_{side}": tile for side in ("M", "N", "M1", "N1", "M2", "N2")},
    )  # fmt: skip
    chunked = out.unflatten(2, (-1, size))[..., : spec.window**2, :]
    return from_chunks(chunked, spec.grid, spec.window)


class Layout(NamedTuple):
    """What a mask depends on."""

    grid: Grid
    window: int
    rule: str
    neighbours: str
    dilation: int
    global_tokens: int
    device: torch.device

    @property
    def front(self) -> int:
        """Slots before the first local key."""
        size = block_size(self.window)
        return -(-self.global_tokens // size) * size


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


def _plan(layout: Layout) -> Plan:
    """The positions of all slots, and the block mask: which chunks see which, without a table of token pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    grid, window, device, size = layout.grid, layout.window, layout.device, block_size(layout.window)
    chunks = grid.chunks(window)
    chunk_row, chunk_column = torch.arange(chunks.height, device=device), torch.arange(chunks.width, device=device)
    rows, columns = torch.meshgrid(chunk_row, chunk_column, indexing="ij")
    inner = torch.arange(size, device=device)
    held = inner < window * window
    row = torch.where(held, rows.reshape(-1, 1) * window + inner // window, NOWHERE).flatten()
    column = torch.where(held, columns.reshape(-1, 1) * window + inner % window, NOWHERE).flatten()
    near = _near(chunk_row, layout)[:, None, :, None] & _near(chunk_column, layout)[None, :, None, :]
    seen = F.pad(near.reshape(chunks.tokens, chunks.tokens), (layout.front // size, 0), value=True)
    front = row.new_full((layout.front,), NOWHERE)
    key_row, key_column = torch.cat([front, row]), torch.cat([front, column])
    mask = BlockMask.from_kv_blocks(
        seen.sum(-1, dtype=torch.int32)[None, None],
        seen.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None, None],
        BLOCK_SIZE=size,
        mask_mod=_mask_modification(layout, row, column, key_row, key_column),
        seq_lengths=(row.numel(), key_row.numel()),
    )
    return Plan(row, column, key_row, key_column, mask)


@lru_cache(maxsize=64)
def _cached_plan(layout: Layout) -> Plan:
    with torch.inference_mode(False):  # the tables may be needed by a backward later
        return _plan(layout)


def _near(chunk: Tensor, layout: Layout) -> Tensor:
    """Which chunks of an axis hold keys of which, (chunks, chunks)."""
    reach = layout.dilation if layout.neighbours == "all" else int(layout.neighbours == "one")
    apart = (chunk[:, None] - chunk).abs()
    if is_cyclic(layout.rule):
        apart = torch.minimum(apart, chunk.numel() - apart)
    return apart <= reach


def _mask_modification(
    layout: Layout, rows: Tensor, columns: Tensor, key_rows: Tensor, key_columns: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = _axis(rows[query], key_rows[key], layout.grid.height, layout)
        column = _axis(columns[query], key_columns[key], layout.grid.width, layout)
        local = row.seen & column.seen
        if layout.neighbours == "self":
            local = local & (row.block == 0) & (column.block == 0)
        return (key < layout.global_tokens) | local

    return seen


class _Axis(NamedTuple):
    """One axis of a pair of query and key: offset query − key in steps, block of the key, whether it is seen."""

    offset: Tensor
    block: Tensor
    seen: Tensor


def _axis(query: Tensor, key: Tensor, length: int, layout: Layout) -> _Axis:
    window, counts = layout.window, key < length
    if is_cyclic(layout.rule):
        period = -(-length // window) * window
        apart = torch.div(key, window, rounding_mode="floor") - torch.div(query, window, rounding_mode="floor")
        last = period // window - 1
        moved = torch.where(apart == last, -period, torch.where(apart == -last, period, 0))
        if layout.rule == "cyclic_release":
            counts = counts | (moved != 0)
        key = torch.where(key == NOWHERE, key, key + moved)
    distance = query - key
    block = torch.div(key, window, rounding_mode="floor") - torch.div(query, window, rounding_mode="floor")
    near = block.abs() <= 1
    if layout.rule == "exact":
        near = (distance.abs() <= window * layout.dilation) & (distance % layout.dilation == 0)
    offset = torch.div(distance, layout.dilation, rounding_mode="floor")
    return _Axis(offset, block, near & counts & (key != NOWHERE) & (query != NOWHERE))


def _score_modification(
    layout: Layout, plan: Plan, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None
) -> Callable[..., Tensor] | None:
    """What is added to the scores; for neighbour mode ``one`` also −∞ on the blocks of the mask not wanted now."""
    if bias is None and global_bias is None and neighbour is None:
        return None
    centre, last = 2 * layout.window - 1, max(layout.global_tokens - 1, 0)
    wanted = None if neighbour is None else neighbour_block(neighbour)

    def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = _axis(plan.rows[query], plan.key_rows[key], layout.grid.height, layout)
        column = _axis(plan.columns[query], plan.key_columns[key], layout.grid.width, layout)
        is_global = key < layout.global_tokens
        if bias is not None:
            entry = [(x.offset + centre).clamp(0, 2 * centre) for x in (row, column)]
            score = score + torch.where(is_global, 0.0, bias[head, entry[0], entry[1]])
        if global_bias is not None and layout.global_tokens:
            score = score + torch.where(is_global, global_bias[head, key.clamp(0, last)], 0.0)
        if wanted is not None:
            own = (row.block == 0) & (column.block == 0)
            chosen = (row.block == wanted // 3 - 1) & (column.block == wanted % 3 - 1)
            score = torch.where(is_global | own | chosen, score, float("-inf"))
        return score

    return modify


def _slots(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """(B, N, heads, dim) to (B, heads, slots, dim) in chunk order, chunks padded to blocks."""
    chunked = to_chunks(tokens, spec.grid, spec.window)
    return F.pad(chunked, (0, 0, 0, block_size(spec.window) - spec.window**2)).flatten(2, 3)


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
