"""The built-in data: seeded, divided, with masks that say what can be seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vision_longformer.detection.dataset import TrainSet, open_detection
from vision_longformer.detection.detections import Target
from vision_longformer.detection.garments import (
    MARGIN,
    OPENWORK,
    Placed,
    Sprite,
    _masks,
    cutouts,
    paint,
    photo_parts,
    place,
    random_background,
    random_sprite,
    visible,
)


def _same(one: Target, other: Target) -> bool:
    assert one.masks is not None
    assert other.masks is not None
    return one.masks.shape == other.masks.shape and torch.equal(one.masks, other.masks)


def test_an_image_is_a_function_of_split_number_and_seed() -> None:
    data, again = (open_detection("garments:128", "train") for _ in range(2))
    image, target = data.read(5)
    same, same_target = again.read(5)
    assert np.array_equal(np.asarray(image), np.asarray(same))
    assert _same(target, same_target)
    others = [data.read(6), data.read(5, seed=1), open_detection("garments:128", "validation").read(5)]
    assert not any(_same(target, other) for _, other in others)


def test_sizes_and_categories() -> None:
    training, validation = (open_detection("garments", split) for split in ("train", "val"))
    assert (len(training), len(validation)) == (2000, 200)
    assert [category.id for category in training.categories] == list(range(1, 11))
    assert training.categories[8].name == "Bag"
    for index in range(3):
        image, _ = training.read(index)
        assert 512 <= max(image.size) <= 1600
        small, _ = open_detection("garments:96", "train").read(index)
        assert max(small.size) == 96


def test_boxes_areas_and_masks_agree() -> None:
    """Objects are visible parts: boxes are tight around them, and no pixel belongs to two."""
    data = open_detection("garments:320", "train")
    counts = set()
    for index in range(20):
        image, target = data.read(index)
        masks = target.masks
        assert masks is not None
        assert masks.shape[1:] == (image.height, image.width)
        assert int(masks.sum(0).max()) == 1
        assert target.area.tolist() == masks.sum((1, 2)).tolist()
        for mask, box in zip(masks, target.boxes.int().tolist(), strict=True):
            rows, columns = torch.nonzero(mask, as_tuple=True)
            assert box == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert target.labels.min() >= 1
        assert target.labels.max() <= 10
        counts.add(len(target.labels))
    assert min(counts) >= 2
    assert max(counts) <= 12
    assert len(counts) > 5


def test_splits_share_no_garment_and_no_pixel_of_a_photo() -> None:
    training, validation = (cutouts(training) for training in (True, False))
    assert (len(training.grey), len(validation.grey)) == (6000, 1000)
    for left, right in zip(photo_parts(True), photo_parts(False), strict=True):
        assert left.height == right.height
        assert left.width / (left.width + right.width) == pytest.approx(0.75, abs=0.001)
    assert len(photo_parts(True)) == 7
    random = np.random.default_rng(0)
    assert {max(random_background(False, 100, random).shape) for _ in range(20)} == {100}


def test_new_images_in_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader asks for images of a seed of their own, which are the same when an epoch is begun again."""
    monkeypatch.setattr("vision_longformer.detection.garments.TRAINING_IMAGES", 4)
    loader = TrainSet(open_detection("garments:64", "train"), seed=0, batch_size=4)
    epochs = [next(loader.batches(epoch))[0] for epoch in (0, 1, 0)]
    totals = [sorted(float(image.sum()) for image in epoch) for epoch in epochs]
    assert totals[0] == totals[2]
    assert not set(totals[0]) & set(totals[1])


def _frame(*rows: str) -> np.ndarray:
    """Grey levels (1, h, w): ``#`` is bright, ``-`` is faint, ``.`` is black."""
    return np.array([[{"#": 200, "-": 3, ".": 0}[letter] for letter in row] for row in rows], dtype=np.uint8)[None]


