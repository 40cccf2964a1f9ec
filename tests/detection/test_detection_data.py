"""Data in COCO's form: where it is found, what is read, what is refused; batches for training and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as rle

from vision_longformer.cli.detect.check import detect_check
from vision_longformer.data.images import ImageError
from vision_longformer.data.order import Process
from vision_longformer.detection.coco import CocoData, check_coco
from vision_longformer.detection.dataset import (
    DetectionLoader,
    DetectionShare,
    Target,
    image_tensor,
    mirror,
    open_detection,
    training_target,
)

WIDTH, HEIGHT = 40, 30
SQUARE = [[5, 5, 15, 5, 15, 15, 5, 15]]
CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 7, "name": "train"}, {"id": 90, "name": "toothbrush"}]


def _annotation(number: int, image: int = 1, **changes: Any) -> dict[str, Any]:
    plain = {"category_id": 7, "bbox": [5, 5, 10, 10], "area": 100, "iscrowd": 0, "segmentation": SQUARE}
    return {"id": number, "image_id": image, **plain, **changes}


def _content(annotations: list[dict[str, Any]] | None = None, images: int = 3) -> dict[str, Any]:
    """The annotations are two objects of the first image and one of the last, unless given."""
    named = [
        {"id": 1 + index, "file_name": f"{index}.png", "width": WIDTH, "height": HEIGHT} for index in range(images)
    ]
    if annotations is None:
        annotations = [_annotation(1), _annotation(2, category_id=90, bbox=[0, 10, 40, 20]), _annotation(3, image=3)]
    return {"images": named, "annotations": annotations, "categories": CATEGORIES}


def _write(
    folder: Path,
    content: dict[str, Any] | None = None,
    file: str = "annotations/instances_train.json",
    images: str = "train",
) -> Path:
    """A data set whose image files are of plain colours, darker from one to the next."""
    content = _content() if content is None else content
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(json.dumps(content))
    (folder / images).mkdir(parents=True, exist_ok=True)
    for index, record in enumerate(content["images"]):
        Image.new("RGB", (WIDTH, HEIGHT), (250 - 10 * index, 0, index)).save(folder / images / record["file_name"])
    return folder


def _data(folder: Path, annotations: list[dict[str, Any]] | None = None, **options: Any) -> CocoData:
    return CocoData(_write(folder, _content(annotations)), "train", **options)


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
    data = open_detection(str(_write(tmp_path, file=file, images=images)), split)
    assert len(data) == 3
    assert data.read(2)[0].getpixel((0, 0)) == (230, 0, 2)


def test_a_json_file_beside_its_images(tmp_path: Path) -> None:
    _write(tmp_path, file="trees.json", images="")
    assert len(open_detection(str(tmp_path / "trees.json"), "train")) == 3
    with pytest.raises(ValueError, match=r"trees\.json has no split 'validation'"):
        open_detection(str(tmp_path / "trees.json"), "validation")


def test_places_without_annotations(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no data .*nowhere; give a folder in COCO's form"):
        open_detection(str(tmp_path / "nowhere"), "train")
    with pytest.raises(FileNotFoundError, match=r"has no annotations of split 'train'; they should be in annotations/"):
        open_detection(str(tmp_path), "train")
    for text, message in (("{", "is not a whole JSON file"), ("[]", "not in COCO's form: there is no list of images")):
        (tmp_path / "train.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            open_detection(str(tmp_path), "train")


def test_categories_boxes_and_areas(tmp_path: Path) -> None:
    """Ids become labels in their order; boxes are corners, cut to the image where rounding took them out of it."""
    annotations = [
        _annotation(5, category_id=90, bbox=[-0.5, 20, 40.9, 10.8], area=123.5),
        _annotation(6, category_id=7, bbox=[1, 2, 3, 4], iscrowd=1),
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
    square = np.zeros((HEIGHT, WIDTH), dtype=np.uint8, order="F")
    square[5:15, 5:15] = 1
    coded = rle.encode(square)
    runs = [5 * HEIGHT + 5, *[10, HEIGHT - 10] * 10]
    runs[-1] += HEIGHT * WIDTH - sum(runs)
    forms = [
        SQUARE,
        [[5, 5, 10, 5, 10, 15, 5, 15], [10, 5, 15, 5, 15, 15, 10, 15]],
        {"size": [HEIGHT, WIDTH], "counts": runs},
        {"size": [HEIGHT, WIDTH], "counts": coded["counts"].decode()},
    ]
    data = _data(tmp_path, [_annotation(number, segmentation=form) for number, form in enumerate(forms, 1)])
    masks = data.read(0)[1].masks
    assert masks is not None
    for mask in masks:
        assert torch.equal(mask, torch.from_numpy(square).bool())


def test_images_without_objects(tmp_path: Path) -> None:
    """They have empty targets, and crowds alone are nothing to learn from."""
    data = _data(tmp_path, [_annotation(1), _annotation(2, image=3, iscrowd=1)])
    assert list(data.with_objects()) == [0]
    target = data.read(1)[1]
    assert target.masks is not None
    assert [tuple(x.shape) for x in (target.boxes, target.labels, target.masks)] == [(0, 4), (0,), (0, HEIGHT, WIDTH)]


def test_boxes_without_masks(tmp_path: Path) -> None:
    data = _data(tmp_path, [_annotation(1, segmentation=None)])
    assert not data.has_masks
    assert data.read(0)[1].masks is None
    mixed = [_annotation(1), _annotation(2, segmentation=[])]
    with pytest.raises(ValueError, match="annotation 2 of image 1 has no mask, though others have"):
        _data(tmp_path, mixed)
    assert len(_data(tmp_path, mixed, masks=False).read(0)[1].boxes) == 2


BAD = [
    ({"bbox": [5, 5, 0, 10]}, "has a box of zero area, [5, 5, 0, 10]"),
    ({"bbox": [5, 5, 10, -1]}, "has a box of zero area"),
    ({"bbox": [35, 5, 10, 10]}, "has the box [35, 5, 10, 10], which leaves its image of 40×30"),
    ({"bbox": [40.2, 5, 0.5, 10]}, "which leaves its image"),
    ({"bbox": [1, 2, 3]}, "it should be [left, top, width, height]"),
    ({"bbox": [1, 2, float("nan"), 3]}, "it should be [left, top, width, height]"),
    ({"category_id": 8}, "has category 8, which the data set does not have"),
    ({"image_id": 77}, "belongs to an image that the data set does not have"),
    ({"image_id": [1]}, "belongs to an image that the data set does not have"),
    ({"id": 1}, "has an id that another annotation has"),
    ({"id": "nine"}, "has no id that is a whole number"),
    ({"segmentation": [[1, 2, 3, 4]]}, "has a mask whose outline is no list of x, y"),
    ({"segmentation": [[5, 5, 90, 5, 90, 15]]}, "has a mask that leaves its image of 40×30"),
    ({"segmentation": {"size": [40, 30], "counts": [1200]}}, "mask of height and width [40, 30], but its image is [30"),
    ({"segmentation": {"size": [30, 40], "counts": [7, 8]}}, "runs do not add up to the 1200 pixels"),
    ({"segmentation": {"size": [30, 40], "counts": "@"}}, "has a mask without counts that are lengths of runs"),
    ({"segmentation": {"size": [30, 40], "counts": "5:"}}, "runs do not add up to the 1200 pixels"),
    ({"segmentation": {"size": [30, 40]}}, "has a mask without counts"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_annotations(
    change: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused with file and annotation id; left out when asked, which is logged; and found by the check."""
    wrong = {**_annotation(2), **change}
    content = _content([_annotation(1), wrong])
    folder = _write(tmp_path, content)
    with pytest.raises(ValueError, match=r"instances_train\.json: annotation") as caught:
        CocoData(folder, "train")
    assert message in str(caught.value)
    assert f"annotation {wrong['id']} of image {wrong['image_id']} " in str(caught.value)
    skipping = CocoData(folder, "train", skip_bad=True)
    assert len(skipping.problems) == 1
    assert message in caplog.text
    assert skipping.read(0)[1].boxes.tolist() == [[5, 5, 15, 15]]
    (checked,) = check_coco(folder)
    assert [(p.image, p.annotation) for p in checked.problems] == [(wrong["image_id"], wrong["id"])]
    assert message in checked.problems[0].what


