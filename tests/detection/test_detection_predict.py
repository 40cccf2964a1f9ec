"""What is found in images: whole or in tiles, in pictures and on the command line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import build, write_detector
from PIL import Image
from pycocotools import mask as rle
from torch import Tensor, nn

from vision_longformer import save
from vision_longformer.cli.detect.predict import detect_predict
from vision_longformer.detection.dataset import Category, Target
from vision_longformer.detection.detections import Found, Patch, annotated, coco_result, found_by_model
from vision_longformer.detection.pictures import COLOURS, DRAWN, draw_objects, page, save_image
from vision_longformer.detection.predict import Tile, find_objects, merge, tiles
from vision_longformer.errors import CheckpointError


def test_masks_are_kept_without_their_surroundings() -> None:
    mask = np.zeros((40, 50), dtype=bool)
    mask[10:13, 20:24] = True
    patch = Patch.around(mask)
    assert (patch.top, patch.left, patch.pixels.shape) == (10, 20, (3, 4))
    assert np.array_equal(patch.on(40, 50), mask)
    assert not Patch.around(np.zeros((4, 5), dtype=bool)).on(4, 5).any()


def test_found_by_a_model() -> None:
    output = {
        "boxes": torch.tensor([[1.0, 2, 3, 4], [5, 6, 9, 10], [0, 0, 1, 1]]),
        "labels": torch.tensor([2, 1, 2]),
        "scores": torch.tensor([0.5, 0.75, 0.25]),
        "masks": torch.zeros(3, 1, 20, 30),
    }
    output["masks"][1, 0, 6:10, 5:9] = 0.5
    found = found_by_model(output, 0.5)
    assert [(one.box, one.label, one.score) for one in found] == [((5, 6, 9, 10), 1, 0.75), ((1, 2, 3, 4), 2, 0.5)]
    result = coco_result(found[0], 7, (Category(44, "bottle"), Category(3, "car")), (20, 30))
    assert (result["image_id"], result["category_id"], result["bbox"]) == (7, 44, [5, 6, 4, 4])
    assert rle.decode(json.loads(json.dumps(result))["segmentation"])[6:10, 5:9].sum() == 16
    assert rle.area(result["segmentation"]) == 16


def test_annotated_objects() -> None:
    masks = torch.zeros(2, 8, 8, dtype=torch.bool)
    masks[0, 1:3, 1:4] = True
    boxes = torch.tensor([[1.0, 1, 4, 3], [0, 0, 8, 8]])
    target = Target(1, boxes, torch.tensor([3, 1]), masks, torch.tensor([False, True]), torch.tensor([6.0, 64]))
    (one,) = annotated(target)
    assert (one.box, one.label, one.score) == ((1, 1, 4, 3), 3, None)
    assert one.mask is not None
    assert one.mask.pixels.sum() == 6


@pytest.mark.parametrize(
    ("height", "width", "side"), [(100, 100, 100), (64, 250, 100), (431, 333, 128), (90, 101, 100)]
)
def test_tiles_cover_the_image_and_overlap(height: int, width: int, side: int) -> None:
    covered = np.zeros((height, width), dtype=int)
    parts = tiles(height, width, side)
    for part in parts:
        assert part.bottom - part.top == min(side, height)
        assert part.right - part.left == min(side, width)
        covered[part.top : part.bottom, part.left : part.right] += 1
    assert covered.min() >= 1
    columns = sorted({part.left for part in parts})
    assert columns[-1] + min(side, width) == width
    assert all(later - earlier <= 0.75 * side + 1 for earlier, later in pairwise(columns))


LEFT, RIGHT = Tile(0, 0, 100, 100), Tile(75, 0, 175, 100)


def _found(*box: float, label: int = 1, score: float = 0.5) -> Found:
    return Found((box[0], box[1], box[2], box[3]), label, score)


@pytest.mark.parametrize(
    ("left", "right", "expected", "score"),
    [
        pytest.param([(50, 20, 100, 60)], [(75, 20, 150, 60)], [(50, 20, 150, 60)], 0.9, id="cut by both"),
        pytest.param([(85, 20, 100, 60)], [(85, 20, 140, 60)], [(85, 20, 140, 60)], 0.6, id="whole in one"),
        pytest.param([(80, 20, 95, 40)], [(81, 20, 95, 40)], [(80, 20, 95, 40)], 0.9, id="whole in both"),
        pytest.param([(80, 0, 95, 20)], [(80, 40, 95, 60)], [(80, 0, 95, 20), (80, 40, 95, 60)], 0.9, id="two"),
        pytest.param([(10, 0, 60, 20)], [(110, 0, 150, 20)], [(10, 0, 60, 20), (110, 0, 150, 20)], 0.9, id="far apart"),
        pytest.param([(50, 0, 100, 20)], [(75, 0, 150, 100)], [(50, 0, 100, 20), (75, 0, 150, 100)], 0.9, id="unlike"),
    ],
)
def test_pieces_are_merged(left: list[Any], right: list[Any], expected: list[Any], score: float) -> None:
    found = [(LEFT, [_found(*box, score=0.9) for box in left]), (RIGHT, [_found(*box, score=0.6) for box in right])]
    merged = merge(found, 100, 175)
    assert [one.box for one in merged] == expected
    assert merged[0].score == score


def test_pieces_of_unlike_objects_are_not_merged() -> None:
    found = [(LEFT, [_found(50, 20, 100, 60, label=1)]), (RIGHT, [_found(75, 20, 150, 60, label=2)])]
    assert len(merge(found, 100, 175)) == 2
    same_tile = [(LEFT, [_found(10, 10, 50, 50), _found(11, 10, 50, 50)])]
    assert len(merge(same_tile, 100, 175)) == 2


def test_pieces_of_three_tiles_are_one_object() -> None:
    third = Tile(150, 0, 250, 100)
    found = [(LEFT, [_found(50, 0, 100, 40)]), (RIGHT, [_found(75, 0, 175, 40)]), (third, [_found(150, 0, 220, 40)])]
    (one,) = merge(found, 100, 250)
    assert one.box == (50, 0, 220, 40)


class RedFinder(nn.Module):
    """Finds what is red: the box and mask of all red pixels, and of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        self.largest = 0

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        (image,) = images
        self.largest = max(self.largest, *image.shape[1:])
        red = image[0] > 0.5
        rows, columns = torch.nonzero(red, as_tuple=True)
        if not len(rows):
            none = torch.zeros(0)
            return [{"boxes": none.view(0, 4), "labels": none.long(), "scores": none, "masks": none.view(0, 1, 1, 1)}]
        box = torch.stack((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)).float()
        labels, scores = torch.ones(1, dtype=torch.int64), torch.full((1,), 0.75)
        return [{"boxes": box[None], "labels": labels, "scores": scores, "masks": red[None, None].float()}]


