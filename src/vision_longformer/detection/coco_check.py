"""Everything that is wrong with a data set in COCO's form, its image files included."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import ExifTags, Image

from ..training.task import Tell
from .coco_files import CocoFiles, found_splits, open_coco
from .coco_rules import Problem, inspect_coco

SIDEWAYS = (5, 6, 7, 8)
"""Values of EXIF's orientation that swap width and height."""


class Checked(NamedTuple):
    """An annotation file, how much is in it, and what is wrong."""

    annotations: Path
    images: int
    objects: int
    problems: list[Problem]


def check_coco(data: str | Path, split: str | None = None, tell: Tell | None = None) -> list[Checked]:
    """Check a split, or all that there are; ``tell`` is told of the images of each."""
    data = Path(data)
    if not data.exists():
        raise FileNotFoundError(f"there is no data {data}; give a folder or a .json file in COCO's form")
    return [_check(open_coco(data, name), tell) for name in ([split] if split else found_splits(data))]


def _check(files: CocoFiles, tell: Tell | None) -> Checked:
    found = inspect_coco(files.content)
    problems = [*found.problems, *_file_problems(files, found.images.values(), tell)]
    return Checked(files.annotations, len(files.content["images"]), len(files.content["annotations"]), problems)


def _file_problems(files: CocoFiles, records: Collection[dict[str, Any]], tell: Tell | None) -> Iterator[Problem]:
    """Images that are missing, or of another size than their boxes and masks were made for."""
    for done, record in enumerate(records, 1):
        if tell is not None:
            tell(done, len(records))
        path = files.image(record)
        if not path.is_file():
            yield Problem(record["id"], None, f"has no file: {path} is missing")
            continue
        try:
            width, height = _shown_size(path)
        except Exception as error:  # decoders of damaged files raise nearly anything
            yield Problem(record["id"], None, f"cannot be read: {error}")
            continue
        if (width, height) != (record["width"], record["height"]):
            stated = f"{record['width']}×{record['height']}"
            yield Problem(record["id"], None, f"is stated to be {stated}, but {path} is {width}×{height}")


def _shown_size(path: Path) -> tuple[int, int]:
    """Width and height from a file's first bytes, turned as its EXIF data says."""
    with Image.open(path) as image:
        turned = image.getexif().get(ExifTags.Base.Orientation) in SIDEWAYS
        return (image.height, image.width) if turned else image.size
