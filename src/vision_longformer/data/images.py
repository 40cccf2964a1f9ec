"""Image files: any of them decoded to upright RGB of 8 bits, and those that a list of paths stands for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
"""Files that folders, archives and shards are searched for; of an animation, the first frame counts."""

BACKGROUND = (255, 255, 255)
"""What is seen through transparent pixels: white."""

MAX_PIXELS = 178_956_970
"""Pixels of the largest image that is decoded (half a gigabyte of colour); larger ones are refused as attacks."""

WHITE_OF_INTEGERS = (65535,)
WHITE_OF_FLOATS = (1, 255, 65535)


class ImageError(ValueError):
    """A file that is no whole image, or one too large to decode."""


def decode_image(file: str | Path | BinaryIO | bytes, name: str | None = None) -> Image.Image:
    """The first frame as upright RGB: turned as its EXIF data says, transparency on white.

    Values of more than 8 bits are scaled. ``name`` is what an error calls the file; its path by default.
    """
    if isinstance(file, str | Path):
        name = name or str(file)
        if not Path(file).exists():
            raise FileNotFoundError(f"there is no image file {name}")
    name = name or str(getattr(file, "name", "the image"))
    if isinstance(file, bytes):
        file = BytesIO(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata, and about sizes that we check ourselves
            with Image.open(file) as image:
                _check_size(image)
                image.load()
                return _to_rgb(_upright(image))
    except (ImageError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} is refused as a decompression bomb: {error}") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name} cannot be read as an image: it is of no known format") from error
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise ImageError(f"{name} cannot be read as an image: {error or type(error).__name__}") from error


def _check_size(image: Image.Image) -> None:
    """Pillow refuses such sizes too, but an application may have lifted its limit."""
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError(
            f"{image.width}×{image.height} pixels are more than the {MAX_PIXELS:,} that are decoded"
        )


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF data says; damaged EXIF data says nothing."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # as above
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_8_bits(image)
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), colours).convert("RGB")
    return image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Grey levels of 16 or 32 bits, or floating-point ones, scaled so that their white becomes 255.

    White is 65535 for integers, and for floating-point values 1, 255 or 65535, whichever holds them all; values
    beyond have their own largest one as white.
    """
    levels = np.nan_to_num(np.asarray(image).astype(np.float64))
    top = levels.max()
    white = next((w for w in (WHITE_OF_FLOATS if image.mode == "F" else WHITE_OF_INTEGERS) if top <= w), top)
    return Image.fromarray((levels.clip(0) / white * 255).round().astype(np.uint8))


def image_files(images: Sequence[str | Path]) -> list[Path]:
    """Image files that ``images`` stands for: a folder is the images inside, in order of their names."""
    files: list[Path] = []
    for path in map(Path, images):
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGE_EXTENSIONS)
            if not inside:
                raise ValueError(f"the folder {path} has no images in it ({', '.join(IMAGE_EXTENSIONS)})")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise FileNotFoundError(f"there is no image {path}")
    return files
