"""Average precision: against an independent computation, over several processes, and on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import build, write_detector
from torch import Tensor, nn

from vision_longformer import save
from vision_longformer.cli.detect.evaluate import detect_evaluate
from vision_longformer.data.order import Process
from vision_longformer.detection.dataset import Category, DetectionShare, Target, open_detection
from vision_longformer.detection.detections import run_lengths
from vision_longformer.detection.evaluate import MEASURES, Collected, evaluate, evaluate_detector, measure, result_of
from vision_longformer.errors import CheckpointError

CATEGORIES = (Category(4, "cat"), Category(9, "dog"))
IMAGES = [{"id": 1, "height": 100, "width": 100}, {"id": 2, "height": 100, "width": 100}]


def _object(image: int, box: list[float], category: int = 4, **more: Any) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "bbox": box, "area": box[2] * box[3], **more}


TRUTH = [
    _object(1, [10, 10, 40, 40]),
    _object(1, [60, 60, 20, 20]),
    _object(2, [0, 0, 50, 50]),
    _object(2, [60, 0, 30, 30], 9),
    _object(2, [0, 60, 90, 30], 9, iscrowd=1),
]
FOUND = [
    _object(1, [12, 10, 40, 40], score=0.9),
    _object(1, [11, 11, 40, 40], score=0.8),
    _object(1, [60, 64, 20, 20], score=0.7),
    _object(2, [5, 5, 50, 50], score=0.6),
    _object(2, [70, 70, 20, 20], score=0.95),
    _object(2, [61, 1, 30, 30], 9, score=0.5),
    _object(2, [10, 65, 20, 20], 9, score=0.9),
]


def _iou(one: list[float], other: list[float]) -> float:
    sides = [max(0.0, min(one[a] + one[a + 2], other[a] + other[a + 2]) - max(one[a], other[a])) for a in (0, 1)]
    common = sides[0] * sides[1]
    return common / (one[2] * one[3] + other[2] * other[3] - common)


def _average_precision(category: int, threshold: float) -> float:
    """By the definition: interpolated precision at 101 recalls; what falls into a crowd counts neither way."""
    truth = [one for one in TRUTH if one["category_id"] == category]
    single = [one for one in truth if not one.get("iscrowd")]
    crowds = [one for one in truth if one.get("iscrowd")]
    matched: set[int] = set()
    right: list[bool] = []
    for found in sorted((one for one in FOUND if one["category_id"] == category), key=lambda one: -one["score"]):
        overlaps = [
            (_iou(found["bbox"], one["bbox"]), place)
            for place, one in enumerate(single)
            if one["image_id"] == found["image_id"] and place not in matched
        ]
        best = max(overlaps, default=(0.0, -1))
        if best[0] >= threshold:
            matched.add(best[1])
            right.append(True)
        elif not any(crowd["image_id"] == found["image_id"] for crowd in crowds) or found["bbox"] != [10, 65, 20, 20]:
            right.append(False)
    hits = np.cumsum(right)
    recall, precision = hits / len(single), hits / np.arange(1, len(right) + 1)
    return float(np.mean([max(precision[recall >= at], default=0.0) for at in np.linspace(0, 1, 101)]))


def test_agrees_with_an_independent_computation() -> None:
    measured = measure(IMAGES, TRUTH, FOUND, CATEGORIES)
    thresholds = np.linspace(0.5, 0.95, 10)
    table = {number: [_average_precision(number, at) for at in thresholds] for number in (4, 9)}
    assert 0.2 < np.mean(table[4]) < 0.8
    assert measured.overall["AP"] == pytest.approx(100 * np.mean([table[4], table[9]]))
    assert measured.overall["AP50"] == pytest.approx(50 * (table[4][0] + table[9][0]))
    assert measured.overall["AP75"] == pytest.approx(50 * (table[4][5] + table[9][5]))
    assert measured.by_category == pytest.approx({"cat": 100 * np.mean(table[4]), "dog": 100 * np.mean(table[9])})


def test_measures_of_nothing() -> None:
    """Without results, precision is 0; without objects, there is none."""
    overall = measure(IMAGES, TRUTH, [], CATEGORIES).overall
    assert (overall["AP"], overall["AR100"]) == (0, 0)
    overall, by_category = measure(IMAGES, TRUTH[:1], FOUND, CATEGORIES)
    assert by_category["cat"] > 0
    assert isnan(by_category["dog"])
    assert isnan(overall["APs"])


def test_sizes_of_masks_are_their_own_areas() -> None:
    """A thin diagonal in a large box is a small object, and compared as such."""
    line = np.eye(100, dtype=np.uint8)
    mask = {"segmentation": run_lengths(line)}
    truth = [{**_object(1, [0, 0, 100, 100]), "area": 100, **mask}]
    found = [_object(1, [0, 0, 100, 100], score=1.0, **mask)]
    boxes, masks = (measure(IMAGES, truth, found, CATEGORIES, masks=masks).overall for masks in (False, True))
    assert masks["APs"] == pytest.approx(100)
    assert isnan(masks["APl"])
    assert boxes["AP"] == pytest.approx(100)


def test_pycocotools_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    measure(IMAGES, TRUTH, FOUND, CATEGORIES)
    assert capsys.readouterr() == ("", "")


class Seer(nn.Module):
    """A "detector" that knows the built-in data by heart, but moves boxes and masks by the ``blur`` of an image."""

    def __init__(self, data: Any, *, masks: bool = True) -> None:
        super().__init__()
        self.masks = masks
        self.known = {}
        for index in range(len(data)):
            image, target = data.read(index)
            self.known[image.size, np.asarray(image).sum()] = target
        self.calls = 0

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        assert not self.training
        self.calls += 1
        (image,) = images
        key = (image.shape[2], image.shape[1]), int((image * 255).round().sum())
        target: Target | None = self.known.get(key)
        if target is None:
            return [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long(), "scores": torch.zeros(0)}]
        shift = target.image_id % 5
        output = {
            "boxes": target.boxes + shift,
            "labels": target.labels,
            "scores": torch.linspace(0.9, 0.1, len(target.labels)),
        }
        if self.masks and target.masks is not None:
            output["masks"] = target.masks.roll((shift, shift), (1, 2))[:, None].float()
        return [output]


@pytest.fixture
def garments(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The built-in validation images, but only seven of them, and small ones."""
    monkeypatch.setattr("vision_longformer.detection.garments.VALIDATION_IMAGES", 7)
    return open_detection("garments:160", "validation")


