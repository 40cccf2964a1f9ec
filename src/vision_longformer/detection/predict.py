"""Detections in image files: of whole images, streamed if they would not fit the memory, or of overlapping tiles.

Two tiles see the same object if their detections have the same label and, cut to the strip that both tiles cover,
boxes of an IoU of at least ``SAME_OBJECT_IOU``. So a piece of an object is recognised by what it has in common with the
whole one or with its other piece. Of such a group the best whole one counts; if all are cut by the border of their
tile, the union of their boxes and masks does, with the best score.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from torch import nn

from ..data.images import MAX_PIXELS, ImageError, decode_image, image_files, image_size
from ..errors import check_at_least, check_fraction
from ..geometry import ceil_div
from ..large.memory import format_bytes, free_memory, parse_bytes
from ..large.reading import LargeImage, is_zarr, open_image
from .dataset import image_tensor
from .detections import Box, Detection, MaskCrop, detections_from_output
from .stream import bytes_at_once, refuse_streaming, stream_detections

logger = logging.getLogger(__name__)

SMALLEST_TILE = 64

OVERLAP = 0.25
"""Part of a tile's side that the next tile covers as well; objects up to this size are whole in some tile."""

SAME_OBJECT_IOU = 0.5
TOUCHING = 2.0
"""Pixels from a tile's border within which the tile counts as cutting a box."""


LARGEST_PICTURE = 4096
"""Pixels of the longer side of a picture of a streamed image, at most."""

ROWS = 256
"""Rows that are read at a time for it."""


@dataclass(frozen=True)
class Prediction:
    """An image file, the image, opened to be read by rows if it was streamed, and the detections in it, best first."""

    file: str
    source: Image.Image | LargeImage
    detections: list[Detection]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the image."""
        if isinstance(self.source, LargeImage):
            return self.source.shape[:2]
        return self.source.height, self.source.width

    def picture(self) -> tuple[Image.Image, list[Detection]]:
        """The image, every n-th pixel of one that was streamed, and the detections in its coordinates."""
        if not isinstance(self.source, LargeImage):
            return self.source, self.detections
        step = ceil_div(max(self.size), LARGEST_PICTURE)
        return _every(self.source, step), [detection.every(step) for detection in self.detections]


def input_files(images: Sequence[str | Path]) -> list[Path]:
    """The files that ``images`` stands for: a folder is the images inside, unless it is one of zarr."""
    files = []
    for path in map(Path, images):
        files += [path] if is_zarr(path) else image_files([path])
    return files


def predict(
    model: nn.Module,
    images: Sequence[str | Path],
    *,
    threshold: float = 0.5,
    tile: int | None = None,
    memory: str | int | None = None,
    storage: str | Path | None = None,
    level: int = 0,
    allow_large: bool = False,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> Iterator[Prediction]:
    """Detections with a score of at least ``threshold`` in each image; a folder stands for the images inside.

    Images run one by one. One that would need more than ``memory``, or than is free, is streamed, to the same result
    (:func:`stream_detections`); so are images that Pillow does not know or would not decode, if
    :func:`~vision_longformer.large.open_image` reads them, with ``level`` and ``allow_large`` as there. Each has a
    folder of its own in ``storage``, by its position and name, so that what was interrupted can be resumed. With
    ``tile``, images run in overlapping squares of that many pixels instead.
    """
    check_fraction("threshold", threshold)
    if tile is not None:
        check_at_least("tile", tile, SMALLEST_TILE)
    _check_streaming(model, tile, {"memory": memory, "storage": storage, "level": level or None})
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for number, file in enumerate(input_files(images), 1):
        tokens = None if storage is None else Path(storage) / f"{number}-{file.name}"
        source = _open(model, file, tile, level, allow_large)
        free = free_memory(device)
        limit = free if memory is None else min(free, parse_bytes(memory))
        if isinstance(source, Image.Image) and (tile is not None or _fits(model, source, file, limit)):
            found = predict_image(model, source, threshold=threshold, tile=tile)
        else:
            if isinstance(source, Image.Image):
                source = LargeImage(np.asarray(source), 3)
            try:
                found = stream_detections(
                    model, source, threshold=threshold, memory=memory, storage=tokens, progress=progress
                )
            except ImageError:
                raise
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
            if tokens is not None:
                with suppress(OSError):  # something is in it
                    tokens.parent.rmdir()
        if tile is None and len(found) == cast(Any, model).config.detections:
            sentence = "%s: the limit of %d objects per image was reached; --detections (detections=…) raises it"
            logger.info(sentence, file, len(found))
        yield Prediction(str(file), source, found)


def _check_streaming(model: nn.Module, tile: int | None, options: dict[str, Any]) -> None:
    """Refuse options of streaming that are not None where nothing would be streamed."""
    given = " and ".join(name for name, value in options.items() if value is not None)
    if given and tile is not None:
        raise ValueError(f"leave out {given}, or tile: tiles are cut from a decoded photo, and nothing is streamed")
    if given and (reason := refuse_streaming(model)) is not None:
        raise ValueError(f"leave out {given}: {reason}")


def _open(model: nn.Module, file: Path, tile: int | None, level: int, allow_large: bool) -> Image.Image | LargeImage:
    """A photo, decoded; opened to be read by rows, if it is too large for that and can be streamed, or is no photo."""
    size = None if level else image_size(file)
    is_photo = size is not None and (size[0] * size[1] <= MAX_PIXELS or refuse_streaming(model) is not None)
    if is_photo or tile is not None:
        return decode_image(file, allow_large=allow_large)
    return open_image(file, level=level, allow_large=allow_large)


def _fits(model: nn.Module, image: Image.Image, file: Path, limit: int) -> bool:
    """Whether the detector can take a photo at once, or has to, as it cannot be streamed."""
    size = image.height, image.width
    needed = bytes_at_once(model, size)
    if needed is None or needed <= limit:
        return True
    amounts = f"about {format_bytes(needed)}, but only {format_bytes(limit)} is free or allowed"
    logger.info("%s: %d×%d pixels at once would need %s: streaming the image", file, *size, amounts)
    return False


def _every(image: LargeImage, step: int) -> Image.Image:
    """Every ``step``-th row and column, in 8 bits."""
    many = step * ceil_div(ROWS, step)
    rows = np.concatenate([image[top : top + many][::step, ::step] for top in range(0, image.shape[0], many)])
    return Image.fromarray(rows if rows.dtype == np.uint8 else (rows >> 8).astype(np.uint8))


def predict_image(
    model: nn.Module, image: Image.Image, *, threshold: float = 0.5, tile: int | None = None
) -> list[Detection]:
    """Detections in an RGB image, whole or in tiles, best first."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    pixels = image_tensor(image).to(device)
    side = max(image.size) if tile is None else tile
    by_tile = []
    for part in tiles(image.height, image.width, side):
        with torch.no_grad():
            output = model([pixels[:, part.top : part.bottom, part.left : part.right]])[0]
        detections = detections_from_output(output, threshold)
        by_tile.append((part, [detection.moved(part.top, part.left) for detection in detections]))
    return merge(by_tile, image.height, image.width)


