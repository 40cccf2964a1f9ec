"""Augmentation moves boxes and masks with the pixels."""

from __future__ import annotations

from random import Random

import pytest
import torch
from PIL import Image

from vision_longformer.detection.augment import PADDING, Augmentation, crop_target, flip, zoom
from vision_longformer.detection.detections import Target


def sample() -> tuple[Image.Image, Target]:
    """A black image of 40×20 with two white objects, of 10×10 at (10, 5) and of 4×10 at (36, 10)."""
    boxes = torch.tensor([[10.0, 5, 20, 15], [36, 10, 40, 20]])
    masks = torch.zeros(2, 20, 40, dtype=torch.bool)
    masks[0, 5:15, 10:20] = True
    masks[1, 10:20, 36:40] = True
    image = Image.fromarray(masks.any(0).numpy()).convert("RGB")
    labels, crowd, area = torch.tensor([1, 2]), torch.tensor([False, False]), torch.tensor([100.0, 40])
    return image, Target(7, boxes, labels, masks, crowd, area)


def assert_objects_are_white(image: Image.Image, target: Target) -> None:
    """Every object's pixels are white, its box is the one around them, and nothing else is white."""
    white = torch.tensor(
        [[image.getpixel((x, y)) == (255,) * 3 for x in range(image.width)] for y in range(image.height)]
    )
    assert target.masks is not None
    assert torch.equal(white, target.masks.any(0))
    for box, mask in zip(target.boxes.tolist(), target.masks, strict=True):
        rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
        assert box == [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def test_flip() -> None:
    image, target = flip(*sample())
    assert target.boxes.tolist() == [[20, 5, 30, 15], [0, 10, 4, 20]]
    assert_objects_are_white(image, target)


def test_zooming_in_cuts() -> None:
    """Twice as large: a frame of 20×10 of the image's 40×20, from (5, 5) on at a quarter and a half of the way."""
    image, target = zoom(*sample(), 2.0, 0.25, 0.5)
    assert image.size == (20, 10)
    assert target.boxes.tolist() == [[5, 0, 15, 10]]  # 10 - 5 and 5 - 5; the other object is outside
    assert (target.labels.tolist(), target.area.tolist(), target.image_id) == ([1], [100], 7)
    assert_objects_are_white(image, target)


def test_zooming_out_adds_a_border() -> None:
    """Half as large: a frame of 80×40; at 1, it ends with the image, so that 40 columns and 20 rows come before."""
    image, target = zoom(*sample(), 0.5, 1.0, 1.0)
    assert image.size == (80, 40)
    assert image.getpixel((0, 0)) == image.getpixel((39, 39)) == PADDING
    assert target.boxes.tolist() == [[50, 25, 60, 35], [76, 30, 80, 40]]
    assert_objects_are_white(image, target)


def test_objects_that_a_frame_hardly_shows() -> None:
    """From column 16 on, 4 of 10 columns of the first object are left; from column 18 on, 2 of 10, less than 0.3."""
    _, target = sample()
    assert crop_target(target, 16, 0, 24, 20).boxes.tolist() == [[0, 5, 4, 15], [20, 10, 24, 20]]
    assert crop_target(target, 18, 0, 22, 20).labels.tolist() == [2]


def test_a_frame_without_objects_is_not_taken() -> None:
    image, target = sample()
    same, kept = zoom(image, target, 4.0, 0.0, 0.0)  # 10×5 pixels at the corner
    assert (same.size, kept.labels.tolist()) == ((40, 20), [1, 2])


def test_colours_change_and_objects_do_not() -> None:
    image, target = Image.new("RGB", (4, 4), (100, 100, 100)), sample()[1]
    seen = {Augmentation(0.0, color_jitter=0.2)(image, target, Random(seed))[0].getpixel((0, 0)) for seed in range(20)}
    assert len(seen) > 5
    assert all(78 <= value <= 122 for pixel in seen for value in pixel)  # 100 · 1.2 at most: contrast keeps grey
    assert Augmentation(0.0)(image, target, Random(0)) == (image, target)


def test_scales_are_drawn_between_their_limits() -> None:
    image, target = sample()
    augment = Augmentation(0.0, (0.5, 2.0))
    widths = [augment(image, target, Random(seed))[0].width for seed in range(60)]
    assert min(widths) >= 20
    assert max(widths) <= 80
    assert 15 < sum(width < 40 for width in widths) < 45


@pytest.mark.parametrize("seed", range(3))
def test_the_same_draw_gives_the_same_image(seed: int) -> None:
    augment = Augmentation(0.5, (0.8, 1.25), 0.3)
    one, other = (augment(*sample(), Random(seed)) for _ in range(2))
    assert one[0].tobytes() == other[0].tobytes()
    assert torch.equal(one[1].boxes, other[1].boxes)
