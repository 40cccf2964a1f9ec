"""Multi-Scale Vision Longformer: a vision backbone with linear cost for high-resolution images."""

from .checkpoint import adapt_model, load, load_release, save
from .geometry import Grid
from .models import VisionLongformer
from .models.config import ModelConfig, StageConfig
from .models.timm_registry import create_model
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
