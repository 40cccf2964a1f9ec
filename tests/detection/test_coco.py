"""Data in COCO's format: where it is looked for, what is read, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import COCO_CATEGORIES, COCO_HEIGHT, COCO_SQUARE, COCO_WIDTH, coco_annotation, coco_content, write_coco
from PIL import Image
from pycocotools import mask as rle

from vision_longformer.cli.detect.check import detect_check
from vision_longformer.data.images import ImageError
from vision_longformer.detection.coco import CocoData, check_coco
from vision_longformer.detection.dataset import open_detection


def _data(folder: Path, annotations: list[dict[str, Any]] | None = None, **options: Any) -> CocoData:
    return CocoData(write_coco(folder, coco_content(annotations)), "train", **options)


@pytest.mark.parametrize(
    ("file", "images", "split"),
    [
        ("annotations/instances_train.json", "train", "train"),
        ("annotations/instances_train2017.json", "train2017", "train"),
        ("annotations/instances_val2017.json", "val2017", "validation"),
        ("annotations/instances_val2017.json", "images/val2017", "val"),
        ("train.json", "images", "train"),
        ("valid.json", "", "validation"),
        ("valid/annotations.json", "valid", "validation"),
        ("annotations.json", "images", "train"),
        ("annotations.json", "", "train"),
    ],
)
def test_usual_places(file: str, images: str, split: str, tmp_path: Path) -> None:
    data = open_detection(str(write_coco(tmp_path, file=file, images=images)), split)
    assert len(data) == 3
    assert data.read(2)[0].getpixel((0, 0)) == (230, 0, 2)


def test_a_json_file_beside_its_images(tmp_path: Path) -> None:
    write_coco(tmp_path, file="trees.json", images="")
    assert len(open_detection(str(tmp_path / "trees.json"), "train")) == 3
    with pytest.raises(ValueError, match=r"trees\.json has no split 'validation'"):
        open_detection(str(tmp_path / "trees.json"), "validation")


def test_places_without_annotations(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no data .*nowhere; give a folder in COCO's format"):
        open_detection(str(tmp_path / "nowhere"), "train")
    with pytest.raises(FileNotFoundError, match=r"has no annotations of split 'train'; they should be in annotations/"):
        open_detection(str(tmp_path), "train")
    (tmp_path / "train.json").write_text("{}")
    message = r"split 'validation'; it has 'train' \(train\.json\), which can be evaluated with --split train"
    with pytest.raises(FileNotFoundError, match=message):
        open_detection(str(tmp_path), "validation")
    for text, message in (
        ("{", "is not valid JSON"),
        ("[]", "not in COCO's format: there is no list of images"),
    ):
        (tmp_path / "train.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            open_detection(str(tmp_path), "train")


def test_categories_boxes_and_areas(tmp_path: Path) -> None:
    """Ids become labels in their order; boxes are corners, cut to the image where rounding took them out of it."""
    annotations = [
        coco_annotation(5, category_id=90, bbox=[-0.5, 20, 40.9, 10.8], area=123.5),
        coco_annotation(6, category_id=7, bbox=[1, 2, 3, 4], iscrowd=1),
    ]
    data = _data(tmp_path, annotations)
    assert [tuple(category) for category in data.categories] == [(7, "train"), (18, "dog"), (90, "toothbrush")]
    _, target = data.read(0)
    assert target.image_id == 1
    assert target.labels.tolist() == [3, 1]
    assert target.boxes.tolist() == [[0, 20, 40, 30], [1, 2, 4, 6]]
    assert target.area.tolist() == [123.5, 100]
    assert target.crowd.tolist() == [False, True]


def test_masks_of_every_form(tmp_path: Path) -> None:
    """A square as a polygon, as two polygons, as run lengths and as compressed ones is the same square."""
    square = np.zeros((COCO_HEIGHT, COCO_WIDTH), dtype=np.uint8, order="F")
    square[5:15, 5:15] = 1
    coded = rle.encode(square)
    runs = [5 * COCO_HEIGHT + 5, *[10, COCO_HEIGHT - 10] * 10]
    runs[-1] += COCO_HEIGHT * COCO_WIDTH - sum(runs)
    forms = [
        COCO_SQUARE,
        [[5, 5, 10, 5, 10, 15, 5, 15], [10, 5, 15, 5, 15, 15, 10, 15]],
        {"size": [COCO_HEIGHT, COCO_WIDTH], "counts": runs},
        {"size": [COCO_HEIGHT, COCO_WIDTH], "counts": coded["counts"].decode()},
    ]
    data = _data(tmp_path, [coco_annotation(number, segmentation=form) for number, form in enumerate(forms, 1)])
    masks = data.read(0)[1].masks
    assert masks is not None
    for mask in masks:
        assert torch.equal(mask, torch.from_numpy(square).bool())


def test_images_without_objects(tmp_path: Path) -> None:
    """They have empty targets, and crowds alone are nothing to learn from."""
    data = _data(tmp_path, [coco_annotation(1), coco_annotation(2, image=3, iscrowd=1)])
    assert list(data.with_objects()) == [0]
    target = data.read(1)[1]
    assert target.masks is not None
    assert [tuple(x.shape) for x in (target.boxes, target.labels, target.masks)] == [
        (0, 4),
        (0,),
        (0, COCO_HEIGHT, COCO_WIDTH),
    ]


def test_boxes_without_masks(tmp_path: Path) -> None:
    data = _data(tmp_path, [coco_annotation(1, segmentation=None)])
    assert not data.has_masks
    assert data.read(0)[1].masks is None
    mixed = [coco_annotation(1), coco_annotation(2, segmentation=[])]
    with pytest.raises(ValueError, match="annotation 2 of image 1 has no mask, although other annotations do"):
        _data(tmp_path, mixed)
    assert len(_data(tmp_path, mixed, masks=False).read(0)[1].boxes) == 2


BAD = [
    ({"bbox": [5, 5, 0, 10]}, "has a box of zero area, [5, 5, 0, 10]"),
    ({"bbox": [5, 5, 10, -1]}, "has a box of zero area"),
    ({"bbox": [35, 5, 10, 10]}, "has the box [35, 5, 10, 10], which extends beyond its image of 40×30"),
    ({"bbox": [40.2, 5, 0.5, 10]}, "which extends beyond its image"),
    ({"bbox": [1, 2, 3]}, "it should be [left, top, width, height]"),
    ({"bbox": [1, 2, float("nan"), 3]}, "it should be [left, top, width, height]"),
    ({"area": None}, "has the area None; it should be a number of pixels"),
    ({"category_id": 8}, "has category 8, which the data set does not have"),
    ({"image_id": 77}, "belongs to an image that the data set does not have"),
    ({"image_id": [1]}, "belongs to an image that the data set does not have"),
    ({"id": 1}, "has an id that another annotation has"),
    ({"id": 2.5}, "has no id that is an integer"),
    ({"id": "nine"}, "has the text 'nine' as id; ids are integers"),
    ({"image_id": "1"}, "belongs to an image that the data set does not have: its image_id is the text '1'; ids are"),
    ({"segmentation": [[1, 2, 3, 4]]}, "has a mask whose outline is not a list x, y"),
    ({"segmentation": [[5, 5, 90, 5, 90, 15]]}, "has a mask that extends beyond its image of 40×30"),
    ({"segmentation": {"size": [40, 30], "counts": [1200]}}, "mask of height and width [40, 30], but its image is [30"),
    ({"segmentation": {"size": [30, 40], "counts": [7, 8]}}, "runs do not add up to the 1200 pixels"),
    ({"segmentation": {"size": [30, 40], "counts": "@"}}, "has a mask whose counts are not run lengths"),
    ({"segmentation": {"size": [30, 40], "counts": "5:"}}, "runs do not add up to the 1200 pixels"),
    ({"segmentation": {"size": [30, 40]}}, "has a mask whose counts are not run lengths"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_annotations(
    change: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused with file and annotation id; left out when asked, which is logged; and named by the check."""
    wrong = {**coco_annotation(2), **change}
    content = coco_content([coco_annotation(1), wrong])
    folder = write_coco(tmp_path, content)
    with pytest.raises(ValueError, match=r"instances_train\.json: annotation") as caught:
        CocoData(folder, "train")
    assert message in str(caught.value)
    assert f"annotation {wrong['id']} of image {wrong['image_id']} " in str(caught.value)
    skipping = CocoData(folder, "train", skip_bad=True)
    assert len(skipping.problems) == 1
    assert message in caplog.text
    assert skipping.read(0)[1].boxes.tolist() == [[5, 5, 15, 15]]
    (report,) = check_coco(folder)
    assert [(p.image, p.annotation) for p in report.problems] == [(wrong["image_id"], wrong["id"])]
    assert message in report.problems[0].what


