"""RetinaNet and Mask R-CNN: training, images alone and in a batch, anchors and pooling."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import SMALL_DETECTOR, small_detector
from torch import Tensor

from vision_longformer.detection.config import DETECTORS, DetectorConfig
from vision_longformer.detection.detectors import (
    AlignedRoIAlign,
    FixedAnchors,
    build_detector,
    mask_rcnn,
    retinanet,
)


def images(*sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.rand(3, *size, generator=generator) for size in sizes]


def targets(pictures: list[Tensor]) -> list[dict[str, Tensor]]:
    boxes = torch.tensor([[4.0, 6.0, 36.0, 40.0], [20.0, 2.0, 50.0, 30.0]])
    masks = [torch.zeros(2, *picture.shape[1:], dtype=torch.uint8) for picture in pictures]
    for mask in masks:
        for index, (left, top, right, bottom) in enumerate(boxes.int().tolist()):
            mask[index, top:bottom, left:right] = 1
    return [{"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": mask} for mask in masks]


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_step_reaches_every_parameter(detector: str) -> None:
    """All parameters have a gradient; zero only where the last global rows of a stage, which nobody reads, are."""
    model, pictures = small_detector(detector), images((64, 64), (70, 96))
    losses = model(pictures, targets(pictures))
    assert all(math.isfinite(loss.item()) and loss.item() > 0 for loss in losses.values())
    sum(losses.values()).backward()
    zero = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
    assert all(name.endswith((".global_to_local", ".global_to_global")) for name in zero)


@pytest.mark.parametrize("detector", DETECTORS)
def test_learns_two_boxes(detector: str) -> None:
    model, pictures = small_detector(detector), images((64, 80))
    wanted = targets(pictures)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    history = []
    for _ in range(40):
        loss = sum(model(pictures, wanted).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.5 * history[0]


@pytest.mark.parametrize("detector", DETECTORS)
def test_images_without_objects_train(detector: str) -> None:
    model, pictures = small_detector(detector), images((64, 64))
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long), "masks": torch.zeros(0, 64, 64)}
    sum(model(pictures, [empty]).values()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(("channels", "deviation"), [(64, math.sqrt(2 / (9 * 64))), (256, 0.01)])
def test_narrow_heads_of_retinanet_carry_the_signal(channels: int, deviation: float) -> None:
    """Hidden layers of the paper's width are drawn as the paper's; the last ones always are."""
    head = retinanet("vil", 3, channels=channels).head
    for part in (head.classification_head, head.regression_head):
        assert [conv[0].weight.std().item() for conv in part.conv] == pytest.approx([deviation] * 4, rel=0.02)
    assert head.classification_head.cls_logits.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert head.regression_head.bbox_reg.weight.std().item() == pytest.approx(0.01, rel=0.05)


def test_labels_of_retinanet_count_from_one() -> None:
    """A detector whose first class is certain everywhere finds label 1, and its loss wants label 1 there."""
    model, pictures = small_detector("retinanet", score_threshold=0.5), images((64, 64))
    layer = model.head.classification_head.cls_logits
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([9.0, -9.0, -9.0]).repeat(9))
    assert set(model.eval()(pictures)[0]["labels"].tolist()) == {1}
    model.train()
    everything = torch.tensor([[0.0, 0.0, 64.0, 64.0]])
    losses = [
        model(pictures, [{"boxes": everything, "labels": torch.tensor([label])}])["classification"].item()
        for label in (1, 3)
    ]
    assert losses[0] < losses[1]


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.tensor([1, 0])}, "targets[1] has label 0; labels count from 1 to 3, 0 is the background"),
        ({"labels": torch.tensor([4, 1])}, "targets[1] has label 4; labels count from 1 to 3, 0 is the background"),
        ({"labels": torch.tensor([1])}, "targets[1] has labels (1,); they must be (2,)"),
        ({"boxes": torch.rand(2, 5)}, "targets[1] has boxes (2, 5); they must be (2, 4)"),
        (
            {"boxes": torch.tensor([[4.0, 6.0, 36.0, 40.0], [20.0, 30.0, 50.0, 20.0]])},
            "targets[1] has the box [20.0, 30.0, 50.0, 20.0], without area; boxes are left, top, right, bottom",
        ),
    ],
)
def test_targets_are_checked(detector: str, changes: dict[str, Tensor], message: str) -> None:
    model, pictures = small_detector(detector), images((64, 64), (64, 80))
    first, second = targets(pictures)
    with pytest.raises(ValueError, match=re.escape(message)):
        model(pictures, [first, {**second, **changes}])
    with pytest.raises(ValueError, match=re.escape("there are 1 targets for 2 images")):
        model(pictures, [first])
    with pytest.raises(ValueError, match="there are no targets for 2 images; in training, give one for each, or call"):
        model(pictures)


def test_masks_are_checked() -> None:
    model, pictures = small_detector("mask_rcnn"), images((64, 80))
    (target,) = targets(pictures)
    with pytest.raises(ValueError, match=re.escape("targets[0] has masks (2, 80, 64); they must be (2, 64, 80)")):
        model(pictures, [{**target, "masks": target["masks"].transpose(1, 2)}])
    del target["masks"]
    with pytest.raises(ValueError, match=re.escape("targets[0] has no masks")):
        model(pictures, [target])


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("backbone", ["vil", "resnet10t"])
def test_gradient_checkpointing_changes_memory_alone(detector: str, backbone: str) -> None:
    pictures, gradients, saved = images((64, 64)), [], []
    modes = (False, True, "strips") if backbone == "vil" else (False, True)

    def count(tensor: Tensor) -> Tensor:
        saved[-1] += tensor.numel()
        return tensor

    for enable in modes:
        model = small_detector(detector, backbone=backbone)
        model.set_grad_checkpointing(enable)
        torch.manual_seed(0)
        saved.append(0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = sum(model(pictures, targets(pictures)).values())
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert max(saved[1:]) < saved[0]
    for others in gradients[1:]:
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(gradients[0], others, strict=True))


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("backbone", ["vil", "resnet10t"])
def test_an_image_alone_and_in_a_batch(detector: str, backbone: str) -> None:
    model = small_detector(detector, backbone=backbone).eval()
    pictures = images((64, 64), (70, 96), (90, 64), (70, 96))
    with torch.no_grad():
        together = model(pictures)
        alone = [model([picture])[0] for picture in pictures]
    assert len(alone[0]["boxes"]) > 20
    for got, expected in zip(together, alone, strict=True):
        assert torch.equal(got["labels"], expected["labels"])
        for name in set(expected) - {"labels"}:
            torch.testing.assert_close(got[name], expected[name], atol=1e-4, rtol=0)


def test_anchors_are_exact_and_ordered() -> None:
    sizes = [[32.0, 32.0 * 2 ** (1 / 3)], [64.0, 128.0]]
    anchors = FixedAnchors(sizes, (0.5, 2.0), [8, 16])
    maps = [torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 1, 2)]

    class Two:
        image_sizes = ((10, 20), (16, 24))

    first, second = anchors(Two(), maps)  # type: ignore[arg-type]
    assert torch.equal(first, second)
    expected = []
    for (rows, columns), stride, level in (((2, 3), 8, sizes[0]), ((1, 2), 16, sizes[1])):
        for row in range(rows):
            for column in range(columns):
                for size in level:
                    for ratio in (0.5, 2.0):
                        width, height = size / math.sqrt(ratio), size * math.sqrt(ratio)
                        x, y = column * stride, row * stride
                        expected.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
    torch.testing.assert_close(first, torch.tensor(expected))


def test_paper_anchors() -> None:
    """32 to 512 pixels: one size per level in Mask R-CNN, three in RetinaNet."""
    with torch.device("meta"):
        mask, retina = mask_rcnn("vision_longformer_tiny", 80), retinanet("vision_longformer_tiny", 80)
    assert mask.rpn.anchor_generator.sizes == ((32.0,), (64.0,), (128.0,), (256.0,), (512.0,))
    assert [level[0] for level in retina.anchor_generator.sizes] == [32.0, 64.0, 128.0, 256.0, 512.0]
    assert retina.anchor_generator.num_anchors_per_location() == [9] * 5
    assert retina.anchor_generator.strides == [8, 16, 32, 64, 128]


def test_paper_settings() -> None:
    """Thresholds, numbers of candidates and regions, and the preparation of images: as the paper's models have them."""
    with torch.device("meta"):
        mask, retina = mask_rcnn("vision_longformer_tiny", 80), retinanet("vision_longformer_tiny", 80)
    assert (retina.proposal_matcher.high_threshold, retina.proposal_matcher.low_threshold) == (0.5, 0.4)
    assert (retina.topk_candidates, retina.detections_per_img) == (1000, 100)
    assert (retina.score_thresh, retina.nms_thresh, retina.box_coder.weights) == (0.05, 0.5, (1, 1, 1, 1))
    assert retina.head.regression_head._loss_type == "l1"
    rpn, heads = mask.rpn, mask.roi_heads
    assert rpn._pre_nms_top_n == {"training": 2000, "testing": 1000}
    assert rpn._post_nms_top_n == {"training": 1000, "testing": 1000}
    assert (rpn.proposal_matcher.high_threshold, rpn.proposal_matcher.low_threshold, rpn.nms_thresh) == (0.7, 0.3, 0.7)
    assert (rpn.fg_bg_sampler.batch_size_per_image, rpn.fg_bg_sampler.positive_fraction) == (256, 0.5)
    assert (heads.proposal_matcher.high_threshold, heads.proposal_matcher.low_threshold) == (0.5, 0.5)
    assert (heads.fg_bg_sampler.batch_size_per_image, heads.fg_bg_sampler.positive_fraction) == (512, 0.25)
    assert (heads.score_thresh, heads.nms_thresh, heads.detections_per_img) == (0.05, 0.5, 100)
    assert (rpn.box_coder.weights, heads.box_coder.weights) == ((1, 1, 1, 1), (10, 10, 5, 5))
    for transform in (mask.transform, retina.transform):
        assert transform.image_mean == [0.485, 0.456, 0.406]
        assert transform.image_std == [0.229, 0.224, 0.225]
        assert (transform.min_size, transform.max_size, transform.size_divisible) == ((800,), 1333, 32)


