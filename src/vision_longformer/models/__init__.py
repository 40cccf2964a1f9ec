"""The multi-scale backbone: what a model is (``config``), the named models (``zoo``), and the modules that run."""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .vision_longformer import VisionLongformer

__all__ = ["VisionLongformer"]

lazy_exports(__name__, {".vision_longformer": ["VisionLongformer"]})
