"""RetinaNet and Mask R-CNN: torchvision's detectors on our pyramid, with the settings of the paper's models.

Anchors and pooled regions have fixed strides, and images of unlike sizes are evaluated apart, so that the result of an
image does not depend on the other images of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign, roi_align
from torchvision.ops.poolers import LevelMapper

from .backbone import ImageTransform, PyramidBackbone, group_by
from .config import DetectorConfig

Images = list[Tensor]
Targets = list[dict[str, Tensor]]
Outputs = list[dict[str, Tensor]]

BOX_POOL, MASK_POOL = 7, 14
SCALES_PER_OCTAVE = 3
"""Anchor sizes of a level of RetinaNet: a third of an octave apart."""

PAPER_CHANNELS = 256


def retinanet(backbone: str, num_classes: int, **options: Any) -> RetinaNet:
    """A RetinaNet on a named backbone; ``options`` are fields of :class:`DetectorConfig`.

    ``num_classes`` counts kinds of objects, without background, unlike torchvision's. :func:`build_detector` says what
    it takes and gives.
    """
    return RetinaNetDetector(DetectorConfig("retinanet", backbone, num_classes).override(**options))


def mask_rcnn(backbone: str, num_classes: int, **options: Any) -> MaskRCNN:
    """A Mask R-CNN on a named backbone; ``options`` are fields of :class:`DetectorConfig`.

    ``num_classes`` counts kinds of objects, without background, unlike torchvision's. :func:`build_detector` says what
    it takes and gives.
    """
    return MaskRCNNDetector(DetectorConfig("mask_rcnn", backbone, num_classes).override(**options))


def build_detector(config: DetectorConfig) -> RetinaNet | MaskRCNN:
    """The detector that ``config`` describes.

    In training it takes a list of images (3, h, w) with values from 0 to 1 and a list of targets, and gives a dict of
    losses. The target of an image with n objects is a dict of ``boxes`` (n, 4), left, top, right, bottom in pixels;
    ``labels`` (n,), integers from 1 to ``num_classes``, as 0 is the background; and, for Mask R-CNN, ``masks``
    (n, h, w), 0 or 1. In evaluation it gives a list of dicts ``boxes``, ``labels``, ``scores`` and, for Mask R-CNN,
    ``masks`` (n, 1, h, w), probabilities. The result of an image does not depend on the other images.
    """
    return {"retinanet": RetinaNetDetector, "mask_rcnn": MaskRCNNDetector}[config.kind](config)


def check_targets(images: Images, targets: Targets | None, num_classes: int, *, masks: bool) -> Targets:
    """The targets of these images, if a detector of so many classes can learn from them; or say what is wrong.

    torchvision takes a label that is out of range for another class, or fails deep inside.
    """
    if targets is None or len(targets) != len(images):
        count = "no targets" if targets is None else f"{len(targets)} targets"
        raise ValueError(f"there are {count} for {len(images)} images; in training, give one for each, or call eval()")
    for index, (image, target) in enumerate(zip(images, targets, strict=True)):
        wanted = ("boxes", "labels", "masks") if masks else ("boxes", "labels")
        if missing := [name for name in wanted if name not in target]:
            raise ValueError(f"targets[{index}] has no {' and no '.join(missing)}")
        boxes, labels, objects = target["boxes"], target["labels"], len(target["boxes"])
        shapes: dict[str, tuple[int, ...]] = {"boxes": (objects, 4), "labels": (objects,)}
        if masks:
            shapes["masks"] = (objects, *image.shape[-2:])
        for name, shape in shapes.items():
            if tuple(target[name].shape) != shape:
                raise ValueError(f"targets[{index}] has {name} {tuple(target[name].shape)}; they must be {shape}")
        wrong = (labels < 1) | (labels > num_classes)
        if wrong.any():
            raise ValueError(
                f"targets[{index}] has label {labels[wrong][0].item()}; "
                f"labels count from 1 to {num_classes}, 0 is the background"
            )
        flat = (boxes[:, 2:] <= boxes[:, :2]).any(1)
        if flat.any():
            raise ValueError(
                f"targets[{index}] has the box {boxes[flat][0].tolist()}, without area; "
                "boxes are left, top, right, bottom"
            )
    return targets


class RetinaNetDetector(RetinaNet):
    """torchvision's RetinaNet with labels from 1, as Mask R-CNN has them; ``config`` says what it is."""

    def __init__(self, config: DetectorConfig) -> None:
        backbone = PyramidBackbone(config)
        steps = [2 ** (step / SCALES_PER_OCTAVE) for step in range(SCALES_PER_OCTAVE)]
        sizes = [[config.cells * stride * step for step in steps] for stride in backbone.strides]
        super().__init__(
            backbone,
            config.num_classes,
            anchor_generator=FixedAnchors(sizes, config.anchor_ratios, backbone.strides),
            score_thresh=config.score_threshold,
            nms_thresh=config.nms_threshold,
            detections_per_img=config.detections,
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.4,
            topk_candidates=config.proposals,
        )
        self.box_coder = PreciseBoxCoder(UNIT_WEIGHTS)
        if config.channels < PAPER_CHANNELS:
            _init_narrow_head(self.head)
        self.transform = _transform(config, backbone)
        self.config = config

    def forward(self, images: Images, targets: Targets | None = None) -> Any:
        if self.training:
            checked = check_targets(images, targets, self.config.num_classes, masks=False)
            return super().forward(images, [{**target, "labels": target["labels"] - 1} for target in checked])
        outputs = _size_by_size(super().forward, images)
        return [{**output, "labels": output["labels"] + 1} for output in outputs]

    def set_grad_checkpointing(self, enable: bool | str = True) -> None:
        """Recompute the blocks of the backbone in backward instead of keeping what is inside them."""
        self.backbone.set_grad_checkpointing(enable)


