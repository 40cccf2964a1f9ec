"""Weights of a run as files of the package."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from vision_longformer.checkpoint.native import DETECTOR, read, write

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_halved_weights_keep_their_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """65,537 has no float16."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import ship_weights

    monkeypatch.setattr(ship_weights, "SHIPPED", tmp_path)
    tensors = {"weight": torch.tensor([0.5]), "steps": torch.tensor([65_537])}
    write(tmp_path / "run.safetensors", tensors, format=DETECTOR, config={}, info={})
    ship_weights.ship(str(tmp_path / "run.safetensors"), "shipped", half=True)
    shipped = read(tmp_path / "shipped.safetensors", DETECTOR)[1]
    assert {name: tensor.dtype for name, tensor in shipped.items()} == {"weight": torch.float16, "steps": torch.int64}
    assert shipped["steps"].item() == 65_537


def test_an_unknown_option_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ship_weights.py", "run.safetensors", "name", "--haff"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPTS / "ship_weights.py"), run_name="__main__")
    assert "unrecognized arguments: --haff" in capsys.readouterr().err
