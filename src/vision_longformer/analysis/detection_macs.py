"""Multiply-accumulates of whole detectors: as the paper's detection tables count them, and as they really are.

The detection tables count otherwise than the classification tables of ``macs.py``. What reproduces all of their eight
values for Vision Longformer, at an image padded to 800×1344:

- convolutions and MLPs count with their biases, the linear layers of the attention without;
- Mask R-CNN counts 1,000 regions in the box head, and nothing in the mask head;
- local attention is charged 9w² keys, but for each channel in place of each token, which leaves almost all of it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import config as cfg
from ..config import ModelConfig, StageConfig
from ..geometry import Grid
from .executed import executed_macs

CHANNELS, BOX_WIDTH, CLASSES, REGIONS, DETECTIONS = 256, 1024, 80, 1000, 100
BOX_POOL, MASK_POOL, MASK_LAYERS = 7, 14, 4


@dataclass(frozen=True)
class DetectorMacs:
    """Of a detector, for one image, by module."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def paper_detector_macs(kind: str, config: ModelConfig, size: tuple[int, int]) -> DetectorMacs:
    """The cost as the paper's detection tables count it; ``size`` is the padded image's."""
    parts = _maps_and_heads(kind, config, size, bias=True)
    parts.pop("mask head", None)
    return DetectorMacs({"backbone": _paper_backbone(config, size), **parts})


def executed_detector_macs(kind: str, config: ModelConfig, size: tuple[int, int]) -> DetectorMacs:
    """The matrix products that are really executed, biases not counted, with 1,000 regions and 100 masks."""
    backbone = executed_macs(config.override(num_classes=0), size).total
    return DetectorMacs({"backbone": backbone, **_maps_and_heads(kind, config, size, bias=False)})


def _conv(inputs: int, outputs: int, kernel: int, positions: int, bias: bool) -> int:
    return (kernel**2 * inputs + bias) * outputs * positions


def _maps_and_heads(kind: str, config: ModelConfig, size: tuple[int, int], *, bias: bool) -> dict[str, int]:
    """Of the pyramid and the heads on it, which do not depend on the attention."""
    first = 1 if kind == "retinanet" else 0
    grids, dims = config.grids(size)[first:], [stage.dim for stage in config.stages[first:]]
    pyramid = 0
    for grid, dim in zip(grids, dims, strict=True):
        pyramid += _conv(dim, CHANNELS, 1, grid.tokens, bias) + _conv(CHANNELS, CHANNELS, 3, grid.tokens, bias)
    positions = sum(grid.tokens for grid in grids)
    p6 = grids[-1].reduced(2, pad=True)
    if kind == "mask_rcnn":
        return {"pyramid": pyramid, **_region_heads(positions + p6.tokens, bias)}
    p7 = p6.reduced(2, pad=True)
    pyramid += _conv(dims[-1], CHANNELS, 3, p6.tokens, bias) + _conv(CHANNELS, CHANNELS, 3, p7.tokens, bias)
    positions += p6.tokens + p7.tokens
    heads = 8 * _conv(CHANNELS, CHANNELS, 3, positions, bias) + _conv(CHANNELS, 9 * (CLASSES + 4), 3, positions, bias)
    return {"pyramid": pyramid, "dense heads": heads}


def _region_heads(positions: int, bias: bool) -> dict[str, int]:
    """Of the proposals on ``positions`` cells, the box head and the mask head."""
    proposals = _conv(CHANNELS, CHANNELS, 3, positions, bias) + _conv(CHANNELS, 3 * 5, 1, positions, bias)
    flat, outputs = CHANNELS * BOX_POOL**2, CLASSES + 1 + 4 * CLASSES
    boxes = (flat + BOX_WIDTH + outputs) * BOX_WIDTH * REGIONS
    cells = MASK_POOL**2
    masks = MASK_LAYERS * _conv(CHANNELS, CHANNELS, 3, cells, bias)
    masks += _conv(CHANNELS, CHANNELS, 1, 4 * cells, bias) + _conv(CHANNELS, CLASSES, 1, 4 * cells, bias)
    return {"proposals": proposals, "box head": boxes, "mask head": masks * DETECTIONS}


def _paper_backbone(config: ModelConfig, size: tuple[int, int]) -> int:
    total, in_chans = 0, config.in_chans
    for stage, grid in zip(config.stages, config.grids(size), strict=True):
        hidden = int(stage.dim * config.mlp_ratio)
        tokens = grid.tokens + (stage.global_tokens if isinstance(stage.attention, cfg.GlobalMemory) else 0)
        mlp = tokens * (2 * stage.dim * hidden + hidden + stage.dim)
        total += _conv(in_chans, stage.dim, stage.patch, grid.tokens, True)
        total += stage.depth * (mlp + _paper_attention(stage, grid, tokens))
        in_chans = stage.dim
    return total


def _paper_attention(stage: StageConfig, grid: Grid, tokens: int) -> int:
    """One block's attention: linear layers for ``tokens``, and products of tokens as the paper has them."""
    attention, dim, extra = stage.attention, stage.dim, stage.global_tokens
    linear = 4 * tokens * dim**2
    if isinstance(attention, cfg.Full):
        return linear + 2 * (grid.tokens + extra) ** 2 * dim
    if isinstance(attention, cfg.Longformer):
        return linear + 2 * (dim - extra) * 9 * attention.window**2 * dim + 2 * extra * (grid.tokens + extra) * dim
    if isinstance(attention, cfg.GlobalMemory):
        return linear + 2 * grid.tokens * extra * dim
    if isinstance(attention, cfg.Performer):
        return linear + 5 * grid.tokens * (attention.features or 0) * dim
    if isinstance(attention, cfg.SpatialReduction):
        reduced = grid.reduced(attention.ratio, pad=False).tokens
        sources = (attention.ratio**2 * reduced + 2 * (reduced + extra)) * dim**2
        return 2 * tokens * dim**2 + sources + 2 * grid.tokens * (reduced + extra) * dim
    raise TypeError(f"the paper's detection tables state no cost of {attention!r}")
