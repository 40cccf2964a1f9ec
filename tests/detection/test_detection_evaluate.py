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
from builders import COCO_HEIGHT, COCO_WIDTH, build, coco_annotation, coco_content, write_coco, write_detector
from torch import Tensor, distributed, nn

from vision_longformer import save
from vision_longformer.cli.detect.evaluate import detect_evaluate
from vision_longformer.data.order import Process
from vision_longformer.detection.checkpoint import Detector
from vision_longformer.detection.config import DetectorConfig
from vision_longformer.detection.dataset import EvalSet, open_detection
from vision_longformer.detection.detections import Category, Target, encode_rle
from vision_longformer.detection.evaluate import METRICS, CocoRecords, coco_metrics, evaluate, evaluate_detector
from vision_longformer.errors import CheckpointError

CATEGORIES = (Category(4, "cat"), Category(9, "dog"))
IMAGES = [{"id": 1, "height": 100, "width": 100}, {"id": 2, "height": 100, "width": 100}]


def _object(image: int, box: list[float], category: int = 4, **more: Any) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "bbox": box, "area": box[2] * box[3], **more}


ANNOTATIONS = [
    _object(1, [10, 10, 40, 40]),
    _object(1, [60, 60, 20, 20]),
    _object(2, [0, 0, 50, 50]),
    _object(2, [60, 0, 30, 30], 9),
    _object(2, [0, 60, 90, 30], 9, iscrowd=1),
]
DETECTIONS = [
    _object(1, [12, 10, 40, 40], score=0.9),
    _object(1, [11, 11, 40, 40], score=0.8),
    _object(1, [60, 64, 20, 20], score=0.7),
    _object(2, [5, 5, 50, 50], score=0.6),
    _object(2, [70, 70, 20, 20], score=0.95),
    _object(2, [61, 1, 30, 30], 9, score=0.5),
    _object(2, [10, 65, 20, 20], 9, score=0.9),
]
IN_CROWD = DETECTIONS[-1]


def _iou(one: list[float], other: list[float]) -> float:
    sides = [max(0.0, min(one[a] + one[a + 2], other[a] + other[a + 2]) - max(one[a], other[a])) for a in (0, 1)]
    common = sides[0] * sides[1]
    return common / (one[2] * one[3] + other[2] * other[3] - common)


def _average_precision(category: int, threshold: float) -> float:
    """By the definition: interpolated precision at 101 recalls; what falls into a crowd counts neither way."""
    single = [one for one in ANNOTATIONS if one["category_id"] == category and not one.get("iscrowd")]
    matched: set[int] = set()
    right: list[bool] = []
    detections = [one for one in DETECTIONS if one["category_id"] == category]
    for detection in sorted(detections, key=lambda one: -one["score"]):
        overlaps = [
            (_iou(detection["bbox"], one["bbox"]), index)
            for index, one in enumerate(single)
            if one["image_id"] == detection["image_id"] and index not in matched
        ]
        best = max(overlaps, default=(0.0, -1))
        if best[0] >= threshold:
            matched.add(best[1])
            right.append(True)
        elif detection is not IN_CROWD:
            right.append(False)
    hits = np.cumsum(right)
    recall, precision = hits / len(single), hits / np.arange(1, len(right) + 1)
    return float(np.mean([max(precision[recall >= at], default=0.0) for at in np.linspace(0, 1, 101)]))


def test_agrees_with_an_independent_computation() -> None:
    metrics = coco_metrics(IMAGES, ANNOTATIONS, DETECTIONS, CATEGORIES)
    thresholds = np.linspace(0.5, 0.95, 10)
    table = {number: [_average_precision(number, at) for at in thresholds] for number in (4, 9)}
    assert 0.2 < np.mean(table[4]) < 0.8
    assert metrics.overall["AP"] == pytest.approx(100 * np.mean([table[4], table[9]]))
    assert metrics.overall["AP50"] == pytest.approx(50 * (table[4][0] + table[9][0]))
    assert metrics.overall["AP75"] == pytest.approx(50 * (table[4][5] + table[9][5]))
    assert metrics.by_category == pytest.approx({"cat": 100 * np.mean(table[4]), "dog": 100 * np.mean(table[9])})


