"""Multi-Scale Vision Longformer: a vision backbone with linear cost for high-resolution images."""

from .checkpoint import adapt_model, load, load_release, save
from .config import ModelConfig, StageConfig
from .geometry import Grid
from .model import VisionLongformer
from .ops import local_attention
from .timm_models import create_model
from .zoo import MODELS, model_config

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