def test_bad_images(tmp_path: Path) -> None:
    content = _content()
    content["images"][1]["id"] = 1
    content["images"][2].pop("width")
    folder = _write(tmp_path, content)
    with pytest.raises(ValueError, match=r"image 1 \(1\.png\) has an id that another image has \(and 1 more things"):
        CocoData(folder, "train")
    data = CocoData(folder, "train", skip_bad=True)
    assert [data.read(index)[1].image_id for index in range(len(data))] == [1]


def test_bad_categories(tmp_path: Path) -> None:
    """Annotations of a category without a name are wrong, too; of two with the same id the first counts."""
    content = _content([_annotation(1), _annotation(2, category_id=8)])
    content["categories"] = [*CATEGORIES, {"id": 7, "name": "tram"}, {"id": 8}]
    folder = _write(tmp_path, content)
    with pytest.raises(ValueError, match="two categories have the id 7"):
        CocoData(folder, "train")
    data = CocoData(folder, "train", skip_bad=True)
    assert [problem.annotation for problem in data.problems] == [None, None, 2]
    assert [category.name for category in data.categories] == ["train", "dog", "toothbrush"]
    assert data.read(0)[1].labels.tolist() == [1]


def test_missing_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = _data(tmp_path)
    (tmp_path / "train/2.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no file .*2\.png, which is image 3 of .*train\.json"):
        data.read(2)
    share = DetectionShare(data, skip_bad=True)
    assert [target.image_id for _, target in share.images()] == [1, 2]
    assert share.skipped == 1
    loader = DetectionLoader(data, seed=0, batch_size=2, skip_bad=True)
    (batch,) = loader.batches(0)
    assert len(batch[0]) == 2
    assert loader.skipped == 1
    assert caplog.messages == ["1 images of epoch 0 could not be read; others took their place"]
    with pytest.raises(FileNotFoundError, match="which is image 3"):
        list(DetectionShare(data, workers=1).images())