def test_categories_of_equal_names_are_kept_apart() -> None:
    same = [category._replace(name="cat") for category in CATEGORIES]
    apart = coco_metrics(IMAGES, ANNOTATIONS, DETECTIONS, CATEGORIES).by_category
    together = coco_metrics(IMAGES, ANNOTATIONS, DETECTIONS, same).by_category
    assert together == pytest.approx({"cat (id 4)": apart["cat"], "cat (id 9)": apart["dog"]})


def test_metrics_of_nothing() -> None:
    """Without results, precision is 0; without objects, there is none."""
    overall = coco_metrics(IMAGES, ANNOTATIONS, [], CATEGORIES).overall
    assert (overall["AP"], overall["AR100"]) == (0, 0)
    overall, by_category = coco_metrics(IMAGES, ANNOTATIONS[:1], DETECTIONS, CATEGORIES)
    assert by_category["cat"] > 0
    assert isnan(by_category["dog"])
    assert isnan(overall["APs"])


def test_sizes_of_masks_are_their_own_areas() -> None:
    """A thin diagonal in a large box is a small object, and compared as such."""
    line = np.eye(100, dtype=np.uint8)
    mask = {"segmentation": encode_rle(line)}
    annotations = [{**_object(1, [0, 0, 100, 100]), "area": 100, **mask}]
    detections = [_object(1, [0, 0, 100, 100], score=1.0, **mask)]
    boxes, masks = (
        coco_metrics(IMAGES, annotations, detections, CATEGORIES, masks=masks).overall for masks in (False, True)
    )
    assert masks["APs"] == pytest.approx(100)
    assert isnan(masks["APl"])
    assert boxes["AP"] == pytest.approx(100)


def test_pycocotools_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    coco_metrics(IMAGES, ANNOTATIONS, DETECTIONS, CATEGORIES)
    assert capsys.readouterr() == ("", "")


class Oracle(nn.Module):
    """A "detector" that knows the data by heart, but moves boxes and masks by the image's id modulo 5."""

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


def _records(model: Oracle, eval_set: EvalSet) -> CocoRecords:
    own = CocoRecords()
    for image, target in eval_set.images():
        own.add(image, target, model.eval()([image])[0], eval_set.categories)
    return own


def test_a_model_is_evaluated_and_left_as_it_was(garments: Any) -> None:
    model = Oracle(garments).train()
    reported: list[tuple[int, int]] = []
    result = evaluate_detector(
        model, EvalSet(garments), torch.device("cpu"), progress=lambda *done: reported.append(done)
    )
    assert model.training
    assert reported == [(done, 7) for done in range(1, 8)]
    assert (result.images, result.skipped, model.calls) == (7, (), 7)
    assert result.masks is not None
    assert 10 < result.boxes.overall["AP"] < 90
    assert 5 < result.masks.overall["AP"] < result.boxes.overall["AP"]
    boxes, masks = result.per_category["Bag"]
    assert (boxes, masks) == (result.boxes.by_category["Bag"], result.masks.by_category["Bag"])
    first = result.detections[0]
    assert set(first) == {"image_id", "category_id", "bbox", "score", "segmentation"}
    assert first["segmentation"]["size"] == [garments.read(0)[0].height, garments.read(0)[0].width]


def test_detectors_without_masks(garments: Any) -> None:
    result = evaluate_detector(Oracle(garments, masks=False), EvalSet(garments), torch.device("cpu"))
    assert result.masks is None
    assert result.per_category["Bag"][1] is None
    assert "segmentation" not in result.detections[0]


@pytest.mark.parametrize("processes", [2, 3])
def test_shares_together_give_the_same_result(garments: Any, processes: int) -> None:
    model = Oracle(garments)
    alone = evaluate_detector(model, EvalSet(garments), torch.device("cpu"))
    eval_sets = [EvalSet(garments, process=Process(rank, processes)) for rank in range(processes)]
    together = CocoRecords.joined(_records(model, eval_set) for eval_set in eval_sets).result(garments.categories)
    assert together.boxes.overall == alone.boxes.overall
    assert together.masks is not None
    assert alone.masks is not None
    assert together.masks.by_category == pytest.approx(alone.masks.by_category, nan_ok=True)
    assert together.detections == alone.detections


