"""What every attention layer of a model was given in an ordinary forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ..attention import FullAttention, LongformerAttention
from ..config import Full, Longformer
from ..geometry import Grid
from ..model import VisionLongformer
from .strips import Strip, chunk_strips, whole_strips

EXPLAINABLE = (Longformer, Full)


class Layer:
    """An attention layer with its input: ``stage`` and ``block`` count from 1, ``stride`` is in pixels per token.

    ``tokens`` are (G + N, dim), global ones first; N is the number of cells of ``grid``.
    """

    def __init__(
        self, attention: LongformerAttention | FullAttention, stage: int, block: int, stride: int, tokens: Tensor,
        grid: Grid,
    ) -> None:  # fmt: skip
        self.attention, self.stage, self.block, self.stride = attention, stage, block, stride
        self.tokens, self.grid = tokens, grid

    @property
    def heads(self) -> int:
        return self.attention.heads

    @property
    def global_tokens(self) -> int:
        return len(self.tokens) - self.grid.tokens

    @property
    def window(self) -> int | None:
        """Side of a chunk; None where attention is full."""
        return self.attention.window if isinstance(self.attention, LongformerAttention) else None

    @cached_property
    def queries_and_keys(self) -> tuple[Tensor, Tensor]:
        """Of all tokens, each (G + N, heads, head_dim)."""
        with torch.no_grad():
            q, k, _ = self.attention.project(self.tokens[None])
        return q[0], k[0]

    @cached_property
    def strips(self) -> tuple[list[Strip], list[Strip]]:
        """The rows and the columns of the map: any pair of strips is a rectangle of queries that see the same keys."""
        if isinstance(self.attention, FullAttention):
            return whole_strips(self.grid.height, 1), whole_strips(self.grid.width, self.grid.width)
        window, rule, neighbours = self.attention.window, self.attention.rule, self.attention.eval_neighbours
        rows, columns = (chunk_strips(length, window, rule, neighbours) for length in self.grid)
        return rows, columns

    def cell(self, point: tuple[float, float]) -> tuple[int, int]:
        """Row and column of the token that covers the pixel (x, y) of the model's input."""
        x, y = (int(value // self.stride) for value in point)
        return min(y, self.grid.height - 1), min(x, self.grid.width - 1)

    def strips_of(self, cell: tuple[int, int]) -> tuple[Strip, Strip]:
        """The strips that a token's row and column are in."""
        row, column = (
            next(strip for strip in axis if position in strip.own)
            for axis, position in zip(self.strips, cell, strict=True)
        )
        return row, column


def capture(model: VisionLongformer, images: Tensor) -> list[Layer]:
    """The layers of a model in evaluation mode while it looks at one image (1, C, H, W), first to last.

    The model runs as it always does; hooks note what its attention layers are given.
    """
    _check_explainable(model)
    if model.training or len(images) != 1:
        raise ValueError("attention is explained in evaluation mode (model.eval()) for one image (1, C, H, W)")
    layers: list[Layer] = []
    handles = []
    for index, info in enumerate(model.feature_info):
        for block, module in enumerate(cast(Any, model.stages[index]).blocks):
            note = _noting(layers, index + 1, block + 1, info["reduction"])
            handles.append(module.attn.register_forward_pre_hook(note))
    try:
        with torch.no_grad():
            model.forward_features(images)
    finally:
        for handle in handles:
            handle.remove()
    return layers


def _noting(layers: list[Layer], stage: int, block: int, stride: int) -> Callable[..., None]:
    def note(attention: Any, arguments: tuple[Any, ...]) -> None:
        tokens, grid = arguments
        layers.append(Layer(attention, stage, block, stride, tokens[0].detach(), grid))

    return note


def _check_explainable(model: VisionLongformer) -> None:
    for number, stage in enumerate(model.config.stages, 1):
        if not isinstance(stage.attention, EXPLAINABLE):
            kinds = " or ".join(mechanism.kind for mechanism in EXPLAINABLE)
            raise ValueError(
                f"stage {number} has {stage.attention.kind} attention; only models whose stages all have {kinds} "
                "attention can be explained"
            )
