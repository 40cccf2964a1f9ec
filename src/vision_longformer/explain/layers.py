"""Which positions of one axis of a map see which: a map is cut into rectangles of queries, each with its keys.

What every attention layer of a model was given in an ordinary forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..geometry import Grid
from ..models import VisionLongformer
from ..models.attention import FullAttention, LongformerAttention
from ..models.config import Full, Longformer
from ..ops.chunks import axis_blocks


class Strip(NamedTuple):
    """Neighbouring positions along an axis, ``own``, and all positions that they may see, in ascending order."""

    own: range
    seen: tuple[int, ...]

    @property
    def inner(self) -> range:
        """Where the own positions are among those seen."""
        start = self.seen.index(self.own.start)
        return range(start, start + len(self.own))


def chunk_strips(length: int, window: int, rule: str, neighbours: str) -> list[Strip]:
    """A strip per chunk; it sees itself and the chunks beside it, around the border if the rule is cyclic.

    The chunks that a strip sees, put together as a map of their own, are neighbours there as they are in the whole map:
    ascending order keeps the last chunk, the only one that may be smaller, at the end.
    """
    chunks = -(-length // window)
    near = axis_blocks(chunks, rule) if neighbours == "all" else (0,)
    inside = {chunk: range(chunk * window, min((chunk + 1) * window, length)) for chunk in range(chunks)}
    strips = []
    for chunk in range(chunks):
        around = {chunk + step for step in near}
        seen = around & inside.keys() if rule in ("chunk", "exact") else {other % chunks for other in around}
        strips.append(Strip(inside[chunk], tuple(position for other in sorted(seen) for position in inside[other])))
    return strips


def whole_strips(length: int, own: int) -> list[Strip]:
    """Strips of ``own`` positions that see the whole axis."""
    everything = range(length)
    return [Strip(everything[start : start + own], tuple(everything)) for start in range(0, length, own)]


def tokens_at(rows: Sequence[int], columns: Sequence[int], grid: Grid, device: torch.device) -> Tensor:
    """The numbers of the tokens in these rows and columns of a map, row by row."""
    starts = torch.tensor(rows, device=device)[:, None] * grid.width
    return (starts + torch.tensor(columns, device=device)).flatten()


EXPLAINABLE = (Longformer, Full)


class Layer:
    """An attention layer with its input: ``stage`` and ``block`` count from 1, ``stride`` is in pixels per token.

    ``tokens`` are (G + N, dim), global ones first; N is the number of cells of ``grid``.
    """

    def __init__(
        self, attention: LongformerAttention | FullAttention, stage: int, block: int, stride: int, tokens: Tensor,
        grid: Grid, neighbours: str,
    ) -> None:  # fmt: skip
        self.attention, self.stage, self.block, self.stride = attention, stage, block, stride
        self.tokens, self.grid, self.neighbours = tokens, grid, neighbours

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
        window, rule = self.attention.window, self.attention.rule
        rows, columns = (chunk_strips(length, window, rule, self.neighbours) for length in self.grid)
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
        tokens, grid, neighbours = arguments
        layers.append(Layer(attention, stage, block, stride, tokens[0].detach(), grid, neighbours))

    return note


def _check_explainable(model: VisionLongformer) -> None:
    for number, stage in enumerate(model.config.stages, 1):
        if not isinstance(stage.attention, EXPLAINABLE):
            kinds = " or ".join(mechanism.mechanism for mechanism in EXPLAINABLE)
            raise ValueError(
                f"stage {number} has {stage.attention.mechanism} attention; only models whose stages all have {kinds} "
                "attention can be explained"
            )
