"""The converter of Pascal VOC's boxes, as a user runs it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

from vision_longformer.detection.coco import CocoData, check_coco

SCRIPT = Path(__file__).parents[2] / "examples" / "voc_to_coco.py"

OBJECT = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"


def _annotated(folder: Path) -> Path:
    """A photo of 100×60, white above and black below, with two oaks and an elm, one of which lies across x = 50."""
    folder.mkdir()
    image = Image.new("RGB", (100, 60), "white")
    image.paste("black", (0, 40, 100, 60))
    image.save(folder / "wood.png")
    objects = [("oak", 10, 10, 30, 40), ("elm", 40, 5, 70, 25), ("oak", 90, 45, 100, 60)]
    text = "".join(OBJECT.format(*one) for one in objects)
    (folder / "wood.xml").write_text(f"<annotation><filename>wood.png</filename>{text}</annotation>")
    return folder


def _converted(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    output = folder / "coco"
    monkeypatch.setattr(sys, "argv", ["voc_to_coco.py", str(_annotated(folder / "voc")), str(output), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert [one.problems for one in check_coco(output)] == [[]] * len(list(output.glob("*.json")))
    return output


def test_whole_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = CocoData(_converted(tmp_path, monkeypatch), "train")
    image, target = data.read(0)
    assert (image.size, image.getpixel((5, 50))) == ((100, 60), (0, 0, 0))
    assert [category.name for category in data.categories] == ["elm", "oak"]
    assert target.labels.tolist() == [2, 1, 2]
    assert target.boxes.tolist() == [[10, 10, 30, 40], [40, 5, 70, 25], [90, 45, 100, 60]]


def test_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four tiles, the last is for evaluation; the elm is where its centre is, and cut there."""
    output = _converted(tmp_path, monkeypatch, "--tile", "50", "--validation", "4", "--name", "tree")
    data = CocoData(output, "train")
    images, targets = zip(*(data.read(index) for index in range(len(data))), strict=True)
    assert [image.size for image in images] == [(50, 30)] * 3
    assert [target.boxes.tolist() for target in targets] == [[[10, 10, 30, 30]], [[0, 5, 20, 25]], []]
    assert [category.name for category in data.categories] == ["tree"]
    (annotation,) = json.loads((output / "validation.json").read_text())["annotations"]
    assert (annotation["bbox"], annotation["area"], annotation["image_id"]) == ([40, 15, 10, 15], 150, 4)
