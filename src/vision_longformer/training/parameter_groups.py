"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import check_choice
from .settings import DECAYS

RELEASE_EXEMPT = ("global_tokens", "position.", "norm", "attn.bias.", "head.bias")
"""Parts of our names that stand for what the authors' release keeps from decaying: tokens, absolute and relative
position, norms and the head's bias. All other biases decay there."""


def parameter_groups(model: nn.Module, weight_decay: float, decay: str) -> list[dict[str, Any]]:
    """The trainable parameters of ``model`` for an optimiser: those that decay, then the others, no group empty.

    ``decay`` is "matrices" (parameters of at least two dimensions that the model does not name in its
    ``no_weight_decay()``), "release" (all but :data:`RELEASE_EXEMPT`) or "all".
    """
    check_choice("decay", decay, DECAYS)
    exempt = _exempt_names(model, decay)
    decayed: list[Tensor] = []
    kept: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (kept if name in exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _exempt_names(model: nn.Module, decay: str) -> set[str]:
    """Names of the parameters that do not decay."""
    if decay == "all":
        return set()
    if decay == "release":
        return {name for name, _ in model.named_parameters() if any(part in name for part in RELEASE_EXEMPT)}
    named: Any = getattr(model, "no_weight_decay", set)
    return named() | {name for name, parameter in model.named_parameters() if parameter.dim() < 2}