class Tile(NamedTuple):
    """A part of an image."""

    left: int
    top: int
    right: int
    bottom: int

    def cuts(self, box: Box, height: int, width: int) -> bool:
        """Whether an object of an image of this size may continue beyond the tile; nothing does beyond the image."""
        return (
            (self.left > 0 and box[0] < self.left + TOUCHING)
            or (self.top > 0 and box[1] < self.top + TOUCHING)
            or (self.right < width and box[2] > self.right - TOUCHING)
            or (self.bottom < height and box[3] > self.bottom - TOUCHING)
        )


def tiles(height: int, width: int, side: int) -> list[Tile]:
    """Tiles of at most ``side`` × ``side`` that cover the image, as evenly spaced as whole pixels allow."""
    rows, columns = _starts(height, side), _starts(width, side)
    return [Tile(left, top, min(left + side, width), min(top + side, height)) for top in rows for left in columns]


def _starts(length: int, side: int) -> list[int]:
    if length <= side:
        return [0]
    count = int(np.ceil((length - side) / (side * (1 - OVERLAP)))) + 1
    return [round(start) for start in np.linspace(0, length - side, count)]


Piece = tuple[Tile, Detection]
"""A detection in the coordinates of the image, and the tile that it was made in."""


def merge(by_tile: Sequence[tuple[Tile, Sequence[Detection]]], height: int, width: int) -> list[Detection]:
    """The detections of an image's tiles, in its coordinates, each object once, best first."""
    merged = []
    for group in _groups([(tile, detection) for tile, detections in by_tile for detection in detections]):
        whole = [detection for tile, detection in group if not tile.cuts(detection.box, height, width)]
        merged.append(max(whole, key=_score) if whole else _union([detection for _, detection in group]))
    return sorted(merged, key=_score, reverse=True)


def _groups(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces of the same object, also by way of a third tile's piece."""
    waiting = list(pieces)
    while waiting:
        group = [waiting.pop(0)]
        for member in group:  # grows meanwhile
            same = [other for other in waiting if _same(member, other)]
            waiting = [other for other in waiting if not any(other is one for one in same)]
            group += same
        yield group


def _same(one: Piece, other: Piece) -> bool:
    (tile, detection), (other_tile, other_detection) = one, other
    if tile == other_tile or detection.label != other_detection.label:
        return False
    strip = _intersection(tile, other_tile)
    return _iou(_intersection(detection.box, strip), _intersection(other_detection.box, strip)) >= SAME_OBJECT_IOU


def _intersection(one: Box, other: Box) -> Box:
    return max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3])


def _iou(one: Box, other: Box) -> float:
    common = _area(_intersection(one, other))
    return common / (_area(one) + _area(other) - common) if common else 0.0


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _union(pieces: Sequence[Detection]) -> Detection:
    """The smallest box around all pieces, the pixels of all their masks, the label and score of the best."""
    best = max(pieces, key=_score)
    left, top = (min(piece.box[side] for piece in pieces) for side in (0, 1))
    right, bottom = (max(piece.box[side] for piece in pieces) for side in (2, 3))
    masks = [piece.mask for piece in pieces if piece.mask is not None and piece.mask.pixels.size]
    return replace(best, box=(left, top, right, bottom), mask=_mask_union(masks) if masks else best.mask)


def _mask_union(masks: Sequence[MaskCrop]) -> MaskCrop:
    """Pixels of any of the masks."""
    top, left = min(mask.top for mask in masks), min(mask.left for mask in masks)
    bottom = max(mask.top + mask.pixels.shape[0] for mask in masks)
    right = max(mask.left + mask.pixels.shape[1] for mask in masks)
    pixels = np.zeros((bottom - top, right - left), dtype=bool)
    for mask in masks:
        moved = MaskCrop(mask.top - top, mask.left - left, mask.pixels)
        pixels |= moved.on(*pixels.shape).astype(bool)
    return MaskCrop(top, left, pixels)


def _score(detection: Detection) -> float:
    return detection.score
