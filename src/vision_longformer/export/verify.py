"""From a module to a file that was seen to compute the same; a file that does not is removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.loading import Progress
from ..errors import check_choice
from ..files import atomic_write
from .runtime import as_tuple, file_bytes, load_exported
from .writers import BESIDE, SUFFIXES, WRITERS, Graph, Shapes, check_packages, trace

TOLERANCE = 1e-4
"""Largest difference of an output in float32, relative to its largest value, or to 1 if that is smaller."""


class ExportError(ValueError):
    """An exported file does not compute what its model does, and was removed."""


class Difference(NamedTuple):
    """How far a file was off: the shape of its input, the largest difference and the largest value of an output."""

    shape: tuple[int, ...]
    difference: float
    largest: float


@dataclass(frozen=True)
class ExportedFile:
    """A file that was written, what it says about itself, and how far it was off on each example.

    Examples for which neither it nor its model gives a single number are left out: nothing was compared on them.
    """

    path: Path
    metadata: dict[str, Any]
    differences: tuple[Difference, ...]

    @property
    def bytes(self) -> int:
        """Its length, with what belongs to it."""
        return file_bytes(self.path)


def export_verified(
    module: nn.Module,
    examples: Sequence[tuple[Tensor, ...]],
    path: str | Path,
    *,
    format: str,
    metadata: Mapping[str, Any],
    input_names: Sequence[str],
    output_names: Sequence[str],
    dynamic_shapes: Shapes = None,
    expected: Callable[..., Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportedFile:
    """Trace ``module`` on the first example, write the file, and compare its outputs on all examples.

    ``expected`` is what they are compared with, ``module`` itself by default. The file appears only if they agree.
    """
    path = check_target(path, format)
    steps = len(examples) + 2
    done = iter(range(1, steps + 1))

    def step() -> None:
        if progress is not None:
            progress(next(done), steps)

    with atomic_write(path, overwrite=overwrite, beside=BESIDE.get(path.suffix, ())) as temporary:
        program = trace(module, examples[0], dynamic_shapes)
        step()
        WRITERS[path.suffix](Graph(program, input_names, output_names, dynamic_shapes), temporary, metadata)
        step()
        exported = load_exported(temporary)
        differences = []
        for example in examples:
            differences.append(compare(exported, expected or module, example))
            step()
    return ExportedFile(path, dict(metadata), tuple(one for one in differences if one is not None))


def check_target(path: str | Path, format: str) -> Path:
    """The path, if its name fits the format and the format can be written here."""
    check_choice("format", format, SUFFIXES)
    path, suffix = Path(path), SUFFIXES[format]
    if path.suffix != suffix:
        raise ValueError(f"{path.name} should end in {suffix}, as the format is {format}")
    check_packages(suffix, to_write=True)
    return path


def compare(run: Callable[..., Any], expected: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Difference | None:
    """The worst of the outputs of both functions, compared; too large a difference is an error.

    None if all outputs of both are empty.
    """
    shape = tuple(inputs[0].shape)
    with torch.no_grad():
        pairs = zip(as_tuple(run(*inputs)), as_tuple(expected(*inputs)), strict=True)
    differences = [_difference(shape, *pair) for pair in pairs]
    worst = max((one for one in differences if one is not None), key=_relative, default=None)
    if worst is None:
        return None
    if not _relative(worst) <= TOLERANCE:
        raise ExportError(
            f"the exported file differs from its model by {worst.difference:.2g} on an input of {shape}, where outputs "
            f"reach {worst.largest:.2g}; no file was written"
        )
    return worst


def _difference(shape: tuple[int, ...], got: Tensor, wanted: Tensor) -> Difference | None:
    if got.shape != wanted.shape:
        raise ExportError(
            f"the exported file returns {tuple(got.shape)} for an input of {shape}, its model {tuple(wanted.shape)}; "
            "no file was written"
        )
    if not got.numel():
        return None
    error = (got.double() - wanted.double()).abs().max().item()
    return Difference(shape, error, max(1.0, wanted.abs().max().item()))


def _relative(difference: Difference) -> float:
    """NaN counts as worse than any number."""
    relative = difference.difference / difference.largest
    return inf if isnan(relative) else relative
