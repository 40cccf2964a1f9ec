"""Detections in image files: whole or in tiles, and on the command line."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import zarr
from builders import build, small_detector, write_coco, write_detector
from PIL import Image
from pycocotools import mask as rle
from torch import Tensor, nn

from vision_longformer import save
from vision_longformer.cli.detect.predict import _print_objects, detect_predict
from vision_longformer.detection import load_detector, save_detector
from vision_longformer.detection import predict as prediction_module
from vision_longformer.detection.detections import Detection
from vision_longformer.detection.pictures import DRAWN
from vision_longformer.detection.predict import Prediction, Tile, merge, predict, predict_image, tiles
from vision_longformer.detection.stream import bytes_at_once
from vision_longformer.errors import CheckpointError
from vision_longformer.large.reading import LargeImage


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


@pytest.mark.parametrize(
    ("length", "side", "starts"),
    [
        (100, 100, [0]),
        (99, 100, [0]),
        (101, 100, [0, 1]),
        (175, 100, [0, 75]),
        (176, 100, [0, 38, 76]),
        (326, 100, [0, 56, 113, 170, 226]),
    ],
)
def test_tiles_of_given_lengths(length: int, side: int, starts: list[int]) -> None:
    """Next to one another they share at least a quarter of their side; the last one ends at the border."""
    across, down = tiles(64, length, side), tiles(length, 64, side)
    end = min(side, length)
    assert across == [Tile(left, 0, left + end, 64) for left in starts]
    assert down == [Tile(0, top, 64, top + end) for top in starts]


def test_tiles_go_row_by_row() -> None:
    assert [tile[:2] for tile in tiles(175, 250, 100)] == [(0, 0), (75, 0), (150, 0), (0, 75), (75, 75), (150, 75)]


@pytest.mark.parametrize(
    ("tile", "box", "cut"),
    [
        pytest.param(Tile(0, 0, 100, 100), (0, 0, 90, 90), False, id="first corner of the image"),
        pytest.param(Tile(150, 75, 250, 175), (160, 85, 250, 175), False, id="last corner of the image"),
        pytest.param(Tile(150, 75, 250, 175), (151.9, 85, 250, 175), True, id="left"),
        pytest.param(Tile(150, 75, 250, 175), (152, 77, 250, 175), False, id="two pixels from left and top"),
        pytest.param(Tile(150, 75, 250, 175), (160, 76.9, 250, 175), True, id="top"),
        pytest.param(Tile(0, 0, 100, 100), (0, 0, 98.1, 90), True, id="right"),
        pytest.param(Tile(0, 0, 100, 100), (0, 0, 98, 98), False, id="two pixels from right and bottom"),
        pytest.param(Tile(0, 0, 100, 100), (0, 0, 90, 98.1), True, id="bottom"),
    ],
)
def test_what_a_tile_cuts(tile: Tile, box: tuple[float, float, float, float], cut: bool) -> None:
    """Of an image of 175×250: what touches the tile's border, unless that is the image's."""
    assert tile.cuts(box, height=175, width=250) == cut


LEFT, RIGHT = Tile(0, 0, 100, 100), Tile(75, 0, 175, 100)


def _detection(*box: float, label: int = 1, score: float = 0.5) -> Detection:
    return Detection((box[0], box[1], box[2], box[3]), label, score)


@pytest.mark.parametrize(
    ("left", "right", "expected", "score"),
    [
        pytest.param([(50, 20, 100, 60)], [(75, 20, 150, 60)], [(50, 20, 150, 60)], 0.9, id="cut by both"),
        pytest.param([(85, 20, 100, 60)], [(85, 20, 140, 60)], [(85, 20, 140, 60)], 0.6, id="whole in one"),
        pytest.param([(80, 20, 95, 40)], [(81, 20, 95, 40)], [(80, 20, 95, 40)], 0.9, id="whole in both"),
        pytest.param([(85, 20, 99, 60)], [(85, 20, 175, 60)], [(85, 20, 175, 60)], 0.6, id="at the image's border"),
        pytest.param([(80, 0, 95, 20)], [(80, 40, 95, 60)], [(80, 0, 95, 20), (80, 40, 95, 60)], 0.9, id="two"),
        pytest.param([(10, 0, 60, 20)], [(110, 0, 150, 20)], [(10, 0, 60, 20), (110, 0, 150, 20)], 0.9, id="far apart"),
        pytest.param([(50, 0, 100, 20)], [(75, 0, 150, 100)], [(50, 0, 100, 20), (75, 0, 150, 100)], 0.9, id="unlike"),
    ],
)
def test_pieces_are_merged(left: list[Any], right: list[Any], expected: list[Any], score: float) -> None:
    detections = [
        (LEFT, [_detection(*box, score=0.9) for box in left]),
        (RIGHT, [_detection(*box, score=0.6) for box in right]),
    ]
    merged = merge(detections, 100, 175)
    assert [one.box for one in merged] == expected
    assert merged[0].score == score


def test_pieces_of_unlike_objects_are_not_merged() -> None:
    detections = [(LEFT, [_detection(50, 20, 100, 60, label=1)]), (RIGHT, [_detection(75, 20, 150, 60, label=2)])]
    assert len(merge(detections, 100, 175)) == 2
    same_tile = [(LEFT, [_detection(10, 10, 50, 50), _detection(11, 10, 50, 50)])]
    assert len(merge(same_tile, 100, 175)) == 2


def test_pieces_of_three_tiles_are_one_object() -> None:
    third = Tile(150, 0, 250, 100)
    detections = [
        (LEFT, [_detection(50, 0, 100, 40)]),
        (RIGHT, [_detection(75, 0, 175, 40)]),
        (third, [_detection(150, 0, 220, 40)]),
    ]
    (one,) = merge(detections, 100, 250)
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
    (whole,) = predict_image(model, image)
    assert model.largest == 200
    model.largest = 0
    (tiled,) = predict_image(model, image, tile=100)
    assert model.largest == 100
    assert whole.box == tiled.box == place
    assert whole.mask is not None
    assert tiled.mask is not None
    assert np.array_equal(whole.mask.on(200, 200), tiled.mask.on(200, 200))
    assert predict_image(model, image, threshold=0.8, tile=100) == []


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
    results = json.loads(capsys.readouterr().out)
    assert [(one["file"], one["image_id"]) for one in results] == [(str(photo), 1)] * 5
    assert {one["category_id"] for one in results} <= {1, 2}
    assert all(one["category"] == {1: "cat", 2: "dog"}[one["category_id"]] for one in results)
    assert [one["score"] for one in results] == sorted((one["score"] for one in results), reverse=True)
    assert all(one["segmentation"]["size"] == [70, 100] for one in results)
    left, top, width, height = results[0]["bbox"]
    first = next(line for line in output.splitlines() if line.split()[:1] in (["cat"], ["dog"]))
    assert first.split()[1:] == [
        f"{100 * results[0]['score']:.1f}",
        *(f"{value:.0f}" for value in (left, top, left + width, top + height)),
    ]
    detect_predict(checkpoint, [str(photo)], threshold=0.0, tile=64, json=True)
    assert len(json.loads(capsys.readouterr().out)) > 5
    with pytest.raises(FileExistsError, match=r"photo\.png exists"):
        detect_predict(checkpoint, [str(photo)], output=str(tmp_path / "out"))
    detect_predict(checkpoint, [str(photo)], threshold=0.0, output=str(tmp_path / "out"), overwrite=True)
    capsys.readouterr()
    detect_predict(checkpoint, [str(photo)], threshold=1.0)
    assert capsys.readouterr().out == f"{photo}: nothing found with a score of 1 or more; give a lower --threshold\n"


def test_many_objects_are_not_all_printed(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 607, the best twenty, and how many more there are; of twenty all."""
    image, found = Image.open(photo), [Detection((1, 2, 3, 4), 1, 1 - number / 1000) for number in range(607)]
    _print_objects(Prediction("a.png", image, found), ["cat"], None, 0.3)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "a.png: 607 found with a score of 0.3 or more"
    assert [line.split()[1] for line in lines if line.startswith("cat ")] == [
        f"{100 - number / 10:.1f}" for number in range(20)
    ]
    assert lines[-1] == "… and 587 more (--json prints all)"
    _print_objects(Prediction("a.png", image, found[:20]), ["cat"], None, 0.3)
    assert "more (" not in capsys.readouterr().out


