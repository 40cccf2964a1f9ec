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

from ..geometry import Grid, ceil_div, is_cyclic
from ..models import VisionLongformer
from ..models.config import ModelConfig, size_pair
from ..ops.operator import OPERATORS, spec_of
from ..ops.spec import LocalSpec, PackedInputs
from .formulas import ModelMacs, StageMacs

TRANSPARENT = ("aten", "prim", "prims")
"""Operator families that torch's counter knows, or that do no matrix product."""

UNCOUNTED = ("mv", "addmv", "dot", "vdot", "_trilinear", "_int_mm")
"""Products of the first family that torch's counter counts as nothing."""

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
    counter = FlopCounterMode(display=False, custom_mapping=operator_formulas())
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


def operator_formulas() -> dict[Any, Callable[..., int]]:
    """A formula for each of our operators, in the form that torch's counter takes."""
    formulas: dict[Any, Callable[..., int]] = dict.fromkeys(OPERATORS.values(), _operator_flops)
    return formulas | {OPERATORS["triton_rows"]: _packed_flops}


def _operator_flops(*arguments: Any, out_shape: Any = None) -> int:
    """FLOPs (twice the MACs) of scores and context. Tensors come as their shapes, q as (B, N, heads, dim)."""
    return _flops(arguments[0], arguments[1][1], spec_of(arguments))


def _packed_flops(*arguments: Any, out_shape: Any = None) -> int:
    """As :func:`_operator_flops`, with the rows of global tokens; qkv comes as (B, G + N, 3, heads, dim)."""
    (batch, tokens, _, heads, dim), spec = arguments[0], spec_of(arguments, PackedInputs)
    local = spec.grid.tokens
    return _flops((batch, local, heads, dim), tokens, spec) + 4 * batch * dim * heads * (tokens - local) * tokens


def _flops(q: tuple[int, int, int, int], keys: int, spec: LocalSpec) -> int:
    """FLOPs of local rows, with all keys of global tokens."""
    batch, tokens, heads, dim = q
    dilations = (spec.dilation,) * heads if isinstance(spec.dilation, int) else spec.dilation
    local = sum(dilations.count(dilation) * _dilated_pairs(spec, dilation) for dilation in set(dilations))
    return 4 * batch * dim * (local + heads * tokens * (keys - spec.key_grid.tokens))


def _dilated_pairs(spec: LocalSpec, dilation: int) -> int:
    """As :func:`block_pairs`; a dilation of d makes d×d interleaved maps of one."""
    height, width = spec.grid
    maps = (
        Grid(ceil_div(height - row, dilation), ceil_div(width - column, dilation))
        for row in range(min(dilation, height))
        for column in range(min(dilation, width))
    )
    return sum(block_pairs(grid, spec.window, spec.rule, spec.neighbour_mode, spec.halo) for grid in maps)


def block_pairs(
    grid: Grid, window: int, rule: str, neighbour_mode: str = "all", halo: tuple[int, int] | None = None
) -> int:
    """Pairs of a query and a local key in the blocks that the query sees.

    Kernels compute these whole, and the ``exact`` rule then masks some. Keys beyond the map are left out, but cyclic
    rules multiply padding with the rest. For one neighbour it is the mean over the eight, rounded down.
    """
    rows, columns = _axis_pairs(grid.height, window, rule, halo), _axis_pairs(grid.width, window, rule, None)
    own = rows[1] * columns[1]
    others = sum(rows) * sum(columns) - own
    return own + {"all": others, "self": 0, "one": others // 8}[neighbour_mode]


def _axis_pairs(length: int, window: int, rule: str, halo: tuple[int, int] | None) -> list[int]:
    """Pairs along one axis of a query with a key of the chunk before its own, of its own, and of the chunk after."""
    own = queries = [min(window, length - start) for start in range(0, length, window)]
    before, after = halo or (0, 0)
    if is_cyclic(rule):
        own = [window] * len(queries)
        before, after = (window if halo is None or side else 0 for side in (before, after))
    blocks = [before, *own[:-1]], own, [*own[1:], after]
    return [sum(q * k for q, k in zip(queries, keys, strict=True)) for keys in blocks]
