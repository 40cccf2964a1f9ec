"""Streamed detection: the whole detector's own pyramid, anchors, regions and detections, computed in windows."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import small_detector
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import paste_masks_in_image

from vision_longformer.detection import build_detector, stream_detections
from vision_longformer.detection import stream as streaming
from vision_longformer.detection.config import DETECTORS, DetectorConfig
from vision_longformer.detection.detections import Detection, detections_from_output
from vision_longformer.detection.stream import InputRows, Plan, mask_crops
from vision_longformer.detection.windows import (
    PyramidWindows,
    Window,
    anchor_boxes,
    best_anchors,
    pool_regions,
    windows,
)
from vision_longformer.geometry import Grid
from vision_longformer.large.memory import format_bytes

DOUBLE, SINGLE = torch.float64, torch.float32


def _image(height: int, width: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def _whole(model: Any, image: Tensor) -> list[Detection]:
    with torch.no_grad():
        return detections_from_output(model([image])[0])


def _assert_same(one: list[Detection], other: list[Detection], tolerance: float, size: tuple[int, int]) -> None:
    assert len(one) == len(other)
    assert [first.label for first in one] == [second.label for second in other]
    boxes = [torch.tensor([detection.box for detection in each]).view(-1, 4) for each in (one, other)]
    assert (boxes[0] - boxes[1]).abs().max() <= tolerance * max(size)
    scores = [torch.tensor([detection.score for detection in each]) for each in (one, other)]
    assert (scores[0] - scores[1]).abs().max() <= tolerance
    for first, second in zip(one, other, strict=True):
        assert (first.mask is None) == (second.mask is None)
        if first.mask is not None and second.mask is not None:
            unlike = np.count_nonzero(first.mask.on(*size) != second.mask.on(*size))
            assert unlike <= (0 if tolerance < 1e-8 else 2)  # probabilities next to one half


# Detections


@pytest.mark.parametrize("kind", DETECTORS)
@pytest.mark.parametrize(
    ("options", "size", "side"),
    [
        pytest.param({"scale": 1.0}, (131, 99), 4, id="as it is"),
        pytest.param({"scale": 1.0}, (33, 160), 256, id="one window"),
        pytest.param({"min_size": 100, "max_size": 150}, (97, 211), 6, id="the detector's own size"),
        pytest.param({"scale": 0.5, "levels": (2, 3)}, (201, 151), 5, id="smaller, other levels"),
        pytest.param({"scale": 1.3, "proposals": 20}, (65, 70), 4, id="larger, few candidates"),
    ],
)
def test_streamed_detections_are_the_detectors_own(
    kind: str, options: dict[str, Any], size: tuple[int, int], side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding in float64; and boxes reach over the borders of windows, which are ``side`` cells wide."""
    monkeypatch.setattr(streaming, "SIDES", (side,))
    model = small_detector(kind, **{"detections": 30, "proposals": 60, **options}).double().eval()
    image = _image(*size)
    expected = _whole(model, image)
    assert len(expected) > 20
    streamed = stream_detections(model, image, memory="500MB")
    _assert_same(expected, streamed, 1e-10, size)
    ratio = model.transform.resized_size(*size)[0] / size[0]
    border = side * model.backbone.strides[0] / ratio
    if side < 256:
        assert any(one.box[0] < border < one.box[2] and one.box[1] < border < one.box[3] for one in streamed)


