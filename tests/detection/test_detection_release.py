"""Released detectors: each converted part computes what its plain form under detectron2's names does."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vision_longformer import load_release
from vision_longformer.cli.convert import detect_convert
from vision_longformer.detection.config import DetectorConfig
from vision_longformer.detection.export import open_detector
from vision_longformer.detection.release import load_release_detector
from vision_longformer.errors import CheckpointError

ENTRY: dict[str, Any] = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "assets" / "checkpoint_keys.json.gz").read_bytes())
)["models"]["vil_tiny_rpb_224_all_s1"]
"""Names and shapes of a released backbone with Longformer attention in all stages."""

CLASSES, CHANNELS, WIDTH, DIMS = 4, 8, 12, (48, 96, 192, 384)
OPTIONS = {"channels": CHANNELS, "box_width": WIDTH, "mask_channels": CHANNELS, "mask_layers": 2}


def _layers(detector: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights beside the backbone, under the names of the release."""
    first = 2 if detector == "mask_rcnn" else 3
    square = (CHANNELS, CHANNELS, 3, 3)
    shapes: dict[str, tuple[int, ...]] = {}
    for level in range(first, 6):
        shapes[f"backbone.fpn_lateral{level}"] = (CHANNELS, DIMS[level - 2], 1, 1)
        shapes[f"backbone.fpn_output{level}"] = square
    if detector == "mask_rcnn":
        shapes |= {
            "proposal_generator.rpn_head.conv": square,
            "proposal_generator.rpn_head.objectness_logits": (3, CHANNELS, 1, 1),
            "proposal_generator.rpn_head.anchor_deltas": (12, CHANNELS, 1, 1),
            "roi_heads.box_head.fc1": (WIDTH, CHANNELS * 49),
            "roi_heads.box_head.fc2": (WIDTH, WIDTH),
            "roi_heads.box_predictor.cls_score": (CLASSES + 1, WIDTH),
            "roi_heads.box_predictor.bbox_pred": (4 * CLASSES, WIDTH),
            "roi_heads.mask_head.mask_fcn1": square,
            "roi_heads.mask_head.mask_fcn2": square,
            "roi_heads.mask_head.deconv": (CHANNELS, CHANNELS, 2, 2),
            "roi_heads.mask_head.predictor": (CLASSES, CHANNELS, 1, 1),
        }
        return shapes
    for layer in (0, 2, 4, 6):
        shapes |= {f"head.cls_subnet.{layer}": square, f"head.bbox_subnet.{layer}": square}
    shapes |= {"head.cls_score": (9 * CLASSES, CHANNELS, 3, 3), "head.bbox_pred": (36, CHANNELS, 3, 3)}
    return shapes | {"backbone.top_block.p6": (CHANNELS, DIMS[-1], 3, 3), "backbone.top_block.p7": square}


def _state(detector: str) -> dict[str, Tensor]:
    """Random weights of a whole released detector, with its constants and its unused classifier."""
    generator = torch.Generator().manual_seed(5)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    backbone = {
        name: torch.zeros(shape, dtype=torch.int64) if name.endswith("index") else drawn(tuple(shape))
        for name, shape in ENTRY["keys"].items()
    }
    state = {f"backbone.bottom_up.{name}": backbone[ENTRY["shared"].get(name, name)] for name in backbone}
    for name, shape in _layers(detector).items():
        outputs = shape[1] if name.endswith("deconv") else shape[0]
        state |= {f"{name}.weight": drawn(shape), f"{name}.bias": drawn((outputs,))}
    return state | {"pixel_mean": torch.zeros(3), "anchor_generator.cell_anchors.0": torch.zeros(3, 4)}


def _config(detector: str, **options: Any) -> DetectorConfig:
    return DetectorConfig(detector, "vision_longformer_tiny", CLASSES).override(**{**OPTIONS, **options})


@pytest.fixture(scope="module", params=["mask_rcnn", "retinanet"])
def any_pair(request: pytest.FixtureRequest) -> tuple[dict[str, Tensor], Any]:
    return _pair(request.param)


@pytest.fixture(scope="module")
def mask_pair() -> tuple[dict[str, Tensor], Any]:
    return _pair("mask_rcnn")


