"""Weights in and out: our own files, the authors' released ones, and other sizes."""

from ..models.adapt import AdaptReport, adapt_model
from .native import load, load_info, save
from .release import load_release

__all__ = ["AdaptReport", "adapt_model", "load", "load_info", "load_release", "save"]
