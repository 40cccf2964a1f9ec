"""Attention rollout through a multi-scale stack: how much of each part of the image reaches the pooled output.

Read backwards, from the output to the pixels, as shares that sum to one:

- The output is the mean of the last stage's tokens (or its first global token): equal shares (or all for that one).
- A layer with attention A, the mean over its heads, has a residual connection beside it. A token's share goes half to
  itself and half to the tokens that it attends to: ``shares @ (A + I) / 2``.
- A token of a later stage was made from the p×p tokens under its patch of the stage before; each gets an equal part.
- Global tokens are learned, not seen: their shares at the entrance of a stage rest there, unless the model hands its
  global tokens on from stage to stage.

MLPs, norms and the sizes of the values do not count; it is a summary of where attention goes, not of what decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import ModelConfig
from ..geometry import Grid
from .layers import Layer
from .weights import all_local_rows, global_rows

Progress = Callable[[int, int], None]


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
    """The rollout of the layers that :func:`~vision_longformer.explain.capture` noted of a model."""
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
