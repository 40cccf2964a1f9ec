"""Boxes in Pascal VOC's XML files as a data set in COCO's format, with large images cut into tiles.

    python examples/voc_to_coco.py ANNOTATED OUTPUT [--tile 400] [--validation 4] [--name tree]

ANNOTATED is a folder of .xml files with their images beside them. An object belongs to the tile that its centre is in,
and is cut at the border of the tile, so that every object is there once. With `--validation 4`, every fourth tile is
held out for evaluation; with `--name tree`, all objects are trees, whatever they are called.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from PIL import Image


class Box(NamedTuple):
    """An object's name and its borders in pixels."""

    name: str
    left: float
    top: float
    right: float
    bottom: float

    def within(self, left: int, top: int, right: int, bottom: int) -> Box | None:
        """The box as a part of the image shows it, if its centre is there."""
        if not (left <= (self.left + self.right) / 2 < right and top <= (self.top + self.bottom) / 2 < bottom):
            return None
        borders = max(self.left, left), max(self.top, top), min(self.right, right), min(self.bottom, bottom)
        return Box(self.name, borders[0] - left, borders[1] - top, borders[2] - left, borders[3] - top)


Tile = tuple[dict[str, Any], list[Box]]
"""How COCO's files state an image, and the objects that it shows."""


def annotated_images(folder: Path, name: str | None) -> Iterator[tuple[Path, list[Box]]]:
    """The image of each .xml file, and the objects in it, by their own names or all by one."""
    for path in sorted(folder.glob("*.xml")):
        root = ElementTree.parse(path).getroot()
        boxes = []
        for item in root.iter("object"):
            borders = [float(item.findtext(f"bndbox/{side}", "nan")) for side in ("xmin", "ymin", "xmax", "ymax")]
            boxes.append(Box(name or item.findtext("name", ""), *borders))
        yield folder / root.findtext("filename", ""), boxes


def tiles(image: Image.Image, side: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Equal parts of the image of at most ``side`` × ``side``: left, top, right, bottom; the whole of it without."""
    rows, columns = (-(-length // (side or length)) for length in (image.height, image.width))
    for row in range(rows):
        for column in range(columns):
            left, top = column * image.width // columns, row * image.height // rows
            yield left, top, (column + 1) * image.width // columns, (row + 1) * image.height // rows


def cut(images: Iterable[tuple[Path, list[Box]]], output: Path, side: int | None) -> list[Tile]:
    """Write all tiles as images."""
    cut_out: list[Tile] = []
    for path, boxes in images:
        image = Image.open(path).convert("RGB")
        for part in tiles(image, side):
            number, tile = len(cut_out) + 1, image.crop(part)
            stated = {"id": number, "file_name": f"{number:05}.png", "width": tile.width, "height": tile.height}
            tile.save(output / stated["file_name"])
            cut_out.append((stated, [box for one in boxes if (box := one.within(*part))]))
    return cut_out


def coco_content(cut_out: list[Tile], names: list[str]) -> dict[str, Any]:
    """The tiles as an annotation file."""
    content: dict[str, Any] = {"images": [stated for stated, _ in cut_out], "annotations": []}
    content["categories"] = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
    for stated, boxes in cut_out:
        for box in boxes:
            width, height = box.right - box.left, box.bottom - box.top
            content["annotations"].append(
                {
                    "id": len(content["annotations"]) + 1,
                    "image_id": stated["id"],
                    "category_id": 1 + names.index(box.name),
                    "bbox": [box.left, box.top, width, height],
                    "area": width * height,
                    "iscrowd": 0,
                }
            )
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("annotated", type=Path, help="folder of .xml files and images")
    parser.add_argument("output", type=Path, help="folder to be made")
    parser.add_argument("--tile", type=int, default=None, help="cut images into squares of so many pixels")
    parser.add_argument("--validation", type=int, default=None, help="hold out one tile in so many for evaluation")
    parser.add_argument("--name", default=None, help="one name for all objects")
    arguments = parser.parse_args()

    images = arguments.output / "images"
    images.mkdir(parents=True)
    annotated = annotated_images(arguments.annotated, arguments.name)
    splits = {"train": cut(annotated, images, arguments.tile)}
    names = sorted({box.name for _, boxes in splits["train"] for box in boxes})
    if arguments.validation:
        splits["validation"] = splits["train"][arguments.validation - 1 :: arguments.validation]
        del splits["train"][arguments.validation - 1 :: arguments.validation]
    for split, cut_out in splits.items():
        (arguments.output / f"{split}.json").write_text(json.dumps(coco_content(cut_out, names)))
        print(f"{split}: {len(cut_out)} images, {sum(len(boxes) for _, boxes in cut_out)} objects")


if __name__ == "__main__":
    main()
