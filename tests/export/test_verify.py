"""Files are compared with their models, and appear only if they agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vision_longformer.export import load_exported
from vision_longformer.export.verify import ExportError, check_target, compare, export_verified

INPUT = (torch.ones(1, 2),)


def _constant(*outputs: Any) -> Any:
    """A function with these outputs, whatever its inputs."""
    return lambda *inputs: tuple(torch.as_tensor(output) for output in outputs)


def test_the_worst_output_relative_to_its_largest_value() -> None:
    """0.004 of 100 is less than 0.00008 of 0.5, whose largest value counts as 1; an empty output does not count."""
    expected = _constant([100.0, -50.0], [0.5, 0.25], torch.zeros(0, 4))
    got = _constant([100.0, -50.004], [0.50008, 0.25], torch.zeros(0, 4))
    shape, difference, largest = compare(got, expected, INPUT)
    assert (shape, largest) == ((1, 2), 1.0)
    assert difference == pytest.approx(8e-5, rel=1e-3)


@pytest.mark.parametrize(("largest", "off", "agrees"), [(0.5, 9e-5, True), (0.5, 1.1e-4, False), (30.0, 2.9e-3, True)])
def test_tolerance(largest: float, off: float, agrees: bool) -> None:
    expected, got = (_constant(torch.tensor([largest + by], dtype=torch.float64)) for by in (0, off))
    if agrees:
        assert compare(got, expected, INPUT).difference == pytest.approx(off)
    else:
        with pytest.raises(ExportError, match=r"differs from its model by 0\.00011 on an input of \(1, 2\)"):
            compare(got, expected, INPUT)


@pytest.mark.parametrize("position", [0, 1])
def test_not_a_number_is_a_difference(position: int) -> None:
    """In whichever output it is."""
    outputs = [[1.0], [1.0]]
    outputs[position] = [float("nan")]
    with pytest.raises(ExportError, match="differs from its model by nan"):
        compare(_constant(*outputs), _constant([1.0], [1.0]), INPUT)


def test_other_shapes_and_numbers_of_outputs() -> None:
    with pytest.raises(ExportError, match=r"returns \(2,\) for an input of \(1, 2\), its model \(3,\); no file"):
        compare(_constant([1.0, 2.0]), _constant([1.0, 2.0, 3.0]), INPUT)
    with pytest.raises(ValueError, match="zip"):
        compare(_constant([1.0]), _constant([1.0], [2.0]), INPUT)


class Halves(nn.Module):
    """Two outputs: x / 2, and its square."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x / 2, (x / 2) ** 2


def _export(path: Path, **options: Any) -> Any:
    examples = [(torch.tensor([2.0, 4.0]),), (torch.tensor([-6.0, 1.0]),)]
    names = {"input_names": ["x"], "output_names": ["half", "square"]}
    metadata = {"format": "vision_longformer_export/1", "kind": "toy"}
    return export_verified(Halves(), examples, path, format="pt2", metadata=metadata, **names, **options)


def test_a_file_that_agrees(tmp_path: Path) -> None:
    """Traced, written, and compared on both examples: four steps."""
    reported: list[tuple[int, int]] = []
    exported = _export(tmp_path / "halves.pt2", progress=lambda *done: reported.append(done))
    assert reported == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert exported.path == tmp_path / "halves.pt2"
    assert exported.metadata == {"format": "vision_longformer_export/1", "kind": "toy"}
    assert [one.shape for one in exported.differences] == [(2,), (2,)]
    assert [one.difference for one in exported.differences] == [0, 0]
    half, square = load_exported(exported.path)(torch.tensor([3.0, 8.0]))
    assert (half.tolist(), square.tolist()) == ([1.5, 4.0], [2.25, 16.0])
    with pytest.raises(FileExistsError, match=r"halves\.pt2 exists"):
        _export(tmp_path / "halves.pt2")
    _export(tmp_path / "halves.pt2", overwrite=True)


def test_a_file_that_differs_is_removed(tmp_path: Path) -> None:
    """By what is expected of it, on the second example only."""

    def expected(x: Tensor) -> tuple[Tensor, Tensor]:
        half, square = Halves()(x)
        return half, square + 0.01 * (x[0] < 0)

    with pytest.raises(ExportError, match=r"differs from its model by 0\.01 on an input of \(2,\)"):
        _export(tmp_path / "halves.pt2", expected=expected)
    assert list(tmp_path.iterdir()) == []


def test_an_agreement_of_nothing_is_none(tmp_path: Path) -> None:
    """Where both give no number, nothing was compared; a file that always gives none differs elsewhere."""
    nothing = _constant(torch.zeros(0, 4), torch.zeros(0))
    assert compare(nothing, nothing, INPUT) is None
    with pytest.raises(ExportError, match=r"returns \(0, 4\) for an input of \(1, 2\), its model \(1, 4\)"):
        compare(nothing, _constant(torch.zeros(1, 4), torch.zeros(1)), INPUT)

    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[torch.nonzero(x > 0)[:, 0]]

    examples = [(torch.tensor([1.0, -1.0]),), (torch.tensor([-1.0, -1.0]),)]
    names = {"input_names": ["x"], "output_names": ["positive"], "metadata": {"format": "vision_longformer_export/1"}}
    exported = export_verified(Positive(), examples, tmp_path / "positive.pt2", format="pt2", **names)  # type: ignore[arg-type]
    assert [one.shape for one in exported.differences] == [(2,)]


def test_names_fit_the_format() -> None:
    assert check_target("a.pt2", "pt2") == Path("a.pt2")
    with pytest.raises(ValueError, match=r"a\.pt2 should end in \.onnx, as the format is onnx"):
        check_target("a.pt2", "onnx")
    with pytest.raises(ValueError, match="unknown format 'onx'; did you mean 'onnx'"):
        check_target("a.onx", "onx")