@pytest.fixture(scope="module")
def retina_pair() -> tuple[dict[str, Tensor], Any]:
    return _pair("retinanet")


def _pair(detector: str) -> tuple[dict[str, Tensor], Any]:
    state = _state(detector)
    return state, load_release_detector({"model": state, "iteration": 7}, _config(detector))


def _conv(state: dict[str, Tensor], name: str, image: Tensor, **options: Any) -> Tensor:
    weight = state[f"{name}.weight"]
    return F.conv2d(image, weight, state[f"{name}.bias"], padding=weight.shape[-1] // 2, **options)


def test_backbone(any_pair: tuple[dict[str, Tensor], Any]) -> None:
    state, model = any_pair
    prefix = "backbone.bottom_up."
    net = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    reference = load_release({"net": net, "arch": "msvit"}, arch=ENTRY["arch"])
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = reference.forward_intermediates(image, intermediates_only=True)
        got = model.backbone.body(image)
    for level, wanted in zip(got, expected[-len(got) :], strict=True):
        torch.testing.assert_close(level, wanted)


def test_pyramid(any_pair: tuple[dict[str, Tensor], Any]) -> None:
    state, model = any_pair
    levels = [stage + 1 for stage in model.config.levels]
    maps = {level: torch.randn(1, DIMS[level - 2], 128 // 2**level, 192 // 2**level) for level in levels}
    got = list(model.backbone.fpn({str(level): one for level, one in maps.items()}).values())
    merged: Tensor | None = None
    for index, level in reversed(list(enumerate(levels))):
        lateral = _conv(state, f"backbone.fpn_lateral{level}", maps[level])
        merged = lateral if merged is None else lateral + merged.repeat_interleave(2, 2).repeat_interleave(2, 3)
        torch.testing.assert_close(got[index], _conv(state, f"backbone.fpn_output{level}", merged))
    if model.config.kind == "mask_rcnn":
        torch.testing.assert_close(got[-1], got[-2][:, :, ::2, ::2])
        return
    p6 = _conv(state, "backbone.top_block.p6", maps[5], stride=2)
    torch.testing.assert_close(got[-2], p6)
    torch.testing.assert_close(got[-1], _conv(state, "backbone.top_block.p7", p6.relu(), stride=2))


def test_proposals(mask_pair: tuple[dict[str, Tensor], Any]) -> None:
    state, model = mask_pair
    image = torch.randn(2, CHANNELS, 5, 7)
    hidden = _conv(state, "proposal_generator.rpn_head.conv", image).relu()
    scores, deltas = model.rpn.head([image])
    torch.testing.assert_close(scores[0], _conv(state, "proposal_generator.rpn_head.objectness_logits", hidden))
    torch.testing.assert_close(deltas[0], _conv(state, "proposal_generator.rpn_head.anchor_deltas", hidden))


def test_boxes_have_background_first(mask_pair: tuple[dict[str, Tensor], Any]) -> None:
    state, model = mask_pair
    regions = torch.randn(3, CHANNELS, 7, 7)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"roi_heads.{name}.weight"].t() + state[f"roi_heads.{name}.bias"]

    hidden = linear("box_head.fc2", linear("box_head.fc1", regions.flatten(1)).relu()).relu()
    scores, deltas = model.roi_heads.box_predictor(model.roi_heads.box_head(regions))
    theirs = linear("box_predictor.cls_score", hidden)
    torch.testing.assert_close(scores[:, 0], theirs[:, CLASSES])
    torch.testing.assert_close(scores[:, 1:], theirs[:, :CLASSES])
    torch.testing.assert_close(deltas[:, 4:], linear("box_predictor.bbox_pred", hidden))


def test_masks_follow_their_classes(mask_pair: tuple[dict[str, Tensor], Any]) -> None:
    state, model = mask_pair
    regions = hidden = torch.randn(3, CHANNELS, 14, 14)
    for layer in (1, 2):
        hidden = _conv(state, f"roi_heads.mask_head.mask_fcn{layer}", hidden).relu()
    weight, bias = (state[f"roi_heads.mask_head.deconv.{part}"] for part in ("weight", "bias"))
    up = F.conv_transpose2d(hidden, weight, bias, stride=2).relu()
    masks = model.roi_heads.mask_predictor(model.roi_heads.mask_head(regions))
    torch.testing.assert_close(masks[:, 1:], _conv(state, "roi_heads.mask_head.predictor", up))


def test_dense_heads(retina_pair: tuple[dict[str, Tensor], Any]) -> None:
    """Scores and boxes of each cell's nine anchors, cell by cell."""
    state, model = retina_pair
    image = torch.randn(1, CHANNELS, 3, 2)
    got = model.head([image])
    for subnet, last, name, width in (
        ("cls_subnet", "cls_score", "cls_logits", CLASSES),
        ("bbox_subnet", "bbox_pred", "bbox_regression", 4),
    ):
        hidden = image
        for layer in (0, 2, 4, 6):
            hidden = _conv(state, f"head.{subnet}.{layer}", hidden).relu()
        out = _conv(state, f"head.{last}", hidden)
        for row, column, anchor in ((0, 0, 0), (1, 1, 4), (2, 0, 8)):
            expected = out[0, width * anchor : width * (anchor + 1), row, column]
            torch.testing.assert_close(got[name][0, (row * 2 + column) * 9 + anchor], expected)


def test_detects_from_a_file(tmp_path: Path) -> None:
    """A file gives the detector of its dict, whose first class is label 1."""
    state = _state("mask_rcnn")
    state["roi_heads.box_predictor.cls_score.bias"] = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0])
    torch.save({"model": state}, tmp_path / "model.pth")
    model: Any = load_release_detector(tmp_path / "model.pth", _config("mask_rcnn", min_size=(64,), max_size=96))
    with torch.no_grad():
        result = model([torch.rand(3, 64, 96)])[0]
    assert set(result["labels"][:10].tolist()) == {1}
    assert result["scores"][0] > 0.9