def test_pooling_is_aligned() -> None:
    """A map whose values are its own pixel centres gives the centres of the bins, exactly."""
    stride, side = 4, 16
    centres = (torch.arange(side) + 0.5) * stride
    ramp = torch.stack([centres.expand(side, side), centres[:, None].expand(side, side)])[None]
    pool = AlignedRoIAlign(["0", "1"], 7, [stride, 2 * stride])
    box = torch.tensor([[8.0, 12.0, 43.0, 47.0]])
    pooled = pool({"0": ramp, "1": torch.zeros(1, 2, 8, 8)}, [box], [(64, 64)])[0]
    bins = (torch.arange(7) + 0.5) * 5
    torch.testing.assert_close(pooled[0], (8 + bins).expand(7, 7))
    torch.testing.assert_close(pooled[1], (12 + bins)[:, None].expand(7, 7))


def test_regions_are_pooled_where_they_are_in_bf16() -> None:
    """A map that steps from 0 to 1 at pixel 800, where bf16 has multiples of 4 only, seen in bins of one pixel."""
    side, stride = 256, 4
    step = (torch.arange(side) >= 200).expand(1, 1, side, side).to(torch.bfloat16)
    box = torch.tensor([[797.0, 0, 804, 7]])
    pooled = AlignedRoIAlign(["0"], 7, [stride])({"0": step}, [box], [(1024, 1024)])
    assert pooled.dtype == torch.bfloat16
    assert pooled[0, 0, 0].tolist() == [0, 0.125, 0.375, 0.625, 0.875, 1, 1]