class Stub(nn.Module):
    """A detector with the given output for each image, by the blue of :func:`builders.write_coco`."""

    def __init__(self, outputs: dict[int, dict[str, Tensor]]) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.outputs[round(float(image[2, 0, 0]) * 255)] for image in images]


def _output(*objects: tuple[list[int], float]) -> dict[str, Tensor]:
    """Trains, each of which fills its box [left, top, right, bottom], with their scores."""
    masks = torch.zeros(len(objects), 1, COCO_HEIGHT, COCO_WIDTH)
    for mask, ((left, top, right, bottom), _) in zip(masks, objects, strict=True):
        mask[0, top:bottom, left:right] = 1
    return {
        "boxes": torch.tensor([box for box, _ in objects], dtype=torch.float32).view(-1, 4),
        "labels": torch.ones(len(objects), dtype=torch.int64),
        "scores": torch.tensor([score for _, score in objects]),
        "masks": masks,
    }


def test_a_crowd_through_the_whole_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detection inside a crowd is neither right nor wrong, and the crowd is no object to be found.

    Of two objects, the detector finds one exactly, after a better-scored detection inside the crowd: precision is 1 up
    to a recall of 1/2, which 51 of the 101 recalls 0, 0.01, …, 1 reach, at every IoU. If the crowd were an object, the
    precision would be 1/2 up to a recall of 1/3; if it were left out, 1/2 up to a recall of 1/2.
    """
    runs = {"size": [COCO_HEIGHT, COCO_WIDTH], "counts": [20 * COCO_HEIGHT, 20 * COCO_HEIGHT]}  # the right half
    crowd = {"bbox": [20, 0, 20, COCO_HEIGHT], "area": 20 * COCO_HEIGHT, "iscrowd": 1, "segmentation": runs}
    annotations = [coco_annotation(1), coco_annotation(2, **crowd), coco_annotation(3, image=2)]
    data = write_coco(tmp_path, coco_content(annotations, images=2), "validation.json", "validation")
    square, inside_the_crowd = [5, 5, 15, 15], [22, 5, 32, 15]
    model = Stub({0: _output((inside_the_crowd, 0.9), (square, 0.8)), 1: _output()})
    categories = (Category(7, "train"), Category(18, "dog"), Category(90, "toothbrush"))
    detector = Detector(model, DetectorConfig("mask_rcnn", "vil", 3), categories, named=True)
    monkeypatch.setattr(sys.modules["vision_longformer.detection.evaluate"], "open_detector", lambda _: detector)
    result = evaluate("stub", str(data), workers=0)
    for metrics in (result.boxes, result.masks):
        assert metrics is not None
        for name in ("AP", "AP50", "AP75"):
            assert metrics.overall[name] == pytest.approx(100 * 51 / 101)
        assert metrics.overall["AR100"] == pytest.approx(50)
        assert metrics.by_category["train"] == pytest.approx(100 * 51 / 101)


def test_precision_of_an_evaluation(tmp_path: Path) -> None:
    """Matrix products of the model run in the dtype that the precision names."""
    data = open_detection(str(write_coco(tmp_path)), "train")
    dtypes = []

    class Recorder(nn.Module):
        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            dtypes.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            return [_output()]

    for precision in ("fp32", "bf16", "fp16"):
        evaluate_detector(Recorder(), EvalSet(data), torch.device("cpu"), precision)
    assert dtypes == [torch.float32] * 3 + [torch.bfloat16] * 3 + [torch.float16] * 3


def test_precision_of_a_checkpoint(garments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_detector(tmp_path / "detector.safetensors", None)
    dtypes = set()
    forward = nn.Conv2d.forward

    def recorded(self: nn.Conv2d, x: Tensor) -> Tensor:
        dtypes.add(forward(self, x).dtype)
        return forward(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", recorded)
    result = evaluate(checkpoint, "garments:160", workers=0, precision="bf16")
    assert dtypes == {torch.bfloat16}
    assert len(result.detections) == 7 * 5
    with pytest.raises(ValueError, match="unknown precision 'bf61'; did you mean 'bf16'"):
        evaluate(checkpoint, "garments:160", precision="bf61")
    with pytest.raises(ValueError, match=r"d\.onnx computes in the precision .*; leave out bf16"):
        evaluate("d.onnx", "garments:160", precision="bf16")


WORKER = """
import sys, json, torch
from torch import distributed
sys.path[:0] = sys.argv[1].split(":")
import vision_longformer.detection.garments as built_in
built_in.VALIDATION_IMAGES = 5
from test_detection_evaluate import Oracle
from vision_longformer.data.order import Process
from vision_longformer.detection.dataset import open_detection
from vision_longformer.detection.evaluate import evaluate_detector
from vision_longformer.detection.dataset import EvalSet
rank, count = int(sys.argv[2]), int(sys.argv[3])
if count > 1:
    distributed.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=count)
