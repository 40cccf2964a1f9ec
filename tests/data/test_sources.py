"""Labelled images by index: arrays, folders, archives and other libraries' data sets, whole and damaged."""

from __future__ import annotations

import io
import os
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from builders import (
    IMAGE_CLASSES,
    grey_arrays,
    grey_files,
    grey_png,
    grey_samples,
    write_folder,
    write_npz,
    write_photos,
    write_tar,
    write_zip,
)
from PIL import Image

from vision_longformer.data.images import IMAGE_EXTENSIONS, ImageError
from vision_longformer.data.loading import BatchLoader
from vision_longformer.data.sources import ArraySource, NoSplitError, Source, open_source, subset


def _samples(source: Source, workers: int = 0) -> list[tuple[int, int]]:
    """Grey value and label of every image, each of one grey."""

    def read(index: int) -> tuple[int, int]:
        image, label = source.read(index)
        assert image.mode == "RGB"
        ((low, high), *others) = image.getextrema()
        assert low == high
        assert others == [(low, low)] * 2
        return low, label

    return list(BatchLoader(read, range(len(source)), workers))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "folder")


# Arrays


def test_fashion_mnist() -> None:
    train, test = (open_source("fashion-mnist", split) for split in ("train", "validation"))
    assert train.classes == test.classes
    assert (len(train.classes), train.classes[0], train.classes[9]) == (10, "T-shirt/top", "Ankle boot")
    for source, each in ((train, 600), (test, 100)):
        assert np.bincount([source.read(index)[1] for index in range(len(source))]).tolist() == [each] * 10
    assert train.read(0)[0].size == (28, 28)


def test_npz(tmp_path: Path) -> None:
    arrays = {"train_x": grey_arrays(12), "train_y": np.arange(12) % 3, "test_x": grey_arrays(6, 3)}
    path = write_npz(tmp_path / "two.npz", **arrays, test_y=np.arange(6) % 3, classes=np.array(IMAGE_CLASSES))
    assert _samples(open_source(str(path), "train")) == grey_samples()
    evaluation = open_source(str(path), "validation")
    assert evaluation.classes == IMAGE_CLASSES
    assert _samples(evaluation) == grey_samples(6)


