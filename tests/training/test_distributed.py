"""Several processes: what they agree on, and steps, logs and resuming by values worked out by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from toy_tasks import BRIEF, START, FixedLossTask, LinearTask, RecipeTask, SignalAt, training_loop

from vision_longformer.training.callbacks import Callback
from vision_longformer.training.distributed import (
    agree,
    autocast,
    broadcast_from_main,
    make_accelerator,
    mean_over_processes,
)
from vision_longformer.training.loop import Interrupted
from vision_longformer.training.recipe import TrainSettings
from vision_longformer.training.run import train
from vision_longformer.training.run_directory import RunDirectory

LOGGED = TrainSettings(epochs=1, batch_size=4, accumulate=2, log_every=4)
STEPPED = TrainSettings(
    epochs=1, batch_size=4, accumulate=2, optimizer="sgd", lr=0.1, weight_decay=0.0, warmup=0, clip_norm=0.5
)
INPUTS = np.random.default_rng(3).normal(size=(2, 2, 1, 2))
"""(processes, micro-batches, samples, features); the targets are 1."""


class SeedOf(Callback):
    """Notes torch's seed in a step."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self._seen = seen

    def on_step(self, step: int) -> None:
        self._seen["seed"] = torch.initial_seed()


class EventsIn(Callback):
    """Notes the steps that a callback is told of."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self._seen = seen

    def on_step(self, step: int) -> None:
        self._seen["events"].append(step)


def in_one_process(rank: int, folder: Path, port: int) -> None:
    """Everything that two processes have to agree on; what this one saw goes into ``RANK.json``."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    accelerator = make_accelerator(LOGGED)
    seen: dict[str, Any] = {
        "means": mean_over_processes(accelerator, {"a": torch.tensor(1.0 + rank), "b": torch.tensor(10.0 * rank)}),
        "from_main": broadcast_from_main(accelerator, f"of process {rank}"),
        "nothing": agree(accelerator, 0, False),
        "clock_of_main": agree(accelerator, 0, rank == 0),
        "clock_of_other": agree(accelerator, 0, rank == 1),
        "signal_of_other": agree(accelerator, 15 * rank, False),
    }

    def logged(callback: SignalAt | None = None) -> None:
        losses = [(10.0 if rank else 1.0) * (index + 1) for index in range(8)]
        training_loop(folder / "logged", FixedLossTask(losses, batches_per_epoch=8), LOGGED, callback).train()

    try:
        logged(SignalAt(2 if rank else 99))
    except Interrupted as interrupted:
        seen["interrupted"] = str(interrupted)
    logged()

    task = LinearTask(torch.from_numpy(INPUTS[rank]), torch.ones(2, 1).double(), batches_per_epoch=2)
    training_loop(folder / "stepped", task, STEPPED, SeedOf(seen)).train()
    seen["weights"] = task.weights()
    seen["events"] = []
    train(RecipeTask, BRIEF, output=folder / "whole", callback=EventsIn(seen), steps=2, log_every=1)
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def in_two_processes(folder: str) -> None:
    """In an interpreter of its own, which may fork: it has no threads yet, and torch is imported once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(in_one_process, (Path(folder), port), nprocs=2, start_method="fork")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    program = "import sys, test_distributed; test_distributed.in_two_processes(sys.argv[1])"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, check=True)
    return folder


@pytest.fixture
def seen(two_processes: Path) -> list[dict[str, Any]]:
    """What each process saw."""
    return [json.loads((two_processes / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_what_processes_agree_on(seen: list[dict[str, Any]]) -> None:
    for values in seen:
        assert values["means"] == {"a": 1.5, "b": 5.0}
        assert values["from_main"] == "of process 0"
        assert values["nothing"] == [0, False]
        assert values["clock_of_main"] == [0, True]
        assert values["clock_of_other"] == [0, False]
        assert values["signal_of_other"] == [15, False]


def test_a_signal_to_one_process_ends_all(seen: list[dict[str, Any]]) -> None:
    assert [values["interrupted"] for values in seen] == ["stopped by SIGTERM after step 2"] * 2


def test_the_first_line_after_resuming_is_the_mean_of_all_steps_and_processes(two_processes: Path) -> None:
    """Losses 1 to 8 in one process and 10 to 80 in the other, stopped after half of them."""
    records = [record for record in RunDirectory(two_processes / "logged").records() if "loss" in record]
    assert [(record["step"], record["loss"], record["double"]) for record in records] == [(4, 24.75, 49.5)]


def test_a_step_uses_the_mean_gradient_of_all_processes(seen: list[dict[str, Any]]) -> None:
    """Of two micro-batches in each; the norm is clipped after the mean is taken."""
    gradient = np.zeros(3)
    for x in INPUTS.reshape(4, 2):
        error = x @ START[:2] + START[2] - 1
        gradient += error * np.array([*x, 1.0]) / 4
    norm = np.sqrt(gradient @ gradient)
    assert norm > 0.5
    expected = np.array(START) - 0.1 * gradient * 0.5 / (norm + 1e-6)
    for values in seen:
        assert values["weights"] == pytest.approx(expected, abs=1e-12)


def test_dropped_paths_differ_between_processes(seen: list[dict[str, Any]]) -> None:
    """The seed of run 0, step 0, in process 0 and in process 1: of "(0, 'step', 0, PROCESS)"."""
    assert [values["seed"] for values in seen] == [4542949739309568895, 4224516640017304111]


def test_one_process_logs_and_draws_for_all(two_processes: Path, seen: list[dict[str, Any]]) -> None:
    assert [values["events"] for values in seen] == [[1, 2], []]
    run = RunDirectory(two_processes / "whole")
    assert [record["step"] for record in run.records()] == [1, 2, 2]
    assert len(list((run.path / "tensorboard").iterdir())) == 1


# In one process


def test_one_process_agrees_with_itself() -> None:
    accelerator = make_accelerator(TrainSettings())
    assert agree(accelerator, 2, True) == (2, True)
    assert broadcast_from_main(accelerator, "mine") == "mine"
    assert mean_over_processes(accelerator, {"a": torch.tensor(1.5)}) == {"a": 1.5}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can compute in fp16")
def test_half_precision_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="precision fp16 needs a GPU; use bf16 or fp32 here"):
        make_accelerator(TrainSettings(precision="fp16"))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_precision_of_autocast(precision: str, dtype: torch.dtype) -> None:
    """Also after another run of this process with another precision."""
    with make_accelerator(TrainSettings(precision=precision)).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    with autocast(torch.device("cpu"), precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
