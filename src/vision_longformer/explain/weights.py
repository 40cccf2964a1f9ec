"""Attention weights of chosen queries, and rollout: how much of each part of the image reaches the pooled output.

Weights are softmax rows over the keys that a query may see, computed by the oracle. The weights of all pairs of tokens
are never in memory: a rectangle of queries is computed with its own keys.

Rollout is read backwards through the stages, from the output to the pixels, as shares that sum to one:

- The output is the mean of the last stage's tokens (or its first global token): equal shares (or all for that one).
- A layer with attention A, the mean over its heads, has a residual connection beside it. A token's share goes half to
  itself and half to the tokens that it attends to: ``shares @ (A + I) / 2``.
- A token of a later stage was made from the p×p tokens under its patch of the stage before; each gets an equal part.
- Global tokens are learned, not seen: their shares at the entrance of a stage rest there, unless the model hands its
  global tokens on from stage to stage.

MLPs, norms and the sizes of the values do not count; it sums up where attention goes, not what decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..geometry import Grid
from ..models.attention import FullAttention, LongformerAttention
from ..models.config import ModelConfig
from ..ops.reference.masked_dense import MASKED_DENSE
from ..ops.spec import Inputs, LocalSpec
from ..ops.tables import map_offsets, table_lookup
from .layers import Layer, Strip, tokens_at

Progress = Callable[[int, int], None]
"""Called with the number of layers done and of all layers."""


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
        q, k, _ = (x[0] for x in attention.project_apart(separate, layer.tokens[None, :count], layer.tokens[None]))
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
    weights = rows.weights[:, rows.queries == query].squeeze(1)
    return _as_maps(layer, weights, rows.keys)


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
    spec = LocalSpec(grid, attention.window, attention.rule, layer.neighbours, 1, attention.scale)
    weights = MASKED_DENSE.attend(Inputs(q[None, keys[count:]], k[None, keys], units, bias, global_bias), spec)
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


# Rollout


@dataclass(frozen=True)
class Rollout:
    """Shares (height, width) of the tokens that enter each stage, first to last.

    Those of the first stage are shares of its patches of pixels; what is missing there to one rests on learned tokens.
    """

    maps: tuple[Tensor, ...]

    @property
    def learned(self) -> float:
        return 1 - float(self.maps[0].sum())


def rollout(layers: Sequence[Layer], config: ModelConfig, progress: Progress | None = None) -> Rollout:
    """The rollout of the layers that :func:`~vision_longformer.explain.capture` recorded."""
    shares = _pooled(layers[-1], config)
    maps: list[Tensor] = []
    for done, layer in enumerate(reversed(layers), 1):
        shares = (shares + attended(layer, shares)) / 2
        if layer.block == 1:
            to_global, local = shares.split([layer.global_tokens, layer.grid.tokens])
            maps.insert(0, local.unflatten(0, tuple(layer.grid)))
            if layer.stage > 1:
                shares = _entered(to_global, maps[0], config, layers[-done - 1])
        if progress:
            progress(done, len(layers))
    return Rollout(tuple(maps))


def attended(layer: Layer, shares: Tensor) -> Tensor:
    """``shares @ A`` (G + N,) with A the mean over heads, computed without ever holding A."""
    rows = global_rows(layer)
    passed = shares[rows.queries] @ rows.weights.mean(0)
    for rows in all_local_rows(layer):
        passed.index_add_(0, rows.keys, shares[rows.queries] @ rows.weights.mean(0))
    return passed


def _pooled(layer: Layer, config: ModelConfig) -> Tensor:
    """What the classifier's head is given of the last stage's tokens."""
    count = len(layer.tokens)
    if config.global_pool == "token":
        return F.one_hot(torch.tensor(0), count).to(layer.tokens)
    return layer.tokens.new_full((count,), 1 / count)


def _entered(to_global: Tensor, local: Tensor, config: ModelConfig, before: Layer) -> Tensor:
    """Shares at the entrance of a stage as shares of the last tokens of the stage before."""
    carried = to_global if config.carry_global_tokens else to_global.new_zeros(before.global_tokens)
    patch = config.stages[before.stage].patch
    return torch.cat([carried, under_patches(local, patch, before.grid).flatten()])


def under_patches(shares: Tensor, patch: int, finer: Grid) -> Tensor:
    """Shares of patches, in equal parts to the cells of the finer map that each of them covers."""
    for axis, length in enumerate(finer):
        covered = min(length, shares.shape[axis] * patch)
        patches = torch.arange(covered, device=shares.device) // patch
        parts = shares.transpose(0, axis) / patches.bincount()[:, None]
        spread = parts.new_zeros(length, parts.shape[1])
        spread[:covered] = parts[patches]
        shares = spread.transpose(0, axis)
    return shares
