"""Models as files that run without this package: ONNX for onnxruntime, and ``torch.export``'s ``.pt2`` for PyTorch."""

from .checked import Exported, export_checked
from .loaded import SUFFIXES, ExportedModel, is_exported, load_exported
from .models import export_model
from .parity import Difference

__all__ = [
    "SUFFIXES",
    "Difference",
    "Exported",
    "ExportedModel",
    "export_checked",
    "export_model",
    "is_exported",
    "load_exported",
]
