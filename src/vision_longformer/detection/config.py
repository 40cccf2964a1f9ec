"""What a detector is, as data: which one, its backbone, pyramid and heads, how images come in and results go out.

Free of torch and timm, so that commands that only list recipes start at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ..errors import check_at_least, check_choice, unknown_name
from ..models.config import ModelConfig
from ..models.zoo import MODELS, describe_model

DETECTORS = ("retinanet", "mask_rcnn")
STAGES = {"retinanet": (2, 3, 4), "mask_rcnn": (1, 2, 3, 4)}
"""Stages of the backbone under the pyramid of the paper's detectors, counted from 1."""

ANCHOR_SCALES = {"retinanet": 4.0, "mask_rcnn": 8.0}
"""Anchors of 32 pixels and up: on the map of stride 8 in RetinaNet, of stride 4 in Mask R-CNN."""

COUNTS = (
    *("num_classes", "channels", "max_size", "box_width", "mask_channels", "mask_layers"),
    *("proposals", "samples", "detections"),
)


@dataclass(frozen=True)
class DetectorConfig:
    """A detector; the defaults are those of the paper's COCO models.

    - ``kind``: retinanet or mask_rcnn.
    - ``backbone``: a model of ours or, for comparison, any of timm's with features; ``backbone_options`` go to it.
    - ``num_classes``: without background. Labels are 1 to ``num_classes``.
    - ``levels``: stages of the backbone under the pyramid, counted from 1; None for the paper's.
    - ``channels``: of the pyramid's maps.
    - ``min_size``: of the shorter side, one or several; training draws one per image, evaluation takes the last.
      ``max_size``: of the longer side, which wins over ``min_size``. ``scale``: the factor by which evaluation resizes
      images instead; 1 leaves them as they are.
    - ``anchor_scale``: side of the smallest anchor in cells of its map; None for the paper's.
    - ``box_width``, ``mask_channels``, ``mask_layers``: of the heads of Mask R-CNN.
    - ``proposals``: regions per image that Mask R-CNN classifies, candidates per level of RetinaNet; ``samples``: how
      many regions Mask R-CNN learns from.
    - ``score_threshold``, ``nms_threshold``, ``detections``: which detections of an image remain, and how many at most.
    """

    kind: str
    backbone: str
    num_classes: int
    backbone_options: dict[str, Any] = field(default_factory=dict)
    levels: tuple[int, ...] | None = None
    channels: int = 256
    min_size: tuple[int, ...] | int = (800,)
    max_size: int = 1333
    scale: float | None = None
    anchor_scale: float | None = None
    anchor_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    box_width: int = 1024
    mask_channels: int = 256
    mask_layers: int = 4
    proposals: int = 1000
    samples: int = 512
    score_threshold: float = 0.05
    nms_threshold: float = 0.5
    detections: int = 100

    def __post_init__(self) -> None:
        check_choice("kind of detector", self.kind, DETECTORS)
        _check_backbone(self.backbone, self.backbone_options)
        if self.levels is None:
            object.__setattr__(self, "levels", STAGES[self.kind])
        if self.anchor_scale is None:
            object.__setattr__(self, "anchor_scale", ANCHOR_SCALES[self.kind])
        if isinstance(self.min_size, int):
            object.__setattr__(self, "min_size", (self.min_size,))
        for name in ("levels", "min_size", "anchor_ratios"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one number")
        for name in COUNTS:
            check_at_least(name, getattr(self, name), 1)
        for size in self.min_sizes:
            check_at_least("min_size", size, 1)
        for name in ("score_threshold", "nms_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be between 0 and 1")
        if self.scale is not None and not self.scale > 0:
            raise ValueError(f"scale is {self.scale}; it must be above 0, or None for min_size and max_size")
        if min(self.anchor_ratios) <= 0 or self.cells <= 0:
            raise ValueError("anchor_ratios and anchor_scale must be positive")
        self._check_levels()

    def _check_levels(self) -> None:
        for level in self.stages:
            check_at_least("a level", level, 1)
        if self.stages != tuple(range(self.stages[0], self.stages[-1] + 1)):
            raise ValueError(f"levels are {self.stages}; give stages that follow one another, as (2, 3, 4)")
        own = self.backbone_config
        if own is not None and self.stages[-1] > len(own.stages):
            count = len(own.stages)
            raise ValueError(
                f"levels are {self.stages}, but the backbone ({self.backbone_in_words}) has {count} stages; "
                f"give levels up to {count}"
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """``levels``, which is never None once it is set."""
        assert self.levels is not None
        return self.levels

    @property
    def min_sizes(self) -> tuple[int, ...]:
        """``min_size``, which is never a single int once it is set."""
        assert isinstance(self.min_size, tuple)
        return self.min_size

    @property
    def cells(self) -> float:
        """``anchor_scale``, which is never None once it is set."""
        assert self.anchor_scale is not None
        return self.anchor_scale

    @property
    def backbone_config(self) -> ModelConfig | None:
        """The configuration of a backbone of ours, without classifier; None for timm's."""
        if self.backbone not in MODELS:
            return None
        return MODELS[self.backbone].override(**{**self.backbone_options, "num_classes": 0})

    @property
    def backbone_in_words(self) -> str:
        """Its name, and what is changed of a model of ours."""
        own = self.backbone_config
        return self.backbone if own is None else describe_model(self.backbone, own)

    def override(self, **changes: Any) -> DetectorConfig:
        """A copy with some fields changed; unknown names are refused with a suggestion."""
        _check_names(changes)
        return replace(self, **changes)

    def without_pretrained(self) -> DetectorConfig:
        """The same detector, whose backbone does not fetch weights of timm's when it is built."""
        options = {name: value for name, value in self.backbone_options.items() if name != "pretrained"}
        return replace(self, backbone_options=options)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DetectorConfig:
        """The inverse of :meth:`to_dict`; unknown fields are refused by name."""
        _check_names(data)
        missing = [name for name in ("kind", "backbone", "num_classes") if name not in data]
        if missing:
            raise ValueError(f"a detector needs {' and '.join(missing)}")
        return cls(**data)


def _check_names(data: Mapping[str, Any]) -> None:
    names = [item.name for item in fields(DetectorConfig)]
    for name in data:
        if name not in names:
            raise unknown_name("detector option", name, names)


def _check_backbone(name: str, options: Mapping[str, Any]) -> None:
    """Refuse unknown names, and unknown options of our models, before anything is built."""
    try:
        json.dumps(options)
    except TypeError as error:
        raise ValueError(f"backbone_options must be plain data, as files hold it ({error})") from error
    if name in MODELS:
        MODELS[name].override(**options)
        return
    import timm

    if not timm.is_model(name):
        raise unknown_name("backbone", name, [*MODELS, *timm.list_models()])
