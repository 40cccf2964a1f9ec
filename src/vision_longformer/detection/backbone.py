"""From images of unlike sizes to the maps of a feature pyramid, on our backbones or timm's, without padding that
anything would attend to.

torchvision pads the images of a batch to one size. Attention would reach into that padding, and the result of an image
would depend on the other images of its batch. Here the backbone gets the images themselves, and only its maps are
brought to a common size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, cast

import timm
import torch
from timm.layers.format import Format
from timm.models._features import FeatureInfo
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops.feature_pyramid_network import (
    ExtraFPNBlock,
    FeaturePyramidNetwork,
    LastLevelMaxPool,
    LastLevelP6P7,
)

from ..geometry import ceil_div
from ..models import VisionLongformer
from .config import DetectorConfig


class ImageBatch(NamedTuple):
    """Images (3, h, w) of several sizes, in place of the padded batch of ``shape`` (B, 3, H, W).

    Each h and w is a multiple of the backbone's stride, H and W are the largest.
    """

    images: list[Tensor]
    shape: tuple[int, int, int, int]

    def padded(self) -> Tensor:
        """The padded batch after all."""
        return torch.stack([_pad(image, self.shape[2:]) for image in self.images])


def resized_size(height: int, width: int, min_size: int, max_size: int, scale: float | None = None) -> tuple[int, int]:
    """The size to which evaluation brings an image, before padding; rounded as torchvision does.

    ``scale`` takes the place of the limits to the shorter and longer side if it is not None.
    """
    sides = sorted((height, width))
    own = min(min_size / sides[0], max_size / sides[1]) if scale is None else scale
    return max(1, int(height * own)), max(1, int(width * own))


class ImageTransform(GeneralizedRCNNTransform):
    """torchvision's resizing and normalising, without its batching.

    In evaluation, ``scale`` takes the place of ``min_size`` and ``max_size`` if it is not None.
    """

    scale: float | None = None

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """The size to which evaluation brings an image, before padding."""
        return resized_size(height, width, self.min_size[-1], self.max_size, self.scale)

    def padded_size(self, height: int, width: int) -> tuple[int, int]:
        """The size of what the backbone sees of an image in evaluation."""
        height, width = _next_multiples(self.resized_size(height, width), self.size_divisible)
        return height, width

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        if self.training or self.scale is None:
            return super().resize(image, target)
        size = self.resized_size(*image.shape[-2:])
        return F.interpolate(image[None], size, mode="bilinear", align_corners=False)[0], target

    def batch_images(self, images: list[Tensor], size_divisible: int = 32) -> ImageBatch:
        images = [_pad(image, _next_multiples(image.shape[1:], size_divisible)) for image in images]
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        return ImageBatch(images, (len(images), images[0].shape[0], height, width))


def group_by(keys: Iterable[Hashable]) -> list[list[int]]:
    """The positions of equal keys, in order of their first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key, []).append(position)
    return list(groups.values())


def _next_multiples(size: Iterable[int], of: int) -> list[int]:
    return [ceil_div(side, of) * of for side in size]


def _pad(image: Tensor, size: Iterable[int]) -> Tensor:
    """Zeros below and to the right of a map (…, h, w) up to ``size``."""
    height, width = size
    return F.pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2]))


