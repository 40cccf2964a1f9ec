"""Parameters and multiply-accumulates of whole detectors: the paper's three detection tables beside our counts.

The paper counts detectors otherwise than classifiers (``formulas.py``). What reproduces all eight detectors on Vision
Longformer to the printed digit, for an image of 800×1333 padded to 800×1344:

- MACs of convolutions and MLPs with their biases, of the linear layers of the attention without;
- in Mask R-CNN, 1,000 regions in the box head, and nothing in the mask head;
- for local attention 9w² keys, but for each channel in place of each token, which leaves almost all of it out;
- parameters of the backbone with absolute position, its tables for an image of 1344×1344, and with the unused
  classifier for 1,000 classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any

import torch

from ..detection.config import DetectorConfig
from ..detection.detectors import build_detector
from ..geometry import Grid
from ..models import config as cfg
from ..models.config import ModelConfig, StageConfig
from ..models.zoo import comparison_config, longformer_config, model_config
from .executed import executed_macs
from .formulas import count_parameters
from .paper_tables import MECHANISM_NAMES, CostRow, PaperEntry, compare

# What the paper prints

TABLES = {
    "retinanet": "RetinaNet, 800×1333 (tab:retinanet_comp_det)",
    "mask_rcnn": "Mask R-CNN, 800×1333 (tab:maskrcnn_comp_det)",
    "mechanisms": "Mask R-CNN with other mechanisms, small, 800×1333 (tab:attention_maskrcnn)",
}

SIZES = {
    "retinanet": {"tiny": "16.64 182.7", "small": "35.68 254.8", "medium": "50.77 330.4", "base": "66.74 420.9"},
    "mask_rcnn": {"tiny": "26.9 145.6", "small": "45.0 218.3", "medium": "60.1 293.8", "base": "76.1 384.4"},
}
"""Parameters (M) and GFLOPs of Vision Longformer by detector and size."""

MECHANISMS = {
    "sra64": "73.3 224.1 7.1",
    "sra32": "51.5 268.3 13.6",
    "partial_sra32": "46.8 352.1 22.6",
    "global": "45.2 226.4 7.6",
    "partial_global": "45.1 326.5 20.1",
    "performer": "45.0 251.5 8.4",
    "partial_performer": "45.0 343.7 20.0",
    "vil": "45.0 218.3 7.4",
    "partial_vil": "45.0 326.8 19.5",
}
"""Parameters (M), GFLOPs and memory in training (GB, on a GPU) by mechanism."""

NAMES = {**MECHANISM_NAMES, "vil": "ViL", "partial_vil": "Partial ViL"}
"""Here the paper's ViL has local attention in all stages."""

LAYOUT = "1_2_8_1"
UNSTATED = "within 0.4%: how the paper charged this mechanism is not stated"

REMARKS = {
    "partial_global": "the paper seems to charge nothing for the 256 global tokens of the first two stages (7 GMACs)",
}
"""Why GFLOPs differ by more than 0.4%, by mechanism."""


@dataclass(frozen=True)
class DetectionEntry(PaperEntry):
    """A row of a detection table; ``config`` is the backbone's, ``memory`` the printed gigabytes if there are any."""

    detector: str = "mask_rcnn"
    backbone: str = ""
    memory: str = ""


def detection_entries() -> Iterator[DetectionEntry]:
    """All 17 rows, table by table."""
    for detector, sizes in SIZES.items():
        for size, printed in sizes.items():
            params, gflops = printed.split()
            yield DetectionEntry(
                detector,
                f"ViL-{size.title()} RPB",
                longformer_config(size),
                params,
                gflops,
                detector=detector,
                backbone=f"vision_longformer_{size}",
            )
    for mechanism, printed in MECHANISMS.items():
        params, gflops, memory = printed.split()
        yield DetectionEntry(
            "mechanisms",
            NAMES[mechanism],
            _mechanism_config(mechanism),
            params,
            gflops,
            REMARKS.get(mechanism, UNSTATED),
            backbone=f"msvit_small_{LAYOUT}_{mechanism}",
            memory=memory,
        )


def _mechanism_config(mechanism: str) -> ModelConfig:
    """As in the comparison of classifiers, but for Partial Global: its full-attention stages have 1 and 0 tokens."""
    config = comparison_config("small", LAYOUT, mechanism)
    if mechanism != "partial_global":
        return config
    tokens = (256, 256, 1, 0)
    stages = [replace(stage, global_tokens=count) for stage, count in zip(config.stages, tokens, strict=True)]
    return replace(config, stages=tuple(stages))