def _collected(model: Seer, share: DetectionShare) -> Collected:
    own = Collected()
    for image, target in share.images():
        own.add(image, target, model.eval()([image])[0], share.categories)
    return own


def test_a_model_is_evaluated_and_left_as_it_was(garments: Any) -> None:
    model = Seer(garments).train()
    told: list[tuple[int, int]] = []
    result = evaluate_detector(model, DetectionShare(garments), torch.device("cpu"), lambda *done: told.append(done))
    assert model.training
    assert told == [(done, 7) for done in range(1, 8)]
    assert (result.images, result.skipped, model.calls) == (7, 0, 7)
    assert result.masks is not None
    assert 10 < result.boxes.overall["AP"] < 90
    assert 5 < result.masks.overall["AP"] < result.boxes.overall["AP"]
    boxes, masks = result.per_category["Bag"]
    assert (boxes, masks) == (result.boxes.by_category["Bag"], result.masks.by_category["Bag"])
    first = result.detections[0]
    assert set(first) == {"image_id", "category_id", "bbox", "score", "segmentation"}
    assert first["segmentation"]["size"] == [garments.read(0)[0].height, garments.read(0)[0].width]


def test_detectors_without_masks(garments: Any) -> None:
    result = evaluate_detector(Seer(garments, masks=False), DetectionShare(garments), torch.device("cpu"))
    assert result.masks is None
    assert result.per_category["Bag"][1] is None
    assert "segmentation" not in result.detections[0]


@pytest.mark.parametrize("processes", [2, 3])
def test_shares_together_give_the_same_result(garments: Any, processes: int) -> None:
    model = Seer(garments)
    alone = evaluate_detector(model, DetectionShare(garments), torch.device("cpu"))
    shares = [DetectionShare(garments, process=Process(rank, processes)) for rank in range(processes)]
    together = result_of(Collected.joined(_collected(model, share) for share in shares), garments.categories)
    assert together.boxes.overall == alone.boxes.overall
    assert together.masks is not None
    assert alone.masks is not None
    assert together.masks.by_category == pytest.approx(alone.masks.by_category, nan_ok=True)
    assert together.detections == alone.detections


