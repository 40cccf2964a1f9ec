"""Detectors: configuration, training, unlike images in a batch, anchors and pooling, checkpoints, backbones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SMALL_MODELS
from torch import Tensor, nn
from torch.nn import functional as F

from vision_longformer import VisionLongformer, load, save
from vision_longformer.detection.backbone import ImageTransform, PyramidBackbone
from vision_longformer.detection.checkpoint import load_backbone, load_detector, load_detector_info, save_detector
from vision_longformer.detection.config import KINDS, DetectorConfig
from vision_longformer.detection.detectors import AlignedRoIAlign, FixedAnchors, build_detector, mask_rcnn, retinanet
from vision_longformer.errors import CheckpointError
from vision_longformer.models import config as cfg
from vision_longformer.models import zoo

SMALL = {
    "channels": 8,
    "box_width": 16,
    "mask_channels": 8,
    "mask_layers": 1,
    "min_size": (64,),
    "max_size": 96,
    "score_threshold": 0.0,
}
BACKBONE, ABSOLUTE = "vil", "vil_ape"


@pytest.fixture(autouse=True)
def _small_backbones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models among those of the zoo: four stages, strides 4 to 32, made for images of 64×64."""
    for name in (BACKBONE, ABSOLUTE):
        monkeypatch.setitem(zoo.MODELS, name, SMALL_MODELS[name])


def small(kind: str, **options: Any) -> Any:
    """A detector of a few thousand parameters beside its backbone, with weights large enough to matter."""
    torch.manual_seed(3)
    model = build_detector(DetectorConfig(kind, BACKBONE, 3).override(**{**SMALL, **options}))
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


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


# Configuration


def test_defaults_are_the_papers() -> None:
    config = DetectorConfig("retinanet", "vision_longformer_tiny", 80)
    assert (config.levels, config.anchor_scale, config.min_size, config.max_size) == ((2, 3, 4), 4.0, (800,), 1333)
    assert DetectorConfig("mask_rcnn", "vision_longformer_tiny", 80).levels == (1, 2, 3, 4)


def test_configuration_survives_json() -> None:
    config = DetectorConfig("mask_rcnn", BACKBONE, 3, {"drop_path_rate": 0.2}, levels=(2, 3), min_size=(64, 96))
    assert DetectorConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "retinnet"}, "unknown kind of detector 'retinnet'; did you mean 'retinanet'"),
        ({"backbone": "resnet_18"}, "unknown backbone 'resnet_18'; did you mean 'resnet18'"),
        ({"backbone_options": {"drop_path": 0.1}}, "unknown model option 'drop_path'; did you mean"),
        ({"backbone_options": {"stages": [object()]}}, "backbone_options must be plain data"),
        ({"levels": (4, 5)}, "vil has 4 stages; give levels up to 4"),
        ({"levels": (2, 1)}, "give stages that follow one another"),
        ({"levels": ()}, "levels is empty"),
        ({"num_classes": 0}, "num_classes is 0; it must be a whole number of at least 1"),
        ({"min_size": (0,)}, "min_size is 0"),
        ({"score_threshold": 2.0}, "score_threshold is 2.0; it must be between 0 and 1"),
        ({"anchor_scale": 0.0}, "must be positive"),
        ({"chanels": 8}, "unknown detector option 'chanels'; did you mean 'channels'"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], message: str) -> None:
    data = {"kind": "mask_rcnn", "backbone": BACKBONE, "num_classes": 3}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        DetectorConfig.from_dict({**data, **changes})


def test_missing_fields_are_named() -> None:
    with pytest.raises(ValueError, match="a detector needs backbone and num_classes"):
        DetectorConfig.from_dict({"kind": "retinanet"})


def test_levels_that_a_timm_backbone_lacks() -> None:
    with pytest.raises(ValueError, match=r"strides \[64\], but resnet18 has \[2, 4, 8, 16, 32\]"):
        retinanet("resnet18", 3, levels=(5,))


# Training


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reaches_every_parameter(kind: str) -> None:
    """All parameters have a gradient; zero only where the last global rows of a stage, which nobody reads, are."""
    model, pictures = small(kind), images((64, 64), (70, 96))
    losses = model(pictures, targets(pictures))
    assert all(math.isfinite(loss.item()) and loss.item() > 0 for loss in losses.values())
    sum(losses.values()).backward()
    zero = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
    assert all(name.endswith((".global_to_local", ".global_to_global")) for name in zero)


@pytest.mark.parametrize("kind", KINDS)
def test_learns_two_boxes(kind: str) -> None:
    model, pictures = small(kind), images((64, 80))
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


