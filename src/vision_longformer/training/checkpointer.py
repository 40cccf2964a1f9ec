"""The state of a run between two steps, whole on one process however it is distributed over several.

Randomness has no state (see :mod:`.randomness`), so weights, optimiser and counters are all there is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from .ema import WeightAverage


@dataclass
class Counters:
    """Where a run is: steps done, the step last evaluated, the best score, and sums of what was not logged yet."""

    step: int = 0
    evaluated: int = 0
    best: float | None = None
    sums: dict[str, float] = field(default_factory=dict)


def take(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None, counters: Counters, scaler: Any
) -> dict[str, Any]:
    """Everything to go on from here; all processes take part, each gets the whole."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, optimisation = get_state_dict(model, optimizer, options=options)
    return {
        "model": weights,
        "optimizer": optimisation,
        "average": None if average is None else {name: _whole(value) for name, value in average.values.items()},
        "scaler": None if scaler is None else scaler.state_dict(),
        "counters": asdict(counters),
    }


def restore(
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
    scaler: Any,
) -> Counters:
    """Put a state back, into one process or a share of it into each of several."""
    options = StateDictOptions(full_state_dict=True, strict=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    if average is not None:
        average.load(state["average"])
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    return Counters(**state["counters"])


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
