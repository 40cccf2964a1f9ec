"""Detectors in files, and classifiers' weights in their backbones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import SMALL_MODELS, small_detector
from torch import nn
from torch.nn import functional as F

from vision_longformer import VisionLongformer, load, save
from vision_longformer.detection.checkpoint import load_backbone, load_detector, load_detector_info, save_detector
from vision_longformer.detection.config import DETECTORS
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.detection.task import DetectionTask
from vision_longformer.errors import CheckpointError
from vision_longformer.models import config as cfg
from vision_longformer.training.distributed import make_accelerator
from vision_longformer.training.recipe import recipe_names, resolve


@pytest.mark.parametrize("detector", DETECTORS)
def test_checkpoint_round_trip(detector: str, tmp_path: Path) -> None:
    model = small_detector(detector, backbone_options={"drop_path_rate": 0.1})
    path = save_detector(model, tmp_path / "d.safetensors", info={"classes": ["a", "b", "c"]})
    restored = load_detector(path)
    assert restored.config == model.config
    assert not restored.training
    assert load_detector_info(path) == {"classes": ["a", "b", "c"]}
    for (name, tensor), (same, expected) in zip(restored.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == same
        assert torch.equal(tensor, expected)
    with pytest.raises(FileExistsError, match="exists; choose another name"):
        save_detector(model, path)
    save_detector(model, path, overwrite=True)


def test_pretrained_weights_are_not_fetched_again(tmp_path: Path) -> None:
    """A file holds the weights; a detector that was built on timm's weights is loaded without them."""
    options = {"pretrained": False, "output_stride": 32}
    model = small_detector("retinanet", backbone="resnet10t", backbone_options=options)
    path = save_detector(model, tmp_path / "d.safetensors")
    assert load_detector(path).config == model.config.override(backbone_options={"output_stride": 32})
    assert model.config.backbone_options == options


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    classifier = save(VisionLongformer(SMALL_MODELS["vil"]), tmp_path / "c.safetensors")
    detector = save_detector(small_detector("retinanet"), tmp_path / "d.safetensors")
    with pytest.raises(CheckpointError, match=r"c\.safetensors is a classifier, which .*; a detector is needed here"):
        load_detector(classifier)
    with pytest.raises(CheckpointError, match=r"d\.safetensors is"):
        load(detector)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_detector(tmp_path / "none.safetensors")
    (tmp_path / "half.safetensors").write_bytes(detector.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="is not a valid safetensors file"):
        load_detector(tmp_path / "half.safetensors")
    with pytest.raises(ValueError, match="a Linear was not built by build_detector"):
        save_detector(nn.Linear(1, 1), tmp_path / "l.safetensors")


def test_full_attention_of_a_classifier_becomes_local(tmp_path: Path) -> None:
    """On maps that both see whole, the maps of the converted backbone are the classifier's."""
    config = SMALL_MODELS["vil"]
    full = [replace(stage, attention=cfg.Full()) for stage in config.stages[2:]]
    classifier = VisionLongformer(replace(config, stages=(*config.stages[:2], *full))).eval()
    for parameter in classifier.parameters():
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = small_detector("mask_rcnn")
    report = load_backbone(model, save(classifier, tmp_path / "c.safetensors"), table_resize="offset")
    assert report.resized == {"stages.3.blocks.0.attn.bias.table": ((2, 3, 3), (2, 7, 7))}
    picture = torch.randn(1, 3, 64, 64)
    expected = classifier.forward_intermediates(picture, intermediates_only=True)
    for got, wanted in zip(model.backbone.body.eval()(picture), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_tables_are_stretched_by_default(tmp_path: Path) -> None:
    config = SMALL_MODELS["vil"]
    last = replace(config.stages[3], attention=cfg.Full())
    classifier = VisionLongformer(replace(config, stages=(*config.stages[:3], last)))
    model = small_detector("mask_rcnn")
    load_backbone(model, save(classifier, tmp_path / "c.safetensors"))
    name = "stages.3.blocks.0.attn.bias.table"
    expected = F.interpolate(classifier.state_dict()[name][None], size=(7, 7), mode="bilinear")[0]
    torch.testing.assert_close(model.state_dict()[f"backbone.body.model.{name}"], expected)


def test_absolute_position_is_resized_to_the_map(tmp_path: Path) -> None:
    classifier = VisionLongformer(SMALL_MODELS["vil_ape"])
    model = small_detector("retinanet", backbone="vil_ape", backbone_options={"img_size": [128, 96]})
    report = load_backbone(model, save(classifier, tmp_path / "c.safetensors"))
    assert report.resized["stages.0.position.rows"] == ((16, 4), (32, 4))
    expected = F.interpolate(classifier.stages[0].position.columns.t()[None], size=24, mode="linear")[0].t()
    torch.testing.assert_close(model.backbone.body.model.stages[0].position.columns, expected)


def test_other_backbones_are_refused(tmp_path: Path) -> None:
    deeper = replace(SMALL_MODELS["vil"], stages=tuple(replace(s, depth=2) for s in SMALL_MODELS["vil"].stages))
    with pytest.raises(
        CheckpointError, match=r"the weights are of another model: \d+ unexpected: stages\.0\.blocks\.1"
    ):
        load_backbone(small_detector("retinanet"), save(VisionLongformer(deeper), tmp_path / "c.safetensors"))


def test_backbones_of_timm_take_no_classifier_of_ours(tmp_path: Path) -> None:
    path = save(VisionLongformer(SMALL_MODELS["vil"]), tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="the backbone resnet10t is timm's"):
        load_backbone(small_detector("retinanet", backbone="resnet10t"), path)


def test_recipes_stretch_tables_as_the_loader_does(tmp_path: Path) -> None:
    """And as the paper does: a run that starts from a classifier has its tables stretched bilinearly."""
    config = SMALL_MODELS["vil"]
    last = replace(config.stages[3], attention=cfg.Full())
    classifier = VisionLongformer(replace(config, stages=(*config.stages[:3], last)))
    path = save(classifier, tmp_path / "c.safetensors")
    recipe = resolve(
        DetectionRecipe,
        "mask_rcnn_small_1x",
        model="vil",
        detector_options={"channels": 8, "box_width": 8, "mask_channels": 8},
        data="garments:64",
        train_split="train",
        eval_split="validation",
        init=str(path),
        workers=0,
    )
    task = DetectionTask(recipe, make_accelerator(recipe))
    name = "stages.3.blocks.0.attn.bias.table"
    expected = F.interpolate(classifier.state_dict()[name][None], size=(7, 7), mode="bilinear")[0]
    torch.testing.assert_close(task.model.state_dict()[f"backbone.body.model.{name}"], expected)


@pytest.mark.parametrize("name", recipe_names(DetectionRecipe))
def test_every_recipe_stretches_tables(name: str) -> None:
    assert resolve(DetectionRecipe, name).table_resize == "bilinear"
