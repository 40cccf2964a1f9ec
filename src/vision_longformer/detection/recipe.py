"""A detection run as data: detector and images, beside what every training run has; and the generated recipes.

Free of torch and timm, so that commands that only list recipes start at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import check_at_least, check_choice, check_fraction
from ..models.config import PAPER_TABLE_RESIZE, TABLE_RESIZES
from ..models.zoo import MODELS
from ..training.recipe import BackboneSettings
from .config import DETECTORS, DetectorConfig

MECHANISMS = {
    "vil": ("local attention, absolute position", 42.9),
    "partial_vil": ("local, then full attention", 43.3),
    "sra64": ("SRA/64", 36.4),
    "sra32": ("SRA/32", 39.9),
    "partial_sra32": ("SRA/32, then full attention", 42.4),
    "global": ("global memory", 34.8),
    "partial_global": ("global memory, then full attention", 42.5),
    "performer": ("Performer", 36.1),
    "partial_performer": ("Performer, then full attention", 42.3),
}
"""The mechanisms compared in Mask R-CNN on ViL-Small: in words, and their box AP in the paper."""

MIN_SIZES_3X = [640, 672, 704, 736, 768, 800]


def _generated() -> dict[str, dict[str, Any]]:
    """Mechanisms in place of ``mask_rcnn_small_1x``'s, and the three times longer schedule of each ``_1x`` recipe."""
    recipes: dict[str, dict[str, Any]] = {}
    for mechanism, (words, box_ap) in MECHANISMS.items():
        recipes[f"mask_rcnn_small_1x_{mechanism}"] = {
            "base": "mask_rcnn_small_1x",
            "about": f"Mechanisms compared: {words}; {box_ap} box AP in the paper",
            "model": f"msvit_small_1_2_8_1_{mechanism}",
        }
    for detector, name in (("mask_rcnn", "Mask R-CNN"), ("retinanet", "RetinaNet")):
        for size in ("tiny", "small", "medium", "base"):
            about = f"{name} on ViL-{size.title()}, COCO, 270,000 steps at several scales"
            recipes[f"{detector}_{size}_3x"] = {
                "base": f"{detector}_{size}_1x",
                "about": f"{about}; give the classifier as --init",
                "steps": 270_000,
                "detector_options": {"min_size": MIN_SIZES_3X},
            }
    return recipes


@dataclass(frozen=True, kw_only=True)
class DetectionRecipe(BackboneSettings):
    """Settings of a detection run; the defaults are the paper's schedule of 90,000 steps (1×).

    Args:
        detector: mask_rcnn or retinanet.
        detector_options: fields of the detector's configuration to change, such as {"min_size": [480]}.
        init: a classifier for the backbone: a checkpoint (.safetensors), a run directory, a folder or hub name of
            'vil hub', or a built-in one (cifar10, cifar10_micro, cifar10_nano); its tables are resized.
        table_resize: how the relative-position tables of init are resized: bilinear, as in the paper, or offset.
        data: a folder in COCO's format, or the built-in garments (garments:320 for small images).
        train_split: name of the split to train on.
        eval_split: name of the split to evaluate on.
        skip_bad: skip invalid images and annotations, instead of stopping.
        hflip: probability of a horizontal flip.
        scale_jitter: smallest and largest factor by which objects change in size, by cropping or padding the image.
        color_jitter: brightness, contrast and saturation change by a factor of up to 1 ± this.
        freeze: keep the first N stages of the backbone, including patch embeddings, at their initial weights.
    """

    task: ClassVar[str] = "detection"
    run_prefix: ClassVar[str] = "detect-"
    generated: ClassVar[Mapping[str, Mapping[str, Any]]] = _generated()
    own_data: ClassVar[str] = "own_objects"
    derived: ClassVar[frozenset[str]] = frozenset(
        {
            *("detector", "detector_options", "model", "model_options", "batch_size", "epochs", "lr"),
            *("warmup_steps", "ema", "eval_every", "log_every", "workers", "precision"),
        }
    )

    detector: str = "mask_rcnn"
    detector_options: dict[str, Any] = field(default_factory=dict)
    init: str | None = None
    table_resize: str = PAPER_TABLE_RESIZE
    data: str = "coco"
    train_split: str = "train2017"
    eval_split: str = "val2017"
    skip_bad: bool = False
    hflip: float = 0.5
    scale_jitter: tuple[float, float] = (1.0, 1.0)
    color_jitter: float = 0.0
    freeze: int = 0
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
        check_choice("detector", self.detector, DETECTORS)
        check_choice("table_resize", self.table_resize, TABLE_RESIZES)
        check_fraction("hflip", self.hflip)
        check_fraction("color_jitter", self.color_jitter)
        if not 0 < self.scale_jitter[0] <= self.scale_jitter[1]:
            raise ValueError(
                f"scale_jitter is {self.scale_jitter}; give a smallest and a largest factor, as [0.8, 1.25]"
            )
        check_at_least("freeze", self.freeze, 0)
        self.detector_config(num_classes=1)

    def detector_config(self, num_classes: int) -> DetectorConfig:
        """The detector's configuration for so many categories."""
        options = dict(self.model_options)
        if self.model in MODELS:
            options |= {"drop_path_rate": self.drop_path, "neighbours": self.neighbours}
        detector = {"kind": self.detector, "backbone": self.model, "num_classes": num_classes}
        return DetectorConfig.from_dict({**detector, "backbone_options": options, **self.detector_options})
