"""Attention you can look at: what a token, the global tokens and the whole model attend to in an image.

>>> from vision_longformer.explain import draw, explain, write_page
>>> explanation = explain("best.safetensors", "photo.jpg", point=(120, 80))
>>> draw(explanation, "photo.png"), write_page(explanation, "photo.html")

For models and tensors of your own: :func:`capture` records the layers, :func:`token_maps` and :func:`global_maps` give
their weights, :func:`rollout` their composition.
"""

from .explanation import Explanation, explain
from .layers import Layer, capture
from .page import write_page
from .pictures import draw
from .weights import Rollout, Rows, all_local_rows, global_maps, global_rows, local_rows, rollout, token_maps

__all__ = [
    "Explanation",
    "Layer",
    "Rollout",
    "Rows",
    "all_local_rows",
    "capture",
    "draw",
    "explain",
    "global_maps",
    "global_rows",
    "local_rows",
    "rollout",
    "token_maps",
    "write_page",
]