def test_masks_of_garments() -> None:
    """Holes in cloth are filled, those of openwork stay if they are large; faint lines are no garment."""
    shirt = _frame(
        "..........",
        ".#######-.",
        ".#..#..#..",
        ".#..#..#-.",
        ".#######..",
        ".#.####---",
        ".#######..",
        "-.......--",
        "..........",
    )
    cloth = _masks(shirt, np.array([False]))[0]
    assert cloth[1:7, 1:8].all()
    assert cloth.sum() == 6 * 7
    openwork = _masks(shirt, np.array([True]))[0]
    assert openwork.sum() == 6 * 7 - 8
    assert not openwork[2:4, 2:4].any()
    assert openwork[5, 2]
    dark = _masks(_frame(".....", ".---.", ".---.", ".---.", "....."), np.array([False]))[0]
    assert dark.sum() == 9


def test_all_garments_have_masks() -> None:
    """Most bright pixels of Fashion-MNIST are in the masks, the margin is not, and only openwork has holes."""
    garments = cutouts(False)
    masks = garments.masks > 0
    assert masks.any((1, 2)).all()
    assert masks[garments.grey >= 40].all()
    assert not masks[:, :MARGIN].any()
    inside = (garments.grey > 0)[masks].mean()
    assert inside > 0.97
    assert set(OPENWORK) == {5, 8}


def _block(height: int, width: int, label: int, colour: float = 1.0) -> Sprite:
    return Sprite(np.full((height, width, 3), colour, np.float32), np.ones((height, width), np.float32), label)


def test_later_objects_hide_earlier_ones() -> None:
    placed = [Placed(_block(10, 10, 1), 0, 0), Placed(_block(10, 10, 2), 5, 0), Placed(_block(4, 4, 3), -2, -2)]
    remaining, masks = visible(placed, 20, 20)
    assert [one.sprite.label for one in remaining] == [1, 2, 3]
    assert masks.sum((1, 2)).tolist() == [50 - 4, 100, 4]
    assert masks[2, :2, :2].all()
    assert masks[1, 5:15, :10].all()


def test_objects_hidden_beyond_four_fifths_are_left_out() -> None:
    """Those that they hid in turn are seen again."""
    bottom, middle = Placed(_block(10, 10, 1), 0, 0), Placed(_block(10, 10, 2), 2, 0)
    remaining, masks = visible([bottom, middle, Placed(_block(9, 10, 3), 4, 0)], 40, 40)
    assert [one.sprite.label for one in remaining] == [1, 2, 3]
    remaining, masks = visible([bottom, middle, Placed(_block(9, 10, 3), 3, 0)], 40, 40)
    assert [one.sprite.label for one in remaining] == [1, 3]
    assert masks.sum((1, 2)).tolist() == [30, 90]
    remaining, _ = visible([Placed(_block(10, 10, 1), -9, 0)], 40, 40)
    assert remaining == []


def test_painted_where_the_masks_are() -> None:
    """The pixels of an object have its colour, and beside it there is at most its shadow."""
    sprite = random_sprite(cutouts(True), np.random.default_rng(1), 4)
    white = Sprite(np.ones_like(sprite.colour), sprite.opacity, sprite.label)
    (one,) = placed = place([white], 200, 200, np.random.default_rng(2))
    remaining, masks = visible(placed, 200, 200)
    assert remaining == [one]
    painted = paint(np.full((200, 200, 3), 100, np.uint8), remaining)
    assert painted[masks[0]].min() > 150
    assert painted[~masks[0]].max() < 190
    far = np.ones((200, 200), bool)
    far[one.windows(200, 200)[0]] = False
    assert (painted[far] == 100).all()


def test_sprites_are_enlarged_up_to_four_times() -> None:
    random = np.random.default_rng(0)
    garments = cutouts(True)
    extents = []
    for _ in range(60):
        rows = np.flatnonzero(random_sprite(garments, random, 4).mask.any(1))
        extents.append(rows[-1] - rows[0] + 1)
    assert 15 < min(extents) < 35
    assert 100 < max(extents) < 28 * 4 * 1.4


def test_garments_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="unknown split 'tset'; did you mean 'test'"):
        open_detection("garments", "tset")
    for wrong in ("garments:", "garments:10", "garments:large"):
        with pytest.raises(ValueError, match="should be garments, or garments:SIDE with at least 64 pixels"):
            open_detection(wrong, "train")
