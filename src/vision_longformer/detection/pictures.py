"""Images with their detections drawn into them: translucent masks, boxes, names and scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isnan
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from ..files import atomic_write
from .detections import Detection, MaskCrop

COLOURS = (
    (230, 57, 70),
    (29, 120, 216),
    (42, 157, 80),
    (244, 140, 6),
    (142, 68, 190),
    (0, 160, 170),
    (214, 51, 132),
    (120, 140, 20),
    (90, 90, 220),
    (170, 95, 40),
)
"""By label, again from the start after the last."""

DRAWN = 900
"""Pixels of the longer side to which smaller images are enlarged, so that names can be read."""

MAX_TAGS = 50
"""Detections with name and score, the best ones; of more, the rest have a box only."""

TEXT_COLOUR, NOTHING_COLOUR = "#1c2733", "#b3261e"

OPACITY = 0.42
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}

Colour = tuple[int, int, int]
Area = tuple[int, int, int, int]
"""Left, top, right, bottom."""


def draw_detections(image: Image.Image, detections: Sequence[Detection], names: Sequence[str]) -> Image.Image:
    """The image with its detections, the best on top; ``names`` are those of the labels from 1 on."""
    scale = max(1.0, DRAWN / max(image.size))
    size = round(image.width * scale), round(image.height * scale)
    canvas = image.resize(size, Image.Resampling.BICUBIC) if scale > 1 else image.copy()
    line, letters = _stroke(max(size), [scale * side for side in _sides(detections)])
    worst_first = list(reversed(detections))
    for detection in worst_first:
        if detection.mask is not None and detection.mask.pixels.size:
            _tint(canvas, detection.mask, _colour(detection.label), scale, line)
    draw = ImageDraw.Draw(canvas)
    for detection in worst_first:
        left, top, right, bottom = (round(value * scale) for value in detection.box)
        draw.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline="white", width=line + 2)
        draw.rectangle((left, top, right, bottom), outline=_colour(detection.label), width=line)
    font = _font(letters)
    taken: list[Area] = []
    for detection in detections[:MAX_TAGS]:
        _tag(draw, detection, names[detection.label - 1], scale, font, taken)
    return canvas


def _sides(detections: Sequence[Detection]) -> list[float]:
    """Shorter sides of boxes."""
    return [min(right - left, bottom - top) for left, top, right, bottom in (one.box for one in detections)]


def _stroke(side: int, sides: Sequence[float]) -> tuple[int, int]:
    """Width of lines and height of letters that suit a picture's longer side, but do not hide boxes of these sides."""
    usual = median(sides) if sides else side
    return max(2, min(max(3, round(side / 300)), round(usual / 12))), max(13, min(round(side / 68), round(usual / 2)))


