"""Data sets in COCO's form: a JSON file of annotations, and a folder of images."""

from __future__ import annotations

import logging
import pickle
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as rle
from torch import Tensor

from ..classification.data.contract import DataError
from ..classification.images import decode_image
from .coco_files import open_coco
from .coco_rules import Problem, inspect_coco, named_categories
from .dataset import Category, Target

logger = logging.getLogger(__name__)


class CocoData:
    """:class:`~.dataset.DetectionData` from ``data``; labels follow the order of the categories' ids.

    Bad annotations are found on opening; ``skip_bad`` leaves them out, ``problems`` says which. An image's annotations
    are kept as bytes: worker processes share those, but would each copy a million small objects on reading them.
    """

    def __init__(self, data: Path, split: str, *, masks: bool = True, skip_bad: bool = False) -> None:
        self._files = open_coco(data, split)
        content = self._files.content
        found = inspect_coco(content, masks=masks)
        self.problems = found.problems
        if self.problems and not skip_bad:
            raise ValueError(f"{self._files.annotations}: {_summary(self.problems)}")
        if self.problems:
            logger.warning("%s: passed over: %s", self._files.annotations, _summary(self.problems))
        if not found.annotations:
            raise ValueError(f"{self._files.annotations} has no annotations with which nothing is wrong")
        self.categories = tuple(Category(*pair) for pair in sorted(named_categories(content).items()))
        self.has_masks = masks and bool(found.annotations[0].get("segmentation"))
        self._labels = {category.id: label for label, category in enumerate(self.categories, 1)}
        of_image = defaultdict(list)
        for record in found.annotations:
            of_image[record["image_id"]].append(record)
        self._with_objects = [
            index for index, image in enumerate(found.images) if any(not _is_crowd(one) for one in of_image[image])
        ]
        self._records = [pickle.dumps((record, of_image[image])) for image, record in found.images.items()]
        self._files = self._files._replace(content={})

    def __len__(self) -> int:
        return len(self._records)

    def with_objects(self) -> Sequence[int]:
        return self._with_objects

    def read(self, index: int, seed: int | None = None) -> tuple[Image.Image, Target]:
        record, annotations = pickle.loads(self._records[index])
        path = self._files.image(record)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}, which is image {record['id']} of {self._where}")
        image = decode_image(path)
        if image.size != (record["width"], record["height"]):
            raise DataError(
                f"{path} is {image.width}×{image.height}, "
                f"but image {record['id']} of {self._where} is {record['width']}×{record['height']}"
            )
        return image, self._target(record, annotations)

    @property
    def _where(self) -> str:
        return str(self._files.annotations)

    def _target(self, image: dict[str, Any], annotations: list[dict[str, Any]]) -> Target:
        width, height = image["width"], image["height"]
        boxes = torch.tensor([one["bbox"] for one in annotations], dtype=torch.float32).view(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        limits = torch.tensor([width, height, width, height])
        areas = [one.get("area", one["bbox"][2] * one["bbox"][3]) for one in annotations]
        masks = torch.zeros(len(annotations), height, width, dtype=torch.bool) if self.has_masks else None
        if masks is not None:
            for mask, one in zip(masks, annotations, strict=True):
                mask.copy_(_mask(one["segmentation"], height, width))
        return Target(
            image_id=image["id"],
            boxes=boxes.clamp(min=0).minimum(limits),
            labels=torch.tensor([self._labels[one["category_id"]] for one in annotations], dtype=torch.int64),
            masks=masks,
            crowd=torch.tensor([_is_crowd(one) for one in annotations], dtype=torch.bool),
            area=torch.tensor(areas, dtype=torch.float32),
        )


def _mask(shape: Any, height: int, width: int) -> Tensor:
    """(height, width) bool, from polygons or from run lengths as a list or as a string."""
    compressed = isinstance(shape, dict) and isinstance(shape["counts"], str)
    coded = shape if compressed else rle.frPyObjects(shape, height, width)
    pixels = rle.decode(rle.merge(coded) if isinstance(coded, list) else coded)
    return torch.from_numpy(np.ascontiguousarray(pixels)).bool()


def _summary(problems: list[Problem]) -> str:
    """The first of the problems, and how to learn about the others."""
    others = f" (and {len(problems) - 1} more things are wrong: see 'vil detect check')" if len(problems) > 1 else ""
    return f"{problems[0]}{others}"


def _is_crowd(annotation: dict[str, Any]) -> bool:
    return bool(annotation.get("iscrowd", 0))