class PyramidBackbone(nn.Module):
    """The maps that the stages of ``body`` leave, through a feature pyramid.

    Above the last stage there are P6, pooled from P5 in Mask R-CNN, or P6 and P7, convolutions of the last stage's map,
    in RetinaNet. ``strides`` are those of all maps that come out.

    Images of unlike sizes go through the body size by size, so that none sees padding; only the maps are padded, with
    zeros. A body with batch normalisation gets the padded batch in training, since its statistics are the batch's.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.body, dims, strides = _build_body(config)
        self.out_channels = config.channels
        self.size_divisible = strides[-1]
        extra: ExtraFPNBlock = LastLevelMaxPool()
        self.strides = [*strides, 2 * strides[-1]]
        if config.kind == "retinanet":
            extra = LastLevelP6P7(dims[-1], config.channels)
            extra.use_P5 = False  # torchvision would start P6 from P5 if channels allow it, not from the stage's map
            self.strides.append(4 * strides[-1])
        self.fpn = FeaturePyramidNetwork(dims, config.channels, extra)
        self.level_names = [str(level) for level in range(len(dims))]
        self.needs_whole_batch = any(isinstance(module, _BatchNorm) for module in self.body.modules())

    def forward(self, batch: ImageBatch) -> dict[str, Tensor]:
        """The pyramid's maps by name, each (B, channels, H / stride, W / stride)."""
        whole = self.training and self.needs_whole_batch
        maps = self.body(batch.padded()) if whole else self._size_by_size(batch)
        return self.fpn(OrderedDict(zip(self.level_names, maps, strict=True)))

    def set_grad_checkpointing(self, enable: bool | str = True) -> None:
        """As timm's models have it; those that cannot refuse it with an AssertionError."""
        self.body.get_submodule("model").set_grad_checkpointing(enable)  # type: ignore[operator]

    def _size_by_size(self, batch: ImageBatch) -> list[Tensor]:
        """The body's maps, computed for the images of each size together and padded to the batch's size."""
        groups = group_by(tuple(image.shape) for image in batch.images)
        if len(groups) == 1:
            return self.body(torch.stack(batch.images))
        sizes = [[ceil_div(side, stride) for side in batch.shape[2:]] for stride in self.strides]
        parts = []
        for group in groups:
            maps = self.body(torch.stack([batch.images[position] for position in group]))
            parts.append([_pad(one, size) for one, size in zip(maps, sizes, strict=False)])
        order = torch.tensor([position for group in groups for position in group]).argsort()
        return [torch.cat(level)[order.to(level[0].device)] for level in zip(*parts, strict=True)]


class StageMaps(nn.Module):
    """A Vision Longformer that gives the maps of some stages, (B, dim, h, w) each, and has nothing else."""

    def __init__(self, model: VisionLongformer, stages: tuple[int, ...]) -> None:
        super().__init__()
        self.indices = [stage - 1 for stage in stages]
        model.prune_intermediate_layers(self.indices, prune_norm=True, prune_head=True)
        self.model = model
        self.frozen = 0

    def freeze(self, stages: int) -> None:
        """Keep the weights of the first stages as they are, patch embeddings included; nothing is dropped in them."""
        if stages > len(self.model.stages):
            raise ValueError(f"freeze is {stages}, but the backbone has {len(self.model.stages)} stages")
        self.frozen = stages
        for stage in self.model.stages[:stages]:
            stage.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> StageMaps:
        super().train(mode)
        for stage in self.model.stages[: self.frozen]:
            stage.eval()
        return self

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.model.forward_intermediates(images, indices=self.indices, intermediates_only=True)


class TimmMaps(nn.Module):
    """The same of one of timm's models, whatever its layout."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.model = timm.create_model(config.backbone, features_only=True, **_timm_options(config))
        info = cast(FeatureInfo, self.model.feature_info)
        self.reductions, self.channels = info.reduction(), info.channels()
        self.channels_last = self.model.output_fmt == Format.NHWC
        wanted = [4 * 2 ** (stage - 1) for stage in config.stages]
        missing = [stride for stride in wanted if stride not in self.reductions]
        if missing:
            raise ValueError(
                f"levels {config.stages} are maps of strides {wanted}, but {config.backbone} has {self.reductions}"
            )
        self.indices = [self.reductions.index(stride) for stride in wanted]

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = self.model(images)
        return [maps[index].permute(0, 3, 1, 2) if self.channels_last else maps[index] for index in self.indices]


def _build_body(config: DetectorConfig) -> tuple[nn.Module, list[int], list[int]]:
    """The backbone proper, and channels and strides of its maps."""
    model_config = config.backbone_config
    if model_config is None:
        body = TimmMaps(config)
        return body, [body.channels[i] for i in body.indices], [body.reductions[i] for i in body.indices]
    model = VisionLongformer(model_config)
    info = [model.feature_info[stage - 1] for stage in config.stages]
    return StageMaps(model, config.stages), [one["num_chs"] for one in info], [one["reduction"] for one in info]


def _timm_options(config: DetectorConfig) -> dict[str, Any]:
    """Swin checks the image size unless told not to."""
    free_size = {"strict_img_size": False} if config.backbone.startswith(("swin_", "swinv2_")) else {}
    return {**free_size, **config.backbone_options}
