"""COCO's measures, average precision and recall, by pycocotools."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from math import nan
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from .dataset import Category

MEASURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""In pycocotools' order: over IoUs from .5 to .95, at .5, at .75, of small, medium and large objects; then recall with
at most 1, 10 and 100 results per image, and of small, medium and large objects."""


class Measured(NamedTuple):
    """Percentages: those of ``MEASURES``, and AP by category; NaN where there are no objects to be found."""

    overall: dict[str, float]
    by_category: dict[str, float]


def measure(
    images: Sequence[Mapping[str, Any]],
    truth: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    categories: Sequence[Category],
    *,
    masks: bool = False,
) -> Measured:
    """Compare ``results`` with the ``truth``, both as in COCO's files, by their boxes or by their ``masks``.

    ``images`` have id, height and width. As in COCO's own evaluation, the size of a result is the area of what is
    compared, box or mask.
    """
    sized = [{**result, "area": _area(result, masks)} for result in results]
    with redirect_stdout(io.StringIO()):
        evaluation = COCOeval(
            _indexed(images, truth, categories), _indexed(images, sized, categories), "segm" if masks else "bbox"
        )
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    overall = {name: _percent(value) for name, value in zip(MEASURES, evaluation.stats, strict=True)}
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # IoU × recall × category, all sizes, most results
    names = {category.id: category.name for category in categories}
    by_category = {
        names[number]: _percent(_mean(precision[:, :, place])) for place, number in enumerate(evaluation.params.catIds)
    }
    return Measured(overall, by_category)


def _indexed(
    images: Sequence[Mapping[str, Any]], objects: Sequence[Mapping[str, Any]], categories: Sequence[Category]
) -> COCO:
    """pycocotools' index of objects, which are numbered from 1: it takes number 0 for "no object"."""
    coco = COCO()
    coco.dataset = {
        "images": [dict(image) for image in images],
        "annotations": [{"iscrowd": 0, **one, "id": number} for number, one in enumerate(objects, 1)],
        "categories": [category._asdict() for category in categories],
    }
    coco.createIndex()
    return coco


def _area(result: Mapping[str, Any], masks: bool) -> float:
    return float(rle.area(result["segmentation"])) if masks else result["bbox"][2] * result["bbox"][3]


def _mean(values: np.ndarray) -> float:
    """Of those that are not -1, which stands for "no objects"."""
    valid = values[values > -1]
    return float(valid.mean()) if valid.size else -1.0


def _percent(value: float) -> float:
    return 100 * float(value) if value > -1 else nan
