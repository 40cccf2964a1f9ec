"""A detector small enough for tests, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vision_longformer.detection.checkpoint import save_detector
from vision_longformer.detection.config import DetectorConfig
from vision_longformer.detection.models import build_detector

SMALL: dict[str, Any] = {
    "channels": 8,
    "min_size": (64,),
    "max_size": 96,
    "box_width": 16,
    "mask_channels": 8,
    "mask_layers": 1,
    "score_threshold": 0.0,
    "detections": 5,
}


def write_detector(path: Path, categories: list[str] | None, kind: str = "mask_rcnn", num_classes: int = 10) -> Path:
    """An untrained one, which finds five things in every image; it knows its categories' names if they are given."""
    torch.manual_seed(0)
    model = build_detector(DetectorConfig(kind, "test_resnet", num_classes, **SMALL))
    named = [{"id": number, "name": name} for number, name in enumerate(categories or (), 1)]
    return save_detector(model, path, info={"categories": named} if categories else None)
