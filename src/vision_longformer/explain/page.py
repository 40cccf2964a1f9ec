"""An explanation as one HTML file to explore: what the token under the mouse attends to. It needs nothing else."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from ..files import written_whole
from .colours import LINE, heat
from .explanation import Explanation
from .layers import Layer
from .packing import Detail, affordable, packed_layer, packed_map, stored
from .pictures import chosen_heads, chosen_layers
from .rollout import Progress
from .strips import Strip

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
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("page.html"))
    with written_whole(path, overwrite=overwrite) as temporary:
        temporary.write_text(page, "utf-8")
    return path


def _part(name: str) -> str:
    return files(__package__).joinpath("web", name).read_text("utf-8")


def page_data(explanation: Explanation, budget: int = BUDGET, progress: Progress | None = None) -> dict[str, Any]:
    """What the page knows, as JSON data; arrays are base64 of little-endian uint8 or float32."""
    details = affordable(explanation.stages, budget)
    todo = sum(len(detail.layers) for detail in details)
    stages: list[dict[str, Any]] = []
    done = 0
    for layers, detail, shares in zip(explanation.stages, details, explanation.rollout.maps, strict=True):
        blocks = []
        for layer in detail.layers:
            blocks.append(packed_layer(layer, detail))
            done += 1
            if progress:
                progress(done, todo)
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
    """A PNG where pixels are to be told apart, a JPEG of photographs."""
    kind = "PNG" if max(image.size) < 128 else "JPEG"
    buffer = BytesIO()
    image.save(buffer, kind, quality=88)
    return f"data:image/{kind.lower()};base64,{b64encode(buffer.getvalue()).decode()}"