@pytest.mark.parametrize("place", [(10, 10, 30, 30), (50, 40, 190, 70), (85, 85, 120, 125), (0, 0, 200, 200)])
def test_tiles_find_what_the_whole_image_shows(place: tuple[int, int, int, int]) -> None:
    image = Image.new("RGB", (200, 200))
    image.paste((255, 0, 0), place)
    model = RedFinder()
    (whole,) = find_objects(model, image)
    assert model.largest == 200
    model.largest = 0
    (tiled,) = find_objects(model, image, tile=100)
    assert model.largest == 100
    assert whole.box == tiled.box == place
    assert whole.mask is not None
    assert tiled.mask is not None
    assert np.array_equal(whole.mask.on(200, 200), tiled.mask.on(200, 200))
    assert find_objects(model, image, threshold=0.8, tile=100) == []


def _mask(top: int, left: int, height: int, width: int) -> Patch:
    return Patch(top, left, np.ones((height, width), dtype=bool))


def test_objects_are_drawn_where_they_are() -> None:
    """The mask is tinted, the box has its colour, the name is above it, and the rest is as it was."""
    image = Image.new("RGB", (1000, 800), (100, 100, 100))
    drawn = np.asarray(draw_objects(image, [Found((400, 300, 600, 500), 2, 0.87, _mask(320, 420, 160, 160))], "ab"))
    colour = np.array(COLOURS[1])
    assert drawn.shape == (800, 1000, 3)
    assert drawn[400, 401].tolist() == colour.tolist()
    assert drawn[400, 500].tolist() == pytest.approx((0.42 * colour + 0.58 * 100).tolist(), abs=2)
    assert drawn[310, 410].tolist() == [100, 100, 100]
    name = drawn[278:299, 400:450].reshape(-1, 3)
    assert (name > 200).all(1).sum() > 20
    assert (name == colour).all(1).sum() > 100
    untouched = np.ones((800, 1000), dtype=bool)
    untouched[270:510, 395:610] = False
    assert (drawn[untouched] == 100).all()
    assert np.asarray(image).min() == 100


