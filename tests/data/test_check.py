"""'vil check': what a folder of images holds, and every kind of problem in it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from builders import grey_png, write_npz, write_zip
from PIL import Image

from vision_longformer.cli.main import main
from vision_longformer.data.check import Problem, check_images


def _image(format: str, value: int, size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (value,) * 3).save(buffer, format, lossless=True)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight images, and beside them a text, a photo outside of the classes, and what a camera's folder hides."""
    files = {
        "train/cat/1.png": _image("PNG", 10, (40, 30)),
        "train/cat/2.webp": _image("WEBP", 20, (60, 50)),
        "train/cat/old/3.PNG": _image("PNG", 30, (50, 90)),
        "train/dog/4.png": _image("PNG", 40, (20, 70)),
        "val/cat/5.gif": _image("GIF", 50, (40, 40)),
        "val/dog/6.png": _image("PNG", 60, (40, 40)),
        "train/cat/notes.txt": b"",
        "train/loose.jpg": b"",
        "train/cat/.hidden.png": b"",
    }
    for name, content in files.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "photos"


def test_what_there_is(folder: Path) -> None:
    """The shorter sides of the training images are 30, 50, 50 and 20."""
    report = check_images(str(folder), workers=0)
    assert report.problems == []
    train, val = report.splits
    assert (train.split, train.images, train.classes) == ("train", 4, {"cat": 3, "dog": 1})
    assert train.formats == {".png": 3, ".webp": 1}
    assert train.sides == (20, 40, 50)
    assert train.ignored == {".txt": 1, ".jpg outside of class folders": 1}
    assert (val.split, val.images, val.classes) == ("validation", 2, {"cat": 1, "dog": 1})
    assert report.imbalance == 3


def test_every_problem(folder: Path) -> None:
    """A truncated file, and one image four times: under another name, class and split, and in another format."""
    (folder / "train/dog/7.png").write_bytes(_image("PNG", 1, (300, 300))[:100])
    copy = _image("PNG", 10, (40, 30))
    (folder / "train/cat/8.png").write_bytes(copy)
    (folder / "train/dog/8.webp").write_bytes(_image("WEBP", 10, (40, 30)))
    (folder / "val/cat/9.png").write_bytes(copy)
    (folder / "val/fox").mkdir()
    (folder / "val/fox/10.png").write_bytes(grey_png(99))
    unreadable, *others = check_images(str(folder), workers=0).problems
    assert unreadable[:2] == ("train", "dog/7.png")
    assert unreadable.what.startswith("cannot be read as an image: ")
    assert others == [
        Problem("train", "cat/8.png", "duplicate of cat/1.png"),
        Problem("train", "dog/8.webp", "duplicate of cat/1.png, which is of class cat"),
        Problem(
            "validation", "cat/9.png",
            "duplicate of train/cat/1.png: evaluation would count an image that was trained on",
        ),
        Problem("train", "", "class 'fox' is missing; validation has it"),
    ]  # fmt: skip


def test_a_wrong_level_of_folders(folder: Path, tmp_path: Path) -> None:
    """The folder above is one class; what lies beside the class folders is more than what lies in them."""
    remedy = "give the folder that holds a folder of images for each class"
    (folder / "train").rename(tmp_path / "outer")
    shutil.rmtree(folder)
    (tmp_path / "outer" / "loose.jpg").unlink()
    (one,) = check_images(str(tmp_path), workers=0).problems
    assert one == Problem("train", "", f"has a single class, 'outer'; {remedy}")
    for number in range(5):
        (tmp_path / "outer" / f"{number}.png").write_bytes(b"")
    assert check_images(str(tmp_path / "outer"), workers=0).problems == [
        Problem("train", "", f"5 images lie outside of class folders, and 4 in them; {remedy}"),
        Problem("train", "", "class 'dog' has only one image, so none can be held out for evaluation"),
    ]


def test_other_forms_of_data(tmp_path: Path) -> None:
    """An undivided archive is all training images; two equally long arrays are two splits."""
    archive = write_zip(
        tmp_path / "photos.zip", {"cat/1.png": grey_png(1), "cat/read.me": b"", "dog/2.png": grey_png(2)}
    )
    (split,) = check_images(str(archive), workers=0).splits
    assert (split.split, split.classes, split.ignored) == ("train", {"cat": 1, "dog": 1}, {".me": 1})
    pixels = np.arange(2, dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2)
    path = write_npz(tmp_path / "a.npz", train_x=pixels, train_y=[0, 1], val_x=pixels + 5, val_y=[0, 1])
    assert [(one.split, one.formats) for one in check_images(str(path), workers=0).splits] == [
        ("train", {"array": 2}),
        ("validation", {"array": 2}),
    ]
    with pytest.raises(ValueError, match="wds/x is streamed, and is not checked"):
        check_images("wds/x")


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(folder)])
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines()]
    assert ["cat", "3", "1"] in rows
    assert ["all", "4", "2"] in rows
    assert "train: 4 images (3 .png, 1 .webp)" in output
    assert "shorter sides from 20 to 50 pixels, median 40" in output
    assert "ignored: 1 .txt, 1 .jpg outside of class folders" in output
    assert "3.0 times as many images as the smallest; train with --balance" in output
    assert output.endswith("no problems\n")
    (folder / "val/dog/copy.png").write_bytes((folder / "train/dog/4.png").read_bytes())
    with pytest.raises(SystemExit, match="1"):
        main(["check", str(folder), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert [split["images"] for split in data["splits"]] == [4, 3]
    assert [problem["image"] for problem in data["problems"]] == ["dog/copy.png"]
