"""Local attention by FlexAttention: tokens in chunk order, one sparse block per chunk, the bias as score modification.

A chunk is padded to a power of two, so that a block of the mask is a chunk, and which blocks see which is known from
the geometry without looking at pairs of tokens. Global tokens come last among the keys, in blocks of their own.

On CUDA ``flex_attention`` is compiled, once for each geometry. Where it cannot be, that is an error: uncompiled it
would hold the scores of all pairs of tokens. On CPU it runs like that, forward only, to check what is computed. The
compiled CUDA kernels cannot be run without a GPU and are not tested where there is none.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..geometry import Grid, ceil_div, is_cyclic
from .chunks import from_chunks, to_chunks
from .spec import Implementation, Inputs, LocalSpec, refuse_dilation_per_head, refuse_halo
from .tables import may_cache, neighbour_block

NOWHERE = -(1 << 20)
"""Row and column of slots that hold no token: too far from everything to be seen."""

TABLE_BYTES = 64 << 20
"""What the block tables that are kept may take on all devices together."""

COMPILED = 64
"""How many compiled functions are kept: one for each stage and size of map, with gradients and without."""


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if q.device.type not in ("cpu", "cuda"):
        return f"FlexAttention runs on CUDA, and forward on CPU; here it is on {q.device.type}"
    if q.device.type == "cpu" and q.requires_grad and torch.is_grad_enabled():
        return "FlexAttention has no backward on CPU, and q requires a gradient"
    if q.device.type == "cuda" and (q.dtype == torch.float64 or q.shape[-1] < 16):
        return "the kernels of FlexAttention need a head dimension of at least 16, and less than float64"
    if is_cyclic(spec.rule) and min(spec.chunks) < 3:
        return f"with fewer than 3 chunks along an axis, rule {spec.rule!r} shows a key twice, which a mask cannot"
    return refuse_dilation_per_head(spec) or refuse_halo(spec)


def _attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
    q, k, v, bias, global_bias, neighbour = inputs
    if q.numel() == 0:
        return torch.empty_like(q)
    global_tokens, size = inputs.global_tokens(spec), block_size(spec.window)
    keys, values = (
        torch.cat([_slots(x[:, global_tokens:], spec), _blocks(x[:, :global_tokens], size)], 2) for x in (k, v)
    )
    geometry = spec.chunks, _reach(spec), is_cyclic(spec.rule), ceil_div(global_tokens, size), q.device
    tables = TABLES.get(*geometry) if may_cache() else block_tables(*geometry)
    block = None if neighbour is None else neighbour_block(neighbour)
    arguments = (_slots(q, spec), keys, values, bias, global_bias, block, *tables)
    if _needs_compiler(q.device) and not torch.compiler.is_compiling():
        out = _compiled(spec, global_tokens, _signature(arguments))(*arguments)
    else:
        out = _flex(spec, global_tokens)(*arguments)
    return from_chunks(out.unflatten(2, (-1, size))[..., : spec.window**2, :], spec)


def block_size(window: int) -> int:
    """Slots of a chunk: its tokens, padded to a power of two of at least 16."""
    return max(16, 1 << (window**2 - 1).bit_length())


def _slots(tokens: Tensor, spec: LocalSpec) -> Tensor:
    """(B, N, heads, dim) to (B, heads, slots, dim) in chunk order, chunks padded to blocks."""
    return F.pad(to_chunks(tokens, spec), (0, 0, 0, block_size(spec.window) - spec.window**2)).flatten(2, 3)


def _blocks(tokens: Tensor, size: int) -> Tensor:
    """Global tokens (B, G, heads, dim) to (B, heads, slots, dim), padded to whole blocks."""
    return F.pad(tokens.transpose(1, 2), (0, 0, 0, -tokens.shape[1] % size))


# Which blocks see which


class BlockTables(NamedTuple):
    """The tables of a ``BlockMask`` for M chunks and g blocks of global keys, int32, with two axes of size 1 in front.

    A row of ``kv_indices`` (M, M + g) begins with the blocks of keys that a chunk of queries sees, ``kv_num_blocks``
    (M) of them; a row of ``q_indices`` (M + g, M) with the chunks that see a block of keys, ``q_num_blocks`` (M + g) of
    them. What follows in a row has no meaning: rows overlap in memory, so that no table takes M × M entries.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor


