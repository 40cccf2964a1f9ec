"""Models as files that run without this package: ONNX for onnxruntime, and ``torch.export``'s ``.pt2`` for PyTorch."""

from .runtime import SUFFIXES, ExportedModel, is_exported, load_exported
from .verify import Difference, Exported, export_checked

__all__ = [
    "SUFFIXES",
    "Difference",
    "Exported",
    "ExportedModel",
    "export_checked",
    "is_exported",
    "load_exported",
]