# Our counts beside it

PADDED = (800, 1344)
"""The image of 800×1333, padded to whole cells of the last stage."""

POSITION_SIZE = (1344, 1344)
"""The image that the absolute-position tables cover whose parameters the paper counts."""

CLASSIFIER = 1000
"""Classes of the classifier whose parameters the paper counts, too."""


@dataclass(frozen=True)
class DetectorMacs:
    """MACs of a detector for one image, by module."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class DetectionRow(CostRow):
    """An entry compared, and what our detector really has: its parameters and its executed MACs by module."""

    counted: DetectorMacs
    own_params: int

    @cached_property
    def executed(self) -> DetectorMacs:
        assert isinstance(self.entry, DetectionEntry)
        return executed_detector_macs(self.entry.detector, model_config(self.entry.backbone), PADDED)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        own = {"params": self.own_params, "macs": self.executed.total, "macs_by_module": self.executed.parts}
        return {**super().to_dict(), "counted_by_module": self.counted.parts, "executed": own}


def compare_detector(entry: DetectionEntry) -> DetectionRow:
    """Our parameters and MACs of an entry's detector beside the printed ones."""
    counted = paper_detector_macs(entry.detector, entry.config, PADDED)
    own, own_backbone = _detector_parameters(entry)
    params = own - own_backbone + count_parameters(_counted_backbone(entry.config)).trainable
    return DetectionRow(
        entry,
        compare(entry.params, Decimal(params).scaleb(-6)),
        compare(entry.gflops, Decimal(counted.total).scaleb(-9)),
        counted,
        own,
    )


def _counted_backbone(config: ModelConfig) -> ModelConfig:
    """The backbone whose parameters the paper printed."""
    stages = tuple(replace(stage, position="absolute") for stage in config.stages)
    return replace(config, stages=stages, img_size=POSITION_SIZE, num_classes=CLASSIFIER)


def _detector_parameters(entry: DetectionEntry) -> tuple[int, int]:
    """Trainable parameters of our detector and of the backbone in it, counted without memory for weights."""
    with torch.device("meta"):
        model = build_detector(DetectorConfig(entry.detector, entry.backbone, CLASSES))
    body = model.get_submodule("backbone.body")
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for p in body.parameters())


# Multiply-accumulates

CHANNELS, BOX_WIDTH, CLASSES, REGIONS, DETECTIONS = 256, 1024, 80, 1000, 100
BOX_POOL, MASK_POOL, MASK_LAYERS = 7, 14, 4
"""The paper's detectors on COCO: pyramid, heads, and what the heads look at."""


def paper_detector_macs(detector: str, config: ModelConfig, size: tuple[int, int]) -> DetectorMacs:
    """The cost as the paper's detection tables count it; ``size`` is the padded image's."""
    parts = _pyramid_and_heads(detector, config, size, bias=True)
    parts.pop("mask head", None)
    return DetectorMacs({"backbone": _paper_backbone(config, size), **parts})


def executed_detector_macs(detector: str, config: ModelConfig, size: tuple[int, int]) -> DetectorMacs:
    """The matrix products that are really executed, biases not counted, with 1,000 regions and 100 masks."""
    backbone = executed_macs(config.override(num_classes=0), size).total
    return DetectorMacs({"backbone": backbone, **_pyramid_and_heads(detector, config, size, bias=False)})


def _pyramid_and_heads(detector: str, config: ModelConfig, size: tuple[int, int], *, bias: bool) -> dict[str, int]:
    """Of the pyramid and the heads on it, which do not depend on the attention."""
    first = 1 if detector == "retinanet" else 0
    grids, dims = config.grids(size)[first:], [stage.dim for stage in config.stages[first:]]
    pyramid = 0
    for grid, dim in zip(grids, dims, strict=True):
        pyramid += _conv(dim, CHANNELS, 1, grid.tokens, bias) + _conv(CHANNELS, CHANNELS, 3, grid.tokens, bias)
    positions = sum(grid.tokens for grid in grids)
    p6 = grids[-1].reduced(2, pad=True)
    if detector == "mask_rcnn":
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


def _conv(inputs: int, outputs: int, kernel: int, positions: int, bias: bool) -> int:
    return (kernel**2 * inputs + bias) * outputs * positions


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
