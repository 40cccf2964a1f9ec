"""Objects in Pascal VOC's .xml files or labelme's .json files as a data set in COCO's format.

    python examples/to_coco.py ANNOTATED OUTPUT [--tile 400] [--validation 4] [--name tree]

ANNOTATED is a folder of .xml or .json files with their images beside them (for Pascal VOC's own folders, with images in
JPEGImages). Outlines of labelme become masks. With `--tile`, large images are cut into tiles: an object belongs to the
tile that its centre is in, its box is cut at the border of the tile, so that every object is there once, and masks are
left out; the rest of such an object is in the neighbouring tile without a label. With `--validation 4`, every fourth
image or tile is for evaluation; with `--name tree`, all objects are trees, whatever they are called.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from xml.etree import ElementTree

from PIL import Image, ImageOps

CIRCLE_POINTS = 32
"""Corners of the outline of a circle."""

IMAGE_SUFFIXES = frozenset(Image.registered_extensions())

SHOWN_FILES = 4
"""Names of images that a message lists."""


class Box(NamedTuple):
    """An object's name, its borders in pixels and, where there is one, its outline as x, y, x, y, …"""

    name: str
    left: float
    top: float
    right: float
    bottom: float
    outline: tuple[float, ...] | None = None

    def crosses(self, left: int, top: int, right: int, bottom: int) -> bool:
        """Whether it leaves a part of the image."""
        return self.left < left or self.top < top or self.right > right or self.bottom > bottom

    def within(self, left: int, top: int, right: int, bottom: int) -> Box | None:
        """The box as a part of the image shows it, if its centre is there."""
        if not (left <= (self.left + self.right) / 2 < right and top <= (self.top + self.bottom) / 2 < bottom):
            return None
        borders = max(self.left, left), max(self.top, top), min(self.right, right), min(self.bottom, bottom)
        return Box(self.name, borders[0] - left, borders[1] - top, borders[2] - left, borders[3] - top)


Tile = tuple[dict[str, Any], list[Box]]
"""How COCO's files state an image, and the objects that it shows."""


def annotated_images(folder: Path, name: str | None) -> Iterator[tuple[Path, list[Box]]]:
    """The image of each annotation file, and the objects in it, by their own names or all by one."""
    if not folder.is_dir():
        raise SystemExit(f"there is no folder {folder}")
    files = sorted([*folder.glob("*.xml"), *folder.glob("Annotations/*.xml"), *folder.glob("*.json")])
    if not files:
        raise SystemExit(f"{folder} has no .xml files of Pascal VOC and no .json files of labelme")
    for path in files:
        image, boxes = read_voc(path) if path.suffix == ".xml" else read_labelme(path)
        yield image, [box._replace(name=name or box.name) for box in boxes]


def read_voc(path: Path) -> tuple[Path, list[Box]]:
    """The image and the boxes of a Pascal VOC file."""
    root = ElementTree.parse(path).getroot()
    boxes = []
    for item in root.iter("object"):
        borders = [float(item.findtext(f"bndbox/{side}", "nan")) for side in ("xmin", "ymin", "xmax", "ymax")]
        boxes.append(Box(item.findtext("name", ""), *borders))
    return find_image(path, root.findtext("filename", ""), path.parent.parent / "JPEGImages"), boxes


def read_labelme(path: Path) -> tuple[Path, list[Box]]:
    """The image, and the polygons, rectangles and circles of a labelme file; other shapes are skipped, and named."""
    content = json.loads(path.read_text(encoding="utf-8"))
    boxes = []
    for shape in content["shapes"]:
        outline = labelme_outline(shape)
        if outline is None:
            print(f"{path}: skipped {shape['label']}, a {shape['shape_type']}, which has no area")
            continue
        xs, ys = outline[::2], outline[1::2]
        boxes.append(Box(shape["label"], min(xs), min(ys), max(xs), max(ys), outline))
    return find_image(path, content["imagePath"].replace("\\", "/")), boxes


