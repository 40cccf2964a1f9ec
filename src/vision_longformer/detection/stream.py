"""A detector on one image of any size, in bounded memory: its own detections, not those of tiles.

The backbone is streamed (:mod:`vision_longformer.large`). Its maps are kept; those of the pyramid, which have many more
channels, and of the heads exist in windows only. From all windows of a level the best anchors remain, as many as the
detector would choose of the whole map, and what follows is done once: decoding, overlaps, and limits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.roi_heads import (
    expand_boxes,
    expand_masks,
    maskrcnn_inference,
    paste_mask_in_image,
)
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.models.detection.transform import resize_boxes

from ..geometry import Grid, ceil_div
from ..large.memory import FIXED, HEADROOM, Work, free_memory, parse_bytes
from ..large.pixels import Pixels
from ..large.storage import token_folder
from ..large.stream import check_model, stream
from .backbone import ImageTransform, StageMaps
from .checkpoint import detector_backbone
from .detections import MASK_THRESHOLD, Detection, MaskCrop
from .windows import PyramidWindows, anchor_boxes, best_anchors, pool_regions

SIDES = (256, 128, 64, 32)
"""Cells along a window, the most that memory allows."""

PIECE_NUMBERS = 2**20
"""Of the rows of an image that are in memory at a time where it is resized."""

COPIES = 6
"""Maps of the pyramid's channels that exist at a time while a window is computed, with those inside convolutions."""


