"""Weights that come with the package: what they are, that they fit their size, and what they reach."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

from vision_longformer.checkpoint.native import shipped_weights
from vision_longformer.classification.evaluate import evaluate
from vision_longformer.cli.main import main
from vision_longformer.models.zoo import SHIPPED

PHOTO = Path(__file__).parents[2] / "src/vision_longformer/assets/photos/friends_by_Aitzol_Berasategi.jpg"
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def test_names_and_size() -> None:
    assert shipped_weights() == ["cifar10", "cifar10_nano", "fashion_mnist", "garments"]
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 15e6


def test_the_quick_start_classifier() -> None:
    """The accuracy that its run ended with."""
    assert evaluate("fashion_mnist", data="fashion-mnist", workers=0).accuracies["top1"] == pytest.approx(85.3, abs=0.2)


def test_classes_of_a_photo(capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "cifar10", str(PHOTO), "--top", "10"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in CIFAR10)


def test_a_folder_of_them(tmp_path: Path) -> None:
    """Through ``vil hub save`` and timm."""
    main(["hub", "save", "cifar10", str(tmp_path / "folder")])
    folder = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(folder(images), timm.create_model("vision_longformer_micro", pretrained=True)(images))


def test_objects_in_a_photo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["detect", "predict", "garments", str(PHOTO), "--threshold", "0.05", "--output", str(tmp_path / "pictures")])
    assert (tmp_path / "pictures" / PHOTO.name).exists() or any((tmp_path / "pictures").iterdir())
    assert "friends_by_Aitzol_Berasategi" in capsys.readouterr().out