def test_images_that_are_shrunk_much_are_told(tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To 48 of 100 pixels; in tiles, at their own scale, or to 50 of 100, nothing is said."""
    small = write_detector(tmp_path / "small.safetensors", ["cat"], num_classes=1, min_size=(48,), max_size=48)
    half = write_detector(tmp_path / "half.safetensors", ["cat"], num_classes=1, min_size=(50,), max_size=50)
    detect_predict(str(small), [str(photo)], threshold=1.0, json=True)
    assert capsys.readouterr().err == (
        "1 of 1 image shrunk to less than half size (48 pixels, as in training), so small objects may be missed; "
        "--tile 48 processes such images in parts, --scale 1 at full size\n"
    )
    detect_predict(str(half), [str(photo)], threshold=1.0, json=True)
    detect_predict(str(small), [str(photo)], threshold=1.0, json=True, tile=64)
    detect_predict(str(small), [str(photo)], threshold=1.0, json=True, scale=1.0)
    assert capsys.readouterr().err == ""


def test_image_ids_of_a_data_set(tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Image 3 of the file is 2.png; a run directory stands for its best detector."""
    (tmp_path / "run").mkdir()
    write_detector(tmp_path / "run" / "best.safetensors", ["cat", "dog"], num_classes=2)
    data, run = write_coco(tmp_path / "data"), str(tmp_path / "run")
    detect_predict(run, [str(data / "train" / "2.png")], threshold=0.0, data=str(data), json=True)
    assert {one["image_id"] for one in json.loads(capsys.readouterr().out)} == {3}
    with pytest.raises(ValueError, match=r"photo\.png is not an image of .*; leave out --data, or give images of"):
        detect_predict(run, [str(photo)], data=str(data), json=True)


def test_refused_arguments(tmp_path: Path, photo: Path) -> None:
    checkpoint = str(write_detector(tmp_path / "detector.safetensors", None, num_classes=2))
    with pytest.raises(ValueError, match="threshold is 2; it must be between 0 and 1"):
        detect_predict(checkpoint, [str(photo)], threshold=2)
    with pytest.raises(ValueError, match="tile is 10; it must be an integer of at least 64"):
        detect_predict(checkpoint, [str(photo)], tile=10)
    with pytest.raises(FileNotFoundError, match=r"there is no image .*nothing\.jpg"):
        detect_predict(checkpoint, [str(tmp_path / "nothing.jpg")])
    with pytest.raises(FileExistsError, match=r"photo\.png exists"):
        detect_predict(checkpoint, [str(photo)], output=str(tmp_path))
    classifier = save(build("two_stages"), tmp_path / "classifier.safetensors")
    with pytest.raises(CheckpointError, match=r"classifier\.safetensors is a classifier"):
        detect_predict(str(classifier), [str(photo)])


# Streamed


@pytest.fixture
def large(tmp_path: Path) -> tuple[str, Path, int]:
    """A detector that can be streamed, an image, and a byte less than it takes at once."""
    model = small_detector("mask_rcnn", proposals=30, detections=8)
    info = {"categories": [{"id": number, "name": name} for number, name in enumerate(("cat", "dog", "hen"), 1)]}
    path = tmp_path / "large.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (150, 210, 3), dtype=np.uint8)).save(path)
    checkpoint = save_detector(model, tmp_path / "vil.safetensors", info=info)
    needed = bytes_at_once(load_detector(checkpoint, scale=1.0), (150, 210))
    assert needed is not None
    return str(checkpoint), path, needed - 1


def _found(checkpoint: str, path: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[list[Any], str]:
    detect_predict(checkpoint, [str(path)], threshold=0.0, scale=1.0, json=True, **options)
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_an_image_that_does_not_fit_is_streamed(
    large: tuple[str, Path, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, with what would be needed; the result is that of the whole image."""
    checkpoint, path, limit = large
    whole, quiet = _found(checkpoint, path, capsys, memory=str(limit + 1))
    assert "streamed" not in quiet
    assert "the limit of 8 objects per image was reached; --detections (detections=…) raises it" in quiet
    streamed, said = _found(checkpoint, path, capsys, memory=str(limit))
    assert re.search(
        r"large.png: 150×210 pixels at once would need about \d+MB, but only \d+MB is free or allowed: "
        r"streaming the image",
        said,
    )
    _assert_same_results(whole, streamed)
    monkeypatch.setattr(prediction_module, "free_memory", lambda device: limit)
    _, said = _found(checkpoint, path, capsys, memory="10GB")
    assert "streaming the image" in said
    streamed, said = _found(checkpoint, path, capsys, detections=20)
    assert "streaming the image" in said
    assert len(streamed) > 8
    _assert_same_results(whole, streamed[:8])


def _assert_same_results(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for first, second in zip(one, other, strict=True):
        assert first["category"] == second["category"]
        assert first["score"] == pytest.approx(second["score"], abs=1e-5)
        assert first["bbox"] == pytest.approx(second["bbox"], abs=1e-2)
        areas = [rle.decode(result["segmentation"]) for result in (first, second)]
        assert np.count_nonzero(areas[0] != areas[1]) <= 2


def test_files_that_are_read_by_rows(
    large: tuple[str, Path, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiled TIFF, zarr and .npy of the same pixels; pictures are of every second pixel if they would be too large."""
    checkpoint, path, limit = large
    pixels = np.asarray(Image.open(path))
    tifffile.imwrite(path.with_name("tiff.tif"), pixels, tile=(64, 64), photometric="rgb")
    zarr.create_array(str(path.with_name("zarr.zarr")), data=pixels, chunks=(50, 50, 3))
    np.save(path.with_name("numpy.npy"), pixels)
    tifffile.imwrite(path.with_name("sixteen.tif"), pixels * np.uint16(256) + 7, tile=(64, 64), photometric="rgb")
    whole, _ = _found(checkpoint, path, capsys)
    monkeypatch.setattr(prediction_module, "LARGEST_PICTURE", 110)
    monkeypatch.setattr(prediction_module, "ROWS", 33)
    for name in ("tiff.tif", "zarr.zarr", "numpy.npy"):
        streamed, _ = _found(checkpoint, path.with_name(name), capsys, memory=str(limit))
        _assert_same_results(whole, streamed)
        assert streamed[0]["segmentation"]["size"] == [150, 210]
    monkeypatch.setattr(prediction_module, "MAX_PIXELS", 150 * 210 - 1)
    for name in ("sixteen.tif", "zarr.zarr"):
        (prediction,) = predict(load_detector(checkpoint, scale=1.0), [path.with_name(name)], threshold=0.0)
        picture, detections = prediction.picture()
        assert prediction.size == (150, 210)
        assert isinstance(prediction.source, LargeImage)  # though there is memory for it
        assert np.array_equal(np.asarray(picture), pixels[::2, ::2])
    assert detections[0].box == tuple(side / 2 for side in prediction.detections[0].box)


def test_a_turned_photo_is_streamed_upright(large: tuple[str, Path, int]) -> None:
    """EXIF's orientation 6 means that the stored rows are columns."""
    checkpoint, path, limit = large
    turned, exif = path.with_name("turned.png"), Image.Exif()
    exif[274] = 6
    Image.open(path).transpose(Image.Transpose.ROTATE_90).save(turned, exif=exif)
    model = load_detector(checkpoint, scale=1.0)
    for memory in (None, limit):
        (upright,), (other,) = (list(predict(model, [each], threshold=0.0, memory=memory)) for each in (path, turned))
        assert other.size == (150, 210)
        assert [each.box for each in other.detections] == [each.box for each in upright.detections]
        assert isinstance(other.source, Image.Image if memory is None else LargeImage)


def test_a_decoded_photo_may_change_while_it_is_streamed(large: tuple[str, Path, int]) -> None:
    checkpoint, path, limit = large
    pixels, model = np.asarray(Image.open(path)), load_detector(checkpoint, scale=1.0)
    (prediction,) = predict(model, [path], memory=limit, progress=lambda done, total: path.unlink(missing_ok=True))
    assert isinstance(prediction.source, LargeImage)
    assert np.array_equal(np.asarray(prediction.picture()[0]), pixels)


def test_images_that_are_streamed_have_folders_of_their_own(
    large: tuple[str, Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that ends in its second image is resumed there; of two files of one name, too."""
    checkpoint, path, limit = large
    other, tokens = path.parent / "other" / path.name, path.with_name("tokens")
    other.parent.mkdir()
    Image.open(path).rotate(180).save(other)
    command = (load_detector(checkpoint, scale=1.0), [path, other])
    options: dict[str, Any] = {"threshold": 0.0, "memory": limit, "storage": tokens}
    expected = [one.detections[0].box for one in predict(*command, **{**options, "storage": None})]

    def stop(done: int, total: int) -> None:
        if done > 0.5 * total and sorted(each.name for each in tokens.iterdir()) == ["2-large.png"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(predict(*command, progress=stop, **options))
    left = tokens / "2-large.png" / "state.safetensors"
    assert left.exists()
    shares: dict[str, float] = {}

    def note(done: int, total: int) -> None:
        image = min(each.name for each in tokens.iterdir())
        shares.setdefault(image, done / total)

    assert [one.detections[0].box for one in predict(*command, progress=note, **options)] == expected
    assert shares["1-large.png"] < 0.3
    assert shares["2-large.png"] > 0.3
    assert not tokens.exists()


def test_options_that_would_have_no_effect_are_refused(
    large: tuple[str, Path, int], photo: Path, tmp_path: Path
) -> None:
    checkpoint = large[0]
    for options, names in [
        ({"memory": "1GB"}, "memory"),
        ({"storage": str(tmp_path / "tokens")}, "storage"),
        ({"level": 1}, "level"),
        ({"memory": "1GB", "level": 1}, "memory and level"),
    ]:
        sentence = f"leave out {names}, or tile: tiles are cut from a decoded photo, and nothing is streamed"
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            detect_predict(checkpoint, [str(photo)], tile=64, **options)
    detect_predict(checkpoint, [str(photo)], tile=64, level=0)
    exported = RedFinder()
    for options, name in [({"memory": 10**9}, "memory"), ({"storage": tmp_path / "tokens"}, "storage")]:
        sentence = f"leave out {name}: a RedFinder was not built by build_detector, and cannot be streamed"
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            next(predict(exported, [photo], **options))
    assert next(predict(exported, [photo], tile=64)).size == (70, 100)
    assert not (tmp_path / "tokens").exists()


def test_settings_of_a_loaded_detector(large: tuple[str, Path, int]) -> None:
    checkpoint, path, _ = large
    model = load_detector(checkpoint, scale=0.5, detections=3)
    assert (model.config.scale, model.config.detections, model.config.channels) == (0.5, 3, 8)
    with pytest.raises(ValueError, match=r"unknown setting 'channels'; choose from detections, max_size, min_size"):
        load_detector(checkpoint, channels=4)
    with pytest.raises(ValueError, match=r"scale is -1; it must be above 0, or None for min_size and max_size"):
        load_detector(checkpoint, scale=-1)
    with pytest.raises(ValueError, match=rf"^{path}: 1MB of memory is too little .*at least"):
        detect_predict(checkpoint, [str(path)], scale=1.0, memory="1KB")
