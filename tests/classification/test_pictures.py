"""Pictures of results: whole PNG files that replace nothing unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vision_longformer.classification.pictures import draw_confusion, draw_prediction, draw_predictions
from vision_longformer.classification.predict import Prediction

CLASSES = ("ant", "bee", "cat", "dog", "eel")


def _pictures(folder: Path, **options: Any) -> list[Path]:
    """One picture of each sort, of random contents."""
    images = torch.randint(256, (11, 1, 28, 28), dtype=torch.uint8)
    labels = torch.arange(11) % 5
    prediction = Prediction("photo.jpg", CLASSES[:3], (0.7, 0.2, 0.1))
    return [
        draw_confusion(torch.arange(25).view(5, 5), CLASSES, folder / "few.png", **options),
        draw_confusion(torch.eye(100).long(), [str(index) for index in range(100)], folder / "many.png", **options),
        draw_predictions(images, labels, labels.flip(0), torch.rand(11), CLASSES, folder / "page.png", **options),
        draw_prediction(Image.new("RGB", (400, 250), "teal"), prediction, folder / "one.png", **options),
    ]


def test_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    paths = _pictures(folder)
    assert sorted(folder.iterdir()) == sorted(paths)
    for path in paths:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert min(picture.size) > 300
            assert max(picture.size) < 3000
            assert len(picture.convert("RGB").getcolors(2**24) or ()) > 20


def test_pictures_are_not_overwritten_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "few.png"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"few\.png exists"):
        draw_confusion(torch.eye(5).long(), CLASSES, path)
    assert path.read_bytes() == b"mine"
    _pictures(tmp_path, overwrite=True)
    assert path.read_bytes() != b"mine"
    with pytest.raises(ValueError, match=r"page\.jpg should end in \.png"):
        draw_confusion(torch.eye(5).long(), CLASSES, tmp_path / "page.jpg")


def test_a_failed_picture_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        draw_confusion(torch.eye(5).long(), CLASSES, tmp_path / "few.png")
    assert list(tmp_path.iterdir()) == []
