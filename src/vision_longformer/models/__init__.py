"""The multi-scale backbone: patch embedding, block, stage, and the stack of stages."""

from .vision_longformer import VisionLongformer

__all__ = ["VisionLongformer"]
