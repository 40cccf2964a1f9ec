"""Where a data set in COCO's form keeps its annotations and images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..classification.data.splits import check_undivided, split_names

YEARS = ("2017", "2014")
"""What follows the names of splits in COCO's own releases."""

SPLITS = ("train", "validation")
UNDIVIDED = "annotations.json"


class CocoFiles(NamedTuple):
    """An annotation file, its content, and the folder that its images' names are relative to."""

    annotations: Path
    content: dict[str, Any]
    images: Path

    def image(self, record: dict[str, Any]) -> Path:
        return self.images / str(record["file_name"])


def open_coco(data: Path, split: str) -> CocoFiles:
    """The annotations of a split, wherever they usually are, and the folder in which its images are found.

    Annotations are ``annotations/instances_<split>.json``, ``<split>.json`` or ``<split>/annotations.json``; a file
    ``annotations.json``, or a .json file given as ``data``, has no splits, and is for training unless asked otherwise.
    """
    annotations = _annotation_file(data, split)
    content = _content(annotations)
    folder = annotations.parent if data.is_file() else data
    return CocoFiles(annotations, content, _image_folder(folder, annotations, split, content["images"]))


def found_splits(data: Path) -> tuple[str, ...]:
    """The splits that have annotations of their own; undivided data is for training."""
    return tuple(split for split in SPLITS if _split_file(data, split)) or SPLITS[:1]


def _annotation_file(data: Path, split: str) -> Path:
    if data.is_file():
        check_undivided(str(data), split)
        return data
    if (own := _split_file(data, split)) is not None:
        return own
    if (data / UNDIVIDED).is_file():
        check_undivided(str(data / UNDIVIDED), split)
        return data / UNDIVIDED
    raise FileNotFoundError(
        f"{data} has no annotations of split {split!r}; they should be in annotations/instances_{split}.json, "
        f"{split}.json or {UNDIVIDED}"
    )


def _split_file(data: Path, split: str) -> Path | None:
    """The split's own annotation file in a folder."""
    for name in _names(split):
        for place in (f"annotations/instances_{name}.json", f"{name}.json", f"{name}/{UNDIVIDED}"):
            if (data / place).is_file():
                return data / place
    return None


def _image_folder(data: Path, annotations: Path, split: str, records: list[dict[str, Any]]) -> Path:
    """The first usual place that has one of the first images; should none have it, the first place that exists."""
    places = [data / name for name in _names(split)]
    places += [data / "images" / name for name in _names(split)]
    places = [place for place in (*places, data / "images", annotations.parent, data) if place.is_dir()]
    names = [str(record["file_name"]) for record in records[:10] if "file_name" in record]
    return next((place for place in places if any((place / name).is_file() for name in names)), places[0])


def _names(split: str) -> Iterator[str]:
    for name in split_names(split):
        yield name
        yield from (f"{name}{year}" for year in YEARS)


def _content(path: Path) -> dict[str, Any]:
    """The file's JSON data, which has lists of images, annotations and categories."""
    try:
        with path.open("rb") as file:
            content = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} is not a whole JSON file ({error})") from error
    for name in ("images", "annotations", "categories"):
        items = content.get(name) if isinstance(content, dict) else None
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ValueError(f"{path} is not in COCO's form: there is no list of {name} in it")
    return content
