"""``vil detect convert``."""

from __future__ import annotations

from ..output import millions, print_line


def detect_convert(
    released: str, converted: str, *, model: str, detector: str = "mask_rcnn", overwrite: bool = False
) -> None:
    """Convert a detector of the authors' release, trained on COCO, to a .safetensors file with its category names.

    Args:
        released: the .pth file, in detectron2's format.
        converted: the .safetensors file to write.
        model: name of its backbone from 'vil models', such as vision_longformer_small.
        detector: mask_rcnn or retinanet.
        overwrite: replace an existing file.
    """
    from ...detection import DetectorConfig, load_release_detector, save_detector
    from ...detection.release import coco_categories

    categories = coco_categories()
    network = load_release_detector(released, DetectorConfig(detector, model, len(categories)))
    info = {"categories": [category._asdict() for category in categories]}
    path = save_detector(network, converted, info=info, overwrite=overwrite)
    count = sum(parameter.numel() for parameter in network.parameters())
    print_line(f"wrote {path}: {detector} on {model}, {millions(count)} M parameters, {len(categories)} categories")
