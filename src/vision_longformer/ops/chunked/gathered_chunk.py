"""Sliding chunk by one gather of keys and one of values: the form of local attention that exported graphs hold.

Where the size of the map is known, chunks that see as many keys are computed together: the corners, the edges and the
inside, each with just the keys that exist, and the numbers of tokens are constants. Where the size is a symbol, all
chunks are computed together: each gathers as many rows and columns of keys as exist, three chunks of them at most, some
of them twice.

Tokens are gathered head by head, straight into the layout of torch's attention, which runtimes have a kernel for.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from ..chunks import contiguous_copy
from ..spec import Implementation, Inputs, LocalSpec, refuse_dilation, refuse_halo
from .whole_map import softmax_attention


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if spec.rule not in ("chunk", "exact") or spec.neighbour_mode != "all":
        return "it has the rules 'chunk' and 'exact' with all neighbours only"
    return refuse_dilation(spec) or refuse_halo(spec)


def _attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
    return _attend_rows(inputs.q, inputs, spec, None)


def attend_all_rows(q: Tensor, inputs: Inputs, spec: LocalSpec, from_global_bias: Tensor | None) -> Tensor:
    """The rows of global and of local tokens, (B, G + N, heads, dim), put in order once.

    ``q`` are the queries of all of them, ``from_global_bias`` (heads, G, G + N) is that of the global ones.
    """
    global_q, k, v = (x.transpose(1, 2) for x in (q[:, : inputs.global_tokens(spec)], inputs.k, inputs.v))
    rows = softmax_attention(global_q, k, v, from_global_bias, spec.scale).transpose(1, 2)
    return _attend_rows(q, inputs, spec, contiguous_copy(rows))


def _attend_rows(q: Tensor, inputs: Inputs, spec: LocalSpec, global_rows: Tensor | None) -> Tensor:
    """The rows of local tokens, the last of ``q``, after ``global_rows``, which are those of the first."""
    first = 0 if global_rows is None else int(global_rows.shape[1])
    heads = int(q.shape[2])  # torch.jit.trace has tensors
    any_size = any(isinstance(length, torch.SymInt) for length in spec.grid)
    outputs, places = (attend_any_size if any_size else _attend_by_class)(q, first, inputs, spec)
    if global_rows is not None:
        outputs = [global_rows.flatten(1, 2), *outputs]
        places = torch.cat([torch.arange(first * heads, device=q.device), places + first * heads])
    return torch.cat(outputs, 1).index_select(1, places).unflatten(1, (-1, heads))


def _gather(x: Tensor, numbers: Tensor) -> Tensor:
    """From (B, N, heads, dim) the rows of the given numbers (n,), token · heads + head: (B, n, dim)."""
    return contiguous_copy(x).flatten(1, 2).index_select(1, numbers)


def _tokens(rows: Any, columns: Any, width: int) -> Any:
    """Numbers of the tokens at rows (a, n₁) and columns (b, n₂) of each of a·b chunks, (ab, n₁n₂)."""
    numbers = rows[:, None, :, None] * width + columns[None, :, None, :]
    return numbers.reshape(-1, rows.shape[1] * columns.shape[1])


def _biases(inputs: Inputs, spec: LocalSpec) -> Tensor:
    """What may be added to a score, (heads, G + (4w)²): the bias of each global key; then that of each offset, row by
    row, with −∞ in a last row and a last column, for keys that are not seen.

    Without any it is zero: OpenVINO 2026.4 computes something else where attention has no mask and tokens are gathered.
    """
    q, _, _, bias, global_bias, _ = inputs
    given, heads, side = next((x for x in (bias, global_bias) if x is not None), q), q.shape[2], 4 * spec.window - 1
    to_global = given.new_zeros(heads, inputs.global_tokens(spec)) if global_bias is None else global_bias
    local = F.pad(given.new_zeros(heads, side, side) if bias is None else bias, (0, 1, 0, 1), value=float("-inf"))
    return torch.cat([to_global, local.flatten(1)], 1)


# A map of known size


def _attend_by_class(q: Tensor, first: int, inputs: Inputs, spec: LocalSpec) -> tuple[list[Tensor], Tensor]:
    """Rows of tokens and heads (B, n, dim), and the places among them of those of the map, in its order.

    Chunks that see keys at the same offsets are a batch, with one bias for all. K such classes of M chunks each, which
    see as many keys, are heads of their own: (B · M, K · heads, n, dim).
    """
    device, heads, dim, count = q.device, *map(int, (*q.shape[2:], inputs.global_tokens(spec)))
    biases, head, outputs, order = _biases(inputs, spec), np.arange(heads)[:, None], [], []
    for group in _groups(spec):
        own, seen, entries = (np.stack(arrays) for arrays in zip(*group, strict=True))
        seen, entries = (_after_global(numbers, count) for numbers in (seen, entries))
        own, seen = (tokens.swapaxes(0, 1)[:, :, None] * heads + head for tokens in (own, seen))  # (M, K, heads, n)
        queries, keys, values = (
            _gather(x, torch.tensor(numbers.ravel(), device=device)).view(-1, len(group) * heads, numbers.shape[3], dim)
            for x, numbers in ((q, own + first * heads), (inputs.k, seen), (inputs.v, seen))
        )
        mask = biases.index_select(1, torch.tensor(entries.ravel(), device=device)).unflatten(1, entries.shape)
        mask = mask.transpose(0, 1).flatten(0, 1)
        rows = contiguous_copy(softmax_attention(queries, keys, values, mask, spec.scale))
        outputs.append(rows.view(q.shape[0], own.size, dim))
        order.append(own.ravel())
    return outputs, torch.tensor(np.argsort(np.concatenate(order)), device=device)


def _after_global(numbers: np.ndarray, count: int) -> np.ndarray:
    """Those of ``count`` global keys, then those of local ones, along the last axis."""
    return np.concatenate([np.broadcast_to(np.arange(count), (*numbers.shape[:-1], count)), numbers + count], -1)


class ChunkClass(NamedTuple):
    """The M chunks that see keys at the same offsets: tokens of the map that are their n queries, (M, n), and their m
    keys, (M, m), and the entries of all pairs among the local biases, (n, m)."""

    queries: np.ndarray
    keys: np.ndarray
    entries: np.ndarray


def _groups(spec: LocalSpec) -> list[list[ChunkClass]]:
    """The classes of a map, those of as many chunks, queries and keys together."""
    groups: dict[tuple[int, ...], list[ChunkClass]] = {}
    for rows, columns in product(*(_axis_classes(length, spec.window) for length in spec.grid)):
        own, seen = (_tokens(*pair, spec.grid.width) for pair in zip(rows, columns, strict=True))
        down, right = (queries[0][:, None] - keys[0] for queries, keys in (rows, columns))
        entries = _entries(down, right, spec)
        groups.setdefault((*own.shape, seen.shape[1]), []).append(ChunkClass(own, seen, entries))
    return list(groups.values())


def _axis_classes(length: int, window: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions of queries (c, n) and of keys (c, m) of the chunks of an axis, those of like offsets together."""
    classes: dict[tuple[int, int, int], list[int]] = {}
    for start in range(0, length, window):
        before, after = min(start, window), min(length - start, 2 * window)
        classes.setdefault((min(after, window), before, after), []).append(start)
    return [
        (np.array(starts)[:, None] + np.arange(queries), np.array(starts)[:, None] + np.arange(-before, after))
        for (queries, before, after), starts in classes.items()
    ]