data = open_detection("garments:96", "validation")
model = Oracle(data)
result = evaluate_detector(model, EvalSet(data, process=Process(rank, count)), torch.device("cpu"))
values = [result.boxes.overall[name] for name in ("AP", "AR100")] + [result.masks.overall["AP50"]]
print(json.dumps([values, result.images, len(result.detections), model.calls]))
"""


def _run_workers(folder: Path, count: int) -> list[Any]:
    script = folder / "worker.py"
    script.write_text(WORKER)
    tests = Path(__file__).parents[1]
    arguments = [sys.executable, str(script), f"{tests}:{tests / 'detection'}"]
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
        CocoRecords(skipped=["a.png", "b.png", "c.png"]).result(garments.categories)


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
    """A table for people, JSON for programs, and everything that was detections in COCO's format."""
    checkpoint = str(write_detector(tmp_path / "detector.safetensors", NAMES))
    results = tmp_path / "results.json"
    options: dict[str, Any] = {"data": "garments:160", "workers": 0, "per_category": True}
    detect_evaluate(checkpoint, results=str(results), **options)
    output = capsys.readouterr().out
    assert all(text in output for text in ("7 images", "boxes", "masks", "AP75", "mask AP", "Ankle boot"))
    detections = json.loads(results.read_text())
    assert len(detections) == 7 * 5
    assert {one["image_id"] for one in detections} == set(range(1, 8))
    detect_evaluate(checkpoint, json=True, **options)
    reported = json.loads(capsys.readouterr().out)
    assert (reported["images"], reported["skipped"], set(reported["boxes"])) == (7, 0, set(METRICS))
    assert [one["category"] for one in reported["categories"]] == NAMES
    expected = evaluate(checkpoint, "garments:160", workers=0)
    assert reported["boxes"]["AP"] == expected.boxes.overall["AP"]
    with pytest.raises(FileExistsError, match=r"results\.json exists"):
        detect_evaluate(checkpoint, results=str(results), **options)


def test_the_command_closes_its_process_group(garments: Any, tmp_path: Path) -> None:
    """As a process that torchrun has started has to, before it ends."""
    checkpoint = write_detector(tmp_path / "detector.safetensors", NAMES)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        detect_evaluate(str(checkpoint), data="garments:160", workers=0)
        assert not distributed.is_initialized()
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def test_boxes_alone(garments: Any, tmp_path: Path) -> None:
    checkpoint = write_detector(tmp_path / "detector.safetensors", None, detector="retinanet")
    assert evaluate(checkpoint, "garments:160", workers=0).masks is None


def test_checkpoints_that_do_not_fit(garments: Any, tmp_path: Path) -> None:
    other = write_detector(tmp_path / "cats.safetensors", ["cat", "dog"], num_classes=2)
    with pytest.raises(ValueError, match="garments:160 lacks class 'cat', which the model has"):
        evaluate(other, "garments:160", workers=0)
    unnamed = write_detector(tmp_path / "unnamed.safetensors", None, num_classes=3)
    with pytest.raises(ValueError, match=r"has 10 categories, but the detector in .* has 3"):
        evaluate(unnamed, "garments:160", workers=0)
    half = write_detector(tmp_path / "half.safetensors", ["cat"], num_classes=3)
    with pytest.raises(CheckpointError, match="names 1 categories, but its detector has 3"):
        evaluate(half, "garments:160", workers=0)
    classifier = save(build("two_stages"), tmp_path / "classifier.safetensors")
    with pytest.raises(CheckpointError, match=r"classifier\.safetensors is a classifier"):
        evaluate(classifier, "garments:160", workers=0)
