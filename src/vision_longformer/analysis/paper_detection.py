"""The paper's three detection tables, as printed, and our costs beside them.

Besides the GFLOPs of ``detection_macs.py``, the printed parameters have a convention of their own: they are those of
the models with absolute position, whose tables cover a canvas of 1344×1344, and with the unused classifier for 1,000
classes. So counted, all eight detectors agree to the printed digit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any

import torch

from ..config import ModelConfig
from ..detection.config import DetectorConfig
from ..detection.models import build_detector
from ..zoo import comparison_config, longformer_config, model_config
from .detection_macs import CLASSES, DetectorMacs, executed_detector_macs, paper_detector_macs
from .paper_tables import MECHANISM_NAMES, PaperEntry
from .parameters import count_parameters
from .report import CostRow, compare

PADDED = (800, 1344)
"""The image of 800×1333, padded to whole cells of the last stage."""

CANVAS = (1344, 1344)
CLASSIFIER = 1000

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
NOT_KNOWN = "within 0.4%: how the paper charged this mechanism is not stated"

REMARKS = {
    "partial_global": "the paper seems to charge nothing for the 256 global tokens of the first two stages (7 GMACs)",
}


@dataclass(frozen=True)
class DetectionEntry(PaperEntry):
    """A row of a detection table; ``config`` is the backbone's, ``memory`` the printed gigabytes if there are any."""

    kind: str = "mask_rcnn"
    backbone: str = ""
    memory: str = ""


@dataclass(frozen=True)
class DetectionRow(CostRow):
    """An entry compared, and what our detector really has: its parameters and its executed MACs by module."""

    counted: DetectorMacs
    own_params: int

    @cached_property
    def executed(self) -> DetectorMacs:
        assert isinstance(self.entry, DetectionEntry)
        return executed_detector_macs(self.entry.kind, model_config(self.entry.backbone), PADDED)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        own = {"params": self.own_params, "macs": self.executed.total, "macs_by_module": self.executed.parts}
        return {**super().to_dict(), "counted_by_module": self.counted.parts, "executed": own}


def detection_entries() -> Iterator[DetectionEntry]:
    """All 17 rows, table by table."""
    for kind, sizes in SIZES.items():
        for size, printed in sizes.items():
            params, gflops = printed.split()
            config = longformer_config(size)
            name = f"vision_longformer_{size}"
            yield DetectionEntry(kind, f"ViL-{size.title()} RPB", config, params, gflops, kind=kind, backbone=name)
    for mechanism, printed in MECHANISMS.items():
        params, gflops, memory = printed.split()
        yield DetectionEntry(
            "mechanisms",
            NAMES[mechanism],
            _mechanism_config(mechanism),
            params,
            gflops,
            REMARKS.get(mechanism, NOT_KNOWN),
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


def compare_detector(entry: DetectionEntry) -> DetectionRow:
    """Our parameters and MACs of an entry's detector beside the printed ones."""
    counted = paper_detector_macs(entry.kind, entry.config, PADDED)
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
    return replace(config, stages=stages, img_size=CANVAS, num_classes=CLASSIFIER)


def _detector_parameters(entry: DetectionEntry) -> tuple[int, int]:
    """Trainable parameters of our detector and of the backbone in it, counted without memory for weights."""
    with torch.device("meta"):
        model = build_detector(DetectorConfig(entry.kind, entry.backbone, CLASSES))
    body = model.get_submodule("backbone.body")
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for p in body.parameters())
