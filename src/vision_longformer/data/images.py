"""Image files: any of them decoded to upright RGB of 8 bits, and those that a list of paths stands for."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from timm.utils.misc import natural_key

logger = logging.getLogger(__name__)

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


def decode_image(
    file: str | Path | BinaryIO | bytes, name: str | None = None, *, allow_large: bool = False
) -> Image.Image:
    """The first frame as upright RGB: turned as its EXIF data says, transparency on white.

    Values of more than 8 bits are scaled. ``name`` is what an error calls the file; its path by default.
    ``allow_large``: decode more than :data:`MAX_PIXELS`, too.
    """
    if isinstance(file, str | Path):
        name = name or str(file)
        if not Path(file).exists():
            raise FileNotFoundError(f"there is no image file {name}")
    name = name or str(getattr(file, "name", "the image"))
    if isinstance(file, bytes):
        file = BytesIO(file)
    try:
        with warnings.catch_warnings(), _pillow_limit(allow_large):
            warnings.simplefilter("ignore")  # about metadata, and about sizes that we check ourselves
            with Image.open(file) as image:
                if not allow_large:
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


def image_size(file: str | Path) -> tuple[int, int] | None:
    """Height and width as a file states them, whatever its EXIF data says; None if Pillow does not know the format."""
    try:
        with warnings.catch_warnings(), _pillow_limit(lifted=True):
            warnings.simplefilter("ignore")
            with Image.open(file) as image:
                return image.height, image.width
    except (OSError, SyntaxError, ValueError):
        return None


@contextmanager
def _pillow_limit(lifted: bool) -> Iterator[None]:
    """Pillow's own limit, which is global, lifted meanwhile if so asked."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None if lifted else limit
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _check_size(image: Image.Image) -> None:
    """Pillow refuses such sizes too, but an application may have lifted its limit."""
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError(f"{image.width}×{image.height} pixels exceed the limit of {MAX_PIXELS:,}")


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


def list_images(folder: Path) -> tuple[list[str], list[str]]:
    """Paths below a folder of the images in it and in its folders, and of its other files, both in natural order.

    What is hidden, by a dot, is left out.
    """
    images: list[str] = []
    others: list[str] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = (name for name in folders if not name.startswith("."))
        inner = Path(parent).relative_to(folder)
        for name in (name for name in names if not name.startswith(".")):
            (images if name.lower().endswith(IMAGE_EXTENSIONS) else others).append(str(inner / name))
    return sorted(images, key=natural_key), sorted(others, key=natural_key)


def count_kinds(paths: Iterable[str]) -> dict[str, int]:
    """Files that are not used by kind, the most frequent first; those that are images lie in the wrong place."""
    return dict(Counter(map(_kind, paths)).most_common())


def _kind(path: str) -> str:
    suffix = Path(path).suffix.lower()
    return f"{suffix} outside of class folders" if suffix in IMAGE_EXTENSIONS else suffix or "without extension"


def image_files(images: Sequence[str | Path]) -> list[Path]:
    """Image files that ``images`` stands for: a folder is the images inside, also in its folders; others are logged."""
    files: list[Path] = []
    for path in map(Path, images):
        if path.is_dir():
            inside, others = list_images(path)
            if not inside:
                raise ValueError(f"the folder {path} has no images in it ({', '.join(IMAGE_EXTENSIONS)})")
            files += [path / name for name in inside]
            if others:
                kinds = ", ".join(f"{count:,} {kind}" for kind, count in count_kinds(others).items())
                logger.info("ignored in %s: %s", path, kinds)
        elif path.is_file():
            files.append(path)
        else:
            raise FileNotFoundError(f"there is no image {path}")
    return files
