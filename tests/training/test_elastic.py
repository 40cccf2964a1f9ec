"""Runs that outlive their processes: killed and stopped workers, fewer processes, processes that are not alike."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from vision_longformer.training.checkpointer import latest_checkpoint
from vision_longformer.training.run_directory import RunDirectory

pytestmark = pytest.mark.slow

STAGE = {"dim": 16, "depth": 2, "heads": 2, "patch": 2, "attention": {"kind": "longformer", "window": 2}}
SETTINGS = {
    "image-size": 8, "model-options": {"stages": [STAGE], "in_chans": 1}, "neighbours": "random", "drop-path": 0.2,
    "mean": [0.5], "std": [0.5], "batch-size": 12, "steps": 120, "log-every": 1, "eval-every": 10,
    "checkpoint-minutes": 0, "timeout-minutes": 5,
}  # fmt: skip
WAIT = 500.0
"""Seconds for anything to happen; machines may be busy."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With images of four classes, and ``whole``, an undisturbed run of two processes on them."""
    path = tmp_path_factory.mktemp("elastic")
    generator, labels = np.random.default_rng(0), np.arange(144) % 4
    images = (generator.integers(0, 60, (144, 8, 8)) + 60 * labels[:, None, None]).astype(np.uint8)
    np.savez(path / "images.npz", train_x=images, train_y=labels, validation_x=images[:9], validation_y=labels[:9])
    with started(path, "--output", "whole") as run:
        assert run.wait(WAIT) == 0
    return path