class MaskRCNNDetector(MaskRCNN):
    """torchvision's Mask R-CNN with aligned pooling; ``config`` says what it is."""

    def __init__(self, config: DetectorConfig) -> None:
        backbone = PyramidBackbone(config)
        levels, classes = backbone.level_names, config.num_classes + 1
        sizes = [[config.cells * stride] for stride in backbone.strides]
        mask_layers = [config.mask_channels] * config.mask_layers
        super().__init__(
            backbone,
            rpn_anchor_generator=FixedAnchors(sizes, config.anchor_ratios, backbone.strides),
            rpn_pre_nms_top_n_train=2 * config.proposals,
            rpn_pre_nms_top_n_test=config.proposals,
            rpn_post_nms_top_n_train=config.proposals,
            rpn_post_nms_top_n_test=config.proposals,
            box_roi_pool=AlignedRoIAlign(levels, BOX_POOL, backbone.strides),
            box_head=TwoMLPHead(config.channels * BOX_POOL**2, config.box_width),
            box_predictor=FastRCNNPredictor(config.box_width, classes),
            box_score_thresh=config.score_threshold,
            box_nms_thresh=config.nms_threshold,
            box_batch_size_per_image=config.samples,
            box_detections_per_img=config.detections,
            mask_roi_pool=AlignedRoIAlign(levels, MASK_POOL, backbone.strides),
            mask_head=MaskRCNNHeads(config.channels, mask_layers, 1),
            mask_predictor=MaskRCNNPredictor(config.mask_channels, config.mask_channels, classes),
        )
        for part in (self.rpn, self.roi_heads):
            part.box_coder = PreciseBoxCoder(part.box_coder.weights)
        self.transform = _transform(config, backbone)
        self.config = config

    def forward(self, images: Images, targets: Targets | None = None) -> Any:
        if self.training:
            return super().forward(images, check_targets(images, targets, self.config.num_classes, masks=True))
        return _size_by_size(super().forward, images)

    def set_grad_checkpointing(self, enable: bool | str = True) -> None:
        """Recompute the blocks of the backbone in backward instead of keeping what is inside them."""
        self.backbone.set_grad_checkpointing(enable)


def _size_by_size(forward: Callable[[Images], Outputs], images: Images) -> Outputs:
    """Outputs of the images, those of equal size computed together.

    Convolutions of the pyramid and the heads would carry padding into an image: their biases make it non-zero after
    one layer, and the next layer reads it. So in evaluation no image is padded to the size of another.
    """
    outputs: dict[int, dict[str, Tensor]] = {}
    for group in group_by(tuple(image.shape) for image in images):
        outputs |= zip(group, forward([images[position] for position in group]), strict=True)
    return [outputs[position] for position in range(len(images))]


