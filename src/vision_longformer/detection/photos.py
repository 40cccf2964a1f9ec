"""The shipped photos as backgrounds: their left parts for training, their right parts for validation."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import numpy as np
from PIL import Image

from ..classification.images import decode_image

TRAINING_PART = 0.75
"""Of a photo's width, from the left; the rest is for validation, so that no pixel is in both."""

ASPECTS = (4 / 3, 3 / 4, 1.0)
"""Width to height of the backgrounds."""


@lru_cache(maxsize=2)
def photo_parts(training: bool) -> tuple[Image.Image, ...]:
    """Each photo's part for training or for validation."""
    folder = files("vision_longformer.data") / "photos"
    photos = sorted((file for file in folder.iterdir() if file.name.endswith(".jpg")), key=lambda file: file.name)
    parts = []
    for photo in photos:
        image = decode_image(photo.read_bytes(), photo.name)
        border = round(TRAINING_PART * image.width)
        parts.append(image.crop((0, 0, border, image.height) if training else (border, 0, *image.size)))
    return tuple(parts)


def random_background(training: bool, longer: int, random: np.random.Generator) -> np.ndarray:
    """A random crop of a random photo's part, mirrored half of the time: (h, w, 3), uint8, ``longer`` at most."""
    parts = photo_parts(training)
    part = parts[random.integers(len(parts))]
    aspect = ASPECTS[random.integers(len(ASPECTS))]
    largest = min(part.width / aspect, part.height)
    height = random.uniform(0.5, 1) * largest
    width = height * aspect
    left, top = random.uniform(0, part.width - width), random.uniform(0, part.height - height)
    scale = longer / max(width, height)
    size = round(width * scale), round(height * scale)
    crop = part.resize(size, Image.Resampling.BILINEAR, box=(left, top, left + width, top + height), reducing_gap=1)
    pixels = np.array(crop)
    return np.ascontiguousarray(pixels[:, ::-1]) if random.random() < 0.5 else pixels