def stream_detections(
    model: nn.Module,
    image: Any,
    *,
    threshold: float = 0.0,
    memory: str | int | None = "2GB",
    storage: str | Path | None = None,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> list[Detection]:
    """What a detector finds in one image, best first, with scores of at least ``threshold``.

    The detections are those of ``model([image])``, and the image is resized as there: see ``scale`` of
    :class:`DetectorConfig`.

    Args:
        model: a detector of ``build_detector`` on a backbone whose stages are Longformer, in evaluation mode.
        image: a tensor (3, height, width) with values from 0 to 1, or anything that
            :func:`~vision_longformer.large.open_image` takes or has opened.
        memory: what tokens, strips and windows may take, beside the model and the image: ``"2GB"``, or bytes; None for
            what is free.
        storage: a folder for the backbone's tokens; None for memory. A run that ended early is resumed from there; it
            is emptied at the end.
        progress: called with the approximate number of multiplications that are done, and of all.
    """
    if (reason := refuse_streaming(model)) is not None:
        raise ValueError(reason)
    assert isinstance(model, RetinaNet | MaskRCNN)
    backbone = detector_backbone(model)
    source = InputRows(model.transform, image, next(model.parameters()).dtype)
    plan = Plan(model, source.shape[:2], in_memory=storage is None)
    memory = plan.free_memory() if memory is None else memory
    side, total = plan.choose_side(memory), plan.backbone_work + plan.head_work
    kept = plan.work.kept
    with torch.no_grad(), token_folder(storage) as folder:
        streamed = stream(
            backbone, source, memory=memory, storage=folder, maps=kept,
            identity=None if folder is None else source.identity(),
            progress=lambda now: progress(plan.backbone_work * now.done // now.total, total),
        )  # fmt: skip
        pyramid = PyramidWindows(model.backbone, [streamed.maps[stage] for stage in kept])
        run = _Run(model, pyramid, source, side, lambda share: progress(total - plan.head_work + share, total))
        detections = run.retinanet(threshold) if isinstance(model, RetinaNet) else run.mask_rcnn(threshold)
        if folder is not None:
            folder.close()
    return detections


def refuse_streaming(model: nn.Module) -> str | None:
    """Why a detector cannot be streamed, or None."""
    if not isinstance(model, RetinaNet | MaskRCNN):  # an exported file
        return f"a {type(model).__name__} was not built by build_detector, and cannot be streamed"
    try:
        check_model(detector_backbone(model))
    except ValueError as error:
        return str(error)
    return None


class InputRows:
    """The rows of an image as a detector's backbone takes them: normalised, resized, and padded to whole patches.

    Sliced by rows it gives (n, width, 3); ``shape`` is (height, width, 3). ``size`` is the size of the image itself,
    ``resized`` its size before padding.
    """

    def __init__(self, transform: ImageTransform, image: Any, dtype: torch.dtype) -> None:
        self._pixels = Pixels(image, 3, (0.0,) * 3, (1.0,) * 3)
        self._transform = transform
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.dtype = np.dtype(str(self._dtype).partition(".")[2])
        self.size = self._pixels.size
        self.resized = transform.resized_size(*self.size)
        self.shape = *transform.padded_size(*self.size), 3

    def identity(self) -> str:
        """What tells the input from others."""
        return f"{self._pixels.identity()} {self.size} {self.resized}"

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(self.shape[0])
        rows_of_image = max(0, min(last, self.resized[0]) - first)
        content = self._resized_rows(first, first + rows_of_image) if rows_of_image else None
        if content is not None and content.shape[2:] == (last - first, self.shape[1]):
            return content[0].permute(1, 2, 0).numpy()
        padded = torch.zeros(last - first, *self.shape[1:], dtype=self._dtype)
        if content is not None:
            padded[:rows_of_image, : self.resized[1]] = content[0].permute(1, 2, 0)
        return padded.numpy()

    def _resized_rows(self, first: int, last: int) -> Tensor:
        """Normalised rows (1, 3, n, width) of the resized image, made of a few rows of the image at a time."""
        if self.resized == self.size:
            return self._read(range(first, last))
        rows_of_image = PIECE_NUMBERS // (3 * self.size[1])
        step = max(1, rows_of_image * self.resized[0] // self.size[0])
        return torch.cat([self._resized_piece(row, min(row + step, last)) for row in range(first, last, step)], 2)

    def _resized_piece(self, first: int, last: int) -> Tensor:
        ratio = torch.tensor(self.size[0], dtype=self._dtype) / self.resized[0]
        places = ((torch.arange(first, last, dtype=self._dtype) + 0.5) * ratio - 0.5).clamp(min=0)
        above = places.long().clamp(max=self.size[0] - 1)
        below = (above + 1).clamp(max=self.size[0] - 1)
        start = int(above[0])
        source = self._read(range(start, int(below[-1]) + 1))
        weights = (places - above)[:, None]
        blended = source[:, :, above - start] * (1 - weights) + source[:, :, below - start] * weights
        return F.interpolate(blended, (last - first, self.resized[1]), mode="bilinear", align_corners=False)

    def _read(self, rows: range) -> Tensor:
        pixels = self._pixels.read(rows, torch.device("cpu"), self._dtype)
        return self._transform.normalize(pixels[0])[None]


class Plan:
    """What a detector takes for an input of some size (height, width): memory, and multiplications."""

    def __init__(self, model: RetinaNet | MaskRCNN, size: tuple[int, int], *, in_memory: bool = True) -> None:
        backbone, body = detector_backbone(model), model.backbone.body
        assert isinstance(body, StageMaps)
        self.model, self.config, self.size = model, model.config, size
        self.computed = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self.work = Work(
            backbone.config, len(backbone.stages), size, next(model.parameters()).dtype, self.computed,
            tuple(body.indices), in_memory=in_memory,
        )  # fmt: skip
        self.grids = [Grid(*(ceil_div(side, stride) for side in size)) for stride in model.backbone.strides]
        work = self.work
        self.backbone_work = sum(work.multiplications(step, work.grids[step.stage].height) for step in work.steps)
        layers = 1 + _dense_layers(model)
        self.head_work = sum(grid.tokens for grid in self.grids) * layers * 9 * self.config.channels**2

    @property
    def anchor_numbers(self) -> int:
        """Logits and offsets of a cell."""
        classes = 1 if isinstance(self.model, MaskRCNN) else self.config.num_classes
        scales = self.model.rpn if isinstance(self.model, MaskRCNN) else self.model
        return scales.anchor_generator.num_anchors_per_location()[0] * (classes + 4)

    def window_bytes(self, side: int) -> int:
        """Of what is computed for a window; for Mask R-CNN also of the largest region, the whole top level."""
        cells = min((side + 2 * _margin(self.model) + 2) ** 2, self.grids[0].tokens)
        numbers = cells * (COPIES * self.config.channels + 3 * self.anchor_numbers)
        if isinstance(self.model, MaskRCNN):
            numbers = max(numbers, self.grids[len(self.config.stages) - 1].tokens * COPIES * self.config.channels)
        return FIXED + int(HEADROOM * numbers * self.computed.itemsize)

    def free_memory(self) -> int:
        """What tokens, in the machine's memory, and strips and windows, in that of the model, can take together."""
        device = next(self.model.parameters()).device
        return min(free_memory(torch.device("cpu")), free_memory(device) + self.work.token_bytes())

    def choose_side(self, memory: str | int) -> int:
        """Cells along a window, as many as the limit allows; refused if it does not allow any."""
        self.work.choose_rows(memory, beside=self.window_bytes(SIDES[-1]))
        limit = parse_bytes(memory) - self.work.token_bytes()
        return next(side for side in SIDES if side == SIDES[-1] or self.window_bytes(side) <= limit)

    def whole_bytes(self, image_size: tuple[int, int]) -> int:
        """Of the detector's own pass, with the masks of an image of some size that it makes of what it finds."""
        cells = sum(grid.tokens for grid in self.grids)
        pyramid = cells * (3 * self.config.channels + 3 * self.anchor_numbers)
        pixels = 3 * (self.size[0] * self.size[1] + image_size[0] * image_size[1])
        masks = self.config.detections * image_size[0] * image_size[1] if isinstance(self.model, MaskRCNN) else 0
        numbers = pixels + sum(self.work.map_bytes(stage) for stage in self.work.kept) // self.work.stored.itemsize
        at_once = max(int(HEADROOM * pyramid) * self.computed.itemsize, self.work.plain_bytes())
        return at_once + (numbers + masks) * self.computed.itemsize


def bytes_at_once(model: nn.Module, size: tuple[int, int]) -> int | None:
    """What a detector would need for an image of ``size`` (height, width) at once; None if it cannot be streamed."""
    if refuse_streaming(model) is not None:
        return None
    assert isinstance(model, RetinaNet | MaskRCNN)
    return Plan(model, model.transform.padded_size(*size)).whole_bytes(size)


def _dense_layers(model: RetinaNet | MaskRCNN) -> int:
    """3×3 convolutions of the head that runs on all cells."""
    return len(model.rpn.head.conv) if isinstance(model, MaskRCNN) else 2 * _margin(model)


def _margin(model: RetinaNet | MaskRCNN) -> int:
    """Cells around its output that this head reads; RetinaNet's last layer is of 3×3, too."""
    if isinstance(model, MaskRCNN):
        return len(model.rpn.head.conv)
    return len(model.head.classification_head.conv) + 1


class _Anchors(NamedTuple):
    """The best anchors of all levels, a list of each: boxes (n, 4), logits (n, classes), offsets (n, 4)."""

    boxes: list[Tensor]
    logits: list[Tensor]
    offsets: list[Tensor]


class _Run:
    """The pyramid and the heads over windows, and what is done once for all of them."""

    def __init__(
        self, model: Any, pyramid: PyramidWindows, source: InputRows, side: int, progress: Callable[[int], Any]
    ) -> None:
        self.model, self.pyramid, self.source, self.side = model, pyramid, source, side
        self._progress, self._done = progress, 0

    def retinanet(self, threshold: float) -> list[Detection]:
        model = self.model

        def head(features: Tensor) -> tuple[Tensor, Tensor]:
            output = model.head([features])
            return output["cls_logits"][0], output["bbox_regression"][0]

        best = self._best_anchors(model.anchor_generator, head, model.topk_candidates)
        outputs = {
            "cls_logits": [logits[None] for logits in best.logits],
            "bbox_regression": [offsets[None] for offsets in best.offsets],
        }
        (found,) = model.postprocess_detections(outputs, [best.boxes], [self.source.resized])
        return self._detections(found["boxes"], found["labels"] + 1, found["scores"], threshold)

    def mask_rcnn(self, threshold: float) -> list[Detection]:
        heads = self.model.roi_heads
        regions = self._regions()
        logits = self._empty(len(regions), heads.box_predictor.cls_score.out_features)
        offsets = self._empty(len(regions), heads.box_predictor.bbox_pred.out_features)
        for positions, pooled in pool_regions(self.pyramid, heads.box_roi_pool, regions, self.side):
            logits[positions], offsets[positions] = heads.box_predictor(heads.box_head(pooled))
        found = heads.postprocess_detections(logits, offsets, [regions], [self.source.resized])
        (boxes,), (scores,), (labels,) = found
        return self._detections(boxes, labels, scores, threshold)

    def _regions(self) -> Tensor:
        """Boxes (n, 4) that may hold something."""
        rpn = self.model.rpn

        def head(features: Tensor) -> tuple[Tensor, Tensor]:
            return concat_box_prediction_layers(*rpn.head([features]))

        best = self._best_anchors(rpn.anchor_generator, head, rpn.pre_nms_top_n())
        boxes = rpn.box_coder.decode(torch.cat(best.offsets), [torch.cat(best.boxes)]).view(1, -1, 4)
        counts = [len(level) for level in best.boxes]
        (regions,), _ = rpn.filter_proposals(boxes, torch.cat(best.logits), [self.source.resized], counts)
        return regions

    def _best_anchors(self, generator: Any, head: Any, most: int) -> _Anchors:
        work = (1 + _dense_layers(self.model)) * 9 * self.pyramid.channels**2
        best = _Anchors([], [], [])
        for level in range(len(self.pyramid.grids)):
            found = best_anchors(
                self.pyramid, level, head, margin=_margin(self.model), most=most, side=self.side,
                progress=lambda cells: self._advance(cells * work),
            )  # fmt: skip
            best.boxes.append(anchor_boxes(generator, self.pyramid, level, found.numbers))
            best.logits.append(found.logits)
            best.offsets.append(found.offsets)
        return best

    def _detections(self, boxes: Tensor, labels: Tensor, scores: Tensor, threshold: float) -> list[Detection]:
        """In pixels of the image, best first, with masks from Mask R-CNN."""
        keep = torch.where(scores >= threshold)[0]
        boxes, labels, scores = boxes[keep], labels[keep], scores[keep]
        own = resize_boxes(boxes, self.source.resized, self.source.size)
        masks: list[Any] = [None] * len(keep)
        if isinstance(self.model, MaskRCNN):
            masks = self._masks(boxes, labels, own)
        objects = zip(own.tolist(), labels.tolist(), scores.tolist(), masks, strict=True)
        detections = [Detection(tuple(box), label, score, mask) for box, label, score, mask in objects]
        return sorted(detections, key=lambda detection: -detection.score)

    def _masks(self, boxes: Tensor, labels: Tensor, own: Tensor) -> list[MaskCrop]:
        """Of objects with boxes (n, 4) in the input, ``own`` in the image."""
        heads = self.model.roi_heads
        masks: list[MaskCrop | None] = [None] * len(boxes)
        for positions, pooled in pool_regions(self.pyramid, heads.mask_roi_pool, boxes, self.side):
            logits = heads.mask_predictor(heads.mask_head(pooled))
            (shares,) = maskrcnn_inference(logits, [labels[positions]])
            crops = mask_crops(shares, own[positions], self.source.size)
            for position, crop in zip(positions.tolist(), crops, strict=True):
                masks[position] = crop
        return [mask for mask in masks if mask is not None]

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.pyramid.dtype, device=self.pyramid.device)

    def _advance(self, work: int) -> None:
        self._done += work
        self._progress(self._done)


def mask_crops(shares: Tensor, boxes: Tensor, size: tuple[int, int]) -> list[MaskCrop]:
    """Masks in the frames of their boxes, probabilities (n, 1, m, m), in an image of ``size`` (height, width).

    As torchvision pastes them, but into the frames alone, and one after the other.
    """
    padded, scale = expand_masks(shares, padding=1)
    crops = []
    for mask, box in zip(padded, expand_boxes(boxes, scale).to(torch.int64).tolist(), strict=True):
        left, top = max(box[0], 0), max(box[1], 0)
        height, width = max(min(box[3] + 1, size[0]) - top, 0), max(min(box[2] + 1, size[1]) - left, 0)
        frame = torch.tensor([box[0] - left, box[1] - top, box[2] - left, box[3] - top])
        pasted = paste_mask_in_image(mask[0], frame, height, width)
        crop = MaskCrop.around((pasted >= MASK_THRESHOLD).cpu().numpy())
        crops.append(MaskCrop(crop.top + top, crop.left + left, crop.pixels) if crop.pixels.size else crop)
    return crops