def _entries(rows: np.ndarray, columns: np.ndarray, spec: LocalSpec) -> np.ndarray:
    """Places in the local biases for all pairs of queries and keys, (n₁n₂, m₁m₂), from their offsets along each axis,
    (n₁, m₁) and (n₂, m₂)."""
    side = 4 * spec.window
    rows, columns = (
        np.where((spec.rule == "exact") & (abs(offsets) > spec.window), side - 1, offsets + side // 2 - 1)
        for offsets in (rows, columns)
    )
    entries = rows[:, None, :, None] * side + columns[None, :, None, :]
    return entries.reshape(entries.shape[0] * entries.shape[1], -1)


# A map of any size

REPEATED = -40.0
"""Added to the score of a key that is there twice: beside the first it weighs 4e-18, less than rounding in float64.

To mask it by −∞ takes onnxruntime three times as long: the exponentials of such scores are denormal numbers.
"""


class AnySize(NamedTuple):
    """Where the tokens and biases of M chunks are. Each gathers m keys: three chunks by three, or fewer rows or columns
    if there are no more.

    A chunk with fewer neighbours than that repeats keys that it sees. Without global tokens each chunk repeats its own
    first token in the place of one, so that there are two keys at least: of one, a graph would not know whether to
    broadcast it. ``queries`` (heads · M · n) and ``keys`` (heads · M · (G + m), G at least 1) are token · heads + head.
    ``columns`` are the entries of pairs of a query and a key along the columns of the biases, (c₂ · w · m₂), and
    ``runs`` (M · n · m₁) places of the runs of m₂ biases that these make of each row. ``places`` (N · heads) are those
    of the tokens of the map among the queries.
    """

    queries: Tensor
    keys: Tensor
    columns: Tensor
    runs: Tensor
    places: Tensor


def attend_any_size(q: Tensor, first: int, inputs: Inputs, spec: LocalSpec) -> tuple[list[Tensor], Tensor]:
    """As :func:`_attend_by_class`, with all chunks of a head as heads of their own, (B, heads · M, n, dim)."""
    batch, _, heads, dim = q.shape
    plan, chunks = _planned(inputs, spec), heads * spec.chunks.tokens
    queries, keys, values = (
        _gather(x, numbers).view(batch, chunks, -1, dim)
        for x, numbers in ((q, plan.queries + first * heads), (inputs.k, plan.keys), (inputs.v, plan.keys))
    )
    rows = softmax_attention(queries, keys, values, _chunk_biases(inputs, spec, plan), spec.scale)
    return [contiguous_copy(rows).flatten(1, 2)], plan.places


def _chunk_biases(inputs: Inputs, spec: LocalSpec, plan: AnySize) -> Tensor:
    """The bias of each chunk, (heads · M, n, G + m)."""
    side, heads, size = 4 * spec.window, inputs.q.shape[2], spec.window**2
    to_global, table = _biases(inputs, spec).split((int(inputs.global_tokens(spec)), side * side), 1)
    first = to_global[:, None, None]
    if inputs.global_tokens(spec) == 0:
        steps = np.arange(spec.window) + 2 * spec.window - 1
        entries = torch.tensor((steps[:, None] * side + steps).ravel(), device=table.device)
        first = table.index_select(1, entries)[:, None, :, None] + REPEATED
    table = table.view(heads, side, side)
    repeated = table + REPEATED
    once, twice = torch.cat([table, repeated], 2), torch.cat([repeated, repeated], 2)
    runs = torch.cat([once, twice], 1).index_select(2, plan.columns)
    runs = runs.view(heads, 2 * side * spec.chunks.width * spec.window, -1).index_select(1, plan.runs)
    local = runs.view(heads, spec.chunks.tokens, size, -1)
    return torch.cat([first.expand(-1, spec.chunks.tokens, size, -1), local], 3).flatten(0, 1)


_PLANS: WeakKeyDictionary[Any, dict[Any, AnySize]] = WeakKeyDictionary()
"""By the tracer of a graph, in which all blocks of a stage share a plan: it is most of what there is to trace."""


def _planned(inputs: Inputs, spec: LocalSpec) -> AnySize:
    heads, count, device = inputs.q.shape[2], int(inputs.global_tokens(spec)), inputs.q.device
    mode, sizes = get_proxy_mode(), [str(length) for length in spec.grid]
    if mode is None:
        return _plan(spec, heads, count, device)
    plans = _PLANS.setdefault(mode.tracer, {})
    key = (*sizes, spec.window, spec.rule, heads, count, device)
    if key not in plans:
        plans[key] = _plan(spec, heads, count, device)
    return plans[key]


def _plan(spec: LocalSpec, heads: int, count: int, device: torch.device) -> AnySize:
    window, (height, width), chunks = spec.window, spec.grid, spec.chunks
    rows, columns = (_axis_plan(*lengths, spec, device) for lengths in zip(spec.grid, chunks, strict=True))
    head, own = torch.arange(heads, device=device), _tokens(rows.queries, columns.queries, width)
    first = torch.arange(count, device=device).expand(chunks.tokens, -1) if count else own[:, :1]
    seen = torch.cat([first, _tokens(rows.keys, columns.keys, width) + count], 1)
    run = torch.arange(chunks.width * window, device=device).view(-1, 1, window, 1)
    row, column = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)
    start = (row // window * chunks.width + column // window) * window**2
    places = (start + row % window * window + column % window).view(-1, 1)

    def of_heads(tokens: Tensor) -> Tensor:
        return (tokens * heads + head[:, None, None]).flatten()

    return AnySize(
        queries=of_heads(own),
        keys=of_heads(seen),
        columns=columns.entries.flatten(),
        runs=(rows.entries[:, None, :, None] * (chunks.width * window) + run).flatten(),
        places=(places + head * (chunks.tokens * window**2)).flatten(),
    )


class AxisPlan(NamedTuple):
    """Of the c chunks of an axis the positions of their queries (c, w) and of m keys (c, m), and the entries of all
    pairs along an axis of the biases (c, w, m); those of repeated keys come after the 4w of the others."""

    queries: Tensor
    keys: Tensor
    entries: Tensor


def _axis_plan(length: int, chunks: int, spec: LocalSpec, device: torch.device) -> AxisPlan:
    window = spec.window
    start = torch.arange(chunks, device=device)[:, None] * window
    gathered = torch.sym_min(length, 3 * window)
    queries = start + torch.arange(window, device=device)
    among = (start - window).clamp(max=length - gathered).clamp(min=0) + torch.arange(gathered, device=device)
    keys = among.maximum(start - window).minimum(start + (2 * window - 1))
    offsets = queries[:, :, None] - keys[:, None]
    entries = offsets + (2 * window - 1)
    if spec.rule == "exact":
        entries = entries.masked_fill(offsets.abs() > window, 4 * window - 1)
    entries = entries + (keys != among)[:, None] * (4 * window)
    return AxisPlan(queries.clamp(max=length - 1), keys, entries)


GATHERED_CHUNK = Implementation(_refusal, _attend)
