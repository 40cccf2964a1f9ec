"""A large test image of real pictures, a tiled BigTIFF: ``python scripts/make_gigapixel.py OUTPUT.tif [SIDE]``.

A mosaic of 8×8 scenes: crops of the shipped photos, enlarged, with shipped garments pasted onto them. The default side
of 32,768 pixels is one gigapixel. One row of scenes is in memory at a time, and the result depends on the side alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

from vision_longformer.detection.garments import cutouts, paint, photo_parts, place, random_sprite
from vision_longformer.files import atomic_write

SCENES = 8
"""Along each side."""

GARMENTS = 24
"""On each scene."""

TILE = 256


def scene(number: int, side: int) -> np.ndarray:
    """A square crop of a photo with garments of up to a third of its side, (side, side, 3) uint8."""
    random = np.random.default_rng(number)
    photos = photo_parts(training=True)
    photo = photos[number % len(photos)]
    crop = random.uniform(0.6, 1) * min(photo.size)
    left, top = (random.uniform(0, length - crop) for length in photo.size)
    enlarged = photo.resize((side, side), Image.Resampling.BICUBIC, box=(left, top, left + crop, top + crop))
    garments = cutouts(training=True)
    sprites = [random_sprite(garments, random, side / 100) for _ in range(GARMENTS)]
    return paint(np.asarray(enlarged), place(sprites, side, side, random))


def tiles(side: int) -> Iterator[np.ndarray]:
    """All tiles of the mosaic, (TILE, TILE, 3) uint8, row by row."""
    of_scene = side // SCENES
    for row in range(SCENES):
        print(f"\rrow {row + 1} of {SCENES}", end="", flush=True)
        band = np.concatenate([scene(row * SCENES + column, of_scene) for column in range(SCENES)], 1)
        for top in range(0, of_scene, TILE):
            for left in range(0, side, TILE):
                yield band[top : top + TILE, left : left + TILE]
    print()


def main(output: str, side: int = 32768) -> None:
    if side < SCENES * TILE or side % (SCENES * TILE):
        sys.exit(f"SIDE is {side}; it must be a multiple of {SCENES * TILE}")
    with atomic_write(Path(output), overwrite=False) as path:
        tifffile.imwrite(
            path,
            tiles(side),
            shape=(side, side, 3),
            dtype=np.uint8,
            photometric="rgb",
            tile=(TILE, TILE),
            compression="zlib",
            predictor=True,
            bigtiff=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
