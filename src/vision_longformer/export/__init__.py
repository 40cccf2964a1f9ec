"""Models as files that run without this package: ONNX for onnxruntime, and ``torch.export``'s ``.pt2`` for PyTorch.

What all tasks share; which module is traced, on which images, and what its outputs mean is each task's own.
"""

from .runtime import ExportedModel, is_exported, load_exported
from .verify import Difference, ExportedFile, export_verified

__all__ = [
    "Difference",
    "ExportedFile",
    "ExportedModel",
    "export_verified",
    "is_exported",
    "load_exported",
]