def test_other_detectors_are_refused(tmp_path: Path) -> None:
    state = _state("mask_rcnn")
    with pytest.raises(
        CheckpointError, match=r"does not match the detector of the configuration[^\n]*\n24 missing:\n  backbone\.top"
    ):
        load_release_detector({"model": state}, _config("retinanet"))
    with pytest.raises(CheckpointError, match=r"do not fit the detector[^\n]*\n  roi_heads\.box_predictor\.cls_score"):
        load_release_detector({"model": state}, _config("mask_rcnn", num_classes=3))
    with pytest.raises(CheckpointError, match="has no weights under 'model'"):
        load_release_detector({"net": state}, _config("mask_rcnn"))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_release_detector(tmp_path / "none.pth", _config("mask_rcnn"))
    with pytest.raises(ValueError, match="released detectors with absolute position"):
        load_release_detector({"model": state}, _config("mask_rcnn", backbone="vision_longformer_tiny_ape"))
    with pytest.raises(ValueError, match="the backbone resnet18 is timm's"):
        load_release_detector({"model": state}, _config("mask_rcnn", backbone="resnet18"))


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A detector of the paper's size is written with the names and ids of COCO's categories."""
    monkeypatch.setitem(globals(), "CLASSES", 80)
    monkeypatch.setitem(globals(), "CHANNELS", 256)
    state = _state("retinanet")
    torch.save({"model": state}, tmp_path / "released.pth")
    converted = tmp_path / "ours.safetensors"
    detect_convert(str(tmp_path / "released.pth"), str(converted), model="vision_longformer_tiny", detector="retinanet")
    assert "retinanet on vision_longformer_tiny, 16.2" in capsys.readouterr().out
    detector = open_detector(converted)
    assert torch.equal(detector.model.get_parameter("head.regression_head.bbox_reg.bias"), state["head.bbox_pred.bias"])
    named = {category.id: category.name for category in detector.categories}
    assert (len(named), named[1], named[90]) == (80, "person", "toothbrush")
    with pytest.raises(FileExistsError, match="exists"):
        detect_convert(
            str(tmp_path / "released.pth"), str(converted), model="vision_longformer_tiny", detector="retinanet"
        )
