"""Exported files, running; and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vision_longformer.errors import CheckpointError
from vision_longformer.export import ExportedModel, is_exported, load_exported


def test_outputs_of_a_file() -> None:
    """One output comes as it is, several as a tuple."""
    one = ExportedModel(lambda inputs: (inputs[0] + inputs[1],), {})
    assert one(torch.tensor([1.0]), torch.tensor([2.0])).tolist() == [3.0]
    two = ExportedModel(lambda inputs: (inputs[0], -inputs[0]), {})
    assert [output.tolist() for output in two(torch.tensor([5.0]))] == [[5.0], [-5.0]]


def test_a_file_computes_in_its_own_precision() -> None:
    """Whatever the surroundings ask for, and without gradients."""
    seen: list[tuple[torch.dtype, bool]] = []

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(((inputs[0] @ inputs[0]).dtype, torch.is_grad_enabled()))
        return inputs

    with torch.autocast("cpu", torch.bfloat16):
        ExportedModel(run, {})(torch.ones(2, 2))
    assert seen == [(torch.float32, False)]


def test_names_of_exported_files() -> None:
    names = ("a.onnx", Path("b.pt2"), "c.safetensors", "onnx")
    assert [is_exported(name) for name in names] == [True, True, False, False]


def test_files_that_are_no_exported_models(tmp_path: Path) -> None:
    for suffix in ("onnx", "pt2"):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            load_exported(tmp_path / f"none.{suffix}")
        broken = tmp_path / f"broken.{suffix}"
        broken.write_bytes(b"not a model")
        with pytest.raises(CheckpointError, match=rf"broken\.{suffix} is not a valid \.{suffix} file"):
            load_exported(broken)
    torch.export.save(torch.export.export(nn.Identity(), (torch.ones(1),)), tmp_path / "foreign.pt2")
    with pytest.raises(CheckpointError, match=r"foreign\.pt2 was not written by 'vil export'"):
        load_exported(tmp_path / "foreign.pt2")
    with pytest.raises(ValueError, match=r"photo\.png should end in \.onnx or \.pt2"):
        load_exported(tmp_path / "photo.png")