@pytest.mark.parametrize("kind", KINDS)
def test_images_without_objects_train(kind: str) -> None:
    model, pictures = small(kind), images((64, 64))
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long), "masks": torch.zeros(0, 64, 64)}
    sum(model(pictures, [empty]).values()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(("channels", "deviation"), [(64, math.sqrt(2 / (9 * 64))), (256, 0.01)])
def test_narrow_heads_of_retinanet_carry_the_signal(channels: int, deviation: float) -> None:
    """Hidden layers of the paper's width are drawn as the paper's; the last ones always are."""
    head = retinanet(BACKBONE, 3, channels=channels).head
    for part in (head.classification_head, head.regression_head):
        assert [conv[0].weight.std().item() for conv in part.conv] == pytest.approx([deviation] * 4, rel=0.02)
    assert head.classification_head.cls_logits.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert head.regression_head.bbox_reg.weight.std().item() == pytest.approx(0.01, rel=0.05)


def test_labels_of_retinanet_count_from_one() -> None:
    """A detector whose first class is certain everywhere finds label 1, and its loss wants label 1 there."""
    model, pictures = small("retinanet", score_threshold=0.5), images((64, 64))
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


# Images of unlike sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backbone", [BACKBONE, "resnet10t"])
def test_an_image_alone_and_in_a_batch(kind: str, backbone: str) -> None:
    model = small(kind, backbone=backbone).eval()
    pictures = images((64, 64), (70, 96), (90, 64), (70, 96))
    with torch.no_grad():
        together = model(pictures)
        alone = [model([picture])[0] for picture in pictures]
    assert len(alone[0]["boxes"]) > 20
    for got, expected in zip(together, alone, strict=True):
        assert torch.equal(got["labels"], expected["labels"])
        for name in set(expected) - {"labels"}:
            torch.testing.assert_close(got[name], expected[name], atol=1e-4, rtol=0)


def test_the_backbone_sees_no_padding_in_training() -> None:
    """Before the pyramid, an image's maps in a batch are those it has alone, and zeros beyond."""
    backbone = small("retinanet").backbone.train()
    seen: list[dict[str, Tensor]] = []
    backbone.fpn.register_forward_pre_hook(lambda module, inputs: seen.append(dict(inputs[0])))
    transform = ImageTransform((64,), 128, [0.5] * 3, [0.25] * 3)  # type: ignore[arg-type]
    small_one, large_one = images((64, 64), (64, 120))
    for batch in ([small_one, large_one], [small_one], [large_one]):
        backbone(transform(batch)[0].tensors)
    for name, maps in seen[0].items():
        inside = maps[0, :, :, : seen[1][name].shape[-1]]
        torch.testing.assert_close(inside, seen[1][name][0])
        assert not maps[0, :, :, seen[1][name].shape[-1] :].any()
        torch.testing.assert_close(maps[1], seen[2][name][0])


def test_batch_normalisation_trains_on_the_whole_batch() -> None:
    backbone = PyramidBackbone(DetectorConfig("retinanet", "resnet10t", 3, channels=8)).train()
    sizes: list[tuple[int, ...]] = []
    backbone.body.register_forward_pre_hook(lambda module, inputs: sizes.append(tuple(inputs[0].shape)))
    batch = ImageTransform((64,), 96, [0.5] * 3, [0.25] * 3)(images((64, 64), (64, 90)))[0].tensors  # type: ignore[arg-type]
    backbone(batch)
    backbone.eval()(batch)
    assert sizes == [(2, 3, 64, 96), (1, 3, 64, 64), (1, 3, 64, 96)]


# Pyramid, anchors, pooling


def test_retinanet_levels() -> None:
    """P6 comes from the last stage's map, also where its channels are the pyramid's; P7 from P6."""
    backbone = small("retinanet", channels=16).backbone.eval()
    assert backbone.strides == [8, 16, 32, 64, 128]
    maps = [torch.randn(1, dim, size, size) for dim, size in ((8, 16), (16, 8), (16, 4))]
    pyramid = backbone.fpn({str(level): one for level, one in enumerate(maps)})
    torch.testing.assert_close(pyramid["p6"], backbone.fpn.extra_blocks.p6(maps[-1]))
    torch.testing.assert_close(pyramid["p7"], backbone.fpn.extra_blocks.p7(F.relu(pyramid["p6"])))


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


def test_large_regions_pool_from_coarser_levels() -> None:
    """By the pyramid's rule a box of 224 pixels belongs to stride 16."""
    names, strides = ["0", "1", "2", "3"], [4, 8, 16, 32]
    pool = AlignedRoIAlign(names, 7, strides)
    maps = {name: torch.full((2, 1, 64, 64), float(stride)) for name, stride in zip(names, strides, strict=True)}
    sides = [20.0, 111.0, 112.0, 223.0, 225.0, 447.0, 449.0, 900.0]
    boxes = torch.tensor([[0.0, 0.0, side, side] for side in sides])
    pooled = pool(maps, [boxes[:3], boxes[3:]], [(900, 900)] * 2)
    assert pooled[:, 0, 0, 0].tolist() == [4, 4, 8, 8, 16, 16, 32, 32]


# Checkpoints


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_round_trip(kind: str, tmp_path: Path) -> None:
    model = small(kind, backbone_options={"drop_path_rate": 0.1})
    path = save_detector(model, tmp_path / "d.safetensors", info={"classes": ["a", "b", "c"]})
    loaded = load_detector(path)
    assert loaded.config == model.config
    assert not loaded.training
    assert load_detector_info(path) == {"classes": ["a", "b", "c"]}
    for (name, tensor), (same, expected) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == same
        assert torch.equal(tensor, expected)
    with pytest.raises(FileExistsError, match="exists; give another name"):
        save_detector(model, path)
    save_detector(model, path, overwrite=True)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    classifier = save(VisionLongformer(SMALL_MODELS[BACKBONE]), tmp_path / "c.safetensors")
    detector = save_detector(small("retinanet"), tmp_path / "d.safetensors")
    with pytest.raises(CheckpointError, match=r"c\.safetensors is a classifier, which .*; a detector was asked for"):
        load_detector(classifier)
    with pytest.raises(CheckpointError, match=r"d\.safetensors is"):
        load(detector)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_detector(tmp_path / "none.safetensors")
    (tmp_path / "half.safetensors").write_bytes(detector.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        load_detector(tmp_path / "half.safetensors")
    with pytest.raises(ValueError, match="a Linear is no detector"):
        save_detector(nn.Linear(1, 1), tmp_path / "l.safetensors")


# Backbones from classifiers


def test_full_attention_of_a_classifier_becomes_local(tmp_path: Path) -> None:
    """On maps that both see whole, the maps of the converted backbone are the classifier's."""
    config = SMALL_MODELS[BACKBONE]
    full = [replace(stage, attention=cfg.Full()) for stage in config.stages[2:]]
    classifier = VisionLongformer(replace(config, stages=(*config.stages[:2], *full))).eval()
    for parameter in classifier.parameters():
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = small("mask_rcnn")
    report = load_backbone(model, save(classifier, tmp_path / "c.safetensors"), table_resize="offset")
    assert report.resized == {"stages.3.blocks.0.attn.bias.table": ((2, 3, 3), (2, 7, 7))}
    picture = torch.randn(1, 3, 64, 64)
    expected = classifier.forward_intermediates(picture, intermediates_only=True)
    for got, wanted in zip(model.backbone.body.eval()(picture), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_tables_are_stretched_by_default(tmp_path: Path) -> None:
    config = SMALL_MODELS[BACKBONE]
    last = replace(config.stages[3], attention=cfg.Full())
    classifier = VisionLongformer(replace(config, stages=(*config.stages[:3], last)))
    model = small("mask_rcnn")
    load_backbone(model, save(classifier, tmp_path / "c.safetensors"))
    name = "stages.3.blocks.0.attn.bias.table"
    expected = F.interpolate(classifier.state_dict()[name][None], size=(7, 7), mode="bilinear")[0]
    torch.testing.assert_close(model.state_dict()[f"backbone.body.model.{name}"], expected)


def test_absolute_position_is_resized_to_the_map(tmp_path: Path) -> None:
    classifier = VisionLongformer(SMALL_MODELS[ABSOLUTE])
    model = small("retinanet", backbone=ABSOLUTE, backbone_options={"img_size": [128, 96]})
    report = load_backbone(model, save(classifier, tmp_path / "c.safetensors"))
    assert report.resized["stages.0.position.rows"] == ((16, 4), (32, 4))
    expected = F.interpolate(classifier.stages[0].position.columns.t()[None], size=24, mode="linear")[0].t()
    torch.testing.assert_close(model.backbone.body.model.stages[0].position.columns, expected)


def test_other_backbones_are_refused(tmp_path: Path) -> None:
    deeper = replace(SMALL_MODELS[BACKBONE], stages=tuple(replace(s, depth=2) for s in SMALL_MODELS[BACKBONE].stages))
    with pytest.raises(
        CheckpointError, match=r"the weights are of another model: \d+ unexpected: stages\.0\.blocks\.1"
    ):
        load_backbone(small("retinanet"), save(VisionLongformer(deeper), tmp_path / "c.safetensors"))


def test_backbones_of_timm_take_no_classifier_of_ours(tmp_path: Path) -> None:
    path = save(VisionLongformer(SMALL_MODELS[BACKBONE]), tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="the backbone resnet10t is timm's"):
        load_backbone(small("retinanet", backbone="resnet10t"), path)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "pvt_v2_b0"])
def test_backbones_of_timm_run_at_any_size(name: str) -> None:
    backbone = PyramidBackbone(DetectorConfig("mask_rcnn", name, 3, channels=8)).eval()
    batch = ImageTransform((64,), 160, [0.5] * 3, [0.25] * 3)(images((64, 150)))[0].tensors  # type: ignore[arg-type]
    with torch.no_grad():
        pyramid = backbone(batch)
    assert [tuple(one.shape[1:]) for one in pyramid.values()] == [
        (8, 16, 40),
        (8, 8, 20),
        (8, 4, 10),
        (8, 2, 5),
        (8, 1, 3),
    ]
