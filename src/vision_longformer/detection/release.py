"""The authors' released detectors, in detectron2's format, loaded as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

from ..checkpoint.release import read_pth, translate
from ..checkpoint.release_names import ReleaseNames, Source, model_names
from ..errors import CheckpointError
from .config import DetectorConfig
from .detections import Category
from .detectors import build_detector

DERIVED = ("pixel_mean", "pixel_std", ".cell_anchors.", "backbone.bottom_up.norm.", "backbone.bottom_up.head.")
"""Parts of names that are not loaded: constants, and what is left of the classifier."""

HEAD_CONVS = 4
"""Convolutions of each of RetinaNet's two heads."""


def load_release_detector(source: str | Path | Mapping[str, Any], config: DetectorConfig) -> nn.Module:
    """The detector of a released file (or of a dict read from one), in evaluation mode.

    ``config`` says which it is, as ``DetectorConfig("mask_rcnn", "vision_longformer_small", 80)``. Classes stay in
    their order, with labels from 1. Any difference between file and configuration is an error that lists it.
    """
    names = _names(config)
    model = build_detector(config)
    state = _translated(_weights(source), names)
    wanted = model.state_dict()
    wrong = [
        f"{name}: {tuple(tensor.shape)} in the file, {tuple(wanted[name].shape)} in the model"
        for name, tensor in state.items()
        if tensor.shape != wanted[name].shape
    ]
    if wrong:
        raise CheckpointError("these weights do not fit the detector; nothing was loaded\n  " + "\n  ".join(wrong))
    model.load_state_dict(state)
    return model.eval()


def coco_categories() -> tuple[Category, ...]:
    """COCO's 80 categories with their ids, as torchvision names them beside its own weights."""
    names = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    return tuple(Category(number, name) for number, name in enumerate(names) if name not in ("__background__", "N/A"))


def _weights(source: str | Path | Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors under ``model``, without those that are derived."""
    content, name = (source, "the dict") if isinstance(source, Mapping) else (read_pth(Path(source)), str(source))
    state = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(f"{name} has no weights under 'model', as a released detector has; nothing was loaded")
    return {name: tensor for name, tensor in state.items() if not any(part in name for part in DERIVED)}


def _translated(state: Mapping[str, Tensor], names: ReleaseNames) -> dict[str, Tensor]:
    try:
        return translate(state, names)
    except CheckpointError as error:
        differences = str(error).partition("\n")[2]
        raise CheckpointError(
            f"the file does not match the detector of the configuration; nothing was loaded\n{differences}"
        ) from error


def _names(config: DetectorConfig) -> ReleaseNames:
    """Which tensors of the file make up each of ours."""
    names = ReleaseNames()
    names.add(_backbone_names(config), "backbone.body.model.", "backbone.bottom_up.")
    for index, stage in enumerate(config.stages):
        names.linear(f"backbone.fpn.inner_blocks.{index}.0", f"backbone.fpn_lateral{stage + 1}")
        names.linear(f"backbone.fpn.layer_blocks.{index}.0", f"backbone.fpn_output{stage + 1}")
    if config.kind == "retinanet":
        _add_retinanet(names)
    else:
        _add_mask_rcnn(names, config.mask_layers)
    return names


def _backbone_names(config: DetectorConfig) -> ReleaseNames:
    model = config.backbone_config
    if model is None:
        raise ValueError(f"the backbone {config.backbone} is timm's; released detectors are on backbones of ours")
    if any(stage.position == "absolute" for stage in model.stages):
        raise ValueError(
            "released detectors with absolute position cut their tables to the image, where ours are resized; only "
            "those with relative bias can be loaded"
        )
    names = model_names(model)
    for name in ("norm.weight", "norm.bias"):
        del names.sources[name]
    return names


def _add_retinanet(names: ReleaseNames) -> None:
    for level in ("p6", "p7"):
        names.linear(f"backbone.fpn.extra_blocks.{level}", f"backbone.top_block.{level}")
    for ours, theirs in (("classification_head", "cls_subnet"), ("regression_head", "bbox_subnet")):
        for layer in range(HEAD_CONVS):
            names.linear(f"head.{ours}.conv.{layer}.0", f"head.{theirs}.{2 * layer}")
    names.linear("head.classification_head.cls_logits", "head.cls_score")
    names.linear("head.regression_head.bbox_reg", "head.bbox_pred")


def _add_mask_rcnn(names: ReleaseNames, mask_layers: int) -> None:
    proposals, boxes, masks = "proposal_generator.rpn_head", "roi_heads.box_head", "roi_heads.mask_head"
    names.linear("rpn.head.conv.0.0", f"{proposals}.conv")
    names.linear("rpn.head.cls_logits", f"{proposals}.objectness_logits")
    names.linear("rpn.head.bbox_pred", f"{proposals}.anchor_deltas")
    names.linear("roi_heads.box_head.fc6", f"{boxes}.fc1")
    names.linear("roi_heads.box_head.fc7", f"{boxes}.fc2")
    for layer in range(mask_layers):
        names.linear(f"roi_heads.mask_head.{layer}.0", f"{masks}.mask_fcn{layer + 1}")
    names.linear("roi_heads.mask_predictor.conv5_mask", f"{masks}.deconv")
    for part in ("weight", "bias"):
        score, offsets = f"roi_heads.box_predictor.cls_score.{part}", f"roi_heads.box_predictor.bbox_pred.{part}"
        names.sources[score] = Source((score,), _last_first)
        names.sources[offsets] = Source((offsets,), lambda rows: _with_background(rows, 4))
        mask = f"roi_heads.mask_predictor.mask_fcn_logits.{part}"
        names.sources[mask] = Source((f"{masks}.predictor.{part}",), lambda rows: _with_background(rows, 1))


def _last_first(rows: Tensor) -> Tensor:
    """Background, the last class there, is the first here."""
    return torch.roll(rows, 1, 0)


def _with_background(rows: Tensor, count: int) -> Tensor:
    """Rows of zeros for the background, which has no box or mask there."""
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (count, 0))
