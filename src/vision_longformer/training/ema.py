"""An exponential moving average of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Averages parameters after each step; buffers (such as random features) are not averaged.

    The averages are tensors beside the parameters, not a second model, so that sharded parameters are averaged shard
    by shard. The decay grows as ``(1 + step) / (10 + step)`` up to ``decay``, so that a short run forgets its start.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.values = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights as they are after ``step`` steps, counted from 1."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        current = [parameter.detach() for parameter in self._parameters.values()]
        torch._foreach_lerp_(list(self.values.values()), current, weight)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        for name, value in self.values.items():
            value.copy_(values[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Meanwhile, the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            current = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(current)