def test_images_of_another_size(tmp_path: Path) -> None:
    data = _data(tmp_path)
    Image.new("RGB", (HEIGHT, WIDTH)).save(tmp_path / "train/0.png")
    with pytest.raises(ValueError, match=r"0\.png is 30×40, but image 1 of .* is 40×30"):
        data.read(0)
    (tmp_path / "train/1.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"1\.png cannot be read as an image"):
        data.read(1)
    told: list[tuple[int, int]] = []
    (checked,) = check_coco(tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert [(p.image, p.what.split(" (")[0].split(":")[0]) for p in checked.problems] == [
        (1, f"is stated to be 40×30, but {tmp_path}/train/0.png is 30×40"),
        (2, "cannot be read"),
    ]


def test_empty_data_sets(tmp_path: Path) -> None:
    for name in ("images", "annotations", "categories"):
        content = {**_content(), name: []}
        with pytest.raises(ValueError, match=f"the data set has no {name}"):
            CocoData(_write(tmp_path, content), "train")
    with pytest.raises(ValueError, match="has no annotations with which nothing is wrong"):
        _data(tmp_path, [_annotation(1, category_id=1)], skip_bad=True)


def test_check_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every split that there is; exit code 1 if anything is wrong."""
    _write(tmp_path)
    detect_check(str(tmp_path))
    assert "3 images, 3 annotations, nothing wrong" in capsys.readouterr().out
    _write(tmp_path, _content([_annotation(4, bbox=[0, 0, 0, 0])]), "annotations/instances_val2017.json", "val2017")
    (tmp_path / "val2017/1.png").unlink()
    with pytest.raises(SystemExit) as stop:
        detect_check(str(tmp_path))
    assert stop.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("instances_train.json" in line and "nothing wrong" in line for line in lines)
    assert any(line.split()[:2] == ["1", "4"] and "zero area" in line for line in lines)
    assert any(line.split()[:1] == ["2"] and "1.png is missing" in line for line in lines)
    detect_check(str(tmp_path), split="train")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        detect_check(str(tmp_path), split="validation", json=True)
    (told,) = json.loads(capsys.readouterr().out)
    assert [(problem["image"], problem["annotation"]) for problem in told["problems"]] == [(1, 4), (2, None)]
    with pytest.raises(FileNotFoundError, match="there is no data nowhere"):
        detect_check("nowhere")


def _sample() -> tuple[Image.Image, Target]:
    """An image with a red rectangle, its only object, beside a crowd."""
    pixels = np.zeros((20, 40, 3), dtype=np.uint8)
    pixels[4:10, 2:12, 0] = 255
    masks = torch.zeros(2, 20, 40, dtype=torch.bool)
    masks[0, 4:10, 2:12] = True
    boxes = torch.tensor([[2.0, 4, 12, 10], [20, 0, 40, 20]])
    target = Target(3, boxes, torch.tensor([5, 6]), masks, torch.tensor([False, True]), torch.tensor([60.0, 400]))
    return Image.fromarray(pixels), target


def _red(image: Image.Image) -> torch.Tensor:
    return image_tensor(image)[0] > 0.5


def test_mirrored_together() -> None:
    image, target = mirror(*_sample())
    assert target.boxes.tolist() == [[28, 4, 38, 10], [0, 0, 20, 20]]
    assert target.masks is not None
    assert torch.equal(target.masks[0], _red(image))


def test_crowds_are_not_learned() -> None:
    learned = training_target(_sample()[1])
    assert learned["labels"].tolist() == [5]
    assert learned["boxes"].tolist() == [[2, 4, 12, 10]]
    assert (learned["masks"].dtype, learned["masks"].sum().item()) == (torch.uint8, 60)


def _many(folder: Path, images: int = 8) -> CocoData:
    annotations = [_annotation(1 + index, image=1 + index) for index in range(images)]
    return CocoData(_write(folder, _content(annotations, images)), "train")


def _shown(images: list[torch.Tensor]) -> list[int]:
    """Which image it is, by its blue."""
    return [round(float(image[2, 0, 0]) * 255) for image in images]


def test_batches_are_functions_of_their_place(tmp_path: Path) -> None:
    """A resumed epoch, other workers and two processes show what a single uninterrupted run shows."""
    data = _many(tmp_path)
    options: dict[str, Any] = {"seed": 3, "batch_size": 4}
    loader = DetectionLoader(data, **options)
    assert loader.batches_per_epoch == 2
    epochs = [list(loader.batches(epoch)) for epoch in (0, 1)]
    orders = [[number for images, _ in epoch for number in _shown(images)] for epoch in epochs]
    assert [sorted(order) for order in orders] == [list(range(8))] * 2
    assert orders[0] != orders[1]
    resumed = list(DetectionLoader(data, workers=1, **options).batches(1, 1))
    parts = [DetectionLoader(data, process=Process(rank, 2), **options).batches(1, 1) for rank in (0, 1)]
    halves = [next(part) for part in parts]
    joined = [halves[0][0] + halves[1][0], halves[0][1] + halves[1][1]]
    for images, targets in (*resumed, joined):
        for image, expected in zip(images, epochs[1][1][0], strict=True):
            assert torch.equal(image, expected)
        for target, learned in zip(targets, epochs[1][1][1], strict=True):
            assert all(torch.equal(target[name], learned[name]) for name in ("boxes", "labels", "masks"))


def test_mirrored_half_of_the_time(tmp_path: Path) -> None:
    """Both ways of an image are seen, and never or always if so asked."""
    data = _many(tmp_path)
    for hflip, expected in ((0.0, {5.0}), (0.5, {5.0, 25.0}), (1.0, {25.0})):
        loader = DetectionLoader(data, seed=0, batch_size=8, hflip=hflip)
        _, targets = next(loader.batches(0))
        assert {float(target["boxes"][0, 0]) for target in targets} == expected


def test_images_without_objects_are_not_trained_on(tmp_path: Path) -> None:
    loader = DetectionLoader(_data(tmp_path), seed=0, batch_size=2)
    assert loader.batches_per_epoch == 1
    assert sorted(_shown(next(loader.batches(0))[0])) == [0, 2]
    with pytest.raises(ValueError, match="batch_size is 3, but there are only 2 images to train on"):
        DetectionLoader(_data(tmp_path), seed=0, batch_size=3)


def test_shares_show_every_image_once(tmp_path: Path) -> None:
    data = _many(tmp_path, 5)
    shares = [DetectionShare(data, process=Process(rank, 2)) for rank in (0, 1)]
    seen = [[target.image_id for _, target in share.images()] for share in shares]
    assert seen == [[1, 3, 5], [2, 4]]
    assert [share.size for share in shares] == [5, 5]
