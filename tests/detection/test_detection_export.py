"""Exported detectors: the graph, the file, and its use in place of the checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import paste_masks_in_image

from vision_longformer.cli import export as export_command
from vision_longformer.cli.detect.predict import detect_predict
from vision_longformer.cli.export import export
from vision_longformer.detection import export as detection_export
from vision_longformer.detection.backbone import ImageTransform
from vision_longformer.detection.checkpoint import save_detector
from vision_longformer.detection.config import DETECTORS, DetectorConfig
from vision_longformer.detection.detectors import build_detector
from vision_longformer.detection.export import (
    ExportedDetector,
    MaskRCNNGraph,
    RetinaNetGraph,
    export_detector,
    load_exported_detector,
    open_detector,
)
from vision_longformer.errors import CheckpointError
from vision_longformer.export import load_exported
from vision_longformer.export.runtime import ExportedModel
from vision_longformer.export.verify import Difference, ExportedFile, ExportError, compare
from vision_longformer.export.writers import SUFFIXES, trace
from vision_longformer.models import zoo

SIZE = (64, 90)
"""Not a multiple of the backbone's stride, so that the graph has to pad it."""

GRAPHS = {"retinanet": RetinaNetGraph, "mask_rcnn": MaskRCNNGraph}
CATEGORIES = [{"id": 10 * number, "name": name} for number, name in enumerate(("cat", "dog", "cow"), 1)]


def small(detector: str, **options: Any) -> Any:
    """A detector on two stages that finds much in every image, with weights large enough to matter."""
    torch.manual_seed(3)
    config = DetectorConfig(
        detector,
        "vil",
        3,
        levels=(1, 2),
        channels=8,
        min_size=(SIZE[0],),
        max_size=SIZE[1],
        box_width=16,
        mask_channels=8,
        mask_layers=1,
        score_threshold=0.2,
        detections=20,
    )
    model = build_detector(config.override(**options)).eval()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(0.15 * torch.randn_like(parameter))
    if detector == "retinanet":
        with torch.no_grad():
            model.head.classification_head.cls_logits.weight.mul_(0.2)  # scores that differ from 1 and from each other
            model.head.regression_head.bbox_reg.weight.mul_(0.2)
            model.head.classification_head.cls_logits.bias.add_(4)
    return model


def image(height: int, width: int) -> Tensor:
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(4))