def test_small_images_are_enlarged_and_names_do_not_cover_each_other() -> None:
    image = Image.new("RGB", (90, 60), "black")
    twice = [Found((30, 30, 60, 50), 1, 0.9), Found((30, 30, 60, 50), 2, 0.8)]
    drawn = draw_objects(image, twice, ["cat", "dog"])
    assert drawn.size == (DRAWN, DRAWN * 2 // 3)
    pixels = np.asarray(drawn).reshape(-1, 3)
    assert all((pixels == COLOURS[label]).all(1).sum() > 300 for label in (0, 1))


def test_names_stay_inside_the_picture() -> None:
    """At the border as much of a name is seen as in the middle."""
    image = Image.new("RGB", (900, 900), "black")
    seen = []
    for box in ((400, 400, 420, 420), (0, 0, 20, 20), (890, 880, 900, 900), (880, 0, 900, 20)):
        drawn = np.asarray(draw_objects(image, [Found(box, 1, 0.5)], ["a rather long name"]))
        seen.append(int((drawn > 200).all(2).sum()))
    assert seen[0] > 100
    assert seen[1:] == pytest.approx([seen[0]] * 3, rel=0.1)


def test_page() -> None:
    pictures = [Image.new("RGB", (100 + 50 * index, 200), (0, 0, 255)) for index in range(4)]
    sheet = np.asarray(page(pictures, "four pictures", columns=3, width=600))
    blue = (sheet == (0, 0, 255)).all(2)
    assert sheet.shape[1] == 600
    assert blue.sum() > 4 * 90 * 180
    assert not blue[:50].any()
    assert (sheet[:50] < 100).all(2).any()


def test_pictures_are_not_overwritten_unless_asked(tmp_path: Path) -> None:
    image = Image.new("RGB", (20, 10), "red")
    for name, kind in (("new/a.png", "PNG"), ("b.jpg", "JPEG"), ("c.JPEG", "JPEG")):
        with Image.open(save_image(image, tmp_path / name)) as written:
            assert (written.format, written.size) == (kind, (20, 10))
    with pytest.raises(FileExistsError, match=r"b\.jpg exists"):
        save_image(image, tmp_path / "b.jpg")
    save_image(image, tmp_path / "b.jpg", overwrite=True)
    with pytest.raises(ValueError, match=r"a\.gif should end in \.png, \.jpg, \.jpeg"):
        save_image(image, tmp_path / "a.gif")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    noise = np.random.default_rng(0).integers(0, 256, (70, 100, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def test_command(tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, pictures, and JSON that agree; tiles too."""
    checkpoint = str(write_detector(tmp_path / "detector.safetensors", ["cat", "dog"], num_classes=2))
    detect_predict(checkpoint, [str(photo)], threshold=0.0, output=str(tmp_path / "out"))
    output = capsys.readouterr().out
    assert f"{photo}: 5 found" in output
    assert f"wrote {tmp_path}/out/photo.png" in output
    with Image.open(tmp_path / "out/photo.png") as picture:
        assert picture.size == (DRAWN, DRAWN * 7 // 10)
    detect_predict(checkpoint, [str(photo)], threshold=0.0, json=True)
    told = json.loads(capsys.readouterr().out)
    assert [(one["file"], one["image_id"]) for one in told] == [(str(photo), 1)] * 5
    assert {one["category_id"] for one in told} <= {1, 2}
    assert [one["score"] for one in told] == sorted((one["score"] for one in told), reverse=True)
    assert all(one["segmentation"]["size"] == [70, 100] for one in told)
    left, top, width, height = told[0]["bbox"]
    first = next(line for line in output.splitlines() if line.split()[:1] in (["cat"], ["dog"]))
    assert first.split()[1:] == [
        f"{100 * told[0]['score']:.1f}",
        *(f"{value:.0f}" for value in (left, top, left + width, top + height)),
    ]
    detect_predict(checkpoint, [str(photo)], threshold=0.0, tile=64, json=True)
    assert len(json.loads(capsys.readouterr().out)) > 5
    detect_predict(checkpoint, [str(photo)], threshold=1.0)
    assert capsys.readouterr().out == f"{photo}: 0 found\n"


def test_mistakes(tmp_path: Path, photo: Path) -> None:
    checkpoint = str(write_detector(tmp_path / "detector.safetensors", None, num_classes=2))
    with pytest.raises(ValueError, match="threshold is 2; it must be between 0 and 1"):
        detect_predict(checkpoint, [str(photo)], threshold=2)
    with pytest.raises(ValueError, match="tile is 10; it must be a whole number of at least 64"):
        detect_predict(checkpoint, [str(photo)], tile=10)
    with pytest.raises(FileNotFoundError, match=r"there is no image .*nothing\.jpg"):
        detect_predict(checkpoint, [str(tmp_path / "nothing.jpg")])
    with pytest.raises(FileExistsError, match=r"photo\.png exists"):
        detect_predict(checkpoint, [str(photo)], output=str(tmp_path))
    classifier = save(build("two_stages"), tmp_path / "classifier.safetensors")
    with pytest.raises(CheckpointError, match=r"classifier\.safetensors is a classifier"):
        detect_predict(str(classifier), [str(photo)])