def test_npz_without_names_and_splits(tmp_path: Path) -> None:
    path = str(write_npz(tmp_path / "plain.npz", x=grey_arrays(12, 1), y=np.arange(12) % 3))
    assert open_source(path, "train").classes == ("0", "1", "2")
    assert _samples(open_source(path, "train")) == grey_samples()
    assert open_source(path, "train", num_classes=5).classes == ("0", "1", "2", "3", "4")
    assert open_source(path, "train", classes=IMAGE_CLASSES).classes == IMAGE_CLASSES
    with pytest.raises(ValueError, match="has no split 'validation'; use split 'train'"):
        open_source(path, "validation")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train_y": np.array([0, 1, 7, 2])}, "label 7 of image 2 of .*bad.npz .train. is out of range; the 3 classes"),
        ({"train_y": np.array([0, -1, 2, 2])}, "label -1 of image 1 of .* is out of range"),
        ({"train_y": np.zeros(3, int)}, r"they should be 4 integers"),
        ({"train_y": np.zeros(4)}, "they should be 4 integers"),
        ({"train_x": np.zeros((4, 8, 8))}, r"are float64 of shape \(4, 8, 8\); they should be uint8"),
        ({"train_x": np.zeros((4, 8, 8, 2), np.uint8)}, r"of shape \(4, 8, 8, 2\); they should be uint8"),
        ({"train_x": np.zeros((0, 8, 8), np.uint8), "train_y": np.zeros(0, int)}, "holds no images"),
        ({"train_y": np.array([None] * 4)}, r"bad.npz is not a valid .npz file \(Object arrays cannot be loaded"),
    ],
)
def test_bad_arrays(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    good = {"train_x": np.zeros((4, 8, 8), np.uint8), "train_y": np.arange(4) % 3, "classes": np.array(IMAGE_CLASSES)}
    path = write_npz(tmp_path / "bad.npz", **{**good, **arrays})
    with pytest.raises(ValueError, match=message):
        open_source(str(path), "train")


# Folders


def test_folder(folder: Path) -> None:
    by_class = sorted(grey_samples(6), key=lambda sample: sample[1])
    assert open_source(str(folder), "train").classes == IMAGE_CLASSES
    assert _samples(open_source(str(folder), "validation")) == by_class
    assert sorted(_samples(open_source(str(folder / "train"), "train"))) == grey_samples()


def test_class_folders_are_in_natural_order(tmp_path: Path) -> None:
    for name in ("class 10", "class 9", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "image.png").write_bytes(grey_png(0))
    assert open_source(str(tmp_path), "train").classes == ("class 9", "class 10")


def test_missing_folders(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no data .*missing; give a folder"):
        open_source(str(tmp_path / "missing"), "train")
    with pytest.raises(NoSplitError, match=r"has no folder 'final', only train, val"):
        open_source(str(folder), "final")
    with pytest.raises(NoSplitError, match=r"has no split 'validation'; use split 'train'"):
        open_source(str(folder / "train"), "validation")
    with pytest.raises(ValueError, match="has no class folders"):
        open_source(str(folder / "train" / "cat"), "train")


def test_empty_class(folder: Path) -> None:
    (folder / "train" / "emu").mkdir()
    with pytest.raises(ValueError, match=r"class 'emu' is empty: there are no images in .*train/emu"):
        len(open_source(str(folder), "train"))


def test_classes_must_be_those_of_the_model(folder: Path) -> None:
    with pytest.raises(ValueError, match="lacks class 'emu', which the model has"):
        open_source(str(folder), "val", classes=(*IMAGE_CLASSES, "emu"))
    with pytest.raises(ValueError, match="has class 'owl', which the model lacks"):
        open_source(str(folder), "val", classes=IMAGE_CLASSES[:2])
    with pytest.raises(ValueError, match="in another order: cat, dog, owl"):
        open_source(str(folder), "val", classes=IMAGE_CLASSES[::-1])
    with pytest.raises(ValueError, match=r"num_classes is 5, but .* has 3 classes"):
        open_source(str(folder), "train", num_classes=5)


# Archives


@pytest.mark.parametrize(("write", "suffix"), [(write_tar, "tar"), (write_zip, "zip")])
@pytest.mark.parametrize("workers", [0, 2])
def test_archives(tmp_path: Path, write: Any, suffix: str, workers: int) -> None:
    divided = {f"set/train/{name}": content for name, content in grey_files().items()}
    divided |= {f"set/val/{name}": content for name, content in grey_files(6).items()}
    whole = write(tmp_path / f"all.{suffix}", divided)
    parts = tmp_path / "parts"
    parts.mkdir()
    write(parts / f"train.{suffix}", grey_files())
    write(parts / f"validation.{suffix}", grey_files(6))
    for data in (whole, parts):
        train, evaluation = (open_source(str(data), split) for split in ("train", "validation"))
        assert train.classes == evaluation.classes == IMAGE_CLASSES
        assert sorted(_samples(train, workers)) == grey_samples()
        assert sorted(_samples(evaluation, workers)) == grey_samples(6)


def test_tar_of_tars(tmp_path: Path) -> None:
    inner = {}
    for number, name in enumerate(IMAGE_CLASSES):
        values = range(number, 12, 3)
        path = write_tar(tmp_path / f"{name}.tar", {f"{value}.png": grey_png(value) for value in values})
        inner[path.name] = path.read_bytes()
    source = open_source(str(write_tar(tmp_path / "all.tar", inner)), "train")
    assert source.classes == IMAGE_CLASSES
    assert sorted(_samples(source)) == grey_samples()


def test_an_archive_that_changes_is_read_anew(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "all.tar", grey_files(3))
    assert len(open_source(str(path), "train")) == 3
    write_tar(path, grey_files(6))
    assert _samples(open_source(str(path), "train")) == sorted(grey_samples(6), key=lambda sample: sample[1])


def test_each_process_opens_a_zip_file_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One handle in two processes would be moved by both."""
    source = open_source(str(write_zip(tmp_path / "all.zip", grey_files(3))), "train")
    opened: list[int] = []
    open_zip = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda *given: opened.append(os.getpid()) or open_zip(*given))
    for process in (1, 1, 2, 1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        source.read(0)
    assert opened == [1, 2]


def test_a_damaged_member_of_a_zip_file_is_no_image(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "all.zip", grey_files(3))
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") + 6] ^= 255
    path.write_bytes(content)
    source = open_source(str(path), "train")
    with pytest.raises(ImageError, match=r"all.zip/cat/00.png cannot be read as an image"):
        source.read(0)
    assert source.read(1)[1] == 1


def test_files_that_are_not_what_they_seem(tmp_path: Path) -> None:
    for suffix in ("npz", "tar", "zip"):
        path = tmp_path / f"text.{suffix}"
        path.write_text("text" * 500)
        with pytest.raises(ValueError, match=rf"text.{suffix} is not a valid .{suffix} file"):
            open_source(str(path), "train")
    with pytest.raises(ValueError, match="has no arrays train_x and train_y, only images"):
        open_source(str(write_npz(tmp_path / "other.npz", images=np.zeros(1))), "train")
    with pytest.raises(ValueError, match=r"has an image outside of class folders: 1.png"):
        open_source(str(write_zip(tmp_path / "flat.zip", {"1.png": grey_png(1)})), "train")
    with pytest.raises(ValueError, match=r"split.tar has no folder 'final', only train"):
        open_source(str(write_tar(tmp_path / "split.tar", {"train/cat/1.png": grey_png(1)})), "final")
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(ValueError, match="neither a folder nor"):
        open_source(str(tmp_path / "notes.txt"), "train")


# Other libraries


def test_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    def pretend(self: Any, root: str, train: bool, download: bool) -> None:
        assert (root, download) == ("/somewhere", False)
        count = 12 if train else 6
        self.data, self.targets = grey_arrays(count, 3), [value % 3 for value in range(count)]
        self.classes = list(IMAGE_CLASSES)

    with monkeypatch.context() as patch:
        patch.setattr(CIFAR10, "__init__", pretend)
        train, evaluation = (open_source("torch/cifar10:/somewhere", split) for split in ("train", "validation"))
    assert isinstance(train, ArraySource), "may be trained on in memory"
    assert train.classes == IMAGE_CLASSES
    assert _samples(train) == grey_samples()
    assert _samples(evaluation) == grey_samples(6)
    photos = write_photos(tmp_path / "photos")
    source = open_source(f"torch/folder:{photos}", "train")
    assert (source.classes, len(source)) == (IMAGE_CLASSES, 12)
    assert [source.read(index)[1] for index in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    with pytest.raises(FileNotFoundError, match=r"torch/cifar10 is not in .*; download it there"):
        open_source(f"torch/cifar10:{tmp_path}", "train")
    with pytest.raises(ValueError, match="torch/nothing is not a data set that timm knows"):
        open_source(f"torch/nothing:{tmp_path}", "train")
    with pytest.raises(ValueError, match="torch/cifar10 does not say where it is"):
        open_source("torch/cifar10", "train")


class _Reader:
    """Stands in for timm's reader of Hugging Face data sets."""

    def __init__(self, name: str, split: str) -> None:
        assert name == "Someone/Pets"
        self.count = 12 if split == "train" else 6
        self.class_to_idx = {"owl": 2, "cat": 0, "dog": 1}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        return io.BytesIO(grey_png(index)), index % 3


def test_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("vision_longformer.data.sources.find_spec", lambda name: None)
        with pytest.raises(ValueError, match="pip install datasets"):
            open_source("hfds/Someone/Pets", "train")
    module = ModuleType("reader_hfds")
    module.ReaderHfds = _Reader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm.data.readers.reader_hfds", module)
    monkeypatch.setattr("vision_longformer.data.sources.find_spec", lambda name: module)
    train, evaluation = (open_source("hfds/Someone/Pets", split) for split in ("train", "validation"))
    assert train.classes == IMAGE_CLASSES
    assert _samples(train) == grey_samples()
    assert _samples(evaluation) == grey_samples(6)
    monkeypatch.setattr(_Reader, "__getitem__", lambda self, index: (io.BytesIO(grey_png(index)), 3))
    with pytest.raises(ValueError, match=r"label 3 of image 2 of hfds/Someone/Pets \(train\) is out of range"):
        train.read(2)


def test_every_format_is_read_and_the_rest_is_told(tmp_path: Path) -> None:
    """Also in folders within a class; what is hidden is not told."""
    picture = Image.new("RGB", (8, 8), (9, 9, 9))
    formats = {".jpg": "JPEG", ".tif": "TIFF", ".pgm": "PPM", ".jfif": "JPEG", ".jpeg": "JPEG", ".tiff": "TIFF"}
    for number, extension in enumerate(IMAGE_EXTENSIONS):
        folder = tmp_path / "cat" / ("old" if number % 2 else "")
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"a{extension.upper()}", formats.get(extension, extension[1:].upper()))
    for name in ("loose.png", "cat/a.heic", "cat/.DS_Store"):
        (tmp_path / name).write_bytes(b"")
    source = open_source(str(tmp_path), "train")
    assert len(source) == len(IMAGE_EXTENSIONS) == 11
    assert {source.read(index)[0].size for index in range(11)} == {(8, 8)}
    assert list(source.labels) == [0] * 11
    assert sorted(source.ignored) == ["cat/a.heic", "loose.png"]


def test_a_subset_by_names(folder: Path) -> None:
    source = open_source(str(folder), "train")
    chosen = [source.names[5], source.names[0]]
    part = subset(source, chosen, "photos")
    assert (list(part.names), len(part), part.classes) == (chosen, 2, source.classes)
    assert [part.read(index)[1] for index in (0, 1)] == list(part.labels) == [source.labels[5], source.labels[0]]
    with pytest.raises(ValueError, match=r"photos no longer has the image gone\.png, which the run's split names"):
        subset(source, ["gone.png"], "photos")


def test_a_subset_of_arrays_is_arrays(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", x=np.arange(3, dtype=np.uint8)[:, None, None], y=[0, 1, 1])
    part = subset(open_source(str(path), "train"), ["2", "0"], "a")
    assert isinstance(part, ArraySource)
    assert (part.images.ravel().tolist(), part.labels.tolist(), part.classes) == ([2, 0], [1, 0], ("0", "1"))
