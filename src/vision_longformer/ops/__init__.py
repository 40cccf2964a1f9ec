"""Local attention over a grid with global tokens, as a function of tensors."""

from .local_attention import IMPLEMENTATIONS, automatic, local_attention
from .longformer import longformer_attention

__all__ = ["IMPLEMENTATIONS", "automatic", "local_attention", "longformer_attention"]
