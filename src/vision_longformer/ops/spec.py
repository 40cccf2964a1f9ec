"""What all implementations of local attention are told."""

from __future__ import annotations

from dataclasses import dataclass

from ..geometry import Grid


@dataclass(frozen=True)
class LocalSpec:
    """Which keys a local query sees, and the scale of its scores.

    ``neighbours`` is ``"all"``, ``"self"`` or ``"one"`` (its own chunk and the neighbour given beside the spec as a
    0-dimensional tensor, so that a compiled graph serves all eight).
    """

    grid: Grid
    window: int
    rule: str
    neighbours: str
    dilation: int
    scale: float


def refuse_dilation(spec: LocalSpec) -> str | None:
    """The refusal of implementations that work on chunks."""
    return None if spec.dilation == 1 else "chunks hold neighbouring tokens only, so dilation must be 1"
