"""Train for an hour while things go wrong, and compare with an undisturbed run.

A small classifier is trained by two processes under torchrun, on a disk of its own (a tmpfs, so this needs root). About
every minute a fault, drawn from a seed: a process killed or told to end, a full disk, a damaged checkpoint. What
torchrun does not start again is started again by the same command with ``--resume auto``. At the end weights and
metrics must be those of a run without faults, bit for bit.

    python scripts/soak.py soak/ --minutes 60
    python scripts/soak.py kills/ --minutes 10 --every 15 --kinds kill --most 10
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import numpy as np
from safetensors.numpy import load_file

from vision_longformer.cli.main import main as vil
from vision_longformer.cli.training import TrainingProgress
from vision_longformer.training.checkpointer import latest_checkpoint
from vision_longformer.training.run_directory import RunDirectory

DISK_MEGABYTES = 24
STEP_SECONDS, DISTURBED = 0.1, 0.7
"""A guess at the time of a step beside its pause, and at the part of the time that faults leave for steps."""


IN_A_ROW = 0.25
"""How often a fault does not wait until the run has recovered from the one before."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything is written; must not exist")
    parser.add_argument("--minutes", type=float, default=60, help="about how long; faults end then")
    parser.add_argument("--steps", type=int, help="of the run; by default as many as should take about that long")
    parser.add_argument("--whole", type=Path, help="an undisturbed run of that many steps, if there is one from before")
    parser.add_argument("--every", type=float, default=60, help="seconds between faults, on average")
    parser.add_argument("--kinds", default="kill,term,end,full,damage", help="of faults, as a list with commas")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="faults at most")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.25, help="seconds after each step of the disturbed run")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    steps = options.steps or round(60 * options.minutes * DISTURBED / (options.pause + STEP_SECONDS))
    training = Training(options.folder.resolve(), steps, options.processes)
    if options.whole is None:
        training.log(f"undisturbed run of {steps} steps")
        training.launch(training.whole, pause=0).wait()
    else:
        shutil.copytree(options.whole, training.whole)
    training.mount()
    try:
        dice = random.Random(options.seed)
        faults = disturb(training, options, {kind: FAULTS[kind] for kind in options.kinds.split(",")}, dice)
        summarise(training, faults)
    finally:
        training.unmount()


def paced(pause: float, arguments: list[str]) -> None:
    """``vil`` with ``arguments``, with a pause after each step: time passes, and the machine is not kept busy."""
    on_step = TrainingProgress.on_step

    def on_step_and_pause(self: TrainingProgress, step: int) -> None:
        on_step(self, step)
        time.sleep(pause)

    TrainingProgress.on_step = on_step_and_pause  # type: ignore[method-assign]
    vil(arguments)


class Training:
    """The run to disturb, in ``folder/disk/run``, and what is known of it."""

    def __init__(self, folder: Path, steps: int, processes: int) -> None:
        self.folder, self.steps, self.processes = folder, steps, processes
        self.disk, self.whole = folder / "disk", folder / "whole"
        self.run = self.disk / "run"
        self.launches = 0
        self.started = time.monotonic()
        generator = np.random.default_rng(0)
        images, labels = generator.integers(0, 256, (416, 8, 8), np.uint8), np.arange(416) % 4
        np.savez(
            folder / "images.npz", train_x=images, train_y=labels, validation_x=images[:16], validation_y=labels[:16]
        )

    def launch(self, run: Path, pause: float) -> subprocess.Popen[bytes]:
        self.launches += 1
        stage = {"dim": 16, "depth": 2, "heads": 2, "patch": 2, "attention": {"kind": "longformer", "window": 2}}
        settings = {
            "data": self.folder / "images.npz", "output": run, "steps": self.steps, "batch-size": 16, "image-size": 8,
            "model-options": {"stages": [stage], "in_chans": 1, "neighbours": "random"}, "drop-path": 0.1,
            "checkpoint-minutes": 0.05, "eval-every": 20, "log-every": 5, "timeout-minutes": 1,
        }  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.processes)]
        command += ["--max-restarts", "20", __file__, "paced", str(pause), "train", "quickstart"]
        command += [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        if run.exists():
            command += ["--resume", "auto"]
        with (self.folder / f"{run.name}.err").open("ab") as errors:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, stderr=errors, stdout=errors, env=environment, cwd=self.folder)

    def mount(self) -> None:
        self.disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "tmpfs", self.disk], check=True)

    def unmount(self) -> None:
        kept = self.folder / "kept"
        subprocess.run(["cp", "-r", self.disk, kept], check=True)
        subprocess.run(["umount", self.disk], check=True)

    def log(self, text: str) -> None:
        line = f"{time.monotonic() - self.started:7.0f} s  {text}"
        print(line, flush=True)

    def step(self) -> int:
        path = latest_checkpoint(self.run / "checkpoints")
        return 0 if path is None else int(path.stem.removeprefix("step_"))