def detect(model: nn.Module, picture: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return model([picture])[0]


EVERYTHING = {"score_threshold": 0.0, "nms_threshold": 1.0}


@pytest.mark.parametrize(
    ("detector", "options", "count"),
    [
        *((detector, {}, 20) for detector in DETECTORS),
        *((detector, {"detections": 7}, 7) for detector in DETECTORS),
        *((detector, {"score_threshold": 1.0}, 0) for detector in DETECTORS),
        pytest.param("mask_rcnn", {**EVERYTHING, "proposals": 3}, 9, id="three classes of three regions"),
    ],
)
def test_the_graph_finds_what_the_detector_finds(detector: str, options: dict[str, Any], count: int) -> None:
    """To the last bit, whatever limits their number, and also if there is nothing."""
    model, picture = small(detector, **options), image(*SIZE)
    expected = detect(model, picture)
    assert len(expected["boxes"]) == count
    assert count < 9 or len(expected["labels"].unique()) >= 2
    graph = GRAPHS[detector](model, SIZE).eval()
    with torch.no_grad():
        got = dict(zip(graph.outputs, graph(picture), strict=True))
    if "masks" in got:
        got["masks"] = paste_masks_in_image(got["masks"], got["boxes"], SIZE)
    assert set(got) == set(expected)
    for name in ("boxes", "labels", "scores"):
        assert torch.equal(got[name], expected[name]), name
    if "masks" in expected:  # sigmoids of other strides may round otherwise
        torch.testing.assert_close(got["masks"], expected["masks"], atol=1e-6, rtol=0)


def test_a_traced_mask_rcnn_finds_more_or_less() -> None:
    """Traced on an image with five objects, it finds none in a black one."""
    graph = MaskRCNNGraph(small("mask_rcnn", score_threshold=0.85), SIZE).eval()
    picture = image(*SIZE)
    traced = trace(graph, (picture,)).module()
    with torch.no_grad():
        got, expected, nothing = traced(picture), graph(picture), traced(torch.zeros_like(picture))
    assert [len(output) for output in (*got, *nothing)] == [5] * 4 + [0] * 4
    for output, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(output, wanted, atol=1e-3, rtol=1e-5)


def assert_same_objects(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same objects, whatever their order; of twenty, rounding may have decided otherwise about one."""
    agree = 0
    for index, box in enumerate(expected["boxes"]):
        near = (got["boxes"] - box).abs().amax(1) < 1e-2
        near &= (got["labels"] == expected["labels"][index]) & (
            (got["scores"] - expected["scores"][index]).abs() < 1e-4
        )
        if "masks" in expected:
            near &= (got["masks"] - expected["masks"][index]).abs().amax((1, 2, 3)) < 1e-3
        agree += int(near.any())
    assert len(got["boxes"]) == len(expected["boxes"]) >= 15
    assert agree >= len(expected["boxes"]) - 1


FILES = [
    ("retinanet", "onnx"),
    pytest.param(("retinanet", "pt2"), marks=pytest.mark.slow),
    pytest.param(("mask_rcnn", "onnx"), marks=pytest.mark.slow),
    pytest.param(("mask_rcnn", "pt2"), marks=pytest.mark.slow),
    *(pytest.param((detector, "openvino"), marks=pytest.mark.slow) for detector in DETECTORS),
]


@pytest.fixture(scope="module", params=FILES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A detector's checkpoint, and the file that ``vil export`` makes of it."""
    detector, format = request.param
    folder = tmp_path_factory.mktemp("export")
    checkpoint = save_detector(small(detector), folder / "d.safetensors", info={"categories": CATEGORIES})
    export(str(checkpoint), format=format, size=SIZE)
    return checkpoint, folder / f"d{SUFFIXES[format]}"


def test_a_file_in_place_of_the_checkpoint(files: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    checkpoint, file = files
    original, detector = open_detector(checkpoint), open_detector(file)
    assert detector[1:] == original[1:]
    assert isinstance(detector.model, ExportedDetector)
    assert detector.model.size == SIZE
    metadata = detector.model.metadata
    assert (metadata["kind"], metadata["dynamic"], metadata["size"]) == ("detector", False, list(SIZE))
    assert metadata["padding"] == [0.485, 0.456, 0.406]
    assert metadata["categories"] == CATEGORIES
    assert (metadata["alpha"], metadata["background"]) == ("composite", [255, 255, 255])
    for size in (SIZE, (2 * SIZE[0], 2 * SIZE[1])):
        picture = image(*size)
        assert_same_objects(detect(detector.model, picture), detect(original.model, picture))
    photo = tmp_path / "photo.png"
    Image.fromarray((255 * image(*SIZE)).byte().permute(1, 2, 0).numpy()).save(photo)
    results = []
    for model in files:
        detect_predict(str(model), [str(photo)], threshold=0.3, json=True)
        results.append(json.loads(capsys.readouterr().out))
    assert len(results[0]) > 5
    assert {one["category_id"] for one in results[1]} <= {10, 20, 30}
    scores = [sorted(one["score"] for one in objects) for objects in results]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)


def test_the_documented_names_are_those_of_a_file(files: tuple[Path, Path]) -> None:
    """All that the page has for detectors, and nothing else."""
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \| ([a-z, ]+) \| .+ \|$", page, re.MULTILINE)
    own = [names for names, kinds in rows if {"all", "detectors"} & set(kinds.split(", "))]
    assert set(re.findall(r"`(\w+)`", " ".join(own))) == set(load_exported(files[1]).metadata)


def exported_model(outputs: tuple[Tensor, ...], seen: list[Tensor], **metadata: Any) -> ExportedModel:
    """A file for images of 32×32 that finds the same in all of them."""

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(inputs[0])
        return outputs

    config = DetectorConfig("mask_rcnn", "vil", 3).to_dict()
    return ExportedModel(
        run, {"kind": "detector", "config": config, "size": [32, 32], "padding": [0.5] * 3, **metadata}
    )


def test_images_are_fitted_into_the_size_of_a_file() -> None:
    """A picture of 20×40 is shrunk to 16×32; what lies in the padding below is no object, nor part of one."""
    boxes = torch.tensor([[0.0, 0, 8, 8], [8, 8, 24, 24], [0, 20, 8, 28]])
    labels, scores, seen = torch.tensor([1, 2, 3]), torch.tensor([0.9, 0.8, 0.7]), []
    detector = ExportedDetector(exported_model((boxes, labels, scores, torch.ones(3, 1, 28, 28)), seen))
    (result,) = detector([torch.full((3, 20, 40), 0.25)])
    (whole,) = seen
    assert whole.shape == (3, 32, 32)
    assert (whole[:, :16] == 0.25).all()
    assert (whole[:, 16:] == 0.5).all()
    assert result["boxes"].tolist() == [[0, 0, 10, 10], [10, 10, 30, 20]]
    assert result["labels"].tolist() == [1, 2]
    assert result["scores"].tolist() == pytest.approx([0.9, 0.8])
    rows, columns = np.nonzero(result["masks"][1, 0].numpy() > 0.9)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (10, 19, 10, 29)


def test_an_image_has_the_size_that_the_detector_gives_it() -> None:
    """Limits of 32 make 32 × 19.61 of 31×19, which torchvision rounds down; a file of 24×24 is too small for that."""
    config = {**DetectorConfig("retinanet", "vil", 3).to_dict(), "min_size": [32], "max_size": 32}
    files = [ExportedDetector(exported_model((), [], config=config, size=[side, side])) for side in (32, 64, 24)]
    assert [one.resized_size(31, 19) for one in files] == [(32, 19), (32, 19), (24, 15)]
    (resized,) = ImageTransform(32, 32, [0.5] * 3, [1.0] * 3).eval()([torch.zeros(3, 31, 19)])[0].image_sizes
    assert resized == (32, 19)


def _two_photos() -> tuple[Difference, ...]:
    return Difference((3, 384, 384), 1e-7, 1.0), Difference((3, 384, 384), 2e-7, 0.5)


def test_the_command_tells_what_becomes_of_images_of_other_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**DetectorConfig("retinanet", "vil", 3).to_dict(), "min_size": [320, 384], "max_size": 512}
    (tmp_path / "d.pt2").touch()
    metadata = {"kind": "detector", "config": config, "size": (384, 384)}
    written = ExportedFile(tmp_path / "d.pt2", metadata, _two_photos())
    monkeypatch.setattr(export_command, "_export", lambda *_, **__: written)
    export("d.safetensors", str(tmp_path / "d.pt2"), format="pt2", overwrite=True)
    lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", lines[2].strip()) == ["images", "largest difference", "largest value of an output"]
    assert lines[4].split() == ["photo", "1,", "384×384", "1.0e-07", "1"]
    assert lines[5].split() == ["photo", "2,", "384×384", "2.0e-07", "0.5"]
    assert lines[-1] == (
        "the file takes images of 384×384; images of another shape are padded, so their scores differ slightly from "
        "the checkpoint's. If all your images have the same shape, export with --size HEIGHTxWIDTH: their size after "
        "scaling to at most 384 on the shorter and 512 on the longer side"
    )


def test_the_command_says_if_nothing_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.pt2").touch()
    config = DetectorConfig("retinanet", "vil", 3).to_dict()
    written = ExportedFile(tmp_path / "d.pt2", {"kind": "detector", "config": config, "size": (384, 384)}, ())
    monkeypatch.setattr(export_command, "_export", lambda *_, **__: written)
    export("d.safetensors", str(tmp_path / "d.pt2"), format="pt2", overwrite=True)
    wrote, nothing, _ = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {tmp_path / 'd.pt2'}: 0.0 MB"
    assert nothing == (
        "its detections could not be compared with the detector's: neither finds anything in the photos that come with "
        "this package. Compare what 'vil detect predict' finds in photos of your own with the file and with the "
        "checkpoint"
    )


def test_a_file_is_judged_by_the_detector_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what is traced: a graph that finds something else is noticed."""

    class Shifted(RetinaNetGraph):
        def detect(self, *inputs: Any) -> tuple[Tensor, ...]:
            boxes, *others = super().detect(*inputs)
            return boxes + 0.1, *others

    monkeypatch.setattr(detection_export, "export_verified", _compare_the_graph)
    differences = export_detector(small("retinanet"), tmp_path / "d.onnx", size=SIZE)
    assert [one.difference for one in differences] == [0, 0]  # type: ignore[attr-defined]
    monkeypatch.setattr(detection_export, "RetinaNetGraph", Shifted)
    with pytest.raises(ExportError, match=r"differs from its model by 0\.1 "):
        export_detector(small("retinanet"), tmp_path / "d.onnx", size=SIZE)


def _compare_the_graph(graph: nn.Module, examples: list[Any], path: Path, *, expected: Any, **options: Any) -> Any:
    """In place of ``export_verified``, without a file."""
    return [compare(graph, expected, example) for example in examples]


def test_a_detector_that_finds_nothing_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection_export, "export_verified", _compare_the_graph)
    assert export_detector(small("retinanet", score_threshold=1.0), tmp_path / "d.onnx", size=SIZE) == [None]


def test_photos_to_compare_on_show_something_that_is_well_decided() -> None:
    """The dark one has no detections, and those of the brightest one depend on the noise."""

    def graph(photo: Tensor) -> tuple[Tensor, ...]:
        count, label = int(photo.mean() > 0.25), int(photo.max() > 1)
        return torch.zeros(count, 4), torch.full((count,), label), torch.ones(count)

    photos = [torch.full((3, 8, 12), brightness) for brightness in (0.0, 0.5, 1.0)]
    (decided,) = detection_export._well_decided(graph, photos)  # type: ignore[arg-type]
    assert decided is photos[1]


def test_a_photo_with_undecided_detections_is_better_than_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a black, a white and a grey one, the white one has detections, whose label depends on the noise."""

    class Graph(nn.Module):
        size = (8, 12)

        def forward(self, photo: Tensor) -> tuple[Tensor, ...]:
            count = int(photo.mean() > 0.75)
            return torch.zeros(count, 4), torch.full((count,), int(photo.max() > 1)), torch.ones(count)

    shades = tuple(Image.new("RGB", (12, 8), (shade,) * 3) for shade in (0, 255, 128))
    monkeypatch.setattr(detection_export, "photo_parts", lambda training: shades)
    (photo,) = detection_export._comparison_photos(Graph())  # type: ignore[arg-type]
    assert photo.mean() == 1
    monkeypatch.setattr(detection_export, "photo_parts", lambda training: shades[::2])
    (photo,) = detection_export._comparison_photos(Graph())  # type: ignore[arg-type]
    assert photo.mean() == 0


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = str(save_detector(small("retinanet"), tmp_path / "d.safetensors"))
    with pytest.raises(ValueError, match=r"is a detector, which is exported for one size; give --size"):
        export(checkpoint, dynamic=True)
    with pytest.raises(ValueError, match=r"d\.pt2 should end in \.onnx"):
        export(checkpoint, str(tmp_path / "d.pt2"))
    with pytest.raises(ValueError, match="a Linear was not built by build_detector"):
        export_detector(nn.Linear(1, 1), tmp_path / "d.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"broken\.onnx is not a valid \.onnx file"):
        open_detector(tmp_path / "broken.onnx")
    for metadata, message in (
        (
            {"kind": "classifier"},
            r"x\.onnx is a classifier, which is for 'vil predict' and .*; a detector is needed here",
        ),
        ({"size": [0, 5]}, r"x\.onnx does not describe its detector \(image size is"),
        ({"padding": [0.5]}, r"x\.onnx does not describe its detector"),
    ):
        monkeypatch.setattr(
            detection_export, "load_exported", lambda path, given=metadata: exported_model((), [], **given)
        )
        with pytest.raises(CheckpointError, match=message):
            load_exported_detector("x.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_a_file_finds_more_or_less(format: str, tmp_path: Path) -> None:
    model = small("mask_rcnn", score_threshold=0.85)
    path = export_detector(model, tmp_path / f"d{SUFFIXES[format]}", format=format, size=SIZE).path
    detector = load_exported_detector(path)
    assert [len(detect(detector, picture)["masks"]) for picture in (image(*SIZE), torch.zeros(3, *SIZE))] == [5, 0]


@pytest.mark.slow
@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("format", SUFFIXES)
def test_detectors_on_vil_tiny(detector: str, format: str, tmp_path: Path) -> None:
    """At full width with one block per stage; scores are far apart, and twenty detections in every photo."""
    torch.manual_seed(0)
    stages = [{**stage, "depth": 1} for stage in zoo.MODELS["vision_longformer_tiny"].to_dict()["stages"]]
    threshold = {"retinanet": 0.05, "mask_rcnn": 0.2}[detector]
    config = DetectorConfig(detector, "vision_longformer_tiny", 5, {"stages": stages})
    model = build_detector(config.override(detections=20, score_threshold=threshold)).eval()
    if detector == "retinanet":
        nn.init.normal_(model.head.classification_head.cls_logits.weight, std=1)
    else:
        nn.init.normal_(model.roi_heads.box_predictor.cls_score.weight, std=0.05)
    path = tmp_path / f"d{SUFFIXES[format]}"
    exported = export_detector(model, path, format=format, size=(320, 320))
    assert len(exported.differences) == 2
    assert all(one.difference <= 1e-4 * one.largest for one in exported.differences)
    (photo, *_) = detection_export._comparison_photos(GRAPHS[detector](detection_export._plain_copy(model), (320, 320)))
    model.transform.min_size, model.transform.max_size = (320,), 320
    expected = detect(model, photo)
    assert len(expected["boxes"]) == 20
    assert_same_objects(detect(load_exported_detector(path), photo), expected)
