"""An explanation as one HTML file to explore: what the token under the mouse attends to. It needs nothing else.

The weights of all tokens are in it, each row in 255 steps of its largest weight. What would still be too large is made
coarser, stage by stage, the largest first: only the last layer, then only the mean of the heads, then only every
second, fourth, … token along each axis as a query. Keys are never made coarser.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..files import atomic_write
from .explanation import Explanation
from .layers import Layer, Strip
from .pictures import LINE, chosen_heads, chosen_layers, heat
from .weights import Progress, global_maps, local_rows

SCRIPTS = ("weights.js", "drawing.js", "controls.js")

BUDGET = 6_500_000
"""Bytes of weights in a page; as text they take a third more."""


def write_page(
    explanation: Explanation,
    path: str | Path,
    *,
    stage: int | None = None,
    head: int | None = None,
    budget: int = BUDGET,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the page; it opens with this stage and head, and holds about ``budget`` bytes of weights."""
    path = Path(path)
    if path.suffix.lower() != ".html":
        raise ValueError(f"{path.name} should end in .html")
    for layer in chosen_layers(explanation, stage):
        chosen_heads(layer, head)
    data = page_data(explanation, budget, progress) | {"stage": stage or 1, "head": head or 0}
    parts = {
        "title": escape(Path(explanation.prediction.file).name),
        "data": json.dumps(data).replace("<", "\\u003c"),  # so that no name can end the script
        "css": _part("page.css"),
        "js": "\n".join(map(_part, SCRIPTS)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html"))
    with atomic_write(path, overwrite=overwrite) as temporary:
        temporary.write_text(page, "utf-8")
    return path


def _part(name: str) -> str:
    return files(__package__).joinpath("web", name).read_text("utf-8")


def page_data(explanation: Explanation, budget: int = BUDGET, progress: Progress | None = None) -> dict[str, Any]:
    """What the page knows, as JSON data; arrays are base64 of little-endian uint8 or float32."""
    details = affordable(explanation.stages, budget)
    total = sum(len(detail.layers) for detail in details)
    stages: list[dict[str, Any]] = []
    done = 0
    for layers, detail, shares in zip(explanation.stages, details, explanation.rollout.maps, strict=True):
        blocks = []
        for layer in detail.layers:
            blocks.append(packed_layer(layer, detail))
            done += 1
            if progress:
                progress(done, total)
        stages.append(_stage(layers, detail) | {"blocks": blocks, "rollout": packed_map(shares)})
    prediction = explanation.prediction
    return {
        "file": Path(prediction.file).name,
        "prediction": list(zip(prediction.labels, prediction.probabilities, strict=True)),
        "image": _data_uri(explanation.image),
        "size": explanation.size,
        "point": explanation.point,
        "learned": explanation.rollout.learned,
        "colours": b64encode(heat().tobytes()).decode(),
        "line": LINE,
        "stages": stages,
    }


def _stage(layers: Sequence[Layer], detail: Detail) -> dict[str, Any]:
    first = layers[0]
    down, across = first.strips
    return {
        "grid": first.grid,
        "stride": first.stride,
        "window": first.window,
        "globalTokens": first.global_tokens,
        "heads": first.heads,
        "eachHead": detail.each_head,
        "step": detail.step,
        "depth": len(layers),
        "rows": [_strip(strip, detail.step) for strip in down],
        "columns": [_strip(strip, detail.step) for strip in across],
    }


def _strip(strip: Strip, step: int) -> dict[str, Any]:
    return {"own": [strip.own.start, strip.own.stop], "stored": stored(strip, step), "seen": strip.seen}


def _data_uri(image: Image.Image) -> str:
    """A PNG where single pixels are to be seen, a JPEG of photographs."""
    format = "PNG" if max(image.size) < 128 else "JPEG"
    buffer = BytesIO()
    image.save(buffer, format, quality=88)
    return f"data:image/{format.lower()};base64,{b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Detail:
    """What the page holds of a stage: its layers, each head or their mean, one query of every ``step``×``step``."""

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
    """The positions of a strip whose weights the page holds: those in the middle of ``step`` consecutive ones."""
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
                "weights": _base64(np.concatenate([_quantised(one) for one in weights])),
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
    return {"weights": _base64(_quantised(weights.flatten())), "largest": float(weights.max()), "global": to_global}


def _stored_rows(layer: Layer, detail: Detail) -> list[Tensor]:
    """The rows (heads, keys) of the queries that the page holds, in the order of the map."""
    by_query: dict[int, Tensor] = {}
    down, across = layer.strips
    for rows in down:
        for columns in across:
            queries = [
                layer.global_tokens + y * layer.grid.width + x
                for y in stored(rows, detail.step)
                for x in stored(columns, detail.step)
            ]
            if queries:
                block = local_rows(layer, rows, columns)
                weights = block.weights if detail.each_head else block.weights.mean(0, keepdim=True)
                indices = torch.searchsorted(block.queries, block.queries.new_tensor(queries))
                by_query |= zip(queries, weights[:, indices].unbind(1), strict=True)
    return [by_query[query] for query in sorted(by_query)]


def _quantised(weights: Tensor) -> np.ndarray:
    """Weights as 0 … 255 of the largest."""
    return (weights * (255 / weights.max().clamp(min=1e-30))).round().to(torch.uint8).cpu().numpy()


def _floats(values: Sequence[float]) -> str:
    return _base64(np.asarray(values, dtype="<f4"))


def _base64(values: np.ndarray) -> str:
    return b64encode(values.tobytes()).decode()
