"""What changes inside a Vision Longformer during training: the neighbours of random shift, new Performer features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..data.randomness import derive
from ..models import VisionLongformer
from ..models.attention import PerformerAttention

RedrawsFeatures = Callable[[int, int, int], bool]
"""(step of the run, epoch, step of the epoch), all counted from 0, to whether features are redrawn before it."""


class BackboneSchedule:
    """Sets every Vision Longformer inside ``model`` before each step, as a function of the step alone.

    From step ``shift_until`` on, all neighbours take the place of random shift.
    """

    def __init__(self, model: nn.Module, seed: int, shift_until: int, redraws_features: RedrawsFeatures) -> None:
        self._backbones = [module for module in model.modules() if isinstance(module, VisionLongformer)]
        self._seed, self._shift_until, self._redraws_features = seed, shift_until, redraws_features
        self._has_features = any(isinstance(module, PerformerAttention) for module in model.modules())

    def before_step(self, step: int, epoch: int, step_of_epoch: int) -> None:
        """Before an optimiser step, counted from 0 in the run (``step``) and in its epoch."""
        for model in self._backbones:
            if model.config.neighbours == "random" and step >= self._shift_until:
                model.set_neighbours("all")
        if self._has_features and self._redraws_features(step, epoch, step_of_epoch):
            generator = torch.Generator().manual_seed(derive(self._seed, "features", step))
            for model in self._backbones:
                model.redraw_features(generator)

    def before_forward(self, step: int) -> None:
        """Before each forward pass of a step: all of them see the same neighbours, however the batch is split."""
        for model in self._backbones:
            if model.config.neighbours == "random":
                model.random_shift.seed(derive(self._seed, "shift") % 2**32, step)
