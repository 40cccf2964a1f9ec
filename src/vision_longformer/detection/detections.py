"""What is in an image: its annotated objects as tensors, detections in a form that is small however large the image is,
and both as COCO's files state them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import nan
from typing import Any, NamedTuple

import numpy as np
import torch
from pycocotools import mask as rle
from torch import Tensor

from ..geometry import ceil_div

MASK_THRESHOLD = 0.5
"""Probability from which a pixel belongs to an object."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class Category(NamedTuple):
    """What an object may be; ``id`` is the data set's own number, and ids may have gaps."""

    id: int
    name: str


@dataclass
class Target:
    """The n annotated objects of an image of h × w pixels.

    - ``boxes``: (n, 4) float32, left, top, right, bottom; ``labels``: (n,) int64, label k is category number k - 1.
    - ``masks``: (n, h, w) bool, or None if the data has boxes only.
    - ``crowd``: (n,) bool, regions of objects too many to tell apart: not learned, and not held against a detector.
    - ``area``: (n,) float32, by which objects count as small, medium or large.
    """

    image_id: int
    boxes: Tensor
    labels: Tensor
    masks: Tensor | None
    crowd: Tensor
    area: Tensor


@dataclass(frozen=True)
class MaskCrop:
    """A mask without its empty surroundings: bool pixels (h, w), and where in the image the first of them is."""

    top: int
    left: int
    pixels: np.ndarray

    @classmethod
    def around(cls, mask: np.ndarray) -> MaskCrop:
        """Of a mask (h, w) of a whole image."""
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if not len(rows):
            return cls(0, 0, np.zeros((0, 0), dtype=bool))
        window = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        return cls(int(rows[0]), int(columns[0]), mask[window].copy())

    def on(self, height: int, width: int) -> np.ndarray:
        """The mask of the whole image, (height, width), uint8 in the column order that run lengths are counted in."""
        canvas = np.zeros((height, width), dtype=np.uint8, order="F")
        rows, columns = self.pixels.shape
        canvas[self.top : self.top + rows, self.left : self.left + columns] = self.pixels
        return canvas

    def run_lengths(self, height: int, width: int) -> dict[str, Any]:
        """The mask of the whole image as COCO's compressed run lengths, which are JSON data, without making it."""
        columns, rows = np.nonzero(self.pixels.T)
        places = (self.left + columns) * height + self.top + rows
        starts = places[np.diff(places, prepend=-2) != 1]
        ends = places[np.diff(places, append=height * width + 1) != 1] + 1
        borders = [0, *np.stack([starts, ends], 1).ravel().tolist(), height * width]
        counts = [later - earlier for earlier, later in pairwise(borders)]
        if len(counts) > 1 and counts[-1] == 0:  # the mask ends with the image
            counts.pop()
        return _json_rle(rle.frPyObjects({"size": [height, width], "counts": counts}, height, width))

    def every(self, step: int) -> MaskCrop:
        """In an image of which every ``step``-th row and column is left."""
        pixels = self.pixels[-self.top % step :: step, -self.left % step :: step]
        return MaskCrop(ceil_div(self.top, step), ceil_div(self.left, step), pixels)


@dataclass(frozen=True)
class Detection:
    """An object that a detector found; ``label`` counts from 1. An annotated object has the score NaN."""

    box: Box
    label: int
    score: float
    mask: MaskCrop | None = None

    def moved(self, down: int, right: int) -> Detection:
        """In the coordinates of an image of which this one is a part, at (``down``, ``right``)."""
        x0, y0, x1, y1 = self.box
        mask = self.mask and replace(self.mask, top=self.mask.top + down, left=self.mask.left + right)
        return replace(self, box=(x0 + right, y0 + down, x1 + right, y1 + down), mask=mask)

    def every(self, step: int) -> Detection:
        """In the coordinates of an image of which every ``step``-th row and column is left."""
        x0, y0, x1, y1 = (side / step for side in self.box)
        return replace(self, box=(x0, y0, x1, y1), mask=self.mask and self.mask.every(step))


def detections_from_output(output: Mapping[str, Tensor], threshold: float = 0.0) -> list[Detection]:
    """A detector's output for an image as detections with scores of at least ``threshold``, best first."""
    keep = torch.nonzero(output["scores"] >= threshold)[:, 0]
    masks: Sequence[MaskCrop | None] = [None] * len(keep)
    if "masks" in output:
        masks = [
            MaskCrop.around((output["masks"][index, 0] >= MASK_THRESHOLD).cpu().numpy()) for index in keep.tolist()
        ]
    boxes, labels, scores = (output[name][keep].tolist() for name in ("boxes", "labels", "scores"))
    objects = zip(boxes, labels, scores, masks, strict=True)
    detections = [Detection(tuple(box), label, score, mask) for box, label, score, mask in objects]
    return sorted(detections, key=lambda detection: -detection.score)


def annotated_objects(target: Target) -> list[Detection]:
    """The annotated objects of an image in the form of detections, crowds left out."""
    objects = []
    for index in torch.nonzero(~target.crowd)[:, 0].tolist():
        mask = None if target.masks is None else MaskCrop.around(target.masks[index].numpy())
        left, top, right, bottom = target.boxes[index].tolist()
        objects.append(Detection((left, top, right, bottom), int(target.labels[index]), nan, mask))
    return objects


def coco_annotations(target: Target, categories: Sequence[Category]) -> list[dict[str, Any]]:
    """The annotated objects of an image as COCO's annotation files state them, without ids of their own."""
    annotations = []
    for index, (left, top, right, bottom) in enumerate(target.boxes.tolist()):
        annotation = {
            "image_id": target.image_id,
            "category_id": categories[int(target.labels[index]) - 1].id,
            "bbox": [left, top, right - left, bottom - top],
            "area": float(target.area[index]),
            "iscrowd": int(target.crowd[index]),
        }
        if target.masks is not None:
            annotation["segmentation"] = encode_rle(target.masks[index].numpy().astype("uint8"))
        annotations.append(annotation)
    return annotations


def coco_result(
    detection: Detection, image_id: int, categories: Sequence[Category], size: tuple[int, int]
) -> dict[str, Any]:
    """A detection in an image of ``size`` (height, width) as COCO's results state it."""
    left, top, right, bottom = detection.box
    result: dict[str, Any] = {
        "image_id": image_id,
        "category_id": categories[detection.label - 1].id,
        "bbox": [left, top, right - left, bottom - top],
        "score": detection.score,
    }
    if detection.mask is not None:
        result["segmentation"] = detection.mask.run_lengths(*size)
    return result


def encode_rle(mask: np.ndarray) -> dict[str, Any]:
    """A mask (h, w), uint8, as COCO's compressed run lengths, which are JSON data."""
    return _json_rle(rle.encode(np.asfortranarray(mask)))


def _json_rle(encoded: Mapping[str, Any]) -> dict[str, Any]:
    return {"size": list(encoded["size"]), "counts": encoded["counts"].decode("ascii")}
