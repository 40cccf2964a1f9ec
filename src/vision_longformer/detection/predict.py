"""What a detector finds in image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from ..classification.images import decode_image
from ..classification.predict import image_files
from ..errors import check_at_least
from .found import Found, found_by_model
from .tiling import merge, tiles
from .transforms import image_tensor

SMALLEST_TILE = 64


@dataclass(frozen=True)
class Prediction:
    """An image file, its pixels, and what was found in it, best first."""

    file: str
    image: Image.Image
    objects: list[Found]


def predict(
    model: nn.Module, images: Sequence[str | Path], *, threshold: float = 0.5, tile: int | None = None
) -> Iterator[Prediction]:
    """Objects with a score of at least ``threshold`` in each image; a folder stands for the images inside.

    Images run one by one; with ``tile``, in overlapping squares of that many pixels, so that objects of large photos
    are not shrunk away, and memory does not grow with the photo.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it must be between 0 and 1")
    if tile is not None:
        check_at_least("tile", tile, SMALLEST_TILE)
    for file in image_files(images):
        image = decode_image(file)
        yield Prediction(str(file), image, find_objects(model, image, threshold=threshold, tile=tile))


def find_objects(
    model: nn.Module, image: Image.Image, *, threshold: float = 0.5, tile: int | None = None
) -> list[Found]:
    """Objects in an RGB image, whole or in tiles."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    pixels = image_tensor(image).to(device)
    side = max(image.size) if tile is None else tile
    found = []
    for part in tiles(image.height, image.width, side):
        with torch.no_grad():
            output = model([pixels[:, part.top : part.bottom, part.left : part.right]])[0]
        found.append((part, [one.moved(part.top, part.left) for one in found_by_model(output, threshold)]))
    return merge(found, image.height, image.width)
