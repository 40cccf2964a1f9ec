"""What changes inside a Vision Longformer as training goes on: random shift and its end, new Performer features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..attention import PerformerAttention
from ..model import VisionLongformer
from .randomness import derive


class BackboneSchedule:
    """Sets every Vision Longformer inside ``model`` before each step, as a function of the step alone.

    ``shift_until`` is the step from which random shift gives way to all neighbours. ``redraw_every`` gives the number
    of steps between new features in an epoch; the first step of an epoch draws new ones.
    """

    def __init__(self, model: nn.Module, seed: int, shift_until: int, redraw_every: Callable[[int], int]) -> None:
        self._backbones = [module for module in model.modules() if isinstance(module, VisionLongformer)]
        self._seed, self._shift_until, self._redraw_every = seed, shift_until, redraw_every
        self._has_features = any(isinstance(module, PerformerAttention) for module in model.modules())

    def before_step(self, step: int, epoch: int, step_of_epoch: int) -> None:
        """Before an optimiser step, counted from 0."""
        for model in self._backbones:
            if model.config.neighbours == "random" and step >= self._shift_until:
                model.set_neighbours("all")
        if self._has_features and step_of_epoch % self._redraw_every(epoch) == 0:
            generator = torch.Generator().manual_seed(derive(self._seed, "features", step))
            for model in self._backbones:
                model.redraw_features(generator)

    def before_forward(self, place: int) -> None:
        """Before the forward pass number ``place`` of the run, counted from 0."""
        for model in self._backbones:
            if model.config.neighbours == "random":
                model.random_shift.seed(derive(self._seed, "shift") % 2**32, place)


def paper_redraw(epoch: int) -> int:
    """Steps between new features in classification: 1 + 5T in epoch T."""
    return 1 + 5 * epoch
