"""Multi-Scale Vision Longformer: a vision backbone with linear cost for high-resolution images.

Importing the package makes its models known to timm; torch and timm themselves are imported when something needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .lazy import after_import, lazy_exports

if TYPE_CHECKING:
    from .checkpoint import load, load_release, save
    from .geometry import Grid
    from .models.adapt import adapt_model
    from .models.config import ModelConfig, StageConfig
    from .models.timm_registry import create_model
    from .models.vision_longformer import VisionLongformer
    from .models.zoo import MODELS, model_config
    from .ops import local_attention

__version__ = "0.1.0"

__all__ = [
    "MODELS",
    "Grid",
    "ModelConfig",
    "StageConfig",
    "VisionLongformer",
    "adapt_model",
    "create_model",
    "load",
    "load_release",
    "local_attention",
    "model_config",
    "save",
]

lazy_exports(
    __name__,
    {
        ".checkpoint": ["load", "load_release", "save"],
        ".geometry": ["Grid"],
        ".models.adapt": ["adapt_model"],
        ".models.config": ["ModelConfig", "StageConfig"],
        ".models.timm_registry": ["create_model"],
        ".models.vision_longformer": ["VisionLongformer"],
        ".models.zoo": ["MODELS", "model_config"],
        ".ops": ["local_attention"],
    },
)
after_import("timm", lambda: import_module(".models.timm_registry", __name__))
