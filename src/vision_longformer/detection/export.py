"""Detectors as exported files: graphs that can be traced, their export, and files in place of their detectors.

A graph is for one image of a fixed size; only the number of detections is open. The trained modules run as they are.
What is written again here is how boxes are chosen: torchvision's code branches on how many candidates there are, which
a graph cannot; the steps here are the same for any number of them, none included.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.models.detection.transform import resize_boxes
from torchvision.ops import clip_boxes_to_image, nms

from ..checkpoint.native import CLASSIFIER, READERS
from ..data.loading import Progress
from ..errors import CheckpointError
from ..export.runtime import ExportedModel, is_exported, load_exported
from ..export.verify import ExportedFile, export_verified
from ..export.writers import file_metadata
from ..models import VisionLongformer
from ..models.config import size_pair
from .backbone import ImageTransform, resized_size
from .checkpoint import Detector, load_detector, load_detector_info
from .config import DetectorConfig
from .dataset import image_tensor
from .garments import photo_parts

COMPARISON_PHOTOS = 2
"""Photos on which a file is compared with its detector."""

NOISE = 1e-5
"""Of the pixels, many times what float32 rounds off; detections that stay the same with it are well decided."""

SMALLEST_OBJECT = 1e-2
"""Sides, in pixels, below which Mask R-CNN counts a box as empty."""

OUTSIDE = [[-2.0, -2.0, -1.0, -1.0], [-4.0, -4.0, -3.0, -3.0]]
"""Boxes that always remain, and are dropped again: torchvision tells ``torch.export`` that two at least will."""

Maps = dict[str, Tensor]

# Graphs


class DetectorGraph(nn.Module):
    """From an image (3, height, width) with values from 0 to 1 to its detections, best first.

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
        """The ``outputs`` from the maps of the pyramid."""
        raise NotImplementedError

    def nms(self, boxes: Tensor, scores: Tensor, groups: Tensor, allowed: Tensor, overlap: float) -> Tensor:
        """Positions of the boxes that remain, best first, when those that overlap a better one of their group go.

        Boxes are (n, 4) inside the image, the others (n,), no score below 0. As in torchvision, groups are kept from
        one another by moving each to a region of its own.
        """
        candidates = torch.nonzero(allowed)[:, 0]
        apart = groups[candidates, None] * float(max(self.size) + 1)
        moved = torch.cat([boxes[candidates] + apart, boxes.new_tensor(OUTSIDE)])
        ranked = torch.cat([scores[candidates], scores.new_full((len(OUTSIDE),), -1)])
        remaining = nms(moved, ranked, overlap)
        return candidates[remaining[remaining < candidates.shape[0]]]


class RetinaNetGraph(DetectorGraph):
    """Of the best anchors of each level, those that do not overlap a better one of the same class."""

    model: RetinaNet

    def detect(self, maps: Maps, images: ImageList) -> tuple[Tensor, ...]:
        model, levels = self.model, list(maps.values())
        output = model.head(levels)
        classes = output["cls_logits"].shape[2]
        per_cell = model.anchor_generator.num_anchors_per_location()
        counts = [count * one[0, 0].numel() * classes for count, one in zip(per_cell, levels, strict=True)]
        scores, best, _ = _best_of_levels(output["cls_logits"].flatten(), counts, model.topk_candidates)
        anchors, labels = best // classes, best % classes
        (anchor_boxes,) = model.anchor_generator(images, levels)
        boxes = model.box_coder.decode_single(output["bbox_regression"][0, anchors], anchor_boxes[anchors])
        boxes, scores = clip_boxes_to_image(boxes, self.size), scores.sigmoid()
        chosen = self.nms(boxes, scores, labels, scores > model.score_thresh, model.nms_thresh)
        chosen = chosen[: model.detections_per_img]
        return boxes[chosen], labels[chosen] + 1, scores[chosen]


class MaskRCNNGraph(DetectorGraph):
    """Regions, then the objects in them, then their masks."""

    outputs = (*DetectorGraph.outputs, "masks")
    model: MaskRCNN

    def detect(self, maps: Maps, images: ImageList) -> tuple[Tensor, ...]:
        boxes, labels, scores = self._objects(maps, self._regions(list(maps.values()), images))
        heads = self.model.roi_heads
        masks = heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(maps, [boxes], [self.size])))
        own = torch.arange(labels.shape[0]) * masks.shape[1] + labels
        return boxes, labels, scores, masks.flatten(0, 1)[own, None].sigmoid()

    def _regions(self, levels: list[Tensor], images: ImageList) -> Tensor:
        """Boxes (n, 4) that may hold something."""
        rpn = self.model.rpn
        (anchors,) = rpn.anchor_generator(images, levels)
        logits, offsets = rpn.head(levels)
        counts = [one.numel() for one in logits]
        logits, offsets = concat_box_prediction_layers(logits, offsets)
        scores, best, level = _best_of_levels(logits[:, 0], counts, rpn.pre_nms_top_n())
        boxes = clip_boxes_to_image(rpn.box_coder.decode_single(offsets[best], anchors[best]), self.size)
        chosen = self.nms(boxes, scores.sigmoid(), level, _at_least(boxes, rpn.min_size), rpn.nms_thresh)
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
        chosen = self.nms(boxes, scores, labels, allowed, heads.nms_thresh)[: heads.detections_per_img]
        return boxes[chosen], labels[chosen], scores[chosen]


