"""Data sets in COCO's format: a JSON file of annotations and a folder of images, wherever they usually are.

Everything that can be wrong with them is named by image and annotation, before training or by ``vil detect check``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import ExifTags, Image
from pycocotools import mask as rle
from torch import Tensor

from ..data.images import decode_image
from ..data.loading import DataError, Progress
from ..data.sources import EVALUATION, TRAINING, check_unsplit, split_names
from .detections import Category, Target

logger = logging.getLogger(__name__)

Record = dict[str, Any]
"""An image, an annotation or a category as the file states it, or the whole file."""

YEARS = ("2017", "2014")
"""What follows the names of splits in COCO's own releases."""

SPLITS = ("train", "validation")
UNDIVIDED, ROBOFLOW = "annotations.json", "_annotations.coco.json"

TOLERANCE = 1.0
"""Pixels by which a box or an outline may leave its image; COCO's own do by rounding, and are cut."""

CORNER_SHARE = 0.05
"""Part of the boxes that must leave their image for all of them to look like corners."""

SIDEWAYS = (5, 6, 7, 8)
"""Values of EXIF's orientation that swap width and height."""


class CocoData:
    """:class:`~.dataset.DetectionData` from ``data``; labels follow the order of the categories' ids.

    Bad annotations are refused on opening; ``skip_bad`` skips them, ``problems`` says which. An image's annotations are
    stored as bytes: worker processes share those, but would each copy a million small objects on reading them.
    """

    def __init__(self, data: Path, split: str, *, masks: bool = True, skip_bad: bool = False) -> None:
        files = open_coco(data, split)
        inspection = inspect_coco(files.content, masks=masks)
        self.problems = inspection.problems
        if self.problems and not skip_bad:
            raise ValueError(f"{files.annotations}: {_summary(self.problems)}")
        if self.problems:
            logger.warning("%s: skipped: %s", files.annotations, _summary(self.problems))
        if not inspection.annotations:
            raise ValueError(f"{files.annotations} has no valid annotations")
        self.categories = tuple(Category(*pair) for pair in sorted(named_categories(files.content).items()))
        self.has_masks = masks and bool(inspection.annotations[0].get("segmentation"))
        self._labels = {category.id: label for label, category in enumerate(self.categories, 1)}
        of_image = defaultdict(list)
        for annotation in inspection.annotations:
            of_image[annotation["image_id"]].append(annotation)
        self._with_objects = [
            index for index, image_id in enumerate(inspection.images) if not all(map(_is_crowd, of_image[image_id]))
        ]
        self.names = tuple(str(image["file_name"]) for image in inspection.images.values())
        self._records = [pickle.dumps((image, of_image[image_id])) for image_id, image in inspection.images.items()]
        self._files = files._replace(content={})

    def __len__(self) -> int:
        return len(self._records)

    def with_objects(self) -> Sequence[int]:
        return self._with_objects

    def shapes(self, index: int) -> tuple[int, int, np.ndarray, list[int]]:
        record, annotations = pickle.loads(self._records[index])
        single = [one for one in annotations if not _is_crowd(one)]
        boxes = np.array([one["bbox"] for one in single], dtype=float).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        return record["width"], record["height"], boxes, [self._labels[one["category_id"]] for one in single]

    def read(self, index: int, seed: int | None = None) -> tuple[Image.Image, Target]:
        record, annotations = pickle.loads(self._records[index])
        path = self._files.image(record)
        where = f"image {record['id']} of {self._files.annotations}"
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}, which is {where}")
        image = decode_image(path)
        if image.size != (record["width"], record["height"]):
            raise DataError(
                f"{path} is {image.width}×{image.height}, but {where} is {record['width']}×{record['height']}"
            )
        return image, self._target(record, annotations)

    def _target(self, image: Record, annotations: list[Record]) -> Target:
        width, height = image["width"], image["height"]
        boxes = torch.tensor([one["bbox"] for one in annotations], dtype=torch.float32).view(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        limits = torch.tensor([width, height, width, height])
        areas = [one.get("area", one["bbox"][2] * one["bbox"][3]) for one in annotations]
        masks = None
        if self.has_masks:
            masks = torch.zeros(len(annotations), height, width, dtype=torch.bool)
            for mask, one in zip(masks, annotations, strict=True):
                mask.copy_(_decode_mask(one["segmentation"], height, width))
        return Target(
            image_id=image["id"],
            boxes=boxes.clamp(min=0).minimum(limits),
            labels=torch.tensor([self._labels[one["category_id"]] for one in annotations], dtype=torch.int64),
            masks=masks,
            crowd=torch.tensor([_is_crowd(one) for one in annotations], dtype=torch.bool),
            area=torch.tensor(areas, dtype=torch.float32),
        )


def _decode_mask(segmentation: Any, height: int, width: int) -> Tensor:
    """(height, width) bool, from polygons or from run lengths as a list or as a string."""
    compressed = isinstance(segmentation, dict) and isinstance(segmentation["counts"], str)
    encoded = segmentation if compressed else rle.frPyObjects(segmentation, height, width)
    pixels = rle.decode(rle.merge(encoded) if isinstance(encoded, list) else encoded)
    return torch.from_numpy(np.ascontiguousarray(pixels)).bool()


def _is_crowd(annotation: Record) -> bool:
    return bool(annotation.get("iscrowd", 0))


def _summary(problems: list[Problem]) -> str:
    """The first of the problems, and how to learn about the others."""
    others = f" (and {len(problems) - 1} more problems: see 'vil detect check')" if len(problems) > 1 else ""
    return f"{problems[0]}{others}"


# All that is wrong, image files included


class CheckReport(NamedTuple):
    """An annotation file, the split that it is for, how many images and objects it states, and what is wrong."""

    annotations: Path
    split: str
    images: int
    objects: int
    problems: list[Problem]


def check_coco(data: str | Path, split: str | None = None, progress: Progress | None = None) -> list[CheckReport]:
    """Check a split, or all that there are; ``progress`` is called with the images of each that are done."""
    data = Path(data)
    if not data.exists():
        raise FileNotFoundError(f"there is no data {data}; give a folder or a .json file in COCO's format")
    reports: list[CheckReport] = []
    opened: list[CocoFiles] = []
    for name in [split] if split else _annotated_splits(data):
        files = open_coco(data, name)
        inspection = inspect_coco(files.content)
        problems = [*inspection.problems, *_file_problems(files, inspection.images.values(), progress)]
        problems += [*_name_problems(files.content), *_corner_problems(inspection)]
        if opened:
            problems += _problems_between(opened[0], files)
        opened.append(files)
        counts = len(files.content["images"]), len(files.content["annotations"])
        reports.append(CheckReport(files.annotations, name, *counts, problems))
    return reports


def _name_problems(content: Record) -> Iterator[Problem]:
    """Names that several categories have: a detector tells them apart, but whoever reads its results cannot."""
    first: dict[str, int] = {}
    for identity, name in sorted(named_categories(content).items()):
        if first.setdefault(name, identity) != identity:
            yield Problem(None, None, f"categories {first[name]} and {identity} have the same name, {name!r}")


def _corner_problems(inspection: Inspection) -> Iterator[Problem]:
    """Boxes that look like [left, top, right, bottom]: read as COCO's, many of them leave their image."""
    sizes = {image_id: (image["width"], image["height"]) for image_id, image in inspection.images.items()}
    boxes = [
        (one["bbox"], sizes[one["image_id"]])
        for one in inspection.stated
        if _is_box(one.get("bbox")) and isinstance(one.get("image_id"), int) and one["image_id"] in sizes
    ]
    corners = leaving = 0
    for (left, top, third, fourth), (width, height) in boxes:
        corners += left < third <= width and top < fourth <= height
        leaving += left + third > width + TOLERANCE or top + fourth > height + TOLERANCE
    if boxes and corners == len(boxes) and leaving > CORNER_SHARE * len(boxes):
        yield Problem(
            None,
            None,
            f"{leaving} of {len(boxes)} boxes extend beyond their image; all look like [left, top, right, bottom], but "
            "COCO's are [left, top, width, height]",
        )


def _problems_between(first: CocoFiles, other: CocoFiles) -> Iterator[Problem]:
    """Two splits should have the same categories and no image in common, by its name or by its content."""
    if named_categories(first.content) != named_categories(other.content):
        yield Problem(None, None, f"its categories differ from those of {first.annotations}: use one list for both")
    hashes: dict[str, Record] = {}
    for record in first.content["images"]:
        if (key := _content_hash(first, record)) is not None:
            hashes.setdefault(key, record)
    for record in other.content["images"]:
        same = hashes.get(_content_hash(other, record) or "")
        if same is not None:
            name = same["file_name"]
            yield Problem(
                record.get("id"), None, f"({record['file_name']}) is a duplicate of {name} in {first.annotations}"
            )


def _content_hash(files: CocoFiles, record: Record) -> str | None:
    """Of an image file; None where there is none."""
    path = files.image(record) if isinstance(record.get("file_name"), str) else None
    return hashlib.blake2b(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None


def image_ids(data: str | Path) -> dict[Path, int]:
    """The ids of a data set's images, of all its splits, by file."""
    ids: dict[Path, int] = {}
    for split in _annotated_splits(Path(data)):
        files = open_coco(Path(data), split)
        valid = inspect_coco(files.content, masks=False).images
        ids |= {files.image(record).resolve(): number for number, record in valid.items()}
    return ids


def _annotated_splits(data: Path) -> tuple[str, ...]:
    """The splits that have annotations of their own; undivided data is for training."""
    return tuple(split for split in SPLITS if split_file(data, split)) or SPLITS[:1]


def _file_problems(files: CocoFiles, records: Collection[Record], progress: Progress | None) -> Iterator[Problem]:
    """Images that are missing, or of another size than their boxes and masks were made for."""
    for done, record in enumerate(records, 1):
        if progress is not None:
            progress(done, len(records))
        path = files.image(record)
        if not path.is_file():
            yield Problem(record["id"], None, f"has no file: {path} is missing")
            continue
        try:
            width, height = _upright_size(path)
        except Exception as error:  # decoders of damaged files raise nearly anything
            yield Problem(record["id"], None, f"cannot be read: {error}")
            continue
        if (width, height) != (record["width"], record["height"]):
            stated = f"{record['width']}×{record['height']}"
            yield Problem(record["id"], None, f"is stated to be {stated}, but {path} is {width}×{height}")


def _upright_size(path: Path) -> tuple[int, int]:
    """Width and height from a file's first bytes, turned as its EXIF data says."""
    with Image.open(path) as image:
        turned = image.getexif().get(ExifTags.Base.Orientation) in SIDEWAYS
        return (image.height, image.width) if turned else image.size


# Where annotations and images are


class CocoFiles(NamedTuple):
    """An annotation file, its content, and the folder that its images' names are relative to."""

    annotations: Path
    content: Record
    images: Path

    def image(self, record: Record) -> Path:
        return self.images / str(record["file_name"])


def open_coco(data: Path, split: str) -> CocoFiles:
    """The annotations of a split, and the folder of its images.

    Annotations are ``annotations/instances_<split>.json``, ``<split>.json``, ``<split>/annotations.json`` or
    ``<split>/_annotations.coco.json``. A file ``annotations.json``, the only .json file of the folder or of its folder
    ``annotations``, or a .json file given as ``data`` has no splits, and is for training unless asked otherwise.
    """
    annotations = _annotation_file(data, split)
    content = _content(annotations)
    folder = annotations.parent if data.is_file() else data
    return CocoFiles(annotations, content, _image_folder(folder, annotations, split, content["images"]))


def _annotation_file(data: Path, split: str) -> Path:
    if data.is_file():
        check_unsplit(str(data), split)
        return data
    if (own := split_file(data, split)) is not None:
        return own
    if (undivided := _undivided_file(data)) is not None:
        check_unsplit(str(undivided), split)
        return undivided
    if (other := _other_format(data)) is not None:
        raise ValueError(
            f"{data} is in the format of {other}, not in COCO's; 'python examples/to_coco.py {data} OUTPUT' converts it"
        )
    others = {name: file for name in SPLITS if (file := split_file(data, name))}
    there = " and ".join(f"{name!r} ({file.relative_to(data)})" for name, file in others.items())
    hint = f"; it has {there}, which can be evaluated with --split {next(iter(others))}" if others else ""
    raise FileNotFoundError(
        f"{data} has no annotations of split {split!r}{hint}; they should be in annotations/instances_{split}.json, "
        f"{split}.json or {UNDIVIDED}"
    )


def _undivided_file(data: Path) -> Path | None:
    """Annotations without splits: by their usual name, or the only file that there is."""
    if (data / UNDIVIDED).is_file():
        return data / UNDIVIDED
    files = [*data.glob("*.json"), *data.glob("annotations/*.json")]
    named = {place for split in (*TRAINING, *EVALUATION) for name in _names(split) for place in _places(name)}
    if len(files) != 1 or str(files[0].relative_to(data)) in named or _is_labelme(files[0]):
        return None
    return files[0]


def _other_format(data: Path) -> str | None:
    """The tool whose files a folder holds, if it is one that examples/to_coco.py reads."""
    if any(data.glob("*.xml")) or any(data.glob("Annotations/*.xml")):
        return "Pascal VOC (.xml)"
    first = next(iter(sorted(data.glob("*.json"))), None)
    return "labelme (.json)" if first is not None and _is_labelme(first) else None


def _is_labelme(path: Path) -> bool:
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and "shapes" in content and "imagePath" in content


def split_file(data: Path, split: str) -> Path | None:
    """The split's own annotation file in a folder."""
    for name in _names(split):
        for place in _places(name):
            if (data / place).is_file():
                return data / place
    return None


def _places(split: str) -> tuple[str, ...]:
    """Where the annotations of a split of this name may be."""
    return f"annotations/instances_{split}.json", f"{split}.json", f"{split}/{UNDIVIDED}", f"{split}/{ROBOFLOW}"


def _image_folder(data: Path, annotations: Path, split: str, records: list[Record]) -> Path:
    """The first usual place that has one of the first images; should none have it, the first place that exists."""
    places = [data / name for name in _names(split)]
    places += [data / "images" / name for name in _names(split)]
    others = (data / "images", data / "images" / "default", annotations.parent, data)
    places = [place for place in (*places, *others) if place.is_dir()]
    names = [str(record["file_name"]) for record in records[:10] if "file_name" in record]
    return next((place for place in places if any((place / name).is_file() for name in names)), places[0])


def _names(split: str) -> Iterator[str]:
    for name in split_names(split):
        yield name
        yield from (f"{name}{year}" for year in YEARS)


def _content(path: Path) -> Record:
    """The file's JSON data, which has lists of images, annotations and categories."""
    try:
        with path.open("rb") as file:
            content = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    for name in ("images", "annotations", "categories"):
        items = content.get(name) if isinstance(content, dict) else None
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ValueError(f"{path} is not in COCO's format: there is no list of {name} in it")
    return content


# What is wrong with annotations, as far as it shows without opening an image


class Problem(NamedTuple):
    """Something wrong with an image or with one of its annotations; None where it is no single one's fault."""

    image: object
    annotation: object
    what: str

    def __str__(self) -> str:
        where = [f"annotation {self.annotation}"] if self.annotation is not None else []
        where += [f"image {self.image}"] if self.image is not None else []
        return f"{' of '.join(where)} {self.what}" if where else self.what


class Inspection(NamedTuple):
    """What is wrong; the valid images, by id, and valid annotations; and all annotations as they are stated."""

    problems: list[Problem]
    images: dict[int, Record]
    annotations: list[Record]
    stated: list[Record]


def inspect_coco(content: Record, *, masks: bool = True) -> Inspection:
    """Inspect a file's content; segmentations only with ``masks``. One problem is named per image or annotation.

    Annotations of an image that is wrong itself are left out without a problem of their own.
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
    valid: list[Record] = []
    for record in content["annotations"]:
        image = record.get("image_id")
        if isinstance(image, int) and image in wrong:
            continue
        if what := rules.problem(record):
            problems.append(Problem(image, record.get("id"), what))
        else:
            valid.append(record)
    return Inspection(problems, images, valid, content["annotations"])


def named_categories(content: Record) -> dict[int, str]:
    """Names by id, of categories that have both; the first of an id counts."""
    named = [record for record in content["categories"] if _has_id(record) and isinstance(record.get("name"), str)]
    return {record["id"]: record["name"] for record in reversed(named)}


class _AnnotationRules:
    """Inspects annotations one after the other, and remembers their ids."""

    def __init__(self, content: Record, images: Mapping[int, Record], masks: bool) -> None:
        self._images = images
        self._categories = named_categories(content)
        self._masks = masks and any(_has_mask(record) for record in content["annotations"])
        self._seen: set[int] = set()

    def problem(self, record: Record) -> str | None:
        """The first thing wrong with an annotation, if any."""
        if not _has_id(record):
            return f"has {_wrong_id(record)}"
        if record["id"] in self._seen:
            return "has an id that another annotation has"
        self._seen.add(record["id"])
        image_id, category = record.get("image_id"), record.get("category_id")
        if not isinstance(image_id, int) or image_id not in self._images:
            text = f": its image_id is the text {image_id!r}; ids are integers" if isinstance(image_id, str) else ""
            return f"belongs to an image that the data set does not have{text}"
        if not isinstance(category, int) or category not in self._categories:
            return f"has category {category}, which the data set does not have"
        image = self._images[image_id]
        if not _is_number(record.get("area", 0)):
            return f"has the area {record['area']}; it should be a number of pixels"
        return _box_problem(record.get("bbox"), image) or (_mask_problem(record, image) if self._masks else None)


def _set_problems(content: Record) -> Iterator[str]:
    """Of the data set as a whole."""
    for name in ("images", "annotations", "categories"):
        if not content[name]:
            yield f"the data set has no {name}"
    seen: set[int] = set()
    for record in content["categories"]:
        if not _has_id(record) or not isinstance(record.get("name"), str):
            text = f", not {record['id']!r}" if isinstance(record.get("id"), str) else ""
            yield f"category {record} should have an integer as id{text}, and a name"
            continue
        if record["id"] in seen:
            yield f"two categories have the id {record['id']}"
        seen.add(record["id"])


def _image_problem(record: Record, seen: Mapping[int, Record]) -> str | None:
    if not _has_id(record):
        return f"({record.get('file_name')}) has {_wrong_id(record)}"
    if record["id"] in seen:
        return f"({record.get('file_name')}) has an id that another image has"
    if not isinstance(record.get("file_name"), str):
        return "has no file_name"
    if not all(isinstance(record.get(side), int) and record[side] > 0 for side in ("width", "height")):
        return f"({record['file_name']}) has no width and height in pixels"
    return None


def _box_problem(box: object, image: Record) -> str | None:
    if not _is_box(box):
        return f"has the box {box}; it should be [left, top, width, height]"
    left, top, width, height = cast("list[float]", box)
    if width <= 0 or height <= 0:
        return f"has a box of zero area, {box}"
    inside = min(left + width, image["width"]) > max(left, 0) and min(top + height, image["height"]) > max(top, 0)
    if not inside or _leaves(left, left + width, image["width"]) or _leaves(top, top + height, image["height"]):
        return f"has the box {box}, which extends beyond its image of {image['width']}×{image['height']}"
    return None


def _is_box(box: object) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))


def _mask_problem(record: Record, image: Record) -> str | None:
    size = [image["height"], image["width"]]
    shape = record.get("segmentation")
    if not _has_mask(record):
        return "has no mask, although other annotations do"
    if isinstance(shape, dict):
        return _rle_problem(shape, size)
    for polygon in shape if isinstance(shape, list) else [shape]:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2 or not all(map(_is_number, polygon)):
            return "has a mask whose outline is not a list x, y, x, y, … of at least three points"
        if any(_leaves(min(polygon[axis::2]), max(polygon[axis::2]), size[1 - axis]) for axis in (0, 1)):
            return f"has a mask that extends beyond its image of {image['width']}×{image['height']}"
    return None


def _rle_problem(mask: Record, size: list[int]) -> str | None:
    if list(mask.get("size", ())) != size:
        return f"has a mask of height and width {mask.get('size')}, but its image is {size}"
    counts = mask.get("counts")
    runs = _decoded_runs(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(isinstance(run, int) and run >= 0 for run in runs):
        return "has a mask whose counts are not run lengths"
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


def _wrong_id(record: Record) -> str:
    """What an image or annotation has in place of an id."""
    identity = record.get("id")
    return f"the text {identity!r} as id; ids are integers" if isinstance(identity, str) else "no id that is an integer"


def _has_id(record: Record) -> bool:
    return isinstance(record.get("id"), int)


def _has_mask(record: Record) -> bool:
    return bool(record.get("segmentation"))


def _leaves(start: float, end: float, length: int) -> bool:
    return start < -TOLERANCE or end > length + TOLERANCE


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)
