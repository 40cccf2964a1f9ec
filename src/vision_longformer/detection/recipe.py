"""A detection run as data: detector, images, beside what every training run has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import check_choice, check_fraction
from ..models.zoo import MODELS
from ..training.recipe import BackboneSettings
from .config import KINDS, DetectorConfig


@dataclass(frozen=True, kw_only=True)
class DetectionRecipe(BackboneSettings):
    """Settings of a detection run; the defaults are the paper's schedule of 90,000 steps (1×).

    Args:
        detector: mask_rcnn or retinanet.
        detector_options: fields of the detector's configuration to change, such as {"min_size": [480]}.
        init: a classification checkpoint (.safetensors) for the backbone; its tables are resized.
        table_resize: how its relative-position tables change size: offset or bilinear.
        data: a folder in COCO's form, or the built-in garments (garments:320 for small images).
        train_split: name of the split to train on.
        eval_split: name of the split to evaluate on.
        skip_bad: pass over images and annotations that make no sense, instead of stopping.
        hflip: probability of a horizontal flip.
    """

    detector: str = "mask_rcnn"
    detector_options: dict[str, Any] = field(default_factory=dict)
    init: str | None = None
    table_resize: str = "offset"
    data: str = "coco"
    train_split: str = "train2017"
    eval_split: str = "val2017"
    skip_bad: bool = False
    hflip: float = 0.5
    steps: int | None = 90_000
    batch_size: int = 16
    lr: float = 1e-4
    weight_decay: float = 0.05
    decay: str = "all"
    clip_norm: float | None = 1.0
    schedule: str = "multistep"
    milestones: tuple[float, ...] = (2 / 3, 8 / 9)
    warmup_steps: int | None = 1000
    warmup_factor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("detector", self.detector, KINDS)
        check_choice("table_resize", self.table_resize, ("offset", "bilinear"))
        check_fraction("hflip", self.hflip)
        self.config(1)

    def config(self, num_classes: int) -> DetectorConfig:
        """The detector's configuration for so many categories."""
        options = dict(self.model_options)
        if self.model in MODELS:
            options |= {"drop_path_rate": self.drop_path, "neighbours": self.neighbours}
        config = DetectorConfig(self.detector, self.model, num_classes, options)
        return config.override(**self.detector_options)
