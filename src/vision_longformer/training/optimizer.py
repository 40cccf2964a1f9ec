"""Which parameters decay, the optimisers, and the learning rate of each step.

The optimisers are torch's own and the two of the authors' release whose steps differ from them. Learning rates are a
pure function of the step, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import check_choice
from .recipe import DECAYS, TrainSettings

RELEASE_EXEMPT = ("global_tokens", "position.", "norm", "attn.bias.", "head.bias")
"""Parts of our names that stand for what the authors' release keeps from decaying: tokens, absolute and relative
position, norms and the head's bias. All other biases decay there."""


def parameter_groups(model: nn.Module, weight_decay: float, decay: str) -> list[dict[str, Any]]:
    """The trainable parameters of ``model`` for an optimiser: those that decay, then the others, no group empty.

    ``decay`` is "matrices" (parameters of at least two dimensions that neither the model nor a part of it names in its
    ``no_weight_decay()``), "release" (all but :data:`RELEASE_EXEMPT`) or "all".
    """
    check_choice("decay", decay, DECAYS)
    exempt = _exempt_names(model, decay)
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (others if name in exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _exempt_names(model: nn.Module, decay: str) -> set[str]:
    """Names of the parameters that do not decay."""
    if decay == "all":
        return set()
    if decay == "release":
        return {name for name, _ in model.named_parameters() if any(part in name for part in RELEASE_EXEMPT)}
    exempt = {name for name, parameter in model.named_parameters() if parameter.dim() < 2}
    for prefix, module in model.named_modules():
        if hasattr(module, "no_weight_decay"):
            exempt |= {f"{prefix}.{name}" if prefix else name for name in module.no_weight_decay()}
    return exempt


Groups = Iterable[dict[str, Any]]

FUSED_DEVICES = ("cpu", "cuda")
"""Where torch's AdamW has a kernel that updates a parameter in one pass: a third of the time on the CPU. Its SGD has
one too, but not for sharded parameters."""


def build_optimizer(groups: Groups, settings: TrainSettings) -> Optimizer:
    """The optimiser that ``settings`` name, over the groups of :func:`parameter_groups`."""
    groups, lr, betas = list(groups), settings.scaled_lr, (0.9, settings.beta2)
    if settings.optimizer == "adamw":
        fused = all(parameter.device.type in FUSED_DEVICES for group in groups for parameter in group["params"])
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=settings.momentum)
    if settings.optimizer == "release_adamw":
        return ReleaseAdamW(groups, lr=lr, betas=betas)
    return QuasiHyperbolicMomentum(groups, lr=lr, momentum=settings.momentum)


class _ForeachOptimizer(Optimizer):
    """An optimiser that updates a whole group at once."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters, [parameter.grad for parameter in parameters])
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        raise NotImplementedError

    def _states(self, name: str, parameters: list[Tensor]) -> list[Tensor]:
        """The tensor ``name`` of each parameter's state, zeros of its shape at first."""
        return [self._state(name, parameter, torch.zeros_like) for parameter in parameters]

    def _steps(self, parameters: list[Tensor]) -> list[Tensor]:
        """How often each parameter was updated, scalars that stay on the CPU, as torch's optimisers keep them."""
        return [self._state("step", parameter, lambda _: torch.zeros(())) for parameter in parameters]

    def _state(self, name: str, parameter: Tensor, new: Callable[[Tensor], Tensor]) -> Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = new(parameter)
        return state[name]


class ReleaseAdamW(_ForeachOptimizer):
    """AdamW as the authors trained with it: weights decay after the step, and eps joins before bias correction.

    torch's AdamW decays first and adds eps to the corrected root; after a few steps they differ by some 1e-5.
    """

    def __init__(
        self,
        params: Groups | Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        steps = self._steps(parameters)
        averages, squares = self._states("exp_avg", parameters), self._states("exp_avg_sq", parameters)
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        rates = [-lr * math.sqrt(1 - beta2**count) / (1 - beta1**count) for count in (step.item() for step in steps)]
        torch._foreach_addcdiv_(parameters, averages, roots, rates)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])


class QuasiHyperbolicMomentum(_ForeachOptimizer):
    """Steps along a mean of the gradient and its moving average, ``nu`` the average's share; decay is in the gradient.

    The average is a true one: new gradients weigh ``1 - momentum``. With ``nu=1`` this therefore is SGD with momentum
    at ``(1 - momentum)`` times the rate: at a momentum of 0.9, the paper's fine-tuning rates are ten times SGD's.
    """

    def __init__(
        self,
        params: Groups | Iterable[Tensor],
        lr: float,
        momentum: float = 0.9,
        nu: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nu": nu, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        averages = self._states("momentum_buffer", parameters)
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        torch._foreach_add_(parameters, averages, alpha=-group["lr"] * group["nu"])
        if group["nu"] != 1:
            torch._foreach_add_(parameters, gradients, alpha=-group["lr"] * (1 - group["nu"]))


MULTISTEP_FACTOR = 0.1
"""What multistep multiplies the rate by at each milestone."""


def learning_rate(settings: TrainSettings, step: int, total: int, warmup: int) -> float:
    """The rate of step ``step``, counted from 0, of ``total``, of which the first ``warmup`` warm up linearly.

    Decay starts where warm-up ends and would reach ``min_lr`` at step ``total``. With "release_cosine" it starts at
    step 0, hidden by warm-up, so that the rate falls a little when warm-up ends; the release's linear decay is as here.
    """
    peak = settings.scaled_lr
    if step < warmup:
        return peak * (settings.warmup_factor + (1 - settings.warmup_factor) * step / warmup)
    if settings.schedule == "constant":
        return peak
    if settings.schedule == "multistep":
        return peak * MULTISTEP_FACTOR ** sum(step >= round(milestone * total) for milestone in settings.milestones)
    start = 0 if settings.schedule == "release_cosine" else warmup
    progress = min(1.0, (step - start) / max(1, total - start))
    left = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.min_lr + (peak - settings.min_lr) * left
