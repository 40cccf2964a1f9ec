"""The converter of Pascal VOC's and labelme's files, as a user runs it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

from vision_longformer.detection.coco import CocoData, check_coco

SCRIPT = Path(__file__).parents[2] / "examples" / "to_coco.py"

OBJECT = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"


def _annotated(folder: Path) -> Path:
    """A photo of 100×60, white above and black below, with two oaks and an elm, one of which lies across x = 50."""
    folder.mkdir()
    image = Image.new("RGB", (100, 60), "white")
    image.paste("black", (0, 40, 100, 60))
    image.putpixel((99, 59), (50, 50, 50))  # so that no two tiles are equal
    image.save(folder / "wood.png")
    objects = [("oak", 10, 10, 30, 40), ("elm", 40, 5, 70, 25), ("oak", 90, 45, 100, 60)]
    text = "".join(OBJECT.format(*one) for one in objects)
    (folder / "wood.xml").write_text(f"<annotation><filename>wood.png</filename>{text}</annotation>")
    return folder


def _converted(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    return _convert(_annotated(folder / "voc"), folder / "coco", monkeypatch, *options)


def _convert(annotated: Path, output: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    monkeypatch.setattr(sys, "argv", ["to_coco.py", str(annotated), str(output), *options])
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


def test_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four tiles, the last is for evaluation; the elm is where its centre is, and cut there, as the first oak is."""
    output = _converted(tmp_path, monkeypatch, "--tile", "50", "--validation", "4", "--name", "tree")
    assert "2 boxes were cut at tile borders\n" in capsys.readouterr().out
    data = CocoData(output, "train")
    images, targets = zip(*(data.read(index) for index in range(len(data))), strict=True)
    assert [image.size for image in images] == [(50, 30)] * 3
    assert [target.boxes.tolist() for target in targets] == [[[10, 10, 30, 30]], [[0, 5, 20, 25]], []]
    assert list(data.names) == ["wood_0_0.png", "wood_0_50.png", "wood_30_0.png"]  # rows first, then columns
    assert [category.name for category in data.categories] == ["tree"]
    (annotation,) = json.loads((output / "validation.json").read_text())["annotations"]
    assert (annotation["bbox"], annotation["area"], annotation["image_id"]) == ([40, 15, 10, 15], 150, 4)


def test_images_without_annotations_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    annotated = _annotated(tmp_path / "voc")
    _convert(annotated, tmp_path / "all", monkeypatch)
    printed = capsys.readouterr().out
    assert "left out" not in printed
    assert "cut at tile borders" not in printed
    (annotated / "lake.JPG").touch()
    _convert(annotated, tmp_path / "but_one", monkeypatch)
    assert "1 image has no annotation file and is left out: lake.JPG\n" in capsys.readouterr().out
    for number in range(5):
        (annotated / f"{number}.png").touch()
    _convert(annotated, tmp_path / "but_six", monkeypatch)
    left = "6 images have no annotation file and are left out: 0.png, 1.png, 2.png, 3.png …"
    assert left in capsys.readouterr().out