def _transform(config: DetectorConfig, backbone: PyramidBackbone) -> ImageTransform:
    """Resizing, ImageNet's mean and standard deviation, and our batching."""
    mean, std = list(IMAGENET_DEFAULT_MEAN), list(IMAGENET_DEFAULT_STD)
    transform = ImageTransform(config.min_sizes, config.max_size, mean, std, size_divisible=backbone.size_divisible)
    transform.scale = config.scale
    return transform


def _init_narrow_head(head: nn.Module) -> None:
    """Draw the weights of hidden convolutions so that they keep the scale of what goes through.

    A standard deviation of 0.01, as in the paper's models, suits many channels and many thousand steps: of 64 channels,
    four layers leave a thousandth, and a small detector learns nothing but the biases for hundreds of steps.
    """
    for name, weight in head.named_parameters():
        if ".conv." in name and weight.dim() == 4:
            nn.init.kaiming_normal_(weight, nonlinearity="relu")


UNIT_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
"""Of the four offsets of a box, as torchvision has them for anchors."""


class PreciseBoxCoder(BoxCoder):
    """Decodes boxes in the precision of the anchors or regions, whatever that of the offsets.

    torchvision's decodes in the precision of the offsets, and bf16 rounds coordinates above 512 to multiples of 4.
    """

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        """Offsets (n, 4 · classes) from boxes (n, 4) to boxes (n, 4 · classes)."""
        return super().decode_single(rel_codes.to(boxes.dtype), boxes)


class FixedAnchors(AnchorGenerator):
    """Anchors of exact size around the corners of the cells, size by size and in each by ratio, in float32 at least.

    torchvision's are rounded to pixels, go ratio by ratio, take strides from the size of the padded batch, and have the
    precision of the maps.
    """

    def __init__(self, sizes: list[list[float]], ratios: tuple[float, ...], strides: list[int]) -> None:
        self.strides = strides
        super().__init__(tuple(map(tuple, sizes)), (tuple(ratios),) * len(sizes))

    def generate_anchors(
        self,
        scales: list[float],
        aspect_ratios: list[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Anchors (sizes · ratios, 4) around the origin; a ratio is height to width."""
        size = torch.tensor(scales, dtype=dtype, device=device)[:, None]
        root = torch.tensor(aspect_ratios, dtype=dtype, device=device).sqrt()
        width, height = (size / root).flatten(), (size * root).flatten()
        return torch.stack([-width, -height, width, height], 1) / 2

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """The anchors of all maps, (N, 4), for each image."""
        first = feature_maps[0]
        self.set_cell_anchors(torch.promote_types(first.dtype, torch.float32), first.device)
        strides = [[torch.tensor(stride, device=first.device)] * 2 for stride in self.strides]
        anchors = self.grid_anchors([list(one.shape[-2:]) for one in feature_maps], strides)
        return [torch.cat(anchors)] * len(image_list.image_sizes)


class AlignedRoIAlign(MultiScaleRoIAlign):
    """Regions pooled with half-pixel alignment and as many samples as they need, from the level that fits their size.

    torchvision's pools without alignment and guesses the scales from the first image it sees. Maps are pooled in the
    precision of the boxes, not the other way round.
    """

    def __init__(self, names: list[str], output_size: int, strides: list[int]) -> None:
        super().__init__(names, output_size, sampling_ratio=0)
        self.strides = strides[: len(names)]
        self.mapper = LevelMapper(*(round(math.log2(stride)) for stride in (self.strides[0], self.strides[-1])))

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """Boxes (n, 4) of each image to (all boxes, channels, size, size)."""
        numbers = torch.cat([torch.full_like(one[:, :1], index) for index, one in enumerate(boxes)])
        regions = torch.cat([numbers, torch.cat(boxes)], 1)
        levels = self.mapper(boxes)
        first = x[self.featmap_names[0]]
        pooled = first.new_zeros(regions.shape[0], first.shape[1], *self.output_size)
        for level, (name, stride) in enumerate(zip(self.featmap_names, self.strides, strict=True)):
            chosen = torch.where(levels == level)[0]
            part = roi_align(x[name].to(regions.dtype), regions[chosen], self.output_size, 1 / stride, 0, aligned=True)
            pooled = pooled.index_copy(0, chosen, part.to(pooled.dtype))
        return pooled
