"""Several processes: what they agree on, and steps, logs and resuming by values worked out by hand."""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import fork_processes, run_program
from torch.distributed import HashStore, Store
from toy_tasks import BRIEF, START, FixedLossTask, LinearTask, RecipeTask, SignalAt, training_loop

from vision_longformer.training.callbacks import Callback
from vision_longformer.training.distributed import (
    agree,
    agree_on_store,
    autocast,
    broadcast_from_main,
    check_alike,
    image_mesh,
    make_accelerator,
    mean_over_processes,
    together,
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
UNEVEN = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [3.0, -2.0]]).double()
"""(samples, features) of a batch that is shared 1 to 2; the targets are 1."""


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


def in_one_process(rank: int, count: int, folder: Path) -> None:
    """Everything that two processes have to agree on; what this one saw goes into ``RANK.json``."""
    accelerator = make_accelerator(LOGGED)
    seen: dict[str, Any] = {
        "means": mean_over_processes(accelerator, {"a": torch.tensor(1.0 + rank), "b": torch.tensor(10.0 * rank)}),
        "from_main": broadcast_from_main(accelerator, f"of process {rank}"),
        "nothing": agree(accelerator, 0, False),
        "clock_of_main": agree(accelerator, 0, rank == 0),
        "clock_of_other": agree(accelerator, 0, rank == 1),
        "signal_of_other": agree(accelerator, 15 * rank, False),
        "none_fails": outcome(lambda: together(lambda: fail(when=False))),
        "both_fail": outcome(lambda: together(lambda: fail(when=True))),
        "one_fails": outcome(lambda: together(lambda: fail(when=rank == 1))),
        "alike": outcome(lambda: check_alike({"lr": 0.1})),
        "unlike": outcome(lambda: check_alike({"lr": 0.1, "seed": rank})),
    }

    mesh = image_mesh(accelerator, TrainSettings(spatial=2, timeout_minutes=2.0))
    backends = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]
    seen["seconds"] = [backend.options._timeout.total_seconds() for backend in backends]

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
    share = UNEVEN[None, 1:] if rank else UNEVEN[None, :1]
    uneven = LinearTask(share, torch.ones(share.shape[:2]).double(), batches_per_epoch=1)
    training_loop(folder / "uneven", uneven, replace(STEPPED, batch_size=3, accumulate=1, log_every=1)).train()
    seen["uneven"] = uneven.weights()
    seen["events"] = []
    train(RecipeTask, BRIEF, output=folder / "whole", callback=EventsIn(seen), steps=2, log_every=1)
    (folder / f"{rank}.json").write_text(json.dumps(seen))


def outcome(call: Callable[[], object]) -> str:
    """What a call returns, or what ends this process."""
    try:
        return f"returned {call()}"
    except (ValueError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def fail(*, when: bool) -> str:
    if when:
        raise ValueError("no data")
    return "all"


def in_two_processes(folder: Path) -> None:
    fork_processes(in_one_process, 2, folder)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_program(in_two_processes, tmp_path_factory.mktemp("processes"))


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


def test_groups_of_processes_wait_as_long_as_the_settings_say(seen: list[dict[str, Any]]) -> None:
    assert [values["seconds"] for values in seen] == [[120.0, 120.0]] * 2


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


def test_every_sample_counts_the_same_where_shares_are_uneven(two_processes: Path, seen: list[dict[str, Any]]) -> None:
    """Of three samples, process 0 has one. Errors of 0.5 x − y + 0.25 − 1: −2.25, −1.75, 2.75."""
    gradient = np.array([-2.25 + 1.75 + 8.25, -4.5 - 0.875 - 5.5, -2.25 - 1.75 + 2.75]) / 3
    expected = np.array(START) - 0.1 * gradient * 0.5 / (np.sqrt(gradient @ gradient) + 1e-6)
    for values in seen:
        assert values["uneven"] == pytest.approx(expected, abs=1e-12)
    (line,) = [record for record in RunDirectory(two_processes / "uneven").records() if "loss" in record]
    assert line["loss"] == pytest.approx((2.25**2 + 1.75**2 + 2.75**2) / 6)


def test_what_fails_in_one_process_ends_all_with_one_sentence(seen: list[dict[str, Any]]) -> None:
    first, second = seen
    assert first["none_fails"] == second["none_fails"] == "returned all"
    assert (first["both_fail"], second["both_fail"]) == ("ValueError: no data", "SystemExit: 2")
    assert (first["one_fails"], second["one_fails"]) == ("SystemExit: 2", "ValueError: no data")


def test_processes_must_be_alike(seen: list[dict[str, Any]]) -> None:
    first, second = seen
    assert first["alike"] == second["alike"] == "returned None"
    host = platform.node()
    assert first["unlike"] == (
        f"ValueError: seed is 0 in process 0 on {host} but 1 in process 1 on {host}; start all with the same versions, "
        "command and recipe"
    )
    assert second["unlike"] == "SystemExit: 2"


def test_dropped_paths_differ_between_processes(seen: list[dict[str, Any]]) -> None:
    """The seed of run 0, step 0, in the last of two parts of each: of "(0, 'step', 0, 1)" and "(0, 'step', 0, 3)"."""
    assert [values["seed"] for values in seen] == [4224516640017304111, 1686612459369737490]


def test_one_process_logs_and_draws_for_all(two_processes: Path, seen: list[dict[str, Any]]) -> None:
    assert [values["events"] for values in seen] == [[1, 2], []]
    run = RunDirectory(two_processes / "whole")
    assert [record["step"] for record in run.records()] == [1, 2, 2]
    assert len(list((run.path / "tensorboard").iterdir())) == 1


# A store that outlives its processes


def join(store: Store, rank: int, count: int, parts: dict[int, Store]) -> threading.Thread:
    thread = threading.Thread(target=lambda: parts.update({rank: agree_on_store(store, rank, count)}), daemon=True)
    thread.start()
    return thread


def test_processes_that_are_started_again_do_not_find_what_the_dead_have_written() -> None:
    """Three starts with one store; the second has a process that dies before the others come, and then two."""
    store, tokens = HashStore(), []
    for count in (3, 2, 2):
        if count == 2:
            store.set("vil/word/1", "of a dead process")
        parts: dict[int, Store] = {}
        threads = [join(store, 0, count, parts)]
        time.sleep(0.15)
        threads += [join(store, rank, count, parts) for rank in range(1, count)]
        for thread in threads:
            thread.join(20)
        assert sorted(parts) == list(range(count))
        assert not parts[1].check(["address"])
        parts[0].set("address", str(count))
        assert parts[1].get("address").decode() == str(count)
        tokens.append(store.get("vil/agreed"))
    assert len(set(tokens)) == 3


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
