"""Sliding chunk by one gather of keys and one of values: the form of local attention that exported graphs hold.

Chunks that see keys at the same offsets are computed together. Where the size of the map is known these are the
corners, the edges and the inside, each with just the keys that exist: no mask, no padding, and the numbers of tokens
are constants. Where it is a symbol all chunks are alike, and keys beyond the map are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..chunks import contiguous_copy
from ..spec import Implementation, Inputs, LocalSpec, refuse_dilation, refuse_halo


class ChunkClass(NamedTuple):
    """M chunks that see keys at the same offsets.

    ``queries`` (M, n) are numbers of local tokens, ``keys`` (M, G + m) of all tokens, the global ones first.
    ``entries`` (n, G + m) are places in what :func:`_biases` returns. ``outside`` (M, 1, G + m): keys that are not in
    the map, None if all are.
    """

    queries: Tensor
    keys: Tensor
    entries: np.ndarray
    outside: Tensor | None = None


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if spec.rule not in ("chunk", "exact") or spec.neighbour_mode != "all":
        return "it has the rules 'chunk' and 'exact' with all neighbours only"
    return refuse_dilation(spec) or refuse_halo(spec)


def _attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
    if any(isinstance(length, torch.SymInt) for length in spec.grid):
        return attend_any_size(inputs, spec)
    device, width, count = inputs.q.device, spec.grid.width, int(inputs.global_tokens(spec))
    classes, order = [], []
    for rows, columns in product(*(_axis_classes(length, spec.window) for length in spec.grid)):
        queries, local = (_tokens(*pair, width) for pair in zip(rows, columns, strict=True))
        keys = np.concatenate([np.tile(np.arange(count), (len(local), 1)), local + count], 1)
        row_offsets, column_offsets = (seeing[0][:, None] - seen[0] for seeing, seen in (rows, columns))
        entries = _entries(row_offsets, column_offsets, spec, count)
        classes.append(ChunkClass(torch.tensor(queries, device=device), torch.tensor(keys, device=device), entries))
        order.append(queries.ravel())
    places = np.argsort(np.concatenate(order))
    return _attend_classes(inputs, spec, classes, torch.tensor(places, device=device))


def attend_any_size(inputs: Inputs, spec: LocalSpec) -> Tensor:
    """As for a known size, but with all chunks alike: the same operators for every size of map."""
    window, device, (height, width) = spec.window, inputs.q.device, spec.grid
    count, steps = int(inputs.global_tokens(spec)), np.arange(-window, 2 * window)
    offsets = steps[window : 2 * window, None] - steps
    rows, columns = (_positions(chunks, steps, window, device) for chunks in spec.chunks)
    outside = _beyond(rows, height)[:, None, :, None] | _beyond(columns, width)[None, :, None, :]
    outside = F.pad(outside.reshape(-1, 1, len(steps) ** 2), (count, 0))
    rows, columns = rows.clamp(max=height - 1).clamp(min=0), columns.clamp(max=width - 1).clamp(min=0)
    own = slice(window, 2 * window)
    queries, local = _tokens(rows[:, own], columns[:, own], width), _tokens(rows, columns, width)
    to_all = torch.arange(count, device=device).expand(local.shape[0], -1)
    every = ChunkClass(queries, torch.cat([to_all, local + count], 1), _entries(offsets, offsets, spec, count), outside)
    row, column = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)
    first = (row // window * spec.chunks.width + column // window) * window**2
    places = first + row % window * window + column % window
    return _attend_classes(inputs, spec, [every], places.flatten())


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


def _positions(chunks: int, steps: np.ndarray, window: int, device: torch.device) -> Tensor:
    """Positions ``steps`` away from the start of each chunk of an axis, (chunks, steps)."""
    return torch.arange(chunks, device=device)[:, None] * window + torch.tensor(steps, device=device)


def _beyond(positions: Tensor, length: int) -> Tensor:
    return (positions < 0) | (positions >= length)


def _tokens(rows: Any, columns: Any, width: int) -> Any:
    """Numbers of the tokens at rows (a, n₁) and columns (b, n₂) of each of a·b chunks, (ab, n₁n₂)."""
    numbers = rows[:, None, :, None] * width + columns[None, :, None, :]
    return numbers.reshape(-1, rows.shape[1] * columns.shape[1])


def _attend_classes(inputs: Inputs, spec: LocalSpec, classes: Sequence[ChunkClass], places: Tensor) -> Tensor:
    """``places`` (N,) are those of the tokens of the map among the queries of all classes."""
    q, k, v = (contiguous_copy(x.transpose(1, 2)) for x in (inputs.q * spec.scale, inputs.k, inputs.v))
    biases, outputs = _biases(inputs, spec), []
    for one in classes:
        scores = _gather(q, one.queries) @ _gather(k, one.keys).transpose(-1, -2)
        if biases is not None:
            entries = torch.tensor(one.entries.ravel(), device=q.device)
            scores = scores + biases.index_select(1, entries).unflatten(1, (1, *one.entries.shape))
        if one.outside is not None:
            scores = scores.masked_fill(one.outside, float("-inf"))
        outputs.append((scores.softmax(-1).to(v.dtype) @ _gather(v, one.keys)).flatten(2, 3))
    return contiguous_copy(torch.cat(outputs, 2).index_select(2, places).transpose(1, 2))


def _gather(tokens: Tensor, numbers: Tensor) -> Tensor:
    """(B, heads, N, dim) and numbers of tokens (M, n) to (B, heads, M, n, dim)."""
    return tokens.index_select(2, numbers.flatten()).unflatten(2, numbers.shape)


def _biases(inputs: Inputs, spec: LocalSpec) -> Tensor | None:
    """What may be added to a score, (heads or 1, G + (4w-1)² + 1): the bias of each global key, of each offset, row by
    row, and −∞ for a key that does not count; None if nothing is."""
    q, _, _, bias, global_bias, _ = inputs
    if bias is None and global_bias is None and spec.rule == "chunk":
        return None
    given = next((x for x in (bias, global_bias) if x is not None), q.new_zeros(1, 0))
    to_global = given.new_zeros(given.shape[0], inputs.global_tokens(spec)) if global_bias is None else global_bias
    local = given.new_zeros(given.shape[0], (4 * spec.window - 1) ** 2) if bias is None else bias.flatten(1)
    return torch.cat([to_global, local, given.new_full((given.shape[0], 1), float("-inf"))], 1)


def _entries(rows: np.ndarray, columns: np.ndarray, spec: LocalSpec, count: int) -> np.ndarray:
    """Places in the biases for all pairs of queries and keys, (n₁n₂, G + m₁m₂), from their offsets along each axis,
    (n₁, m₁) and (n₂, m₂)."""
    side, centre = 4 * spec.window - 1, 2 * spec.window - 1
    rows, columns = rows[:, None, :, None], columns[None, :, None, :]
    local = count + (rows + centre) * side + columns + centre
    if spec.rule == "exact":
        local = np.where(np.maximum(abs(rows), abs(columns)) > spec.window, count + side * side, local)
    local = local.reshape(local.shape[0] * local.shape[1], -1)
    return np.concatenate([np.tile(np.arange(count), (len(local), 1)), local], 1)


GATHERED_CHUNK = Implementation(_refusal, _attend)
