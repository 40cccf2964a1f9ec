"""The weights of all tokens in few bytes, for a page: each row in 255 steps of its largest weight.

What would still be too large is made coarser, stage by stage, the largest first: only the last layer, then only the
mean of the heads, then only every second, fourth, … token along each axis as a query. Keys are never made coarser.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .layers import Layer
from .strips import Strip
from .weights import global_maps, local_rows


@dataclass(frozen=True)
class Detail:
    """What is kept of a stage: the layers, whether each head or their mean, and every how many-th query."""

    layers: tuple[Layer, ...]
    each_head: bool = True
    step: int = 1

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        layer = self.layers[0]
        down, across = (
            sum(len(stored(strip, self.step)) * len(strip.seen) for strip in strips) for strips in layer.strips
        )
        return down * across * len(self.layers) * (layer.heads if self.each_head else 1)

    def coarser(self) -> Detail:
        """The next smaller amount of detail."""
        if len(self.layers) > 1:
            return replace(self, layers=self.layers[-1:])
        if self.each_head and self.layers[0].heads > 1:
            return replace(self, each_head=False)
        return replace(self, step=2 * self.step)


def affordable(stages: Sequence[Sequence[Layer]], budget: int) -> list[Detail]:
    """As much detail of each stage as fits into ``budget`` bytes together."""
    details = [Detail(tuple(layers)) for layers in stages]
    while sum(detail.size for detail in details) > budget:
        largest = max(range(len(details)), key=lambda index: details[index].size)
        details[largest] = details[largest].coarser()
        if not details[largest].size:
            raise ValueError(
                f"{budget} bytes have no room for the weights of one token per stage; give a larger budget"
            )
    return details


def stored(strip: Strip, step: int) -> list[int]:
    """The positions of a strip whose weights are kept: those in the middle of ``step`` neighbours."""
    return [position for position in strip.own if position % step == step // 2]


def packed_layer(layer: Layer, detail: Detail) -> dict[str, Any]:
    """Local queries row by row: for each head their weights, largest weights and shares of the global tokens.

    And the same for what the global tokens look at, on average, if there are any.
    """
    rows = _stored_rows(layer, detail)
    heads = layer.heads if detail.each_head else 1
    packed: dict[str, Any] = {"block": layer.block, "heads": []}
    for head in range(heads):
        weights = [row[head, layer.global_tokens :] for row in rows]
        packed["heads"].append(
            {
                "weights": _base64(np.concatenate([_in_steps(one) for one in weights])),
                "largest": _floats([float(one.max()) for one in weights]),
                "global": _floats([float(row[head, : layer.global_tokens].sum()) for row in rows]),
            }
        )
    if layer.global_tokens:
        maps, among = global_maps(layer)
        if not detail.each_head:
            maps, among = maps.mean(0, keepdim=True), among.mean(0, keepdim=True)
        packed["globals"] = [packed_map(one, float(share.sum())) for one, share in zip(maps, among, strict=True)]
    return packed


def packed_map(weights: Tensor, to_global: float = 0.0) -> dict[str, Any]:
    """A map (height, width) as one row, with the share that is not on it."""
    return {"weights": _base64(_in_steps(weights.flatten())), "largest": float(weights.max()), "global": to_global}


def _stored_rows(layer: Layer, detail: Detail) -> list[Tensor]:
    """The rows (heads, keys) of the queries that are kept, in the order of the map."""
    found: dict[int, Tensor] = {}
    down, across = layer.strips
    for rows in down:
        for columns in across:
            kept = [
                layer.global_tokens + y * layer.grid.width + x
                for y in stored(rows, detail.step)
                for x in stored(columns, detail.step)
            ]
            if kept:
                block = local_rows(layer, rows, columns)
                weights = block.weights if detail.each_head else block.weights.mean(0, keepdim=True)
                places = torch.searchsorted(block.queries, block.queries.new_tensor(kept))
                found |= zip(kept, weights[:, places].unbind(1), strict=True)
    return [found[query] for query in sorted(found)]


def _in_steps(weights: Tensor) -> np.ndarray:
    """Weights as 0 … 255 of the largest."""
    return (weights * (255 / weights.max().clamp(min=1e-30))).round().to(torch.uint8).cpu().numpy()


def _floats(values: Sequence[float]) -> str:
    return _base64(np.asarray(values, dtype="<f4"))


def _base64(values: np.ndarray) -> str:
    return b64encode(values.tobytes()).decode()
