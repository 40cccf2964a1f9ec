"""The benchmarks by name, and what may be chosen about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..errors import check_at_least, check_choice
from ..geometry import Grid
from ..ops import IMPLEMENTATIONS, why_not
from ..ops.local_attention import AUTOMATIC
from ..ops.spec import LocalSpec
from .tasks import Group

Size = tuple[int, int]

BASELINE = "sliding_chunk"
"""What implementations are compared with unless asked otherwise: the paper's fastest."""


@dataclass(frozen=True)
class Choices:
    """What the user chose; None is the benchmark's own default. ``sizes`` are maps of tokens, or images of models."""

    quick: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    implementations: tuple[str, ...] | None = None
    sizes: tuple[Size, ...] | None = None
    models: tuple[str, ...] | None = None
    windows: tuple[int, ...] | None = None
    baseline: str | None = None
    batch: int | None = None
    shift: bool = False

    def __post_init__(self) -> None:
        for name in self.implementations or ():
            check_choice("implementation", name, IMPLEMENTATIONS)
        for window in self.windows or ():
            check_at_least("window", window, 1)
        if self.batch is not None:
            check_at_least("batch", self.batch, 1)

    def methods(self, default: Sequence[str]) -> tuple[str, ...]:
        """Implementations to measure, the baseline that was asked for among them."""
        chosen = tuple(self.implementations or default)
        if self.baseline is None or self.baseline in chosen:
            return chosen
        check_choice("baseline", self.baseline, IMPLEMENTATIONS)
        return (*chosen, self.baseline)


class Bench(NamedTuple):
    """A benchmark: its groups for some choices, the choices it heeds, and the seconds it takes, quick or not."""

    plan: Callable[[Choices], list[Group]]
    heeds: tuple[str, ...]
    quick_seconds: float
    seconds: float


def pick_baseline(wanted: str | None, default: str, variants: Sequence[str]) -> str:
    """The variant that the others are compared with: as asked, the usual one, or the first."""
    if wanted is not None:
        check_choice("baseline", wanted, variants)
        return wanted
    return default if default in variants else variants[0]


def fast_methods(device: torch.device) -> tuple[str, ...]:
    """The implementation that models use here, and the baseline."""
    q = torch.empty(1, 56 * 56, 3, 32, device=device, requires_grad=True)
    spec = LocalSpec(Grid(56, 56), 7, "chunk", "all", 1, 32**-0.5)
    automatic = next(name for name in AUTOMATIC if why_not(name, spec, q) is None)
    return tuple(dict.fromkeys((automatic, BASELINE)))