def _best_of_levels(scores: Tensor, counts: list[int], most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``most`` highest scores of each level, their positions in ``scores``, and the level of each.

    ``scores`` has those of all levels one after another, ``counts`` of them.
    """
    best = []
    for number, level in enumerate(scores.split(counts)):
        values, positions = level.topk(min(most, counts[number]))
        best.append((values, positions + sum(counts[:number]), torch.full_like(positions, number)))
    values, positions, levels = map(torch.cat, zip(*best, strict=True))
    return values, positions, levels


def _at_least(boxes: Tensor, side: float) -> Tensor:
    """Which boxes (n, 4) have no shorter side."""
    return ((boxes[:, 2:] - boxes[:, :2]) >= side).all(1)


# Writing


def export_checkpoint(checkpoint: str | Path, path: str | Path, **options: Any) -> ExportedFile:
    """Write a checkpoint's detector with its categories; ``options`` as in :func:`export_detector`."""
    detector = open_detector(checkpoint)
    categories = [category._asdict() for category in detector.categories]
    return export_detector(detector.model, path, info={"categories": categories, "named": detector.named}, **options)


def export_detector(
    model: nn.Module,
    path: str | Path,
    *,
    format: str = "onnx",
    size: int | tuple[int, int] | None = None,
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportedFile:
    """Write a detector as an ``.onnx``, ``.xml`` or ``.pt2`` file, and compare the detections of both in photos.

    The file takes one float32 image (3, height, width) with values from 0 to 1 and gives the outputs of
    :class:`DetectorGraph`. Images of other sizes are to be resized to fit, and padded at the bottom and on the right
    with the colour that the metadata call ``padding``. The model itself is left as it is.

    Args:
        model: a detector of ``build_detector``.
        path: where to write; the name must end in .onnx, .xml or .pt2.
        format: onnx, for onnxruntime and others, openvino, or pt2, for ``torch.export.load``.
        size: height and width of the image; a square of the model's ``min_size`` if None.
        info: further JSON data for the file's metadata, such as the categories.
        overwrite: replace an existing file.
        progress: called with what is done and what there is in all.
    """
    if not isinstance(model, RetinaNet | MaskRCNN):
        raise ValueError(f"a {type(model).__name__} was not built by build_detector, and cannot be exported as one")
    config = model.config
    own = size_pair(size or config.min_sizes[-1])
    reference = _plain_copy(model)
    graph = (RetinaNetGraph if config.kind == "retinanet" else MaskRCNNGraph)(reference, own).eval()
    details = {"size": own, "padding": reference.transform.image_mean, **(info or {})}

    def expected(image: Tensor) -> tuple[Tensor, ...]:
        (output,) = reference([image])
        return tuple(output[name] for name in graph.outputs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*create_unbacked_symint", FutureWarning)  # torchvision's, for nms
        return export_verified(
            graph,
            [(photo,) for photo in _comparison_photos(graph)],
            path,
            format=format,
            metadata=file_metadata("detector", config.to_dict(), dynamic=False, **details),
            input_names=("image",),
            output_names=graph.outputs,
            expected=expected,
            overwrite=overwrite,
            progress=progress,
        )


class _WithoutResizing(ImageTransform):
    """Images are not resized, so that boxes need not be scaled back; masks stay in the frame of their boxes."""

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        return image, target

    def postprocess(self, result: Any, image_shapes: Any, original_image_sizes: Any) -> Any:
        return result


def _plain_copy(model: RetinaNet | MaskRCNN) -> RetinaNet | MaskRCNN:
    """A copy for inference in float32 on the CPU, for images that have the right size."""
    copy = deepcopy(model).cpu().float().eval().requires_grad_(False)
    old = copy.transform
    sizes = old.min_size, old.max_size
    copy.transform = _WithoutResizing(*sizes, old.image_mean, old.image_std, old.size_divisible).eval()
    for module in copy.modules():
        if isinstance(module, VisionLongformer):
            module.set_attention_implementation("auto")
    return copy


def _comparison_photos(graph: DetectorGraph) -> list[Tensor]:
    """Photos (3, height, width) to compare on.

    Detectors decide: of two boxes with nearly the same score, or with an overlap near the limit, rounding may choose
    another one. Such photos are a last resort; nothing can be compared on those without detections.
    """
    height, width = graph.size
    photos = [image_tensor(photo.resize((width, height))) for photo in photo_parts(training=False)]
    photos += [photo.flip(2) for photo in photos]
    decided = list(islice(_well_decided(graph, photos), COMPARISON_PHOTOS))
    with torch.no_grad():
        return decided or [next((photo for photo in photos if len(graph(photo)[0])), photos[0])]


def _well_decided(graph: DetectorGraph, photos: list[Tensor]) -> Iterator[Tensor]:
    """Photos that have detections, the same ones with and without a little noise."""
    generator = torch.Generator().manual_seed(0)
    for photo in photos:
        noise = NOISE * torch.randn(photo.shape, generator=generator)
        with torch.no_grad():
            (boxes, labels, *_), (noisy_boxes, noisy_labels, *_) = graph(photo), graph(photo + noise)
        if len(boxes) and torch.equal(labels, noisy_labels) and torch.allclose(boxes, noisy_boxes, rtol=0, atol=0.5):
            yield photo


# Reading


class ExportedDetector(nn.Module):
    """A file for images of a fixed ``size``, called like a detector: images of any size, results in their pixels.

    An image is resized as by the detector, or to fit, and padded at the bottom and on the right with the colour that
    counts as zero.
    """

    def __init__(self, model: ExportedModel) -> None:
        super().__init__()
        self.model, self.metadata = model, model.metadata
        self.config = DetectorConfig.from_dict(self.metadata["config"])
        self.size = size_pair(self.metadata["size"])
        self.padding = torch.tensor(self.metadata["padding"]).reshape(3, 1, 1)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        """Images (3, h, w) with values from 0 to 1 to ``boxes``, ``labels``, ``scores`` and perhaps ``masks``."""
        return [self._detect(image) for image in images]

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """That of an image inside the file's: what the detector makes of it if that fits, or else as large as fits."""
        own = resized_size(height, width, self.config.min_sizes[-1], self.config.max_size, self.config.scale)
        if own[0] <= self.size[0] and own[1] <= self.size[1]:
            return own
        scale = min(self.size[0] / height, self.size[1] / width)
        return max(1, round(height * scale)), max(1, round(width * scale))

    def _detect(self, image: Tensor) -> dict[str, Tensor]:
        height, width = image.shape[1:]
        used = self.resized_size(height, width)
        whole = self.padding.to(image).repeat(1, *self.size)
        whole[:, : used[0], : used[1]] = F.interpolate(image[None], used, mode="bilinear")[0]
        output = dict(zip(MaskRCNNGraph.outputs, self.model(whole), strict=False))  # RetinaNet has no masks
        inside = (output["boxes"][:, 0] <= used[1]) & (output["boxes"][:, 1] <= used[0])
        output = {name: values[inside] for name, values in output.items()}
        boxes = resize_boxes(output["boxes"], used, (height, width))
        output["boxes"] = clip_boxes_to_image(boxes, (height, width))
        if "masks" in output:
            output["masks"] = paste_masks_in_image(output["masks"], boxes, (height, width))
        return output


def open_detector(path: str | Path, **settings: Any) -> Detector:
    """The detector of a checkpoint or of an exported file, in evaluation mode, with its categories.

    ``settings`` as in :func:`load_detector`; those of an exported file are part of its graph.
    """
    if not is_exported(path):
        model = load_detector(path, **settings)
        return Detector.from_stored(model, load_detector_info(path).get("categories"), path)
    if settings:
        raise ValueError(f"{path} is an exported file, whose {' and '.join(settings)} cannot be changed")
    model = load_exported_detector(path)
    named = model.metadata.get("named", True)
    return Detector.from_stored(model, model.metadata.get("categories") if named else None, path)


def load_exported_detector(path: str | Path) -> ExportedDetector:
    """The detector of an ``.onnx``, ``.xml`` or ``.pt2`` file."""
    model = load_exported(path)
    model_type = model.metadata["kind"]
    if model_type != "detector":
        what = READERS[CLASSIFIER] if model_type == "classifier" else f"an exported {model_type}"
        raise CheckpointError(f"{path} is {what}; a detector is needed here; nothing was loaded")
    try:
        return ExportedDetector(model)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not describe its detector ({error}); nothing was loaded") from error