# Faults: each returns what it did


def kill(training: Training, launcher: int, dice: random.Random) -> str:
    process = dice.choice(workers(launcher))
    os.kill(process, signal.SIGKILL)
    return f"kill -9 of process {process}"


def term(training: Training, launcher: int, dice: random.Random) -> str:
    process = dice.choice(workers(launcher))
    os.kill(process, signal.SIGTERM)
    return f"SIGTERM to process {process}"


def end(training: Training, launcher: int, dice: random.Random) -> str:
    os.kill(launcher, signal.SIGTERM)
    return "SIGTERM to torchrun"


def full(training: Training, launcher: int, dice: random.Random) -> str:
    ballast = training.disk / "ballast"
    said = count_said(training, "the disk is full")
    try:
        with ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass
    until = time.monotonic() + 60
    while count_said(training, "the disk is full") == said and time.monotonic() < until:
        time.sleep(0.5)
    ballast.unlink()
    return f"full disk, {'noticed' if time.monotonic() < until else 'not noticed within 60 s'}"


def damage(training: Training, launcher: int, dice: random.Random) -> str:
    paths = sorted((training.run / "checkpoints").glob("step_*.pt"))
    if len(paths) < 2:
        return "no checkpoint to spare"
    for process in workers(launcher):
        os.kill(process, signal.SIGKILL)
    path = max((training.run / "checkpoints").glob("step_*.pt"))
    with ZipFile(path) as archive:
        part = dice.choice(archive.infolist())
        stored = archive.read(part)
    content = bytearray(path.read_bytes())
    content[content.index(stored, part.header_offset) + dice.randrange(len(stored))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)
    return f"kill -9 of all, and a bit of {path.name} changed"


FAULTS: dict[str, Callable[[Training, int, random.Random], str]] = {
    "kill": kill,
    "term": term,
    "end": end,
    "full": full,
    "damage": damage,
}


def workers(launcher: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def count_said(training: Training, sentence: str) -> int:
    path = training.folder / "run.err"
    return path.read_text(errors="replace").count(sentence) if path.exists() else 0


def disturb(
    training: Training,
    options: argparse.Namespace,
    faults: dict[str, Callable[[Training, int, random.Random], str]],
    dice: random.Random,
) -> Counter[str]:
    """Start the run, and start it again whenever torchrun ends, until it is finished; meanwhile, faults."""
    done: Counter[str] = Counter()
    deadline = time.monotonic() + 60 * options.minutes
    process = training.launch(training.run, options.pause)
    training.log("started")
    due, from_step = time.monotonic(), 1
    while (code := process.poll()) != 0:
        if code is not None:
            training.log(f"torchrun ended with {code} at step {training.step()}; started again")
            process = training.launch(training.run, options.pause)
        elif due < time.monotonic() < deadline and done.total() < options.most and training.step() >= from_step:
            kind = dice.choice(sorted(faults))
            try:
                training.log(f"{kind}: {faults[kind](training, process.pid, dice)}; last checkpoint {training.step()}")
                done[kind] += 1
            except (IndexError, ProcessLookupError):  # just then no process was running
                training.log(f"{kind}: nothing to disturb")
            due = time.monotonic() + options.every * dice.uniform(0.5, 1.5)
            from_step = 0 if dice.random() < IN_A_ROW else training.step() + 1
        time.sleep(0.2)
    return done


def summarise(training: Training, faults: Counter[str]) -> None:
    log = "".join(path.read_text() for path in [training.run / "logs" / "rank0.log"])
    training.log(f"finished; faults: {', '.join(f'{count} {kind}' for kind, count in sorted(faults.items()))}")
    for what, sentence in {
        "starts of process 0": "started as process 0",
        "resumed": "resuming from step",
        "fallbacks to the checkpoint before": "falling back to",
    }.items():
        training.log(f"{what}: {log.count(sentence)}")
    training.log(
        f"full disks told: {count_said(training, 'the disk is full')}; torchrun started: {training.launches - 1}"
    )
    whole, disturbed = (load_file(run / "last.safetensors") for run in (training.whole, training.run))
    equal = all(np.array_equal(whole[name], disturbed[name]) for name in whole) and whole.keys() == disturbed.keys()
    losses = [
        [(line["step"], line["loss"]) for line in RunDirectory(run).records() if "loss" in line]
        for run in (training.whole, training.run)
    ]
    training.log(
        f"weights equal, bit for bit: {equal}; lines of metrics equal: {losses[0] == losses[1]} ({len(losses[0])})"
    )
    if not equal or losses[0] != losses[1]:
        raise SystemExit("the disturbed run is not the undisturbed one")


if __name__ == "__main__":
    if sys.argv[1:2] == ["paced"]:
        paced(float(sys.argv[2]), sys.argv[3:])
    else:
        main()