def draw_pair(
    image: Image.Image, annotated: Sequence[Detection], detections: Sequence[Detection], names: Sequence[str]
) -> Image.Image:
    """Annotated objects on the left, detections on the right, each below its heading.

    That nothing was found is said, and whether it is right.
    """
    missed = bool(annotated) and not detections
    nothing = "nothing found" if missed else "nothing found: correct"
    headings = (f"annotated: {len(annotated)}", f"found: {len(detections)}" if detections else nothing)
    sides = [draw_detections(image, objects, names) for objects in (annotated, detections)]
    width, height = sides[0].size
    gap, font = round(width / 60), _font(max(16, round(width / 28)))
    head = 2 * round(font.size)
    sheet = Image.new("RGB", (2 * width + gap, head + height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (side, heading) in enumerate(zip(sides, headings, strict=True)):
        left = index * (width + gap)
        sheet.paste(side, (left, head))
        colour = NOTHING_COLOUR if index and missed else TEXT_COLOUR
        draw.text((left + gap, head / 2), heading, font=font, fill=colour, anchor="lm")
    return sheet


def _tint(image: Image.Image, mask: MaskCrop, colour: Colour, scale: float, line: int) -> None:
    """Colour the pixels of a mask, and draw their outline; in place."""
    rows, columns = mask.pixels.shape
    size = max(1, round(columns * scale)), max(1, round(rows * scale))
    scaled = Image.fromarray(mask.pixels.astype(np.uint8) * 255).resize(size, Image.Resampling.BILINEAR)
    inside = np.asarray(scaled) > 127
    opacity = np.where(inside, 255 * OPACITY, 0).astype(np.uint8)
    opacity[inside & ~_shrunk(inside, max(1, line // 2))] = 255
    left, top = round(mask.left * scale), round(mask.top * scale)
    image.paste(colour, (left, top, left + size[0], top + size[1]), Image.fromarray(opacity))


def _shrunk(mask: np.ndarray, pixels: int) -> np.ndarray:
    """Without the pixels at its border, the array's own border included."""
    for _ in range(pixels):
        padded = np.pad(mask, 1)
        mask = mask & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask


def _tag(
    draw: ImageDraw.ImageDraw,
    detection: Detection,
    name: str,
    scale: float,
    font: ImageFont.FreeTypeFont,
    taken: list[Area],
) -> None:
    """Name and score at the corner of the box where they cover no other tag, if there is such a corner."""
    text = name if isnan(detection.score) else f"{name} {detection.score:.0%}"
    left, top, right, bottom = (round(value * scale) for value in detection.box)
    pad = max(2, round(font.size / 5))
    width, height = round(font.getlength(text)) + 2 * pad, round(font.size * 1.2) + pad
    corners = (
        (left, top - height),
        (left, bottom),
        (right - width, top - height),
        (right - width, bottom),
        (left, top),
        (left, bottom - height),
    )
    areas = [_inside(x, y, width, height, draw.im.size) for x, y in corners]
    area = next((area for area in areas if not any(_overlap(area, other) for other in taken)), areas[0])
    taken.append(area)
    draw.rounded_rectangle(area, radius=pad, fill=_colour(detection.label))
    draw.text((area[0] + pad, (area[1] + area[3]) / 2), text, font=font, fill="white", anchor="lm")


def _inside(x: int, y: int, width: int, height: int, size: tuple[int, int]) -> Area:
    """An area of this size, moved into the image."""
    x, y = max(0, min(x, size[0] - width)), max(0, min(y, size[1] - height))
    return x, y, x + width, y + height


def _overlap(one: Area, other: Area) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def page(pictures: Sequence[Image.Image], caption: str, *, columns: int = 3, width: int = 1800) -> Image.Image:
    """Pictures in rows of ``columns``, each in a cell of equal width, below a caption."""
    gap, head = 12, 52
    side = (width - gap * (columns + 1)) // columns
    rows = [pictures[start : start + columns] for start in range(0, len(pictures), columns)]
    small = [[_fitted(picture, side) for picture in row] for row in rows]
    heights = [max(picture.height for picture in row) for row in small]
    sheet = Image.new("RGB", (width, head + sum(heights) + gap * len(heights)), "white")
    ImageDraw.Draw(sheet).text((gap, head / 2), caption, font=_font(22), fill=TEXT_COLOUR, anchor="lm")
    top = head
    for row, height in zip(small, heights, strict=True):
        for column, picture in enumerate(row):
            left = gap + column * (side + gap) + (side - picture.width) // 2
            sheet.paste(picture, (left, top + (height - picture.height) // 2))
        top += height + gap
    return sheet


def _fitted(picture: Image.Image, side: int) -> Image.Image:
    """A copy no larger than ``side`` in either direction."""
    picture = picture.copy()
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return picture


def save_image(image: Image.Image, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a PNG or JPEG file, which appears whole or not at all."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path.name} should end in {', '.join(FORMATS)}")
    with atomic_write(path, overwrite=overwrite) as temporary:
        image.save(temporary, FORMATS[path.suffix.lower()], quality=92)
    return path


def _colour(label: int) -> Colour:
    return COLOURS[(label - 1) % len(COLOURS)]


@lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont:
    """A font that comes with matplotlib, as the system may have none."""
    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)
