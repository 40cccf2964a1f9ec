"""Single objects in an image, found or annotated, in a form that is small however large the image is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pycocotools import mask as rle
from torch import Tensor

from .dataset import Category, Target

MASK_THRESHOLD = 0.5
"""Probability from which a pixel belongs to an object."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True)
class Patch:
    """A mask without its empty surroundings: bool pixels (h, w), and where in the image the first of them is."""

    top: int
    left: int
    pixels: np.ndarray

    @classmethod
    def around(cls, mask: np.ndarray) -> Patch:
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


@dataclass(frozen=True)
class Found:
    """An object; ``label`` counts from 1. Annotated ones have no ``score``."""

    box: Box
    label: int
    score: float | None = None
    mask: Patch | None = None

    def moved(self, down: int, right: int) -> Found:
        """In the coordinates of an image of which this one is a part, at (``down``, ``right``)."""
        left, top, end, bottom = self.box
        mask = self.mask and replace(self.mask, top=self.mask.top + down, left=self.mask.left + right)
        return replace(self, box=(left + right, top + down, end + right, bottom + down), mask=mask)


def found_by_model(output: Mapping[str, Tensor], threshold: float = 0.0) -> list[Found]:
    """A detector's output for an image, with scores of at least ``threshold``, best first."""
    keep = torch.nonzero(output["scores"] >= threshold)[:, 0]
    masks: Sequence[Patch | None] = [None] * len(keep)
    if "masks" in output:
        masks = [Patch.around((output["masks"][index, 0] >= MASK_THRESHOLD).cpu().numpy()) for index in keep.tolist()]
    values = (output[name][keep].tolist() for name in ("boxes", "labels", "scores"))
    found = [Found(tuple(box), label, score, mask) for box, label, score, mask in zip(*values, masks, strict=True)]
    return sorted(found, key=lambda one: -(one.score or 0))


def annotated(target: Target) -> list[Found]:
    """The objects of a target, without crowds."""
    masks = [None] * len(target.labels) if target.masks is None else [Patch.around(one.numpy()) for one in target.masks]
    objects = zip(target.boxes.tolist(), target.labels.tolist(), masks, target.crowd.tolist(), strict=True)
    return [Found(tuple(box), label, None, mask) for box, label, mask, crowd in objects if not crowd]


def coco_result(found: Found, image_id: int, categories: Sequence[Category], size: tuple[int, int]) -> dict[str, Any]:
    """An object of an image of (height, width) as COCO's results have it."""
    left, top, right, bottom = found.box
    result: dict[str, Any] = {
        "image_id": image_id,
        "category_id": categories[found.label - 1].id,
        "bbox": [left, top, right - left, bottom - top],
        "score": found.score,
    }
    if found.mask is not None:
        result["segmentation"] = run_lengths(found.mask.on(*size))
    return result


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """A mask (h, w), uint8, in COCO's compressed form, as JSON data."""
    coded = rle.encode(np.asfortranarray(mask))
    return {"size": list(coded["size"]), "counts": coded["counts"].decode("ascii")}
