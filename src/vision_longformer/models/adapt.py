"""Weights for another image size, window or mechanism: tables resized, everything else as it is.

Full attention and Vision Longformer with shared weights have the same parameters but for the range of their tables of
relative position, so that resizing those tables makes a model with Longformer stages of one with full-attention stages.
By ``"offset"`` the two agree exactly on maps where both see all tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import CheckpointError
from ..geometry import Grid
from .attention import LinformerAttention
from .attention.linformer import resize_projection
from .config import ADAPT_TABLE_RESIZE, ModelConfig
from .position import resize_axis, resize_bias_table, resize_map
from .vision_longformer import VisionLongformer

logger = logging.getLogger(__name__)


@dataclass
class AdaptReport:
    """What was resized on the way into a model: name, old and new shape."""

    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.resized:
            return "nothing was resized"
        lines = [f"  {name}: {old} -> {new}" for name, (old, new) in self.resized.items()]
        return "\n".join([f"resized {len(lines)} tables:", *lines])


def adapt_model(
    model: VisionLongformer, config: ModelConfig, table_resize: str = ADAPT_TABLE_RESIZE
) -> VisionLongformer:
    """The same weights in a model of another configuration (image size, windows, full → Longformer stages).

    ``table_resize`` says how tables of relative position change: ``"offset"`` crops them or extends them by their
    border values, so that each offset keeps its meaning; ``"bilinear"`` stretches them, as the paper does.
    """
    target = VisionLongformer(config).to(next(model.parameters()))
    state, report = adapt_state(model.state_dict(), target, table_resize, model.config.grids())
    target.load_state_dict(state)
    logger.info("%s", report)
    return target.train(model.training)


def adapt_state(
    state: Mapping[str, Tensor],
    model: VisionLongformer,
    table_resize: str = ADAPT_TABLE_RESIZE,
    source_grids: list[Grid] | None = None,
) -> tuple[dict[str, Tensor], AdaptReport]:
    """A state dict whose tables have the shapes of ``model``, and what was resized.

    ``source_grids`` are the maps that the weights were made for; without them, tables over whole maps must be of square
    ones. Any other difference is an error that names it; nothing is skipped.
    """
    wanted = model.state_dict()
    _check_names(set(state), set(wanted))
    report, result, refused = AdaptReport(), {}, []
    for name, tensor in state.items():
        shape = wanted[name].shape
        if tensor.shape == shape:
            result[name] = tensor
            continue
        resized = _resize(name, tensor, model, table_resize, source_grids)
        if resized is None or resized.shape != shape:
            refused.append(f"{name}: {tuple(tensor.shape)} in the file, {tuple(shape)} in the model")
            continue
        result[name] = resized
        report.resized[name] = (tuple(tensor.shape), tuple(shape))
    if refused:
        raise CheckpointError("these weights do not fit the model:\n  " + "\n  ".join(refused))
    return result, report


def _check_names(given: set[str], wanted: set[str]) -> None:
    problems = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:8])}{', …' if len(names) > 8 else ''}"
        for what, names in (("missing", wanted - given), ("unexpected", given - wanted))
        if names
    ]
    if problems:
        raise CheckpointError("the weights are of another model: " + "; ".join(problems))


def _resize(
    name: str, tensor: Tensor, model: VisionLongformer, table_resize: str, source_grids: list[Grid] | None
) -> Tensor | None:
    """The tensor for the model's size, or None if it is not a table."""
    module, _, parameter = name.rpartition(".")
    if not name.startswith("stages."):
        return None
    owner, stage = model.get_submodule(module), int(name.split(".")[1])
    wanted, grid = owner.state_dict()[parameter].shape, model.config.grids()[stage]
    if name.endswith(".bias.table"):
        return resize_bias_table(tensor, (wanted[1], wanted[2]), table_resize)
    if name.endswith((".position.rows", ".position.columns")):
        return resize_axis(tensor, wanted[0])
    if name.endswith(".position.table"):
        return resize_map(tensor, _source_grid(tensor.shape[0], stage, source_grids), grid)
    if isinstance(owner, LinformerAttention) and parameter.startswith("project_"):
        tokens = tensor.shape[0] - owner.global_tokens
        return resize_projection(tensor, _source_grid(tokens, stage, source_grids), grid)
    return None


def _source_grid(tokens: int, stage: int, source_grids: list[Grid] | None) -> Grid:
    if source_grids is not None:
        return source_grids[stage]
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise CheckpointError(
            f"a table over {tokens} tokens is not of a square map; load it with its own image size first"
        )
    return Grid(side, side)
