"""Detections and annotated objects in their small form and in COCO's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from pycocotools import mask as rle

from vision_longformer.detection.detections import Category, Detection, MaskCrop, coco_result, detections_from_output


def test_masks_are_kept_without_their_surroundings() -> None:
    mask = np.zeros((40, 50), dtype=bool)
    mask[10:13, 20:24] = True
    patch = MaskCrop.around(mask)
    assert (patch.top, patch.left, patch.pixels.shape) == (10, 20, (3, 4))
    assert np.array_equal(patch.on(40, 50), mask)
    assert not MaskCrop.around(np.zeros((4, 5), dtype=bool)).on(4, 5).any()


def test_detections_of_an_output() -> None:
    output = {
        "boxes": torch.tensor([[1.0, 2, 3, 4], [5, 6, 9, 10], [0, 0, 1, 1]]),
        "labels": torch.tensor([2, 1, 2]),
        "scores": torch.tensor([0.5, 0.75, 0.25]),
        "masks": torch.zeros(3, 1, 20, 30),
    }
    output["masks"][1, 0, 6:10, 5:9] = 0.5
    detections = detections_from_output(output, 0.5)
    assert [(one.box, one.label, one.score) for one in detections] == [((5, 6, 9, 10), 1, 0.75), ((1, 2, 3, 4), 2, 0.5)]
    result = coco_result(detections[0], 7, (Category(44, "bottle"), Category(3, "car")), (20, 30))
    assert (result["image_id"], result["category_id"], result["bbox"]) == (7, 44, [5, 6, 4, 4])
    assert rle.decode(json.loads(json.dumps(result))["segmentation"])[6:10, 5:9].sum() == 16
    assert rle.area(result["segmentation"]) == 16


@pytest.mark.parametrize(
    "pixels",
    [
        pytest.param(np.ones((3, 4), dtype=bool), id="a rectangle"),
        pytest.param(np.eye(5, dtype=bool), id="a diagonal"),
        pytest.param(np.ones((20, 2), dtype=bool), id="as high as the image"),
        pytest.param(np.zeros((0, 0), dtype=bool), id="nothing"),
        pytest.param(np.random.default_rng(0).random((7, 9)) < 0.5, id="noise"),
    ],
)
@pytest.mark.parametrize("corner", [(0, 0), (13, 21)])
def test_run_lengths_are_those_of_the_whole_mask(pixels: np.ndarray, corner: tuple[int, int]) -> None:
    """As pycocotools counts them, also where a mask begins or ends with the image."""
    top, left = (0 if pixels.shape[0] == 20 else corner[0]), corner[1]
    crop = MaskCrop(top, left, pixels)
    expected = rle.encode(crop.on(20, 30))
    assert crop.run_lengths(20, 30) == {"size": [20, 30], "counts": expected["counts"].decode()}


def test_every_third_pixel() -> None:
    mask = np.random.default_rng(1).random((20, 30)) < 0.3
    mask[:4], mask[:, :5] = False, False
    detection = Detection((6.0, 9.0, 12.0, 15.0), 1, 0.5, MaskCrop.around(mask)).every(3)
    assert detection.box == (2, 3, 4, 5)
    assert detection.mask is not None
    assert np.array_equal(detection.mask.on(7, 10), mask[::3, ::3])
