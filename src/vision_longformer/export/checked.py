"""From a module to a file that was seen to compute the same: what the export of any kind of model shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import check_choice
from ..files import written_whole
from .loaded import load_exported
from .parity import Difference, compare
from .writers import Shapes, check_onnx, trace, write_onnx, write_pt2

FORMATS = ("onnx", "pt2")

Tell = Callable[[int, int], None]
"""Told of progress: steps done, steps in all."""


@dataclass(frozen=True)
class Exported:
    """A file that was written, what it says about itself, and how far it was off at the sizes that were tried."""

    path: Path
    metadata: dict[str, Any]
    differences: tuple[Difference, ...]


def export_checked(
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
    tell: Tell | None = None,
) -> Exported:
    """Trace ``module`` on the first example, write the file, and compare its outputs on all examples.

    ``expected`` is what they are compared with, ``module`` itself by default. The file appears only if they agree.
    """
    path = check_target(path, format)
    steps = len(examples) + 2
    done = iter(range(1, steps + 1))

    def step() -> None:
        if tell is not None:
            tell(next(done), steps)

    with written_whole(path, overwrite=overwrite) as temporary:
        program = trace(module, examples[0], dynamic_shapes)
        step()
        if format == "onnx":
            names = {"input_names": input_names, "output_names": output_names}
            write_onnx(program, temporary, **names, metadata=metadata, dynamic_shapes=dynamic_shapes)
        else:
            write_pt2(program, temporary, metadata=metadata)
        step()
        run = load_exported(temporary)
        differences = []
        for example in examples:
            differences.append(compare(run, expected or module, example))
            step()
    return Exported(path, dict(metadata), tuple(differences))


def check_target(path: str | Path, format: str) -> Path:
    """The path, if its name fits the format and the format can be written here."""
    check_choice("format", format, FORMATS)
    path = Path(path)
    if path.suffix != f".{format}":
        raise ValueError(f"{path.name} should end in .{format}, as the format is {format}")
    if format == "onnx":
        check_onnx()
    return path
