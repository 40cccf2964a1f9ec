"""What a detector is, as data: defaults, JSON, refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
from builders import SMALL_MODELS

from vision_longformer.detection.config import DetectorConfig
from vision_longformer.detection.detectors import build_detector
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.training.recipe import resolve


def test_defaults_are_the_papers() -> None:
    config = DetectorConfig("retinanet", "vision_longformer_tiny", 80)
    assert (config.levels, config.anchor_scale, config.min_size, config.max_size) == ((2, 3, 4), 4.0, (800,), 1333)
    assert DetectorConfig("mask_rcnn", "vision_longformer_tiny", 80).levels == (1, 2, 3, 4)


def test_a_single_min_size() -> None:
    """As in torchvision."""
    config = DetectorConfig("retinanet", "vil", 3, min_size=640)
    assert config.min_size == config.min_sizes == (640,)
    assert build_detector(config).transform.min_size == (640,)
    with pytest.raises(ValueError, match="min_size is 0; it must be an integer of at least 1"):
        config.override(min_size=0)


def test_configuration_survives_json() -> None:
    config = DetectorConfig("mask_rcnn", "vil", 3, {"drop_path_rate": 0.2}, levels=(2, 3), min_size=(64, 96))
    assert DetectorConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "retinnet"}, "unknown kind of detector 'retinnet'; did you mean 'retinanet'"),
        ({"backbone": "resnet_18"}, "unknown backbone 'resnet_18'; did you mean 'resnet18'"),
        ({"backbone_options": {"drop_path": 0.1}}, "unknown model option 'drop_path'; did you mean"),
        ({"backbone_options": {"stages": [object()]}}, "backbone_options must be plain data"),
        ({"levels": (4, 5)}, "but the backbone (vil) has 4 stages; give levels up to 4"),
        ({"levels": (2, 1)}, "give stages that follow one another"),
        ({"levels": ()}, "levels is empty"),
        ({"num_classes": 0}, "num_classes is 0; it must be an integer of at least 1"),
        ({"min_size": (0,)}, "min_size is 0"),
        ({"score_threshold": 2.0}, "score_threshold is 2.0; it must be between 0 and 1"),
        ({"anchor_scale": 0.0}, "must be positive"),
        ({"chanels": 8}, "unknown detector option 'chanels'; did you mean 'channels'"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], message: str) -> None:
    data = {"kind": "mask_rcnn", "backbone": "vil", "num_classes": 3}
    with pytest.raises(ValueError, match=re.escape(message)):
        DetectorConfig.from_dict({**data, **changes})


def test_levels_of_a_changed_backbone() -> None:
    """Stages are counted in the backbone as its options make it."""
    stages = SMALL_MODELS["vil"].to_dict()["stages"]
    assert DetectorConfig("mask_rcnn", "vil", 3, {"stages": [*stages, stages[-1]]}, levels=(4, 5)).stages == (4, 5)
    with pytest.raises(ValueError, match=r"\(vil, changed: stages \(.*\)\) has 3 stages; give levels up to 3"):
        DetectorConfig("mask_rcnn", "vil", 3, {"stages": stages[:3]})


def test_backbone_in_words() -> None:
    """What training sets makes no other backbone, what is cut away does; timm's is just named."""
    tiny = DetectorConfig("retinanet", "vision_longformer_tiny", 3, {"drop_path_rate": 0.2, "neighbours": "random"})
    assert tiny.backbone_in_words == "vision_longformer_tiny"
    small = resolve(DetectionRecipe, "quickstart").detector_config(3)
    expected = "vision_longformer_tiny, changed: stages (blocks 1, 1, 2, 1; channels 48, 96, 192, 384)"
    assert small.backbone_in_words == expected
    assert DetectorConfig("retinanet", "resnet18", 3).backbone_in_words == "resnet18"


def test_missing_fields_are_named() -> None:
    with pytest.raises(ValueError, match="a detector needs backbone and num_classes"):
        DetectorConfig.from_dict({"kind": "retinanet"})
