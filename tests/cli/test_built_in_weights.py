"""Weights that come with the package: what they are, that they fit their size, and what they reach."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torchvision.ops import box_iou
from torchvision.transforms.v2.functional import to_image

from vision_longformer.checkpoint import load
from vision_longformer.checkpoint.native import shipped_weights
from vision_longformer.classification.evaluate import evaluate
from vision_longformer.cli.main import main
from vision_longformer.detection import load_detector
from vision_longformer.detection.dataset import open_detection
from vision_longformer.models.zoo import SHIPPED

PHOTO = Path(__file__).parents[2] / "src/vision_longformer/assets/photos/friends_by_Aitzol_Berasategi.jpg"
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def test_names_and_size() -> None:
    assert shipped_weights() == ["cifar10", "cifar10_micro", "cifar10_nano", "fashion_mnist", "garments"]
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
    torch.testing.assert_close(folder(images), load("cifar10").eval()(images))


def test_objects_in_a_photo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["detect", "predict", "garments", str(PHOTO), "--threshold", "0.05", "--output", str(tmp_path / "pictures")])
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == [f"{PHOTO.stem}.png"]
    assert "Trouser" in capsys.readouterr().out


def test_the_garment_detector() -> None:
    """Of the best objects in ten images, six have a score above 0.75, and all of them are right."""
    detector, data = load_detector("garments"), open_detection("garments:320", "validation")
    found = []
    for index in range(10):
        image, target = data.read(index)
        with torch.no_grad():
            best = {name: x[:1] for name, x in detector([to_image(image) / 255])[0].items()}
        if best["scores"] > 0.75:
            overlap, nearest = box_iou(best["boxes"], torch.as_tensor(target.boxes).float())[0].max(0)
            found.append(bool(overlap > 0.6 and best["labels"] == torch.as_tensor(target.labels)[nearest]))
    assert found == [True] * 6