@pytest.mark.parametrize("detector", DETECTORS)
def test_boxes_are_exact_in_bf16(detector: str) -> None:
    """With offsets of zero, boxes are anchors: around corners of the cells, of configured sizes, cut to the image."""
    model = small_detector(detector, anchor_ratios=(1.0,), min_size=(64,), max_size=960, levels=(2, 3, 4)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bbox_reg" in name or "bbox_pred" in name:
                parameter.zero_()
        with torch.autocast("cpu", torch.bfloat16):
            (output,) = model([torch.rand(3, 64, 960, generator=torch.Generator().manual_seed(0))])
    steps, strides = ((0, 1, 2), (8, 16, 32, 64, 128)) if detector == "retinanet" else ((0,), (8, 16, 32, 64))
    scale = {"retinanet": 4, "mask_rcnn": 8}[detector]
    anchors = [
        (x - half, y - half, x + half, y + half)
        for stride in strides
        for half in [scale * stride * 2 ** (step / 3) / 2 for step in steps]
        for y in range(0, 64, stride)
        for x in range(0, 960, stride)
    ]
    expected = torch.tensor(anchors).clamp(min=0).minimum(torch.tensor([960.0, 64, 960, 64]))
    assert len(output["boxes"]) == 100
    assert output["boxes"].dtype == torch.float32
    assert (output["boxes"][:, 0] > 512).sum() > 10
    distances = (output["boxes"][:, None] - expected[None]).abs().amax(2).amin(1)
    assert distances.max() < 1e-3


def test_large_regions_pool_from_coarser_levels() -> None:
    """By the pyramid's rule a box of 224 pixels belongs to stride 16."""
    names, strides = ["0", "1", "2", "3"], [4, 8, 16, 32]
    pool = AlignedRoIAlign(names, 7, strides)
    maps = {name: torch.full((2, 1, 64, 64), float(stride)) for name, stride in zip(names, strides, strict=True)}
    sides = [20.0, 111.0, 112.0, 223.0, 225.0, 447.0, 449.0, 900.0]
    boxes = torch.tensor([[0.0, 0.0, side, side] for side in sides])
    pooled = pool(maps, [boxes[:3], boxes[3:]], [(900, 900)] * 2)
    assert pooled[:, 0, 0, 0].tolist() == [4, 4, 8, 8, 16, 16, 32, 32]


def one_headed(detector: str) -> DetectorConfig:
    """A detector whose first stage has one head, so that some of its bias tables have a single entry."""
    stages = [
        {"dim": 16, "depth": 1, "heads": heads, "patch": patch, "attention": {"kind": "longformer", "window": 2}}
        | {"global_tokens": 1, "position": "relative"}
        for heads, patch in ((1, 4), (2, 2), (2, 2), (2, 2))
    ]
    return DetectorConfig(detector, "vision_longformer_tiny", 3, {"stages": stages}, **SMALL_DETECTOR)


@pytest.mark.parametrize("detector", DETECTORS)
def test_gradients_have_the_strides_of_their_parameters(detector: str) -> None:
    """Others would be copied by DDP, which warns of it."""
    model, pictures = build_detector(one_headed(detector)), images((64, 96))
    sum(model(pictures, targets(pictures)).values()).backward()
    assert [name for name, p in model.named_parameters() if p.grad.stride() != p.stride()] == []


DDP_STEP = """
import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from test_detectors import images, one_headed, targets
from vision_longformer.detection.detectors import build_detector

torch.distributed.init_process_group("gloo")
warnings.simplefilter("always")
for detector in ("retinanet", "mask_rcnn"):
    model, pictures = DistributedDataParallel(build_detector(one_headed(detector))), images((64, 96))
    sum(model(pictures, targets(pictures)).values()).backward()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_step_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(DDP_STEP)
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "step.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Grad strides" not in done.stderr