def block_tables(chunks: Grid, reach: int, cyclic: bool, global_blocks: int, device: torch.device) -> BlockTables:
    """For chunks that see all chunks up to ``reach`` away along both axes, and the global blocks after them."""
    (row, rows), (column, columns) = (_axis_range(count, reach, cyclic, device) for count in chunks)
    seen = (rows[:, None] * columns).flatten()
    most = min(2 * reach + 1, chunks.height) * min(2 * reach + 1, chunks.width)
    place = torch.arange(most + global_blocks, dtype=torch.int32, device=device)
    wide = columns[None, :, None]
    near_row = (row[:, None, None] + place // wide) % chunks.height
    near_column = (column[None, :, None] + place % wide) % chunks.width
    near = (near_row * chunks.width + near_column).flatten(0, 1)
    last = chunks.tokens + global_blocks - 1
    to_global = (chunks.tokens + place - seen[:, None]).clamp(max=last)
    keys = torch.where(place < seen[:, None], near, to_global)
    everyone = torch.arange(chunks.tokens + (global_blocks - 1) * most, dtype=torch.int32, device=device)
    queries = torch.cat([near[:, :most].flatten(), everyone % chunks.tokens])
    by_everyone = seen.new_full((global_blocks,), chunks.tokens)
    return BlockTables(
        (seen + global_blocks)[None, None],
        _overlapping(F.pad(keys.flatten(), (0, chunks.tokens - most)), chunks.tokens, last + 1, keys.shape[1]),
        torch.cat([seen, by_everyone])[None, None],
        _overlapping(queries, last + 1, chunks.tokens, most),
    )


def _reach(spec: LocalSpec) -> int:
    """How many chunks away along an axis there are keys."""
    return spec.common_dilation if spec.neighbour_mode == "all" else int(spec.neighbour_mode == "one")


def _axis_range(chunks: int, reach: int, cyclic: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first of the chunks that each chunk of an axis sees, and how many they are, wrapping if cyclic."""
    chunk = torch.arange(chunks, dtype=torch.int32, device=device)
    if cyclic:
        return chunk - reach, torch.full_like(chunk, 2 * reach + 1)
    first = (chunk - reach).clamp(min=0)
    return first, (chunk + reach).clamp(max=chunks - 1) - first + 1


def _overlapping(entries: Tensor, rows: int, columns: int, step: int) -> Tensor:
    """A table (1, 1, rows, columns) whose rows begin ``step`` entries apart."""
    return entries.as_strided((1, 1, rows, columns), (entries.numel(), entries.numel(), step, 1))


class TableCache:
    """The block tables that were used last, as many as ``budget`` bytes hold."""

    def __init__(self, budget: int) -> None:
        self.budget, self.bytes = budget, 0
        self._tables: OrderedDict[tuple[Any, ...], BlockTables] = OrderedDict()

    def get(self, *geometry: Any) -> BlockTables:
        """What :func:`block_tables` makes of its arguments."""
        if geometry not in self._tables:
            with torch.inference_mode(False):  # they may be needed by a backward later
                self._tables[geometry] = block_tables(*geometry)
            self.bytes += _bytes(self._tables[geometry])
        self._tables.move_to_end(geometry)
        tables = self._tables[geometry]
        while self.bytes > self.budget:
            self.bytes -= _bytes(self._tables.popitem(last=False)[1])
        return tables


def _bytes(tables: BlockTables) -> int:
    return sum(x.untyped_storage().nbytes() for x in tables)


TABLES = TableCache(TABLE_BYTES)


# The compiled function


def _needs_compiler(device: torch.device) -> bool:
    return device.type == "cuda"


def _flex(spec: LocalSpec, global_tokens: int) -> Callable[..., Tensor]:
    """The function that is compiled: of q, k, v in slots, the biases, the block of the neighbour, the block tables."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention  # half a second, so only where it is used

    size = block_size(spec.window)
    tile = min(64, size)  # must divide the blocks of the mask, which the defaults need not
    options: Any = {f"BLOCK_{side}": tile for side in ("M", "N", "M1", "N1", "M2", "N2")}

    def attend(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, block: Tensor | None,
        kv_num_blocks: Tensor, kv_indices: Tensor, q_num_blocks: Tensor, q_indices: Tensor,
    ) -> Tensor:  # fmt: skip
        if _needs_compiler(q.device) and not torch.compiler.is_compiling():
            raise RuntimeError(
                "FlexAttention was not compiled and would hold the scores of all pairs of tokens; "
                "enable torch.compile, or choose another implementation"
            )
        mask = BlockMask(
            (q.shape[2], k.shape[2]), kv_num_blocks, kv_indices, None, None, q_num_blocks, q_indices, None, None,
            (size, size), mask_modification(spec, global_tokens),
        )  # fmt: skip
        modify = _score_modification(bias, global_bias, block, spec, global_tokens)
        return flex_attention(q, k, v, score_mod=modify, block_mask=mask, scale=spec.scale, kernel_options=options)

    return attend


@lru_cache(maxsize=COMPILED)
def _compiled(spec: LocalSpec, global_tokens: int, signature: tuple[Any, ...]) -> Callable[..., Tensor]:
    """Compiled once for all layers and steps that call it alike.

    Torch counts recompilations by code object and gives up beyond a limit, so each geometry has a code object of its
    own; a whole graph is asked for, so that giving up is an error.
    """
    attend = _flex(spec, global_tokens)
    own = types.FunctionType(attend.__code__.replace(), attend.__globals__, closure=attend.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _signature(arguments: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """All that compiled code depends on beside the geometry."""
    tensors = tuple(None if x is None else (x.shape, x.dtype, x.device, x.requires_grad) for x in arguments)
    return *tensors, torch.is_grad_enabled()


# Masks and scores


def mask_modification(spec: LocalSpec, global_tokens: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Which slots of keys a slot of queries sees; neighbour mode ``one`` is left to the score modification."""

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row, column = _axes(query, key, spec)
        local = row.seen & column.seen
        if spec.neighbour_mode == "self":
            local = local & (row.block == 0) & (column.block == 0)
        return local | (_global_key(key, spec, global_tokens) >= 0)

    return seen


def _score_modification(
    bias: Tensor | None, global_bias: Tensor | None, block: Tensor | None, spec: LocalSpec, global_tokens: int
) -> Callable[..., Tensor] | None:
    """What is added to the scores; for neighbour mode ``one`` also −∞ on the blocks of the mask not wanted now."""
    if bias is None and global_bias is None and block is None:
        return None
    centre = 2 * spec.window - 1

    def modify(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row, column = _axes(query, key, spec)
        number = _global_key(key, spec, global_tokens)
        is_global = number >= 0
        if bias is not None:
            entry = [(x.offset + centre).clamp(0, 2 * centre) for x in (row, column)]
            score = score + torch.where(is_global, 0.0, bias[head, entry[0], entry[1]])
        if global_bias is not None and global_tokens:
            score = score + torch.where(is_global, global_bias[head, number.clamp(min=0)], 0.0)
        if block is not None:
            own = (row.block == 0) & (column.block == 0)
            chosen = (row.block == block // 3 - 1) & (column.block == block % 3 - 1)
            score = torch.where(is_global | own | chosen, score, float("-inf"))
        return score

    return modify


def _global_key(key: Tensor, spec: LocalSpec, global_tokens: int) -> Tensor:
    """The number of the global key in a slot, negative if there is none."""
    number = key - spec.chunks.tokens * block_size(spec.window)
    return torch.where(number < global_tokens, number, -1)


class _Axis(NamedTuple):
    """One axis of a pair of query and key: offset query − key in steps, block of the key, whether it is seen."""

    offset: Tensor
    block: Tensor
    seen: Tensor


def _axes(query: Tensor, key: Tensor, spec: LocalSpec) -> tuple[_Axis, _Axis]:
    """Rows and columns of the tokens in a pair of slots."""
    (query_row, query_column), (key_row, key_column) = _position(query, spec), _position(key, spec)
    return _axis(query_row, key_row, spec.grid.height, spec), _axis(query_column, key_column, spec.grid.width, spec)


def _position(slot: Tensor, spec: LocalSpec) -> tuple[Tensor, Tensor]:
    """Row and column of the token in a slot, :data:`NOWHERE` in the padding of a chunk and among the global keys."""
    window, chunks, size = spec.window, spec.chunks, block_size(spec.window)
    chunk, inner = slot // size, slot % size
    held = (chunk < chunks.tokens) & (inner < window * window)
    row = chunk // chunks.width * window + inner // window
    column = chunk % chunks.width * window + inner % window
    return torch.where(held, row, NOWHERE), torch.where(held, column, NOWHERE)


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


FLEX = Implementation(_refusal, _attend)
