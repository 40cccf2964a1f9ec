"""The attention mechanisms, one per file, behind one signature: ``(tokens, grid, neighbours) -> tokens``."""

from __future__ import annotations

from typing import Any

from ...geometry import Grid
from .. import config as cfg
from .base import Attention, Neighbours, Summary, SummaryAttention
from .full import FullAttention
from .global_memory import GlobalMemoryAttention
from .linformer import LinformerAttention
from .longformer import LongformerAttention
from .performer import PerformerAttention
from .spatial_reduction import SpatialReductionAttention

__all__ = [
    "Attention",
    "FullAttention",
    "GlobalMemoryAttention",
    "LinformerAttention",
    "LongformerAttention",
    "Neighbours",
    "PerformerAttention",
    "SpatialReductionAttention",
    "Summary",
    "SummaryAttention",
    "build_attention",
]


def build_attention(
    stage: cfg.StageConfig, grid: Grid, *, qkv_bias: bool = True, given: bool = False, scale: float | None = None
) -> Attention:
    """The attention module of a stage whose map is ``grid``; ``given``: the caller may add global tokens."""
    options = stage.attention
    common: dict[str, Any] = {"qkv_bias": qkv_bias, "scale": scale}
    bias: dict[str, Any] = {
        "relative": stage.position == "relative",
        "global_tokens": stage.global_tokens,
        "given": given,
    }
    if isinstance(options, cfg.Full):
        return FullAttention(stage.dim, stage.heads, grid, **bias, **common)
    if isinstance(options, cfg.Longformer):
        return LongformerAttention(stage.dim, stage.heads, options, **bias, **common)
    if isinstance(options, cfg.GlobalMemory):
        return GlobalMemoryAttention(stage.dim, stage.heads, options, **bias, **common)
    if isinstance(options, cfg.Linformer):
        return LinformerAttention(stage.dim, stage.heads, options, grid, stage.global_tokens, **common)
    if isinstance(options, cfg.SpatialReduction):
        return SpatialReductionAttention(stage.dim, stage.heads, options.ratio, **common)
    if isinstance(options, cfg.Performer):
        return PerformerAttention(stage.dim, stage.heads, options, qkv_bias=qkv_bias)
    raise TypeError(f"no attention module for {options!r}")
