"""Weights in and out: our own files, the authors' released ones, and where either is."""

from .native import load, load_info, resolve_checkpoint, save
from .release import load_release

__all__ = ["load", "load_info", "load_release", "resolve_checkpoint", "save"]
