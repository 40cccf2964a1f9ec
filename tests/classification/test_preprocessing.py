"""From an image to a model's input: crops, normalisation, ImageNet's defaults, and storage as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import IMAGE_CLASSES, small_config
from classification_builders import image_recipe
from PIL import Image

from vision_longformer.classification.preprocessing import Preprocessing, recipe_preprocessing
from vision_longformer.errors import CheckpointError
from vision_longformer.models.config import Full


def test_preprocessing_crops_the_centre_of_the_resized_image() -> None:
    """From 40×20 at crop_pct .8: the shorter side becomes 20, and the crop is its middle 16 of 20 and of 40 pixels."""
    prepare = Preprocessing((16, 16), (0.5,) * 3, (0.25,) * 3, 0.8, "bicubic", IMAGE_CLASSES)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 40, 3), np.uint8)
    images = prepare.transform()(Image.fromarray(pixels))[None]
    crop = torch.from_numpy(pixels[2:18, 12:28]).permute(2, 0, 1)
    assert torch.equal(images[0], (crop.float() / 255 - 0.5) / 0.25)
    assert torch.equal(images, prepare.normalise(crop[None]))
    assert torch.equal(prepare.denormalise(images)[0], crop)
    assert prepare.transform((8, 12))(Image.fromarray(pixels)).shape == (3, 8, 12)
    assert prepare.shape == (3, 16, 16)


def test_channels_are_normalised_one_by_one() -> None:
    prepare = Preprocessing((2, 2), (0.1, 0.2, 0.3), (0.5, 0.25, 0.125), 1.0, "nearest", IMAGE_CLASSES)
    image = Image.new("RGB", (2, 2), (51, 102, 153))  # .2, .4, .6
    expected = torch.tensor([0.2, 0.8, 2.4]).view(3, 1, 1).expand(3, 2, 2)
    torch.testing.assert_close(prepare.transform()(image), expected)
    pixels = torch.tensor([51, 102, 153], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    assert torch.equal(prepare.normalise(pixels)[0], prepare.transform()(image))


@pytest.mark.parametrize(
    ("size", "crop_pct"),
    [(223, 0.875), (224, 0.875), (225, 0.922), (384, 0.922), ((224, 384), 0.875), ((225, 384), 0.922)],
)
def test_larger_models_see_more_of_an_image(size: int | tuple[int, int], crop_pct: float) -> None:
    """Up to and including 224 pixels of the shorter side, .875 of the resized image, and .922 beyond."""
    config = small_config(Full(), img_size=size)
    assert Preprocessing.for_model(config, IMAGE_CLASSES).crop_pct == crop_pct


@pytest.mark.parametrize(("size", "crop_pct"), [(223, 0.875), (224, 0.875), (225, 0.922)])
def test_larger_recipes_see_more_of_an_image(size: int, crop_pct: float) -> None:
    recipe = image_recipe("fashion-mnist", image_size=size, crop_pct=None)
    assert recipe_preprocessing(recipe, recipe.model_config(3), IMAGE_CLASSES).crop_pct == crop_pct


def test_preprocessing_of_recipes() -> None:
    small = image_recipe("fashion-mnist", mean=None, std=None, crop_pct=None, interpolation="random")
    prepared = recipe_preprocessing(small, small.model_config(3), IMAGE_CLASSES)
    assert prepared == Preprocessing(
        (16, 16), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 0.875, "bicubic", IMAGE_CLASSES
    )
    own = replace(small, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop_pct=0.7, interpolation="nearest")
    assert recipe_preprocessing(own, own.model_config(3), IMAGE_CLASSES) == Preprocessing(
        (16, 16), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 0.7, "nearest", IMAGE_CLASSES
    )
    grey = replace(small, model_options={"in_chans": 1}, crop_pct=1.0)
    prepared = recipe_preprocessing(grey, grey.model_config(3), IMAGE_CLASSES)
    assert (prepared.mean, prepared.std, prepared.crop_pct) == ((0.449,), (0.226,), 1.0)
    levels = np.full((16, 16, 3), 51, np.uint8)
    assert torch.allclose(prepared.transform()(Image.fromarray(levels)), torch.tensor((0.2 - 0.449) / 0.226))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_options": {"in_chans": 4}}, "in_chans is 4; images have 3 channels"),
        ({"mean": (0.5,)}, r"mean is \(0.5,\), but the model's images have 3 channels"),
        ({"std": (0.0, 1.0, 1.0)}, "std is .* must be positive"),
        ({"crop_pct": 0.0}, "crop_pct is 0.0; it must be above 0"),
    ],
)
def test_bad_preprocessing(changes: dict[str, Any], message: str) -> None:
    recipe = image_recipe("fashion-mnist", **changes)
    with pytest.raises(ValueError, match=message):
        recipe_preprocessing(recipe, recipe.model_config(3), IMAGE_CLASSES)


def test_preprocessing_is_stored_as_json() -> None:
    prepare = Preprocessing((16, 24), (0.5,), (0.25,), 0.8, "bilinear", IMAGE_CLASSES)
    data = json.loads(json.dumps(prepare.to_dict()))
    assert Preprocessing.from_dict(data, "model.safetensors") == prepare
    with pytest.raises(CheckpointError, match=r"model.safetensors does not say .*: mean, classes missing"):
        Preprocessing.from_dict({key: data[key] for key in data if key not in ("mean", "classes")}, "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors does not say .*: crop_pct is 7; it must be"):
        Preprocessing.from_dict({**data, "crop_pct": 7}, "model.safetensors")
