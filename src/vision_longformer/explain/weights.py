"""Attention weights of chosen queries, from the oracle: softmax rows over the keys that the queries may see.

Never are the weights of all pairs of tokens in memory: a rectangle of queries is computed with its own keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import FullAttention, LongformerAttention
from ..attention.projection import split_linear
from ..geometry import Grid, map_offsets, table_lookup
from ..ops import masked_dense
from ..ops.spec import LocalSpec
from .layers import Layer
from .strips import Strip, tokens_at


class Rows(NamedTuple):
    """Weights (heads, queries, keys) and which tokens they are between, numbered from 0, global ones first.

    Rows sum to one, but for the rule ``cyclic_release``, where padding takes the rest.
    """

    weights: Tensor
    queries: Tensor
    keys: Tensor


@torch.no_grad()
def global_rows(layer: Layer) -> Rows:
    """What the global tokens attend to: every token."""
    attention, count = layer.attention, layer.global_tokens
    q, k = layer.queries_and_keys
    separate = getattr(attention, "qkv_global", None)
    if separate is not None:
        query, key_value = split_linear(separate, layer.tokens.shape[1])
        (q,) = attention.split(F.linear(layer.tokens[None, :count], *query), 1)[0]
        k = attention.split(F.linear(layer.tokens[None], *key_value), 2)[0][0]
    everything = torch.arange(len(layer.tokens), device=k.device)
    if not count:
        return Rows(q.new_zeros(layer.heads, 0, len(everything)), everything[:0], everything)
    bias = None if attention.bias is None else attention.bias.from_global(count, layer.grid)
    return Rows(_softmax(q[:count], k, attention.scale, bias), everything[:count], everything)


@torch.no_grad()
def local_rows(layer: Layer, rows: Strip, columns: Strip) -> Rows:
    """What the local tokens of a rectangle attend to."""
    count, device = layer.global_tokens, layer.tokens.device
    queries = count + tokens_at(rows.own, columns.own, layer.grid, device)
    local_keys = count + tokens_at(rows.seen, columns.seen, layer.grid, device)
    keys = torch.cat([torch.arange(count, device=device), local_keys])
    if isinstance(layer.attention, FullAttention):
        return Rows(_full_weights(layer, rows, columns, queries), queries, keys)
    return Rows(_local_weights(layer, rows, columns, keys), queries, keys)


def all_local_rows(layer: Layer) -> Iterator[Rows]:
    """The weights of all local tokens, a rectangle at a time."""
    down, across = layer.strips
    return (local_rows(layer, rows, columns) for rows in down for columns in across)


def token_maps(layer: Layer, cell: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """What one local token attends to: maps (heads, height, width), and the share of each global token (heads, G)."""
    rows = local_rows(layer, *layer.strips_of(cell))
    query = layer.global_tokens + cell[0] * layer.grid.width + cell[1]
    found = rows.weights[:, rows.queries == query].squeeze(1)
    return _as_maps(layer, found, rows.keys)


def global_maps(layer: Layer) -> tuple[Tensor, Tensor]:
    """The same for the global tokens, on average."""
    rows = global_rows(layer)
    return _as_maps(layer, rows.weights.mean(1), rows.keys)


def _as_maps(layer: Layer, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    spread = weights.new_zeros(layer.heads, len(layer.tokens))
    spread[:, keys] = weights
    to_global, local = spread.split([layer.global_tokens, layer.grid.tokens], 1)
    return local.unflatten(1, tuple(layer.grid)), to_global


def _local_weights(layer: Layer, rows: Strip, columns: Strip, keys: Tensor) -> Tensor:
    """The oracle on the map of the keys alone. Where values are unit vectors, outputs are weights."""
    attention, count = layer.attention, layer.global_tokens
    assert isinstance(attention, LongformerAttention)
    q, k = layer.queries_and_keys
    grid = Grid(len(rows.seen), len(columns.seen))
    units = torch.eye(len(keys), dtype=k.dtype, device=k.device)[None, :, None].expand(1, -1, layer.heads, -1)
    bias = global_bias = None
    if attention.bias is not None:
        bias, global_bias = attention.bias.table, attention.bias.to_global(count)
    spec = LocalSpec(grid, attention.window, attention.rule, attention.eval_neighbours, 1, attention.scale)
    weights = masked_dense.attend(q[None, keys[count:]], k[None, keys], units, bias, global_bias, None, spec)
    return weights[0, tokens_at(rows.inner, columns.inner, grid, k.device)].transpose(0, 1)


def _full_weights(layer: Layer, rows: Strip, columns: Strip, queries: Tensor) -> Tensor:
    """One softmax over all keys, as full attention is its own oracle."""
    attention, grid = layer.attention, layer.grid
    q, k = layer.queries_and_keys
    if attention.bias is None:
        return _softmax(q[queries], k, attention.scale, None)
    table = attention.bias.table
    offsets = (map_offsets(n, table.device)[list(strip.own)] for n, strip in zip(grid, (rows, columns), strict=True))
    bias = table_lookup(table, *offsets).transpose(2, 3).reshape(layer.heads, len(queries), grid.tokens)
    to_global = attention.bias.to_global(layer.global_tokens)
    if to_global is not None:
        bias = torch.cat([to_global[:, None].expand(-1, len(queries), -1), bias], -1)
    return _softmax(q[queries], k, attention.scale, bias)


def _softmax(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """(queries, heads, dim) and (keys, heads, dim) to (heads, queries, keys)."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return (scores if bias is None else scores + bias).softmax(-1)
