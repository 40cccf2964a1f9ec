"""Multiply-accumulates that our models really execute, counted by torch on tensors without data.

Matrix products, convolutions and attention kernels count, with global tokens and with the padding that an
implementation multiplies; elementwise work does not. Our own operators, which torch sees as one, are counted by a
formula, as are operators registered with ``torch.utils.flop_counter.register_flop_formula``. An operator without a
formula is refused, never counted as nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..geometry import SELF_BLOCK, Grid, is_cyclic
from ..models import VisionLongformer
from ..models.config import ModelConfig, size_pair
from ..ops import IMPLEMENTATIONS
from ..ops.chunks import chunk_tables
from .formulas import ModelMacs, StageMacs

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


TRANSPARENT = ("aten", "prim", "prims")
"""Operator families that torch's counter knows, or that do no matrix product."""

UNCOUNTED = ("mv", "addmv", "dot", "vdot", "_trilinear", "_int_mm")
"""Products of the first family that torch's counter takes for nothing."""

PARTS = {
    "patch_embedding": r"patch_embed",
    "carried": r"carry",
    "attention": r"blocks\.\d+\.attn",
    "mlp": r"blocks\.\d+\.mlp",
}
"""Parts of a stage and their modules; ``carried`` projects the global tokens of the stage before."""


def executed_macs(config: ModelConfig, size: tuple[int, int] | None = None, implementation: str = "auto") -> ModelMacs:
    """The cost of an image of ``size`` (default: the model's own) in evaluation.

    ``implementation`` of local attention is a name in :data:`~vision_longformer.ops.IMPLEMENTATIONS` or ``"auto"``, the
    first that takes tensors without data.
    """
    height, width = size_pair(size or config.img_size)
    with torch.device("meta"):
        model = VisionLongformer(config).eval()
        image = torch.empty(1, config.in_chans, height, width)
    model.set_attention_implementation(implementation)
    counter = FlopCounterMode(display=False, custom_mapping=kernel_formulas())
    with torch.no_grad(), _RefuseUncounted(counter), counter:
        model(image)
    return _by_stage(config.grids((height, width)), counter)


class _RefuseUncounted(TorchDispatchMode):
    """Stops at an operator that may do matrix products and has no formula in ``counter``.

    It must be entered before the counter, so that it sees what is left when the counter has taken composite operators
    apart.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self.formulas = counter.flop_registry

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        known = func.namespace in TRANSPARENT and packet.__name__ not in UNCOUNTED
        if not known and packet not in self.formulas:
            raise ValueError(
                f"the cost of {packet} is unknown, so that this model cannot be counted; register a formula with "
                "torch.utils.flop_counter.register_flop_formula or count with another implementation"
            )
        return func(*args, **(kwargs or {}))


def _by_stage(grids: list[Grid], counter: FlopCounterMode) -> ModelMacs:
    """The counter's results by module name, gathered by stage and part."""
    root = VisionLongformer.__name__
    macs = {name: sum(counts.values()) // 2 for name, counts in counter.get_flop_counts().items()}
    stages = []
    for index, grid in enumerate(grids):
        parts = {part: _matching(macs, rf"{root}\.stages\.{index}\.{module}") for part, module in PARTS.items()}
        stages.append(StageMacs(grid, parts))
    result = ModelMacs(tuple(stages), macs.get(f"{root}.head", 0))
    missed = counter.get_total_flops() // 2 - result.total
    if missed:
        raise RuntimeError(f"{missed} MACs were executed outside the modules that are counted")
    return result


def _matching(macs: dict[str, int], pattern: str) -> int:
    return sum(count for name, count in macs.items() if re.fullmatch(pattern, name))
