"""Images and their objects mirrored together, and as tensors to learn from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from .dataset import Target

Sample = tuple[Image.Image, Target]


def mirror(image: Image.Image, target: Target) -> Sample:
    """Left and right exchanged."""
    left, top, right, bottom = target.boxes.unbind(1)
    boxes = torch.stack((image.width - right, top, image.width - left, bottom), 1)
    masks = None if target.masks is None else target.masks.flip(2)
    return ImageOps.mirror(image), replace(target, boxes=boxes, masks=masks)


def image_tensor(image: Image.Image) -> Tensor:
    """(3, h, w), float32, 0 to 1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)


def training_target(target: Target) -> dict[str, Tensor]:
    """What torchvision's detectors learn from: all but crowds."""
    single = ~target.crowd
    learned = {"boxes": target.boxes[single], "labels": target.labels[single]}
    if target.masks is not None:
        learned["masks"] = target.masks[single].to(torch.uint8)
    return learned
