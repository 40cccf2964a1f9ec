"""The multi-scale backbone: patch embedding, block, stage, and the stack of stages."""

from .multiscale import VisionLongformer

__all__ = ["VisionLongformer"]
