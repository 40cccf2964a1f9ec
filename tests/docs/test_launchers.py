"""The Slurm script and the Kubernetes manifest of ``examples/``: what they start is understood by ``vil``."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_pages import ROOT

from vision_longformer.cli.main import main

SLURM = ROOT / "examples/slurm.sh"
MANIFEST = ROOT / "examples/pytorchjob.yaml"


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What ``vil train`` is asked for, in place of training: recipe, --resume, --output and settings."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("vision_longformer.cli.train.run_training", lambda *values: asked.append(values[1:5]))
    return asked


def cluster(folder: Path, srun: str) -> dict[str, str]:
    """The environment of a job, with programs of Slurm that do as little as possible."""
    programs = {
        "srun": srun,
        "scontrol": 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "$@" >> requeued; fi',
    }
    for name, program in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{program}\n")
        path.chmod(0o755)
    job = {"JOB_ID": "12", "JOB_NAME": "vil", "JOB_NODELIST": "node[7-8]", "NNODES": "2", "GPUS_ON_NODE": "8"}
    path_and_job = {"PATH": f"{folder}:{os.environ['PATH']}", **{f"SLURM_{name}": text for name, text in job.items()}}
    return {**os.environ, **path_and_job}


def test_the_slurm_script_starts_torchrun_on_every_node(tmp_path: Path, understood: list[tuple[Any, ...]]) -> None:
    subprocess.run(["bash", "-n", SLURM], check=True)
    environment = cluster(tmp_path, 'printf "%s\\n" "$@" > started')
    command = ["bash", SLURM, "imagenet1k_small", "--data", "/data/my images", "--precision", "bf16"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    started = (tmp_path / "started").read_text().splitlines()
    launcher = started[: started.index("-m")]
    assert launcher == [
        *("torchrun", "--nnodes", "2", "--nproc-per-node", "8", "--max-restarts", "20"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node7:29500", "--rdzv-id", "12"),
    ]
    assert started[len(launcher) + 1] == "vision_longformer"
    main(started[len(launcher) + 2 :])
    settings = {"data": "/data/my images", "precision": "bf16"}
    assert understood == [("imagenet1k_small", "auto", "runs/vil-12", settings)]
    assert not (tmp_path / "requeued").exists()


def test_the_slurm_script_ends_as_the_run_does(tmp_path: Path) -> None:
    assert subprocess.run(["bash", SLURM], cwd=tmp_path, env=cluster(tmp_path, "exit 3")).returncode == 3


def test_the_slurm_script_requeues_its_job_before_its_time_is_over(tmp_path: Path) -> None:
    """And waits for the processes, which Slurm tells to end, to save."""
    environment = cluster(tmp_path, "touch waiting; while [ ! -e requeued ]; do sleep 0.05; done; sleep 0.3; exit 143")
    job = subprocess.Popen(["bash", SLURM], cwd=tmp_path, env=environment)
    while not (tmp_path / "waiting").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 143
    assert (tmp_path / "requeued").read_text() == "requeue 12\n"


def test_the_manifest_starts_vil_under_torchrun(understood: list[tuple[Any, ...]]) -> None:
    job = yaml.safe_load(MANIFEST.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    workers = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    policy = job["spec"]["elasticPolicy"]
    assert policy["minReplicas"] <= workers["replicas"] <= policy["maxReplicas"]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    launcher, arguments = container["command"][:4], container["command"][4:]
    assert launcher == ["torchrun", "--nproc-per-node=8", "-m", "vision_longformer"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    main(arguments)
    settings = {"data": "/data/imagenet", "precision": "bf16"}
    assert understood == [("imagenet1k_small", "auto", "/runs/imagenet1k_small", settings)]
