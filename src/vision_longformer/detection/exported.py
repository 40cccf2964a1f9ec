"""Exported detectors in place of those they were made from."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.transform import resize_boxes
from torchvision.ops import clip_boxes_to_image

from ..config import size_pair
from ..errors import CheckpointError
from ..export.loaded import ExportedModel, load_exported
from .config import DetectorConfig

OUTPUTS = ("boxes", "labels", "scores", "masks")
"""Of a file, in order; the masks of Mask R-CNN only."""


class ExportedDetector(nn.Module):
    """A file for images of a fixed ``size``, called like a detector: images of any size, results in their pixels.

    An image is resized to fit, and padded at the bottom and on the right with the colour that counts as zero.
    """

    def __init__(self, model: ExportedModel) -> None:
        super().__init__()
        self.model, self.metadata = model, model.metadata
        self.config = DetectorConfig.from_dict(self.metadata["config"])
        self.size = size_pair(self.metadata["size"])
        self.padding = torch.tensor(self.metadata["padding"]).reshape(3, 1, 1)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        """Images (3, h, w) with values from 0 to 1 to ``boxes``, ``labels``, ``scores`` and perhaps ``masks``."""
        return [self._found(image) for image in images]

    def _found(self, image: Tensor) -> dict[str, Tensor]:
        height, width = image.shape[1:]
        scale = min(self.size[0] / height, self.size[1] / width)
        used = max(1, round(height * scale)), max(1, round(width * scale))
        whole = self.padding.to(image).repeat(1, *self.size)
        whole[:, : used[0], : used[1]] = F.interpolate(image[None], used, mode="bilinear")[0]
        found = dict(zip(OUTPUTS, self.model(whole), strict=False))
        inside = (found["boxes"][:, 0] <= used[1]) & (found["boxes"][:, 1] <= used[0])
        found = {name: values[inside] for name, values in found.items()}
        boxes = resize_boxes(found["boxes"], used, (height, width))
        found["boxes"] = clip_boxes_to_image(boxes, (height, width))
        if "masks" in found:
            found["masks"] = paste_masks_in_image(found["masks"], boxes, (height, width))
        return found


def load_exported_detector(path: str | Path) -> ExportedDetector:
    """The detector of a ``.onnx`` or ``.pt2`` file."""
    model = load_exported(path)
    kind = model.metadata["kind"]
    if kind != "detector":
        raise CheckpointError(f"{path} is an exported {kind}; a detector was asked for, and nothing was loaded")
    try:
        return ExportedDetector(model)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not describe its detector ({error}); nothing was loaded") from error
