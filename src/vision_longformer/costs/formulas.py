"""Multiply-accumulates in the paper's convention, by closed formulas: what its tables call FLOPs.

The paper counts matrix products and convolutions and nothing else: no LayerNorm, softmax, activation, residual or
position. Of the biases only those of the patch embedding count. A window is charged whole, (2w+1)² keys per token, also
at the border of the map; global tokens are free, except in models with global memory, where all tokens of every stage
count in the linear layers. ``executed.py`` counts what our models really do.

Numbers of parameters, counted on models without memory for weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from ..geometry import Grid
from ..models import VisionLongformer
from ..models import config as cfg
from ..models.attention import PerformerAttention
from ..models.config import ModelConfig, StageConfig


@dataclass(frozen=True)
class StageMacs:
    """Of a stage with all its blocks, for one image: the map of its tokens and the MACs of its parts."""

    grid: Grid
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class ModelMacs:
    """Of a whole model, for one image."""

    stages: tuple[StageMacs, ...]
    head: int

    @property
    def total(self) -> int:
        return sum(stage.total for stage in self.stages) + self.head


def paper_macs(config: ModelConfig, size: tuple[int, int] | None = None) -> ModelMacs:
    """The cost of an image of ``size`` (default: the model's own) as the paper counts it.

    Of the parts, ``projections`` are the linear layers and convolutions of the attention, ``products`` its products of
    tokens with tokens or features.
    """
    has_memory = any(isinstance(stage.attention, cfg.GlobalMemory) for stage in config.stages)
    stages, in_chans = [], config.in_chans
    for index, (stage, grid) in enumerate(zip(config.stages, config.grids(size), strict=True)):
        tokens = grid.tokens + (stage.global_tokens if has_memory else 0)
        later_stages = len(config.stages) - 1 - index
        hidden = int(stage.dim * config.mlp_ratio)
        parts = {
            "patch_embedding": (stage.patch**2 * in_chans + 1) * stage.dim * grid.tokens,
            "projections": stage.depth * _projections(stage, grid, tokens),
            "products": stage.depth * _pairs(stage, grid, later_stages) * stage.dim,
            "mlp": stage.depth * 2 * tokens * stage.dim * hidden,
        }
        stages.append(StageMacs(grid, parts))
        in_chans = stage.dim
    return ModelMacs(tuple(stages), head=in_chans * config.num_classes)


def _projections(stage: StageConfig, grid: Grid, tokens: int) -> int:
    """Query, key, value and output of one block, of which the paper charges for ``tokens``.

    Global memory is charged twice for keys and values, once for its local and once for its global rows.
    """
    if isinstance(stage.attention, cfg.SpatialReduction):
        reduced = _reduced(grid, stage.attention.ratio)
        return (2 * tokens + (stage.attention.ratio**2 + 2) * reduced) * stage.dim**2
    times = 6 if isinstance(stage.attention, cfg.GlobalMemory) else 4
    return times * tokens * stage.dim**2


def _pairs(stage: StageConfig, grid: Grid, later_stages: int) -> int:
    """How many products of two vectors of the stage's width one block takes.

    The paper states the cost of a window where the map is larger; where it is not, it uses full attention, so that a
    token is never charged for more keys than the map has.
    """
    attention, tokens = stage.attention, grid.tokens
    if isinstance(attention, cfg.Full):
        return 2 * tokens**2
    if isinstance(attention, cfg.Longformer):
        return 2 * tokens * min((2 * attention.window + 1) ** 2, tokens)
    if isinstance(attention, cfg.GlobalMemory):
        return 2 * tokens * (2 * 2**later_stages + 1) ** 2  # windows of 17, 9, 5, 3: not what it computes
    if isinstance(attention, cfg.Linformer):
        return 4 * tokens * attention.features
    if isinstance(attention, cfg.SpatialReduction):
        return 2 * tokens * _reduced(grid, attention.ratio)
    if isinstance(attention, cfg.Performer):
        return 6 * tokens * _features(attention, stage.dim // stage.heads)
    raise TypeError(f"the paper states no cost of {attention!r}")


def _reduced(grid: Grid, ratio: int) -> int:
    """Positions of the reduced map, at least one along each axis."""
    return max(1, grid.height // ratio) * max(1, grid.width // ratio)


def _features(attention: cfg.Performer, head_dim: int) -> int:
    """Random features; the linear kernel has the channels of a head in their place."""
    if attention.kernel == "linear":
        return head_dim
    return attention.features or max(1, int(head_dim * math.log(head_dim)))


@dataclass(frozen=True)
class ParameterCount:
    """``trainable`` parameters, each tensor once, and the fixed ``random_features`` of Performer layers."""

    trainable: int
    random_features: int

    @property
    def paper(self) -> int:
        """What the paper's tables print: trainable parameters and random features."""
        return self.trainable + self.random_features

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(self.trainable + other.trainable, self.random_features + other.random_features)

    def __mul__(self, times: int) -> ParameterCount:
        return ParameterCount(self.trainable * times, self.random_features * times)


def count_parameters(config: ModelConfig) -> ParameterCount:
    """The parameters of the model that ``config`` describes.

    The blocks of a stage are alike, so that one of each is built and multiplied.
    """
    single = replace(config, stages=tuple(replace(stage, depth=1) for stage in config.stages))
    outside, blocks = _count_single(single)
    return sum((block * stage.depth for block, stage in zip(blocks, config.stages, strict=True)), outside)


@lru_cache(maxsize=256)
def _count_single(config: ModelConfig) -> tuple[ParameterCount, tuple[ParameterCount, ...]]:
    """For stages of one block: what is outside the blocks, and each stage's block."""
    with torch.device("meta"):
        model = VisionLongformer(config)
    blocks = tuple(_count(model.get_submodule(f"stages.{index}.blocks")) for index in range(len(config.stages)))
    inside = sum(blocks, ParameterCount(0, 0))
    return _count(model) + inside * -1, blocks


def _count(module: nn.Module) -> ParameterCount:
    trainable = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    performers = [part for part in module.modules() if isinstance(part, PerformerAttention)]
    return ParameterCount(trainable, sum(part.features.numel() for part in performers))
