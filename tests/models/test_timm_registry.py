"""What timm knows of our models."""

from __future__ import annotations

import pytest
import timm

from vision_longformer import MODELS
from vision_longformer.models.timm_registry import data_config


def test_all_models_are_registered() -> None:
    assert set(timm.list_models(module="timm_registry")) == set(MODELS)


@pytest.mark.parametrize(
    ("name", "img_size", "crop_pct"),
    [
        ("vision_longformer_small", (224, 224), 0.875),
        ("vision_longformer_small_384", (384, 384), 0.922),
        ("vision_longformer_micro", (32, 32), 0.875),
        ("vision_longformer_micro", (225, 320), 0.922),
        ("vision_longformer_micro", (320, 224), 0.875),
    ],
)
def test_images_of_a_model(name: str, img_size: tuple[int, int], crop_pct: float) -> None:
    """ImageNet's normalisation; up to 224 pixels, 7/8 of the resized image is seen, as is usual."""
    assert data_config(MODELS[name].override(img_size=img_size)) == {
        "num_classes": 1000,
        "input_size": (3, *img_size),
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "stages.0.patch_embed.proj",
        "classifier": "head",
    }