WORKER = """
import sys, json, torch
from torch import distributed
sys.path.insert(0, sys.argv[1])
import vision_longformer.detection.garments as built_in
built_in.VALIDATION_IMAGES = 5
from test_detection_evaluate import Seer
from vision_longformer.classification.dataset import Process
from vision_longformer.detection.dataset import open_detection
from vision_longformer.detection.evaluate import evaluate_detector
from vision_longformer.detection.dataset import DetectionShare
rank, count = int(sys.argv[2]), int(sys.argv[3])
if count > 1:
    distributed.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=count)
data = open_detection("garments:96", "validation")
model = Seer(data)
result = evaluate_detector(model, DetectionShare(data, process=Process(rank, count)), torch.device("cpu"))
values = [result.boxes.overall[name] for name in ("AP", "AR100")] + [result.masks.overall["AP50"]]
print(json.dumps([values, result.images, len(result.detections), model.calls]))
"""


def _run_workers(folder: Path, count: int) -> list[Any]:
    script = folder / "worker.py"
    script.write_text(WORKER)
    arguments = [sys.executable, str(script), str(Path(__file__).parent)]
    workers = [
        subprocess.Popen([*arguments, str(rank), str(count), str(folder / "store")], stdout=subprocess.PIPE)
        for rank in range(count)
    ]
    return [json.loads(worker.communicate(timeout=600)[0]) for worker in workers]


@pytest.mark.slow
def test_two_processes_give_the_same_result_as_one(tmp_path: Path) -> None:
    """All processes learn it, and run the model equally often; only the main one has the detections."""
    ((values, images, detections, calls),) = _run_workers(tmp_path, 1)
    assert (images, calls) == (5, 5)
    assert _run_workers(tmp_path, 2) == [[values, 5, detections, 3], [values, 5, 0, 3]]


def test_nothing_that_can_be_read(garments: Any) -> None:
    with pytest.raises(ValueError, match="none of the 3 images could be read"):
        result_of(Collected(skipped=3), garments.categories)


NAMES = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]


def test_command(garments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table for people, JSON for programs, and everything that was found in COCO's format."""
    checkpoint = str(write_detector(tmp_path / "detector.safetensors", NAMES))
    results = tmp_path / "results.json"
    options: dict[str, Any] = {"data": "garments:160", "workers": 0, "per_category": True}
    detect_evaluate(checkpoint, results=str(results), **options)
    output = capsys.readouterr().out
    assert all(text in output for text in ("7 images", "boxes", "masks", "AP75", "mask AP", "Ankle boot"))
    found = json.loads(results.read_text())
    assert len(found) == 7 * 5
    assert {one["image_id"] for one in found} == set(range(1, 8))
    detect_evaluate(checkpoint, json=True, **options)
    told = json.loads(capsys.readouterr().out)
    assert (told["images"], told["skipped"], set(told["boxes"])) == (7, 0, set(MEASURES))
    assert [one["category"] for one in told["categories"]] == NAMES
    expected = evaluate(checkpoint, "garments:160", workers=0)
    assert told["boxes"]["AP"] == expected.boxes.overall["AP"]
    with pytest.raises(FileExistsError, match=r"results\.json exists"):
        detect_evaluate(checkpoint, results=str(results), **options)


def test_boxes_alone(garments: Any, tmp_path: Path) -> None:
    checkpoint = write_detector(tmp_path / "detector.safetensors", None, kind="retinanet")
    assert evaluate(checkpoint, "garments:160", workers=0).masks is None


def test_checkpoints_that_do_not_fit(garments: Any, tmp_path: Path) -> None:
    other = write_detector(tmp_path / "cats.safetensors", ["cat", "dog"], num_classes=2)
    with pytest.raises(ValueError, match="garments:160 lacks class 'cat', which the model has"):
        evaluate(other, "garments:160", workers=0)
    unnamed = write_detector(tmp_path / "unnamed.safetensors", None, num_classes=3)
    with pytest.raises(ValueError, match=r"has 10 categories, but the detector in .* tells 3 apart"):
        evaluate(unnamed, "garments:160", workers=0)
    half = write_detector(tmp_path / "half.safetensors", ["cat"], num_classes=3)
    with pytest.raises(CheckpointError, match="names 1 categories, but its detector tells 3 apart"):
        evaluate(half, "garments:160", workers=0)
    classifier = save(build("two_stages"), tmp_path / "classifier.safetensors")
    with pytest.raises(CheckpointError, match=r"classifier\.safetensors is a classifier"):
        evaluate(classifier, "garments:160", workers=0)