def find_image(annotation: Path, name: str, *others: Path) -> Path:
    """The image that an annotation file names, beside it or in one of the other folders.

    If it is not there, the image that is called as the annotation file is, which is told.
    """
    folders = [annotation.parent, *(folder for folder in others if folder.is_dir())]
    for folder in folders:
        if name and (folder / name).is_file():
            return folder / name
    there = sorted(path for folder in folders for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    same = [path for path in there if path.stem == annotation.stem]
    if len(same) == 1:
        missing = f"{name}, which does not exist" if name else "no image"
        print(f"{annotation} names {missing}; using {same[0].name} instead")
        return same[0]
    raise SystemExit(
        f"there is no image {annotation.parent / (name or annotation.stem)}, which is annotated in {annotation.name}; "
        f"images should be beside their annotations, where there are {shown(same or there) or 'no images'}"
    )


def shown(paths: list[Path]) -> str:
    """The first few names."""
    return ", ".join(path.name for path in paths[:SHOWN_FILES]) + (" …" if len(paths) > SHOWN_FILES else "")


def report_unannotated(folder: Path, annotated: Iterable[Path]) -> None:
    """Say which images have no annotations, and so are not part of the data set."""
    beside = [path for part in (".", "Annotations", "JPEGImages") for path in (folder / part).glob("*")]
    left = sorted({path for path in beside if path.suffix.lower() in IMAGE_SUFFIXES}.difference(annotated))
    if left:
        have = "image has no annotation file and is" if len(left) == 1 else "images have no annotation file and are"
        print(f"{len(left)} {have} left out: {shown(left)}")


def labelme_outline(shape: dict[str, Any]) -> tuple[float, ...] | None:
    """Corners x, y, x, y, … of a shape; None for lines and points."""
    points, kind = shape["points"], shape.get("shape_type", "polygon")
    if kind == "rectangle":
        (left, top), (right, bottom) = points
        points = [(left, top), (right, top), (right, bottom), (left, bottom)]
    elif kind == "circle":
        (x, y), edge = points
        radius = math.dist((x, y), edge)
        angles = [2 * math.pi * number / CIRCLE_POINTS for number in range(CIRCLE_POINTS)]
        points = [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]
    elif kind != "polygon" or len(points) < 3:
        return None
    return tuple(float(value) for point in points for value in point)


def tiles(image: Image.Image, side: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Equal parts of the image of at most ``side`` × ``side``: left, top, right, bottom; the whole of it without."""
    rows, columns = (-(-length // (side or length)) for length in (image.height, image.width))
    for row in range(rows):
        for column in range(columns):
            left, top = column * image.width // columns, row * image.height // rows
            yield left, top, (column + 1) * image.width // columns, (row + 1) * image.height // rows


def cut(images: Iterable[tuple[Path, list[Box]]], output: Path, side: int | None) -> list[Tile]:
    """Write all tiles as images, each with the name of its image and where in it the tile begins.

    How many boxes their borders cut is told.
    """
    cut_out: list[Tile] = []
    taken: set[str] = set()
    crossing = 0
    for path, boxes in images:
        image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        boxes = [box for one in boxes if (box := clipped(one, image, path))]
        for part in tiles(image, side):
            number, tile = len(cut_out) + 1, image.crop(part)
            name = path.stem if side is None else f"{path.stem}_{part[1]}_{part[0]}"
            name = f"{name}_{number}" if name in taken else name  # of images in several folders
            taken.add(name)
            stated = {"id": number, "file_name": f"{name}.png", "width": tile.width, "height": tile.height}
            tile.save(output / stated["file_name"])
            inside = [(one, box) for one in boxes if (box := one.within(*part))]
            crossing += sum(one.crosses(*part) for one, _ in inside)
            cut_out.append((stated, boxes if side is None else [box for _, box in inside]))
    if crossing:
        print(f"{crossing} {'box was' if crossing == 1 else 'boxes were'} cut at tile borders")
    return cut_out


def clipped(box: Box, image: Image.Image, path: Path) -> Box | None:
    """The box and its outline without what leaves the image, which is told; None if nothing is left."""
    outline = box.outline and tuple(
        min(max(value, 0.0), float(image.size[index % 2])) for index, value in enumerate(box.outline)
    )
    width, height = image.size
    borders = max(box.left, 0.0), max(box.top, 0.0), min(box.right, width), min(box.bottom, height)
    if borders[2] <= borders[0] or borders[3] <= borders[1]:
        print(f"{path}: skipped {box.name} at {list(box[1:5])}, which has no area in the image")
        return None
    if borders != box[1:5]:
        print(f"{path}: {box.name} at {list(box[1:5])} leaves the image of {width}×{height}, and is cut at its border")
    return Box(box.name, *borders, outline)


def coco_content(cut_out: list[Tile], names: list[str]) -> dict[str, Any]:
    """The tiles as an annotation file."""
    content: dict[str, Any] = {"images": [stated for stated, _ in cut_out], "annotations": []}
    content["categories"] = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
    for stated, boxes in cut_out:
        for box in boxes:
            width, height = box.right - box.left, box.bottom - box.top
            annotation = {
                "id": len(content["annotations"]) + 1,
                "image_id": stated["id"],
                "category_id": 1 + names.index(box.name),
                "bbox": [box.left, box.top, width, height],
                "area": width * height,
                "iscrowd": 0,
            }
            if box.outline is not None:
                annotation |= {"segmentation": [list(box.outline)], "area": polygon_area(box.outline)}
            content["annotations"].append(annotation)
    return content


def polygon_area(outline: tuple[float, ...]) -> float:
    """By the shoelace formula."""
    xs, ys = outline[::2], outline[1::2]
    return abs(sum(xs[index - 1] * ys[index] - xs[index] * ys[index - 1] for index in range(len(xs)))) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("annotated", type=Path, help="folder of .xml or .json files and images")
    parser.add_argument("output", type=Path, help="folder to be made")
    parser.add_argument(
        "--tile",
        type=int,
        help="cut images into about equal tiles, at most so many pixels wide and high (default: images stay whole)",
    )
    parser.add_argument(
        "--validation",
        type=int,
        help="keep one image, or tile, in so many for evaluation (default: none, and training holds some out itself)",
    )
    parser.add_argument("--name", help="one name for all objects (default: the names that they have)")
    arguments = parser.parse_args()

    if (arguments.output / "images").exists():
        raise SystemExit(f"{arguments.output} exists; give the name of a new folder")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=arguments.output.parent, prefix=f".{arguments.output.name}.") as temporary:
        convert(arguments, Path(temporary))  # appears whole or not at all
        arguments.output.mkdir(exist_ok=True)
        for part in Path(temporary).iterdir():
            part.replace(arguments.output / part.name)
    print(f"wrote {arguments.output}; next: vil detect check {arguments.output}")


def convert(arguments: argparse.Namespace, output: Path) -> None:
    """Write images and annotations into a folder."""
    (output / "images").mkdir()
    annotated = list(annotated_images(arguments.annotated, arguments.name))
    report_unannotated(arguments.annotated, (path for path, _ in annotated))
    splits = {"train": cut(annotated, output / "images", arguments.tile)}
    names = sorted({box.name for _, boxes in splits["train"] for box in boxes})
    if arguments.validation:
        splits["validation"] = splits["train"][arguments.validation - 1 :: arguments.validation]
        del splits["train"][arguments.validation - 1 :: arguments.validation]
    for split, cut_out in splits.items():
        (output / f"{split}.json").write_text(json.dumps(coco_content(cut_out, names)))
        print(f"{split}: {len(cut_out)} images, {sum(len(boxes) for _, boxes in cut_out)} objects")


if __name__ == "__main__":
    main()