def test_bad_images(tmp_path: Path) -> None:
    content = coco_content()
    content["images"][1]["id"] = 1
    content["images"][2].pop("width")
    folder = write_coco(tmp_path, content)
    with pytest.raises(ValueError, match=r"image 1 \(1\.png\) has an id that another image has \(and 1 more problems"):
        CocoData(folder, "train")
    data = CocoData(folder, "train", skip_bad=True)
    assert [data.read(index)[1].image_id for index in range(len(data))] == [1]


def test_bad_categories(tmp_path: Path) -> None:
    """Annotations of a category without a name are wrong, too; of two with the same id the first counts."""
    content = coco_content([coco_annotation(1), coco_annotation(2, category_id=8)])
    content["categories"] = [*COCO_CATEGORIES, {"id": 7, "name": "tram"}, {"id": 8}]
    folder = write_coco(tmp_path, content)
    with pytest.raises(ValueError, match="two categories have the id 7"):
        CocoData(folder, "train")
    data = CocoData(folder, "train", skip_bad=True)
    assert [problem.annotation for problem in data.problems] == [None, None, 2]
    assert [category.name for category in data.categories] == ["train", "dog", "toothbrush"]
    assert data.read(0)[1].labels.tolist() == [1]


def test_images_of_another_size(tmp_path: Path) -> None:
    data = _data(tmp_path)
    Image.new("RGB", (COCO_HEIGHT, COCO_WIDTH)).save(tmp_path / "train/0.png")
    with pytest.raises(ValueError, match=r"0\.png is 30×40, but image 1 of .* is 40×30"):
        data.read(0)
    (tmp_path / "train/1.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"1\.png cannot be read as an image"):
        data.read(1)
    reported: list[tuple[int, int]] = []
    (report,) = check_coco(tmp_path, progress=lambda done, total: reported.append((done, total)))
    assert reported == [(1, 3), (2, 3), (3, 3)]
    assert [(p.image, p.what.split(" (")[0].split(":")[0]) for p in report.problems] == [
        (1, f"is stated to be 40×30, but {tmp_path}/train/0.png is 30×40"),
        (2, "cannot be read"),
    ]


def test_empty_data_sets(tmp_path: Path) -> None:
    for name in ("images", "annotations", "categories"):
        content = {**coco_content(), name: []}
        with pytest.raises(ValueError, match=f"the data set has no {name}"):
            CocoData(write_coco(tmp_path, content), "train")
    with pytest.raises(ValueError, match="has no valid annotations"):
        _data(tmp_path, [coco_annotation(1, category_id=1)], skip_bad=True)


def test_check_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every split that there is; exit code 1 if anything is wrong."""
    write_coco(tmp_path)
    detect_check(str(tmp_path))
    assert "3 images, 3 annotations, no problems" in capsys.readouterr().out
    write_coco(
        tmp_path, coco_content([coco_annotation(4, bbox=[0, 0, 0, 0])]), "annotations/instances_val2017.json", "val2017"
    )
    (tmp_path / "val2017/1.png").unlink()
    with pytest.raises(SystemExit) as stop:
        detect_check(str(tmp_path))
    assert stop.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("instances_train.json" in line and "no problems" in line for line in lines)
    assert any(line.split()[:2] == ["1", "4"] and "zero area" in line for line in lines)
    assert any(line.split()[:1] == ["2"] and "1.png is missing" in line for line in lines)
    detect_check(str(tmp_path), split="train")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        detect_check(str(tmp_path), split="validation", json=True)
    (reported,) = json.loads(capsys.readouterr().out)
    assert [(problem["image"], problem["annotation"]) for problem in reported["problems"]] == [(1, 4), (2, None)]
    with pytest.raises(FileNotFoundError, match="there is no data nowhere"):
        detect_check("nowhere")


def test_boxes_that_are_corners(tmp_path: Path) -> None:
    """[10, 10, 30, 25] as left, top, width, height leaves an image of 40×30 below; as corners it is inside."""
    corners = [coco_annotation(number, bbox=[10, 10, 30, 25]) for number in (1, 2)]
    (report,) = check_coco(write_coco(tmp_path, coco_content([*corners, coco_annotation(3, bbox=[1, 1, 5, 5])])))
    assert report.problems[-1].what == (
        "2 of 3 boxes extend beyond their image; all look like [left, top, right, bottom], but COCO's are "
        "[left, top, width, height]"
    )
    proper = coco_annotation(3, bbox=[20, 20, 5, 5])  # no corners: 5 is left of 20
    (report,) = check_coco(write_coco(tmp_path, coco_content([*corners, proper])))
    assert all("look like" not in problem.what for problem in report.problems)


def test_equal_names_of_categories(tmp_path: Path) -> None:
    """The check names them; training goes on, as COCO's format allows it."""
    content = coco_content()
    content["categories"] = [*COCO_CATEGORIES, {"id": 91, "name": "dog"}]
    folder = write_coco(tmp_path, content)
    (report,) = check_coco(folder)
    assert [problem.what for problem in report.problems] == ["categories 18 and 91 have the same name, 'dog'"]
    assert len(CocoData(folder, "train").categories) == 4


def test_problems_between_splits(tmp_path: Path) -> None:
    """The images of the second split have the colours of the first two of the first, under other names."""
    write_coco(tmp_path)
    other = coco_content([coco_annotation(1)], images=2)
    other["categories"] = COCO_CATEGORIES[1:]
    for index, record in enumerate(other["images"]):
        record["file_name"] = f"new{index}.png"
    write_coco(tmp_path, other, "annotations/instances_val.json", "val")
    Image.new("RGB", (COCO_WIDTH, COCO_HEIGHT), (1, 2, 3)).save(tmp_path / "val" / "new0.png")
    first, second = check_coco(tmp_path)
    assert first.problems == []
    assert [(problem.image, problem.what) for problem in second.problems] == [
        (None, f"its categories differ from those of {first.annotations}: use one list for both"),
        (2, f"(new1.png) is a duplicate of 1.png in {first.annotations}"),
    ]


def test_statistics_of_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sides of 10, 10 and the root of 800 of 40 pixels; images become 64, the tenth part of objects 16, two cells."""
    detect_check(str(write_coco(tmp_path)), json=True)
    (report,) = json.loads(capsys.readouterr().out)
    assert report["statistics"]["categories"] == "train 2, dog 0, toothbrush 1"
    assert report["statistics"]["sides of objects"].startswith("25.0, 25.0, 25.0, 47.9, 66.1 %")
    assert report["statistics"]["suggested min_size and max_size"] == "64 (longer side)"
    assert report["statistics"]["suggested anchor_scale"] == "2"
    detect_check(str(tmp_path))
    assert "suggested anchor_scale" in capsys.readouterr().out