def test_help_states_defaults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["to_coco.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = " ".join(capsys.readouterr().out.split())
    for default in ("images stay whole", "none, and training holds some out itself", "the names that they have"):
        assert f"(default: {default})" in printed


def test_folders_of_pascal_voc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    annotated = _annotated(tmp_path / "voc")
    for name, folder in (("wood.xml", "Annotations"), ("wood.png", "JPEGImages")):
        (annotated / folder).mkdir()
        (annotated / name).rename(annotated / folder / name)
    assert len(CocoData(_convert(annotated, tmp_path / "coco", monkeypatch), "train")) == 1


def _labelme(folder: Path) -> Path:
    """A photo of 100×60 with a triangle, a rectangle that leaves it, a circle of radius 10 and a line."""
    folder.mkdir()
    Image.new("RGB", (100, 60)).save(folder / "yard.png")
    shapes = [
        {"label": "tent", "shape_type": "polygon", "points": [[10, 10], [30, 10], [10, 40]]},
        {"label": "car", "shape_type": "rectangle", "points": [[70, 20], [104, 50]]},
        {"label": "pool", "shape_type": "circle", "points": [[50, 40], [60, 40]]},
        {"label": "rope", "shape_type": "line", "points": [[0, 0], [9, 9]]},
    ]
    (folder / "yard.json").write_text(json.dumps({"shapes": shapes, "imagePath": "yard.png"}))
    return folder


def test_outlines_of_labelme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A triangle of 20×30 / 2, a rectangle cut to 30×30, a circle of π · 10² but for its corners."""
    data = CocoData(_convert(_labelme(tmp_path / "labelme"), tmp_path / "coco", monkeypatch), "train")
    assert "skipped rope, a line, which has no area" in capsys.readouterr().out
    _, target = data.read(0)
    names = [data.categories[label - 1].name for label in target.labels.tolist()]
    assert names == ["tent", "car", "pool"]
    assert target.boxes.tolist() == [[10, 10, 30, 40], [70, 20, 100, 50], [40, 30, 60, 50]]
    assert target.area.tolist() == pytest.approx([300, 900, 314], rel=0.01)
    assert target.masks is not None
    assert target.masks.sum((1, 2)).tolist() == pytest.approx([300, 900, 314], rel=0.08)
    assert target.masks[0, 11, 27]
    assert not target.masks[0, 38, 27]


def test_tiles_of_labelme_have_boxes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = _convert(_labelme(tmp_path / "labelme"), tmp_path / "coco", monkeypatch, "--tile", "50")
    annotations = json.loads((output / "train.json").read_text())["annotations"]
    assert len(annotations) == 3
    assert all("segmentation" not in annotation for annotation in annotations)


def test_a_missing_image_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    annotated = _annotated(tmp_path / "voc")
    (annotated / "wood.png").unlink()
    with pytest.raises(SystemExit, match=r"there is no image .*wood\.png, which is annotated.*there are no images"):
        _convert(annotated, tmp_path / "coco", monkeypatch)
    with pytest.raises(SystemExit, match=r"there is no folder .*nowhere"):
        _convert(tmp_path / "nowhere", tmp_path / "coco", monkeypatch)
    assert [path.name for path in tmp_path.iterdir()] == ["voc"], "nothing is left behind"


def test_an_image_of_the_annotations_name_is_taken_for_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where photos were converted after they were annotated; two of the name are not chosen from."""
    annotated = _annotated(tmp_path / "voc")
    text = (annotated / "wood.xml").read_text()
    (annotated / "wood.xml").write_text(text.replace("wood.png", "wood.tif"))
    data = CocoData(_convert(annotated, tmp_path / "coco", monkeypatch), "train")
    assert data.read(0)[0].size == (100, 60)
    told = f"{annotated}/wood.xml names wood.tif, which does not exist; using wood.png instead\n"
    assert told in capsys.readouterr().out
    (annotated / "wood.jpg").touch()
    with pytest.raises(SystemExit, match=r"wood\.tif, which is annotated in .* there are wood\.jpg, wood\.png$"):
        _convert(annotated, tmp_path / "other", monkeypatch)


def test_boxes_that_leave_the_image_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is cut at the border, so that its centre is in the image again; one has nothing in it."""
    annotated = _annotated(tmp_path / "voc")
    text = "".join(OBJECT.format(*one) for one in [("oak", 60, 10, 9999, 40), ("elm", 200, 5, 300, 25)])
    (annotated / "wood.xml").write_text(f"<annotation><filename>wood.png</filename>{text}</annotation>")
    data = CocoData(_convert(annotated, tmp_path / "coco", monkeypatch, "--tile", "100"), "train")
    assert [data.read(index)[1].boxes.tolist() for index in range(len(data))] == [[[60, 10, 100, 40]]]
    output = capsys.readouterr().out
    assert "oak at [60.0, 10.0, 9999.0, 40.0] leaves the image of 100×60, and is cut at its border" in output
    assert "skipped elm at [200.0, 5.0, 300.0, 25.0], which has no area in the image" in output
    with pytest.raises(SystemExit, match="coco exists; give the name of a new folder"):
        _convert(annotated, tmp_path / "coco", monkeypatch)
