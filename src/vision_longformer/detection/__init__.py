"""Object detection and instance segmentation: RetinaNet and Mask R-CNN on our backbones."""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .checkpoint import load_backbone, load_detector, load_detector_info, save_detector
    from .config import DetectorConfig
    from .detectors import build_detector, mask_rcnn, retinanet
    from .evaluate import evaluate
    from .release import load_release_detector
    from .stream import stream_detections
    from .task import resume, train

__all__ = [
    "DetectorConfig",
    "build_detector",
    "evaluate",
    "load_backbone",
    "load_detector",
    "load_detector_info",
    "load_release_detector",
    "mask_rcnn",
    "resume",
    "retinanet",
    "save_detector",
    "stream_detections",
    "train",
]

lazy_exports(
    __name__,
    {
        ".checkpoint": ["load_backbone", "load_detector", "load_detector_info", "save_detector"],
        ".config": ["DetectorConfig"],
        ".detectors": ["build_detector", "mask_rcnn", "retinanet"],
        ".evaluate": ["evaluate"],
        ".release": ["load_release_detector"],
        ".stream": ["stream_detections"],
        ".task": ["resume", "train"],
    },
)
