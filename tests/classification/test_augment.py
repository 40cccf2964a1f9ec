"""Augmentation of single images and of batches: how far, how often, and which boxes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import IMAGE_CLASSES, write_npz, write_photos
from classification_builders import IN_MEMORY, UNCHANGED, image_recipe, train_set_of

from vision_longformer.classification.augment import BatchAugmentation


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


@pytest.fixture
def points(tmp_path: Path) -> Path:
    """200 images with one bright pixel in the middle, at row 8 and column 5 of 16."""
    images = np.zeros((200, 16, 16), np.uint8)
    images[:, 8, 5] = 255
    labels = np.zeros(200, int)
    return write_npz(tmp_path / "point.npz", train_x=images, train_y=labels, classes=np.array(IMAGE_CLASSES))


@pytest.mark.parametrize("in_memory", [False, True])
def test_pad_crop_moves_images_by_an_eighth(points: Path, in_memory: bool) -> None:
    """The bright pixel may be up to 2 of 16 pixels away, and with flips on either side."""
    settings = {**IN_MEMORY, "erase": 0.0, "in_memory": in_memory}
    ((batch, _),) = train_set_of(image_recipe(points, batch_size=200, **settings)).batches(0)
    bright = (batch[:, 0] > 0).nonzero()
    assert bright[:, 0].tolist() == list(range(200))
    assert set(bright[:, 1].tolist()) == set(range(6, 11))
    assert set(bright[:, 2].tolist()) == {3, 4, 5, 6, 7} | {8, 9, 10, 11, 12}


@pytest.mark.parametrize(("hflip", "columns"), [(0.0, {5}), (1.0, {10})])
@pytest.mark.parametrize("in_memory", [False, True])
def test_flips(points: Path, hflip: float, columns: set[int], in_memory: bool) -> None:
    settings = {**UNCHANGED, "hflip": hflip, "in_memory": in_memory}
    ((batch, _),) = train_set_of(image_recipe(points, batch_size=200, **settings)).batches(0)
    assert set((batch[:, 0] > 0).nonzero()[:, 2].tolist()) == columns


@pytest.mark.parametrize("in_memory", [False, True])
def test_random_crop_is_of_the_image_that_evaluation_resizes(tmp_path: Path, in_memory: bool) -> None:
    """At crop_pct .8, crops of 16 are from 20 pixels: a pixel at row 10, column 10 comes to 6 to 10."""
    images = np.zeros((200, 20, 20), np.uint8)
    images[:, 10, 10] = 255
    path = write_npz(tmp_path / "point.npz", train_x=images, train_y=np.zeros(200, int))
    settings = {**UNCHANGED, "crop": "random", "crop_pct": 0.8, "in_memory": in_memory}
    ((batch, _),) = train_set_of(image_recipe(path, batch_size=200, num_classes=3, **settings)).batches(0)
    bright = (batch[:, 0] > 0).nonzero()
    assert set(bright[:, 1].tolist()) == set(bright[:, 2].tolist()) == set(range(6, 11))


def test_erasing_in_memory(tmp_path: Path) -> None:
    """Half of the images have a box of noise, of 2% to a third of their area."""
    path = write_npz(tmp_path / "grey.npz", train_x=np.full((400, 32, 32), 127, np.uint8), train_y=np.arange(400) % 3)
    recipe = image_recipe(path, **{**IN_MEMORY, "crop": "none"}, batch_size=400, image_size=32)
    ((images, _),) = train_set_of(recipe).batches(0)
    noisy = images != images.flatten(1).mode().values[:, None, None, None]
    erased = noisy.flatten(1).any(1)
    assert 160 < erased.sum() < 240
    areas = noisy[erased, 0].flatten(1).float().mean(1)
    assert 0.015 < areas.min() < 0.05
    assert 0.28 < areas.max() < 0.36
    for mask in noisy[erased, 0]:
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns)
        assert (rows.diff().sum(), columns.diff().sum()) <= (2, 2)
    assert abs(images[noisy].mean()) < 0.02
    assert abs(images[noisy].std() - 1) < 0.02


def test_erased_boxes_are_those_of_every_earlier_run() -> None:
    """Boxes worked out image by image from the same draws; part of a batch has the boxes that the whole batch has."""
    digest = bytes.fromhex("b6426057f061eb4a")  # printf "(9, 'erase')" | b2sum -l 64
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    draws = torch.rand(5, 8, 1, generator=generator).squeeze(2).tolist()
    noise = torch.randn(8, 1, 20, 30, generator=generator)
    expected = torch.full((8, 1, 20, 30), 7.0)
    for index, (chance, area, aspect, top, left) in enumerate(zip(*draws, strict=True)):
        if chance >= 0.5:
            continue
        area = (0.02 + area * (1 / 3 - 0.02)) * 20 * 30
        aspect = math.exp(math.log(0.3) + aspect * (math.log(1 / 0.3) - math.log(0.3)))
        height, width = min(round(math.sqrt(area * aspect)), 19), min(round(math.sqrt(area / aspect)), 29)
        row, column = int(top * (20 - height + 1)), int(left * (30 - width + 1))
        box = slice(row, row + height), slice(column, column + width)
        expected[index, 0][box] = noise[index, 0][box]
    augmentation = BatchAugmentation((20, 30), 8, 0.5, 0.5)
    erased = augmentation.erase(torch.full((8, 1, 20, 30), 7.0), 9, slice(0, 8))
    assert torch.equal(erased, expected)
    assert 2 <= (erased != 7).flatten(1).any(1).sum() <= 6
    assert torch.equal(augmentation.erase(torch.full((3, 1, 20, 30), 7.0), 9, slice(4, 7)), expected[4:7])


@pytest.mark.parametrize("crop", ["random_resized", "random", "pad", "none"])
@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m5-w4-d2", "original", None])
def test_augmentation_of_grey_models(photos: Path, crop: str, policy: str | None) -> None:
    options: dict[str, Any] = {"model_options": {"in_chans": 1}, "mean": None, "std": None, "crop_pct": 0.9}
    recipe = image_recipe(photos, **options, interpolation="random", crop=crop, auto_augment=policy, erase=0.0)
    images, _ = next(train_set_of(recipe).batches(0))
    assert images.shape == (4, 1, 16, 16)
    assert (images * 0.226 + 0.449).min() > -1e-6
    assert (images * 0.226 + 0.449).max() < 1 + 1e-6
    assert images.flatten(1).std(1).min() > 0


def test_posterizing_to_no_bits_is_black(photos: Path) -> None:
    """What magnitude 10 of RandAugment asks for, and newer versions of Pillow refuse."""
    train_set = train_set_of(image_recipe(photos, auto_augment="rand-m10-n1-inc1", erase=0.0))
    images = torch.cat([images for epoch in range(10) for images, _ in train_set.batches(epoch)])
    assert 1 <= (images == -1).flatten(1).all(1).sum() <= 20


def test_unknown_policy(photos: Path) -> None:
    with pytest.raises(ValueError, match="auto_augment is 'rand-q9', which timm does not know"):
        train_set_of(image_recipe(photos, auto_augment="rand-q9"))
