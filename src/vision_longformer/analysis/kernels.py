"""The cost of those implementations of local attention that torch's counter sees as one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..geometry import SELF_BLOCK, Grid, chunk_tables, is_cyclic
from ..ops import IMPLEMENTATIONS

NEEDED = {"q", "k", "height", "width", "window", "rule", "neighbours"}
"""Arguments by which an operator says what it computes."""


def kernel_formulas() -> dict[Any, Callable[..., int]]:
    """FLOPs (twice the MACs) of our operators, in the form that torch's counter takes; see :func:`block_pairs`."""
    operators = [getattr(torch.ops.vision_longformer, name, None) for name in IMPLEMENTATIONS]
    formulas: dict[Any, Callable[..., int]] = {}
    for operator in filter(None, operators):
        names = [argument.name for argument in operator.default._schema.arguments]
        if set(names) >= NEEDED:
            formulas[operator] = _formula(names)
    return formulas


def _formula(names: list[str]) -> Callable[..., int]:
    def flops(*values: Any, out_shape: Any = None, **options: Any) -> int:
        """Scores and context; tensors come as their shapes, q as (B, N, heads, dim)."""
        given = {**dict(zip(names, values, strict=False)), **options}
        grid, (batch, tokens, heads, dim) = Grid(given["height"], given["width"]), given["q"]
        pairs = block_pairs(grid, given["window"], given["rule"], given["neighbours"])
        pairs += tokens * (given["k"][1] - tokens)
        return 4 * batch * heads * dim * pairs

    return flops


def block_pairs(grid: Grid, window: int, rule: str, neighbours: str = "all") -> int:
    """Pairs of a query and a local key over the nine blocks of each query, or (``"self"``) over its own.

    Kernels compute these whole, and the ``exact`` rule then masks some. Keys beyond the map are left out, but cyclic
    rules multiply padding with the rest.
    """
    cpu = torch.device("cpu")
    inside = chunk_tables(grid, window, "chunk", cpu).valid
    blocks = slice(None) if neighbours == "all" else slice(SELF_BLOCK, SELF_BLOCK + 1)
    keys = torch.ones_like(inside) if is_cyclic(rule) else inside
    return int((inside[SELF_BLOCK].sum(-1) * keys[blocks].sum((0, 2))).sum())
