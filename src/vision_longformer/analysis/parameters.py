"""Numbers of parameters, counted on models without memory for weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from ..attention import PerformerAttention
from ..config import ModelConfig
from ..model import VisionLongformer


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
