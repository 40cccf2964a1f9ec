"""Whether a file computes what its model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-4
"""Largest difference of an output in float32, relative to its largest value, or to 1 if that is smaller."""


class ExportError(ValueError):
    """An exported file does not compute what its model does; it was not kept."""


class Difference(NamedTuple):
    """How far a file was off: the shape of its input, the largest difference and the largest value of an output."""

    shape: tuple[int, ...]
    difference: float
    largest: float


def compare(run: Callable[..., Any], expected: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Difference:
    """The worst of the outputs of both functions, compared; too large a difference is an error."""
    shape = tuple(inputs[0].shape)
    with torch.no_grad():
        pairs = zip(as_tuple(run(*inputs)), as_tuple(expected(*inputs)), strict=True)
    worst = max((_difference(shape, *pair) for pair in pairs), key=lambda one: one.difference / one.largest)
    if not worst.difference <= TOLERANCE * worst.largest:
        raise ExportError(
            f"the exported file differs from its model by {worst.difference:.2g} on an input of {shape}, where outputs "
            f"reach {worst.largest:.2g}; no file was kept"
        )
    return worst


def _difference(shape: tuple[int, ...], got: Tensor, wanted: Tensor) -> Difference:
    if got.shape != wanted.shape:
        raise ExportError(
            f"the exported file makes {tuple(got.shape)} of an input of {shape}, its model {tuple(wanted.shape)}; "
            "no file was kept"
        )
    if not got.numel():
        return Difference(shape, 0.0, 1.0)
    error = (got.double() - wanted.double()).abs().max().item()
    return Difference(shape, error, max(1.0, wanted.abs().max().item()))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """One tensor or several as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
