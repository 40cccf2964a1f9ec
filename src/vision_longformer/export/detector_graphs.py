"""Detectors for one image of a fixed size, as graphs that can be traced.

The trained modules run as they are. What is said anew here is how boxes are chosen: torchvision's code branches on how
many candidates there are, which a graph cannot; the steps below are the same for any number of them, none included.
Only the number of objects found is left open in a graph.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.ops import clip_boxes_to_image, nms

SMALLEST_OBJECT = 1e-2
"""Sides, in pixels, below which Mask R-CNN takes a box for empty."""

OUTSIDE = [[-2.0, -2.0, -1.0, -1.0], [-4.0, -4.0, -3.0, -3.0]]
"""Boxes that always remain, and as the last: torchvision tells ``torch.export`` that two at least will."""

Maps = dict[str, Tensor]


class DetectorGraph(nn.Module):
    """From an image (3, height, width) with values from 0 to 1 to what is found in it, best first.

    The ``outputs`` are those of the detector for an image that needs no resizing: ``boxes`` (n, 4) as left, top, right
    and bottom, ``labels`` (n,) from 1, ``scores`` (n,) and, for Mask R-CNN, ``masks`` (n, 1, 28, 28), probabilities in
    the frame of each box.
    """

    outputs: ClassVar[tuple[str, ...]] = ("boxes", "labels", "scores")

    def __init__(self, model: RetinaNet | MaskRCNN, size: tuple[int, int]) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        transform = self.model.transform
        batch = transform.batch_images([transform.normalize(image)], transform.size_divisible)
        return self.detect(self.model.backbone(batch), ImageList(image, [self.size]))

    def detect(self, maps: Maps, images: ImageList) -> tuple[Tensor, ...]:
        """What is found in the maps of the pyramid."""
        raise NotImplementedError

    def chosen(self, boxes: Tensor, scores: Tensor, groups: Tensor, allowed: Tensor, overlap: float) -> Tensor:
        """Positions of the boxes that remain, best first, when those that overlap a better one of their group go.

        Boxes are (n, 4) inside the image, the others (n,), no score below 0. As in torchvision, groups are kept from
        one another by moving each to a place of its own.
        """
        candidates = torch.nonzero(allowed)[:, 0]
        apart = groups[candidates, None] * float(max(self.size) + 1)
        moved = torch.cat([boxes[candidates] + apart, boxes.new_tensor(OUTSIDE)])
        ranked = torch.cat([scores[candidates], scores.new_full((len(OUTSIDE),), -1)])
        return candidates[nms(moved, ranked, overlap)[: -len(OUTSIDE)]]


class RetinaNetGraph(DetectorGraph):
    """Of the best anchors of each level those that do not overlap a better one of the same class."""

    model: RetinaNet

    def detect(self, maps: Maps, images: ImageList) -> tuple[Tensor, ...]:
        model, levels = self.model, list(maps.values())
        output = model.head(levels)
        classes = output["cls_logits"].shape[2]
        per_cell = model.anchor_generator.num_anchors_per_location()
        counts = [count * one[0, 0].numel() * classes for count, one in zip(per_cell, levels, strict=True)]
        scores, best, _ = _best_of_levels(output["cls_logits"].flatten(), counts, model.topk_candidates)
        anchors, labels = best // classes, best % classes
        (places,) = model.anchor_generator(images, levels)
        boxes = model.box_coder.decode_single(output["bbox_regression"][0, anchors], places[anchors])
        boxes, scores = clip_boxes_to_image(boxes, self.size), scores.sigmoid()
        chosen = self.chosen(boxes, scores, labels, scores > model.score_thresh, model.nms_thresh)
        chosen = chosen[: model.detections_per_img]
        return boxes[chosen], labels[chosen] + 1, scores[chosen]


class MaskRCNNGraph(DetectorGraph):
    """Regions, then what is in them, then the shapes of what was found."""

    outputs = (*DetectorGraph.outputs, "masks")
    model: MaskRCNN

    def detect(self, maps: Maps, images: ImageList) -> tuple[Tensor, ...]:
        boxes, labels, scores = self._objects(maps, self._regions(list(maps.values()), images))
        heads = self.model.roi_heads
        masks = heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(maps, [boxes], [self.size])))
        own = labels[:, None, None, None].expand(-1, 1, *masks.shape[2:])
        return boxes, labels, scores, masks.gather(1, own).sigmoid()

    def _regions(self, levels: list[Tensor], images: ImageList) -> Tensor:
        """Boxes (n, 4) that may hold something."""
        rpn = self.model.rpn
        (anchors,) = rpn.anchor_generator(images, levels)
        logits, offsets = rpn.head(levels)
        counts = [one.numel() for one in logits]
        logits, offsets = concat_box_prediction_layers(logits, offsets)
        scores, best, level = _best_of_levels(logits[:, 0], counts, rpn.pre_nms_top_n())
        boxes = clip_boxes_to_image(rpn.box_coder.decode_single(offsets[best], anchors[best]), self.size)
        chosen = self.chosen(boxes, scores.sigmoid(), level, _at_least(boxes, rpn.min_size), rpn.nms_thresh)
        return boxes[chosen[: rpn.post_nms_top_n()]]

    def _objects(self, maps: Maps, regions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes, labels and scores; every class of every region is a candidate."""
        heads = self.model.roi_heads
        logits, offsets = heads.box_predictor(heads.box_head(heads.box_roi_pool(maps, [regions], [self.size])))
        boxes = heads.box_coder.decode_single(offsets, regions).unflatten(1, (-1, 4))
        boxes = clip_boxes_to_image(boxes[:, 1:], self.size).flatten(0, 1)
        scores = logits.softmax(1)[:, 1:]
        labels = torch.arange(1, logits.shape[1]).expand_as(scores).flatten()
        scores = scores.flatten()
        allowed = (scores > heads.score_thresh) & _at_least(boxes, SMALLEST_OBJECT)
        chosen = self.chosen(boxes, scores, labels, allowed, heads.nms_thresh)[: heads.detections_per_img]
        return boxes[chosen], labels[chosen], scores[chosen]


def _best_of_levels(scores: Tensor, counts: list[int], most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``most`` highest scores of each level, where they are in ``scores``, and the level of each.

    ``scores`` has those of all levels one after another, ``counts`` of them.
    """
    best = []
    for number, level in enumerate(scores.split(counts)):
        values, places = level.topk(min(most, counts[number]))
        best.append((values, places + sum(counts[:number]), torch.full_like(places, number)))
    values, places, levels = map(torch.cat, zip(*best, strict=True))
    return values, places, levels


def _at_least(boxes: Tensor, side: float) -> Tensor:
    """Which boxes (n, 4) have no shorter side."""
    return ((boxes[:, 2:] - boxes[:, :2]) >= side).all(1)
