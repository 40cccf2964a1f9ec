"""Checkpoints: what a file holds, what comes back from it, and which files stay."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from vision_longformer.errors import CheckpointError
from vision_longformer.training.checkpointer import Checkpointer, Counters, latest_checkpoint, load_counters, load_state
from vision_longformer.training.distributed import make_accelerator
from vision_longformer.training.ema import WeightAverage
from vision_longformer.training.recipe import TrainSettings


def after_one_step(folder: Path) -> tuple[Checkpointer, nn.Linear, torch.optim.SGD, WeightAverage]:
    """A weight of 2 whose gradient was 3, with a rate of 0.1 and an average that is still at 2."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    average = WeightAverage(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (3 * model.weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    accelerator = make_accelerator(TrainSettings())
    return Checkpointer(folder, model, optimizer, average, accelerator), model, optimizer, average


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    checkpointer = after_one_step(tmp_path)[0]
    checkpointer.save(Counters(7, 5, 0.25, 4, 2, {"loss": 1.5, "parts": 2.0}))
    state = load_state(tmp_path / "step_000000007.pt")
    assert set(state) == {"model", "optimizer", "average", "scaler", "counters"}
    sums = {"loss": 1.5, "parts": 2.0}
    assert state["counters"] == {"step": 7, "evaluated": 5, "best": 0.25, "best_step": 4, "stale": 2, "sums": sums}
    assert load_counters(tmp_path / "step_000000007.pt") == Counters(7, 5, 0.25, 4, 2, sums)
    assert state["model"]["weight"].item() == pytest.approx(1.7)
    assert state["average"]["weight"].item() == 2.0
    assert state["optimizer"]["state"]["weight"]["momentum_buffer"].item() == 3.0
    assert state["scaler"] is None


@pytest.mark.parametrize("best", [None, 0.25, math.nan])
def test_restoring(best: float | None, tmp_path: Path) -> None:
    """The next step is the one that would have followed: 1.7 less 0.1 times 0.9 · 3 + 1."""
    after_one_step(tmp_path)[0].save(Counters(7, 5, best, sums={"loss": 1.5}))
    checkpointer, model, optimizer, average = after_one_step(tmp_path)
    nn.init.constant_(model.weight, 100.0)
    average.values["weight"].fill_(100.0)
    optimizer.state.clear()
    path = checkpointer.latest()
    assert path == tmp_path / "step_000000007.pt"
    counters = checkpointer.restore(path)
    assert (counters.step, counters.evaluated, counters.sums) == (7, 5, {"loss": 1.5})
    assert counters.best == best or (best is not None and math.isnan(best) and math.isnan(counters.best or 0))
    assert average.values["weight"].item() == 2.0
    optimizer.zero_grad()
    model.weight.sum().backward()
    optimizer.step()
    assert model.weight.item() == pytest.approx(1.7 - 0.1 * (0.9 * 3 + 1))


def test_the_latest_two_checkpoints_stay(tmp_path: Path) -> None:
    checkpointer = after_one_step(tmp_path)[0]
    assert checkpointer.latest() is None
    assert checkpointer.latest_intact() is None
    for step, before in ((9, []), (10, [9]), (100, [10]), (100, [10])):
        checkpointer.save(Counters(step))
        names = [f"step_{number:09d}.pt" for number in (*before, step)]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert latest_checkpoint(tmp_path) == checkpointer.latest_intact() == tmp_path / names[-1]


def flip(path: Path) -> None:
    """One bit of the weights; of what torch reads without a complaint."""
    content = bytearray(path.read_bytes())
    where = content.index(torch.tensor(1.7).numpy().tobytes())
    content[where] ^= 1
    path.write_bytes(content)
    assert load_state(path)["model"]["weight"].item() != torch.tensor(1.7).item()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-700])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip, "the checksum of .*/data/.* is wrong"),
        (cut, "File is not a zip file"),
        (empty, "File is not a zip file"),
    ],
)
def test_a_damaged_checkpoint_is_replaced_by_the_one_before(
    damage: Callable[[Path], object], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = after_one_step(tmp_path)[0]
    checkpointer.save(Counters(3))
    checkpointer.save(Counters(5))
    damage(tmp_path / "step_000000005.pt")
    assert checkpointer.latest_intact() == checkpointer.latest_intact() == tmp_path / "step_000000003.pt"
    (message,) = caplog.messages
    assert re.search(rf"step_000000005.pt is damaged \({why}.*\): falling back to step_000000003.pt", message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.pt", "step_000000003.pt"]


def test_a_run_without_an_intact_checkpoint_does_not_start_anew(tmp_path: Path) -> None:
    checkpointer = after_one_step(tmp_path)[0]
    for step in (3, 5):
        checkpointer.save(Counters(step))
        cut(tmp_path / f"step_{step:09d}.pt")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact; the run cannot be resumed"):
            checkpointer.latest_intact()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    after_one_step(tmp_path)[0].save(Counters(1))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = Checkpointer(tmp_path, model, optimizer, None, make_accelerator(TrainSettings()))
    with pytest.raises(RuntimeError, match="bias"):
        other.restore(tmp_path / "step_000000001.pt")


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step_000000001.pt"
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"step_000000001.pt cannot be read"):
        load_state(path)
