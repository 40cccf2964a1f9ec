"""Pure functions on tensors: local attention over a grid, with global tokens."""

from .local_attention import IMPLEMENTATIONS, local_attention, why_not

__all__ = ["IMPLEMENTATIONS", "local_attention", "why_not"]