@pytest.mark.parametrize("kind", DETECTORS)
def test_single_precision(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SIDES", (8,))
    model, image = small_detector(kind, proposals=60, scale=1.0).eval(), _image(140, 203, SINGLE)
    _assert_same(_whole(model, image), stream_detections(model, image), 1e-5, (140, 203))


@pytest.mark.parametrize("kind", DETECTORS)
def test_nothing_to_be_found(kind: str) -> None:
    """In a black image, with a threshold that nothing reaches: of the detector, or of the call."""
    model, black = small_detector(kind, scale=1.0, score_threshold=0.999).eval(), torch.zeros(3, 70, 50)
    assert _whole(model, black) == stream_detections(model, black) == []
    model = small_detector(kind, scale=1.0).eval()
    assert stream_detections(model, black, threshold=1.0) == []
    best = max(one.score for one in _whole(model, black))
    assert {round(one.score, 5) for one in stream_detections(model, black, threshold=best - 1e-6)} == {round(best, 5)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DETECTORS)
def test_a_larger_image(kind: str) -> None:
    """1024×1000 pixels by the quick start's backbone, in float32, with windows that memory chooses."""
    stages = [
        {"dim": 48, "depth": 1, "heads": 1, "patch": 4, "attention": {"kind": "longformer"}, "position": "relative"},
        {"dim": 96, "depth": 1, "heads": 3, "patch": 2, "attention": {"kind": "longformer"}, "position": "relative"},
    ]
    stages = [{**stage, "global_tokens": 1} for stage in stages]
    torch.manual_seed(0)
    options: dict[str, Any] = {"levels": (1, 2), "channels": 32, "box_width": 32, "mask_channels": 16, "mask_layers": 1}
    options |= {"scale": 1.0, "score_threshold": 0.0, "detections": 50, "anchor_scale": 3, "proposals": 200}
    config = DetectorConfig(kind, "vision_longformer_tiny", 3, {"stages": stages}, **options)
    model, image = build_detector(config).eval(), _image(1024, 1000, SINGLE)
    streamed = stream_detections(model, image, memory="150MB")
    _assert_same(_whole(model, image), streamed, 1e-4, (1024, 1000))


# Parts


def test_windows_cover_a_map() -> None:
    assert list(windows(Grid(3, 5), 2)) == [
        *((0, 0, 2, 2), (0, 2, 2, 4), (0, 4, 2, 5)),
        *((2, 0, 3, 2), (2, 2, 3, 4), (2, 4, 3, 5)),
    ]
    assert Window(2, 0, 3, 2).grown(2, Grid(3, 5)) == (0, 0, 3, 4)
    assert Window(2, 3, 3, 5).inside(Window(1, 1, 3, 5)) == (slice(1, 2), slice(2, 4))


def _pyramid(kind: str) -> tuple[Any, PyramidWindows, list[Tensor]]:
    """A detector, its pyramid in windows, and whole: four or three stages up to a map of 5×7."""
    model = small_detector(kind).double().eval()
    count = len(model.config.stages)
    generator = torch.Generator().manual_seed(5)
    dims = [block[0].in_channels for block in model.backbone.fpn.inner_blocks]
    sizes = [(5 * 2**power, 7 * 2**power) for power in reversed(range(count))]
    maps = [torch.randn(*size, dim, generator=generator).double() for size, dim in zip(sizes, dims, strict=True)]
    named = OrderedDict((str(level), one.permute(2, 0, 1)[None]) for level, one in enumerate(maps))
    with torch.no_grad():
        whole = list(model.backbone.fpn(named).values())
    return model, PyramidWindows(model.backbone, maps), whole


@pytest.mark.parametrize("kind", DETECTORS)
@torch.no_grad()
def test_windows_of_the_pyramid(kind: str) -> None:
    """Every level, those above the stages included, in windows of three cells and of one."""
    _, pyramid, whole = _pyramid(kind)
    assert pyramid.grids == [tuple(one.shape[2:]) for one in whole]
    assert pyramid.grids[-1] == ((2, 2) if kind == "retinanet" else (3, 4))
    for level, expected in enumerate(whole):
        for side in (3, 1) if expected.shape[2] < 20 else (7,):
            for window in windows(pyramid.grids[level], side):
                part = expected[..., window.top : window.bottom, window.left : window.right]
                torch.testing.assert_close(pyramid.read(level, window), part, rtol=0, atol=1e-12)


@torch.no_grad()
def test_best_anchors_of_the_whole_level() -> None:
    """The highest logits of any class, and the anchors that FixedAnchors makes at their places."""
    model, pyramid, whole = _pyramid("retinanet")
    output = model.head(whole)
    counts = [9 * one.shape[2] * one.shape[3] for one in whole]
    logits, offsets = (output[name][0].split(counts) for name in ("cls_logits", "bbox_regression"))
    image = ImageList(torch.zeros(1, 3, 160, 224), [(160, 224)])
    anchors = model.anchor_generator(image, whole)[0].split(counts)

    def head(features: Tensor) -> tuple[Tensor, Tensor]:
        part = model.head([features])
        return part["cls_logits"][0], part["bbox_regression"][0]

    for level in range(len(whole)):
        best = best_anchors(pyramid, level, head, margin=5, most=7, side=4)
        expected = logits[level].flatten().topk(7).indices.div(3, rounding_mode="floor").unique()
        assert best.numbers.tolist() == expected.tolist()
        torch.testing.assert_close(best.logits, logits[level][expected], rtol=0, atol=1e-12)
        torch.testing.assert_close(best.offsets, offsets[level][expected], rtol=0, atol=1e-12)
        boxes = anchor_boxes(model.anchor_generator, pyramid, level, best.numbers)
        assert torch.equal(boxes, anchors[level][expected])


@torch.no_grad()
def test_regions_pooled_from_windows() -> None:
    """Across the borders of windows, as large as the image, thin, smaller than a cell, and at the image's borders."""
    model, pyramid, whole = _pyramid("mask_rcnn")
    boxes = torch.tensor(
        [
            *([30.0, 28.5, 61.3, 50.2], [0.0, 0.0, 224.0, 160.0], [3.0, 40.0, 221.5, 44.0], [50.1, 0.0, 52.0, 160.0]),
            *([200.0, 140.0, 224.0, 160.0], [100.2, 60.3, 101.0, 61.0], [0.0, 0.0, 5.0, 7.0], [31.9, 31.9, 32.1, 32.1]),
        ]
    ).double()
    named = dict(zip(model.backbone.level_names, whole, strict=False))
    for pooler in (model.roi_heads.box_roi_pool, model.roi_heads.mask_roi_pool):
        expected = pooler(named, [boxes], [(160, 224)])
        for side in (4, 16, 64):
            seen = []
            for positions, pooled in pool_regions(pyramid, pooler, boxes, side):
                torch.testing.assert_close(pooled, expected[positions], rtol=0, atol=1e-12)
                seen += positions.tolist()
            assert sorted(seen) == list(range(8))


def test_masks_are_cut_out_as_they_are_pasted() -> None:
    """Also those of boxes that reach beyond the image, and of boxes without area."""
    shares = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    boxes = [[10.0, 12, 40, 30], [-5, -3, 20.5, 9.2], [80, 50, 99.7, 60], [50, 50, 50, 50], [0, 0, 100, 60]]
    pasted = paste_masks_in_image(shares, torch.tensor(boxes), (60, 100))
    for crop, mask in zip(mask_crops(shares, torch.tensor(boxes), (60, 100)), pasted, strict=True):
        assert np.array_equal(crop.on(60, 100).astype(bool), (mask[0] >= 0.5).numpy())


@pytest.mark.parametrize("piece", [streaming.PIECE_NUMBERS, 1, 5 * 3 * 93])
@pytest.mark.parametrize(
    "options", [{"scale": 1.0}, {"scale": 0.37}, {"scale": 2.0}, {"min_size": 50, "max_size": 60}, {"min_size": 200}]
)
def test_rows_of_the_input(options: dict[str, Any], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resized, normalised and padded as the detector's transform does it to the whole image."""
    monkeypatch.setattr(streaming, "PIECE_NUMBERS", piece)
    model = small_detector("retinanet", **options).eval()
    image = torch.randint(0, 256, (3, 71, 93), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    batch, _ = model.transform([image.double() / 255])
    expected = batch.tensors.images[0].permute(1, 2, 0).numpy()
    for given in (
        image.double() / 255,
        image.permute(1, 2, 0).numpy(),
        image.permute(1, 2, 0).numpy() * np.uint16(257),
    ):
        rows = InputRows(model.transform, given, DOUBLE)
        assert rows.shape == expected.shape
        assert rows.resized == tuple(batch.image_sizes[0])
        parts = [rows[top : min(top + 13, rows.shape[0])] for top in range(0, rows.shape[0], 13)]
        assert np.abs(np.concatenate(parts) - expected).max() < 1e-12


def test_what_tells_inputs_apart() -> None:
    """Also where they are padded to the same size."""
    image, shapes, names = torch.zeros(3, 71, 93), set(), set()
    for scale in (1.0, 0.95):
        rows = InputRows(small_detector("retinanet", scale=scale).transform, image, DOUBLE)
        shapes.add(rows.shape)
        names.add(rows.identity())
    assert (len(shapes), len(names)) == (1, 2)


# Memory and files


@pytest.mark.parametrize("kind", DETECTORS)
def test_the_least_memory_is_said_and_is_enough(kind: str) -> None:
    """A window of a pyramid of many channels is more than any strip."""
    model = small_detector(kind, scale=1.0, detections=10, proposals=20, channels=128).eval()
    plan, image = Plan(model, (96, 96)), _image(80, 96, SINGLE)
    assert plan.window_bytes(32) > max(plan.work.strip_bytes(stage, 1) for stage in range(4))
    least = plan.work.token_bytes() + plan.window_bytes(32)
    message = f"1MB of memory is too little for an image of 96×96; at least {format_bytes(least)} is needed"
    with pytest.raises(ValueError, match=re.escape(message)):
        stream_detections(model, image, memory=1000)
    assert len(stream_detections(model, image, memory=format_bytes(least))) == 10


def test_tokens_in_files(tmp_path: Path) -> None:
    """A run that ends in the heads is resumed after the backbone; the folder is empty at the end."""
    model, image = small_detector("mask_rcnn", scale=1.0, detections=10, proposals=30).double().eval(), _image(70, 90)
    folder, steps = tmp_path / "tokens", []

    def stop(done: int, total: int) -> None:
        steps.append(done / total)
        if len(steps) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream_detections(model, image, storage=folder, progress=stop)
    assert any(folder.iterdir())
    with pytest.raises(ValueError, match="another model, image or setting"):
        stream_detections(model, _image(70, 91), storage=folder)
    shares: list[float] = []
    streamed = stream_detections(model, image, storage=folder, progress=lambda done, all: shares.append(done / all))
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert not folder.exists()
    _assert_same(_whole(model, image), streamed, 1e-10, (70, 90))


@pytest.mark.parametrize(("machine", "limit"), [(10**9, 50_021_312), (4 * 10**7, 4 * 10**7)])
def test_tokens_take_the_machines_memory_and_windows_that_of_the_model(
    monkeypatch: pytest.MonkeyPatch, machine: int, limit: int
) -> None:
    """24·24·8 numbers, over which the second map is written, 6·6·16 and 3·3·16 of 4 bytes are 21,312, for a detector on
    another device with 50 MB."""
    seen = []

    def stop(*arguments: Any, memory: int, **options: Any) -> None:
        seen.append(memory)
        raise KeyboardInterrupt

    monkeypatch.setattr(streaming, "free_memory", lambda device: {"meta": 5 * 10**7, "cpu": machine}[device.type])
    monkeypatch.setattr(streaming, "stream", stop)
    model = small_detector("retinanet", scale=1.0).eval().to("meta")
    with pytest.raises(KeyboardInterrupt):
        stream_detections(model, np.zeros((72, 92, 3), np.uint8), memory=None)
    assert seen == [limit]


def test_what_cannot_be_streamed() -> None:
    image = torch.rand(3, 64, 64)
    with pytest.raises(ValueError, match=r"the backbone test_resnet is timm's"):
        stream_detections(build_detector(DetectorConfig("retinanet", "test_resnet", 2, min_size=64)).eval(), image)
    with pytest.raises(ValueError, match=r"training mode.*call model\.eval\(\) first"):
        stream_detections(small_detector("retinanet"), image)
    full = {"dim": 16, "depth": 1, "heads": 2, "patch": 4, "attention": {"kind": "full"}, "position": "none"}
    config = DetectorConfig("retinanet", "vision_longformer_tiny", 2, {"stages": [full]}, levels=(1,), channels=8)
    with pytest.raises(ValueError, match=r"stage 1 has full attention.*Longformer stage with adapt_model"):
        stream_detections(build_detector(config).eval(), image)
