"""Multiply-accumulates that our models really execute, counted by torch on tensors without data.

Matrix products, convolutions and attention kernels count, with global tokens and with the padding that an
implementation multiplies; elementwise work does not. An operator that torch cannot look into is counted by the formula
of ``kernels.py`` or by one registered with ``torch.utils.flop_counter.register_flop_formula``; without either it is
refused, never counted as nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..config import ModelConfig, size_pair
from ..geometry import Grid
from ..model import VisionLongformer
from .kernels import kernel_formulas
from .macs import ModelMacs, StageMacs

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
