"""What can be wrong with annotations in COCO's form, as far as it shows without opening an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, NamedTuple

TOLERANCE = 1.0
"""Pixels by which a box or an outline may leave its image; COCO's own do by rounding, and are cut."""

Record = dict[str, Any]


class Problem(NamedTuple):
    """Something wrong with an image or with one of its annotations; None where it is no single one's fault."""

    image: object
    annotation: object
    what: str

    def __str__(self) -> str:
        where = [f"annotation {self.annotation}"] if self.annotation is not None else []
        where += [f"image {self.image}"] if self.image is not None else []
        return f"{' of '.join(where)} {self.what}" if where else self.what


class Findings(NamedTuple):
    """What is wrong, and the images and annotations with which nothing is."""

    problems: list[Problem]
    images: dict[int, Record]
    annotations: list[Record]


def inspect_coco(content: Record, *, masks: bool = True) -> Findings:
    """Judge a file's content; segmentations only with ``masks``. One problem is named per image or annotation.

    Annotations of an image that is wrong itself are left out without a word.
    """
    problems = [Problem(None, None, what) for what in _set_problems(content)]
    images: dict[int, Record] = {}
    for record in content["images"]:
        if what := _image_problem(record, images):
            problems.append(Problem(record.get("id"), None, what))
        else:
            images[record["id"]] = record
    wrong = {record["id"] for record in content["images"] if _has_id(record)} - images.keys()
    rules = _AnnotationRules(content, images, masks)
    good: list[Record] = []
    for record in content["annotations"]:
        image = record.get("image_id")
        if isinstance(image, int) and image in wrong:
            continue
        if what := rules.problem(record):
            problems.append(Problem(image, record.get("id"), what))
        else:
            good.append(record)
    return Findings(problems, images, good)


def named_categories(content: Record) -> dict[int, str]:
    """Names by id, of categories that have both; the first of an id counts."""
    named = [record for record in content["categories"] if _has_id(record) and isinstance(record.get("name"), str)]
    return {record["id"]: record["name"] for record in reversed(named)}


class _AnnotationRules:
    """Judges annotations one after the other, and remembers their ids."""

    def __init__(self, content: Record, images: Mapping[int, Record], masks: bool) -> None:
        self._images = images
        self._categories = named_categories(content)
        self._masks = masks and any(_has_mask(record) for record in content["annotations"])
        self._seen: set[int] = set()

    def problem(self, record: Record) -> str | None:
        """The first thing wrong with an annotation, if any."""
        if not _has_id(record):
            return "has no id that is a whole number"
        if record["id"] in self._seen:
            return "has an id that another annotation has"
        self._seen.add(record["id"])
        image_id, category = record.get("image_id"), record.get("category_id")
        if not isinstance(image_id, int) or image_id not in self._images:
            return "belongs to an image that the data set does not have"
        if not isinstance(category, int) or category not in self._categories:
            return f"has category {category}, which the data set does not have"
        image = self._images[image_id]
        return _box_problem(record.get("bbox"), image) or (_mask_problem(record, image) if self._masks else None)


def _set_problems(content: Record) -> Iterator[str]:
    """Of the data set as a whole."""
    for name in ("images", "annotations", "categories"):
        if not content[name]:
            yield f"the data set has no {name}"
    seen: set[int] = set()
    for record in content["categories"]:
        if not _has_id(record) or not isinstance(record.get("name"), str):
            yield f"category {record} should have a whole number as id, and a name"
            continue
        if record["id"] in seen:
            yield f"two categories have the id {record['id']}"
        seen.add(record["id"])


def _image_problem(record: Record, seen: Mapping[int, Record]) -> str | None:
    if not _has_id(record):
        return f"({record.get('file_name')}) has no id that is a whole number"
    if record["id"] in seen:
        return f"({record.get('file_name')}) has an id that another image has"
    if not isinstance(record.get("file_name"), str):
        return "has no file_name"
    if not all(isinstance(record.get(side), int) and record[side] > 0 for side in ("width", "height")):
        return f"({record['file_name']}) has no width and height in pixels"
    return None


def _box_problem(box: object, image: Record) -> str | None:
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        return f"has the box {box}; it should be [left, top, width, height]"
    left, top, width, height = box
    if width <= 0 or height <= 0:
        return f"has a box of zero area, {box}"
    inside = min(left + width, image["width"]) > max(left, 0) and min(top + height, image["height"]) > max(top, 0)
    if not inside or _leaves(left, left + width, image["width"]) or _leaves(top, top + height, image["height"]):
        return f"has the box {box}, which leaves its image of {image['width']}×{image['height']}"
    return None


def _mask_problem(record: Record, image: Record) -> str | None:
    size = [image["height"], image["width"]]
    shape = record.get("segmentation")
    if not _has_mask(record):
        return "has no mask, though others have"
    if isinstance(shape, dict):
        return _rle_problem(shape, size)
    for polygon in shape if isinstance(shape, list) else [shape]:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2 or not all(map(_is_number, polygon)):
            return "has a mask whose outline is no list of x, y, x, y, … for at least three points"
        if any(_leaves(min(polygon[axis::2]), max(polygon[axis::2]), size[1 - axis]) for axis in (0, 1)):
            return f"has a mask that leaves its image of {image['width']}×{image['height']}"
    return None


def _rle_problem(mask: Record, size: list[int]) -> str | None:
    if list(mask.get("size", ())) != size:
        return f"has a mask of height and width {mask.get('size')}, but its image is {size}"
    counts = mask.get("counts")
    runs = _decoded_runs(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(isinstance(run, int) and run >= 0 for run in runs):
        return "has a mask without counts that are lengths of runs"
    if sum(runs) != size[0] * size[1]:
        return f"has a mask whose runs do not add up to the {size[0] * size[1]} pixels of its image"
    return None


def _decoded_runs(text: str) -> list[int]:
    """The run lengths in COCO's compressed form, which pycocotools decodes into anything should they be damaged.

    A character from "0" on holds five bits of a number, lowest first, and whether more follow; a set highest bit makes
    it negative. From the fourth on, numbers are differences to the last but one.
    """
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - ord("0")
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            if bits & 0x10:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return runs


def _has_id(record: Record) -> bool:
    return isinstance(record.get("id"), int)


def _has_mask(record: Record) -> bool:
    return bool(record.get("segmentation"))


def _leaves(start: float, end: float, length: int) -> bool:
    return start < -TOLERANCE or end > length + TOLERANCE


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)
