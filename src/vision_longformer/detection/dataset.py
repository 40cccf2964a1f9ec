"""Images with boxes and masks by number: one form, whatever they are read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from PIL import Image
from torch import Tensor


class Category(NamedTuple):
    """What an object may be; ``id`` is the data set's own number, which need not follow on the one before."""

    id: int
    name: str


@dataclass
class Target:
    """The n objects of an image of h × w pixels.

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


class DetectionData(Protocol):
    """Images with their objects; ``categories`` are in order of labels."""

    categories: tuple[Category, ...]
    has_masks: bool

    def __len__(self) -> int: ...

    def read(self, index: int, seed: int | None = None) -> tuple[Image.Image, Target]:
        """An RGB image and its objects.

        Data that is made on the fly makes another image for each ``seed``; other data has no use for it.
        """
        ...

    def with_objects(self) -> Sequence[int]:
        """Numbers of the images that there is something to learn from; the others are for evaluation only."""
        ...


def open_detection(data: str, split: str, *, masks: bool = True, skip_bad: bool = False) -> DetectionData:
    """The ``split`` of a folder in COCO's form, or of the built-in ``garments``.

    ``garments:320`` are images whose longer side is 320 pixels, for quick runs. Without ``masks``, a folder's masks are
    not looked at, right or wrong. ``skip_bad`` passes over annotations that make no sense, instead of stopping.
    """
    from .coco import CocoData
    from .garments import NAME, open_garments

    if data.partition(":")[0] == NAME:
        return open_garments(data, split)
    if not Path(data).exists():
        raise FileNotFoundError(f"there is no data {data}; give a folder in COCO's form, or the built-in {NAME}")
    return CocoData(Path(data), split, masks=masks, skip_bad=skip_bad)