class started:
    """``vil train`` in a context, under torchrun if there are several processes or nodes; it ends with the context.

    ``node``: torchrun's options for one node of several.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        processes: int = 2,
        restarts: int = 0,
        node: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        values = {"data": folder / "images.npz", **SETTINGS, **settings}
        options = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        launcher = ["--nproc-per-node", str(processes), "--max-restarts", str(restarts), "-m"]
        launcher = ["torch.distributed.run", *node, *launcher] if processes > 1 or node else []
        command = [*launcher, "vision_longformer", "train", "quickstart", *arguments, *options]
        self._errors = (folder / f"{len(list(folder.iterdir()))}.err").open("w+")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command], stderr=self._errors, cwd=folder, env=environment, start_new_session=True
        )
        self.pid, self.wait, self.terminate = self._process.pid, self._process.wait, self._process.terminate

    def __enter__(self) -> started:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._errors.close()

    def errors(self) -> str:
        return Path(self._errors.name).read_text()

    def until(self, happened: Callable[[], bool]) -> None:
        limit = time.monotonic() + WAIT
        while not happened():
            assert self._process.poll() is None, self.errors()
            assert time.monotonic() < limit, self.errors()
            time.sleep(0.02)


def step_of(run: Path) -> int:
    path = latest_checkpoint(run / "checkpoints")
    return 0 if path is None else int(path.stem.removeprefix("step_"))


def process_id(run: Path, rank: int) -> int:
    """Of the process that was last started with a rank."""
    return int(re.findall(r"process id (\d+)", (run / "logs" / f"rank{rank}.log").read_text())[-1])


def losses(run: Path) -> list[float]:
    records = [record for record in RunDirectory(run).records() if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, 121))
    return [record["loss"] for record in records]


def assert_same_run(run: Path, other: Path) -> None:
    """To the last bit."""
    one, two = (load_file(path / "last.safetensors") for path in (run, other))
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert losses(run) == losses(other)


def test_killed_workers_are_started_again_in_the_same_run(folder: Path) -> None:
    """Without --output, so that each start has to find the directory that the first has chosen."""
    run, dice = folder / "runs" / "quickstart-1", random.Random(0)
    with started(folder, restarts=3) as training:
        for step in (10, 50):
            training.until(lambda step=step: step_of(run) >= step)  # type: ignore[misc]
            os.kill(process_id(run, dice.randrange(2)), signal.SIGKILL)
            restarts = (run / "logs" / "rank0.log").read_text().count("started as process 0")
            training.until(lambda n=restarts: (run / "logs" / "rank0.log").read_text().count("resuming from") >= n)  # type: ignore[misc]
        assert training.wait(WAIT) == 0
    assert [path.name for path in (folder / "runs").iterdir()] == ["quickstart-1"]
    assert_same_run(run, folder / "whole")
    log = (run / "logs" / "rank0.log").read_text()
    assert "restart 2 of torchrun" in log
    assert log.endswith("finished after step 120\n")
    assert {path.name for path in (run / "logs").iterdir()} == {"rank0.log", "rank1.log"}


def test_one_process_takes_over_from_two(folder: Path) -> None:
    """By the same command, with what FSDP2 saved: dropped paths, mixed images and shifts are those of two processes."""
    run = folder / "fsdp"
    with started(folder, "--output", "fsdp", strategy="fsdp") as training:
        training.until(lambda: step_of(run) >= 10)
        training.terminate()
        assert training.wait(WAIT) != 0
    assert 10 <= step_of(run) < 120
    with started(folder, "--output", "fsdp", "--resume", "auto", processes=1, strategy="fsdp") as training:
        assert training.wait(WAIT) == 0
    assert losses(run) == pytest.approx(losses(folder / "whole"), abs=1e-5)
    log = (run / "logs" / "rank0.log").read_text()
    assert "stopped by SIGTERM after step" in log
    assert (
        "running with 1 process, but started with 2: the batch of 12 is divided again, each share into 2 parts" in log
    )


def can_connect(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_run_goes_on_by_itself_when_a_node_is_gone_for_good(folder: Path) -> None:
    """Two nodes of one process each; the first is where all meet."""
    run = folder / "left"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "left"]
    times = ["--rdzv-conf", "last_call_timeout=15,keep_alive_interval=1"]
    settings: dict[str, Any] = {"processes": 1, "restarts": 1, "node": [*meeting, *times]}
    with started(folder, "--output", "left", **settings) as first:
        first.until(lambda: can_connect(port))
        with started(folder, "--output", "left", **settings) as second:
            first.until(lambda: step_of(run) >= 10)
            (worker,) = (each for each in (process_id(run, rank) for rank in (0, 1)) if parent(each) == second.pid)
            os.kill(second.pid, signal.SIGKILL)
            os.kill(worker, signal.SIGKILL)
        assert first.wait(WAIT) == 0, first.errors()
    assert losses(run) == pytest.approx(losses(folder / "whole"), abs=1e-5)
    log = (run / "logs" / "rank0.log").read_text()
    assert "running with 1 process, but started with 2" in log
    assert "restart 1 of torchrun" in log


def test_a_stopped_worker_ends_in_a_sentence_and_not_in_silence(folder: Path) -> None:
    run = folder / "stopped"
    with started(folder, "--output", "stopped", restarts=1, **{"timeout-minutes": 0.5}) as training:
        training.until(lambda: step_of(run) >= 10)
        stopped = process_id(run, 1)
        os.kill(stopped, signal.SIGSTOP)
        sentence = re.compile(
            r"vil: process 0 waited 30 s for the others after step \d+: process 1 has shown no sign of life for \d+ s; "
            r"the log is stopped/logs/rank1.log; the checkpoint stopped/checkpoints/step_\d+.pt is intact: "
            r"continue with --resume"
        )
        training.until(lambda: bool(sentence.search(training.errors())))
        os.kill(stopped, signal.SIGKILL)  # torchrun would do so, half a minute later
        assert training.wait(WAIT) == 0
    assert_same_run(run, folder / "whole")


def test_processes_with_different_recipes_end_with_one_sentence(folder: Path) -> None:
    program = f"{sys.executable} -m vision_longformer train quickstart --output unlike --seed $RANK"
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", "bash", "-c", program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode != 0
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("vil: ")]
    assert len(sentences) == 1
    assert re.match(r"vil: seed is 0 in process 0 on \S+ but 1 in process 1 on", sentences[0])
    assert not (folder / "unlike").exists()
