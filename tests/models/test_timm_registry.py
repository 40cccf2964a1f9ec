"""What timm knows of our models."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.data import resolve_model_data_config

from vision_longformer import MODELS
from vision_longformer.checkpoint import load, load_info
from vision_longformer.models.timm_registry import data_config


def test_all_models_are_registered() -> None:
    assert set(timm.list_models(module="timm_registry")) == set(MODELS)


@pytest.mark.parametrize(
    ("name", "classes", "img_size", "crop_pct"),
    [
        ("vision_longformer_small", 1000, (224, 224), 0.875),
        ("vision_longformer_small_384", 1000, (384, 384), 0.922),
        ("vision_longformer_micro", 10, (32, 32), 0.875),
        ("vision_longformer_micro", 10, (225, 320), 0.922),
        ("vision_longformer_micro", 10, (320, 224), 0.875),
    ],
)
def test_images_of_a_model(name: str, classes: int, img_size: tuple[int, int], crop_pct: float) -> None:
    """ImageNet's normalisation; up to 224 pixels, 7/8 of the resized image is seen, as is usual."""
    assert data_config(MODELS[name].override(img_size=img_size)) == {
        "num_classes": classes,
        "input_size": (3, *img_size),
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "stages.0.patch_embed.proj",
        "classifier": "head",
    }


@pytest.mark.parametrize(
    ("name", "weights"), [("vision_longformer_micro", "cifar10_micro"), ("vision_longformer_nano", "cifar10_nano")]
)
def test_pretrained(name: str, weights: str) -> None:
    """The model and the preparation of images are those of the file; other classes and channels get new weights."""
    model = timm.create_model(name, pretrained=True).eval()
    image = torch.randn(2, 3, *model.config.img_size)
    torch.testing.assert_close(model(image), load(weights)(image))

    prepared, stored = resolve_model_data_config(model), load_info(weights)["preprocessing"]
    assert prepared["input_size"] == (3, *stored["size"])
    assert [list(prepared["mean"]), list(prepared["std"])] == [stored["mean"], stored["std"]]
    assert (prepared["crop_pct"], prepared["interpolation"]) == (1.0, "bicubic")

    other = timm.create_model(name, pretrained=True, num_classes=3, in_chans=1)
    assert other.head.weight.shape[0] == 3
    assert torch.equal(other.stages[0].blocks[0].mlp.fc1.weight, model.stages[0].blocks[0].mlp.fc1.weight)


def test_models_without_weights() -> None:
    assert timm.list_pretrained("vision_longformer*") == [
        "vision_longformer_micro.cifar10",
        "vision_longformer_nano.cifar10",
    ]
    with pytest.raises(RuntimeError, match="No pretrained weights exist for vision_longformer_tiny"):
        timm.create_model("vision_longformer_tiny", pretrained=True)
