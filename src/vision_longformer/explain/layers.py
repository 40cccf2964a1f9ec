"""What every attention layer of a model was given in an ordinary forward pass, and which tokens see which.

A map is cut into strips along each axis; any pair of strips is a rectangle of queries that all may see the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..geometry import Grid, ceil_div
from ..models.attention import FullAttention, LongformerAttention
from ..models.config import Full, Longformer
from ..models.vision_longformer import Stage, VisionLongformer
from ..ops.tables import axis_blocks

EXPLAINABLE = (Longformer, Full)


@dataclass(frozen=True, eq=False)
class Layer:
    """An attention layer with its input: ``stage`` and ``block`` count from 1, ``stride`` is in pixels per token.

    ``tokens`` are (G + N, dim), global ones first; N is the number of cells of ``grid``. ``neighbours``, ``"all"`` or
    ``"self"``, is what local attention saw.
    """

    attention: LongformerAttention | FullAttention
    stage: int
    block: int
    stride: int
    tokens: Tensor
    grid: Grid
    neighbours: str

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
        """The rows and the columns of the map."""
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

    The model runs as it always does; hooks record what its attention layers are given.
    """
    _check_explainable(model)
    if model.training or len(images) != 1:
        raise ValueError("attention is explained in evaluation mode (model.eval()) for one image (1, C, H, W)")
    layers: list[Layer] = []
    handles = []
    for number, (stage, info) in enumerate(zip(model.stages, model.feature_info, strict=False), 1):
        for block, module in enumerate(cast(Stage, stage).blocks, 1):
            record = _recorder(layers, number, block, info["reduction"])
            handles.append(cast(Any, module).attn.register_forward_pre_hook(record))
    try:
        with torch.no_grad():
            model.forward_features(images)
    finally:
        for handle in handles:
            handle.remove()
    return layers


def _recorder(layers: list[Layer], stage: int, block: int, stride: int) -> Callable[..., None]:
    def record(attention: Any, arguments: tuple[Any, ...]) -> None:
        tokens, grid, neighbours = arguments
        layers.append(Layer(attention, stage, block, stride, tokens[0].detach(), grid, neighbours))

    return record


def _check_explainable(model: VisionLongformer) -> None:
    for number, stage in enumerate(model.config.stages, 1):
        if not isinstance(stage.attention, EXPLAINABLE):
            names = " or ".join(config.mechanism for config in EXPLAINABLE)
            raise ValueError(
                f"stage {number} has {stage.attention.mechanism} attention; only models whose stages all have {names} "
                "attention can be explained"
            )


class Strip(NamedTuple):
    """Consecutive positions along an axis, ``own``, and all positions that they may see, in ascending order."""

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
    chunks = ceil_div(length, window)
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
