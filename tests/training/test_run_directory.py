"""Run directories: not overwritten, locked, with metrics that are JSON and survive crashes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from vision_longformer.training.run_directory import RunDirectory, next_free


def test_a_run_directory_is_not_overwritten(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "seed: 3\n")
    assert (run.path / "recipe.yaml").read_text() == "seed: 3\n"
    assert json.loads((run.path / "environment.json").read_text())["packages"]["torch"] in torch.__version__
    with pytest.raises(FileExistsError, match="exists; give another --output, or resume that run by --resume"):
        RunDirectory.create(tmp_path / "run", "")
    with pytest.raises(ValueError, match="another process is training in"):
        RunDirectory.reopen(run.path).lock()
    with pytest.raises(FileNotFoundError, match=r"is not a run: it has no recipe\.yaml"):
        RunDirectory.reopen(tmp_path)
    assert next_free(tmp_path, "run") == tmp_path / "run-1"
    (tmp_path / "run-1").mkdir()
    assert next_free(tmp_path, "run") == tmp_path / "run-2"


def test_metrics_survive_a_torn_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "")
    for step in (1, 2, 3):
        run.record({"step": step})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    run.drop_metrics_after(2, 2)
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_nothing_but_json_in_the_metrics(tmp_path: Path) -> None:
    """JSON has no NaN and no infinity; they become null, inside groups too."""
    run = RunDirectory.create(tmp_path / "run", "")
    run.record({"step": 1, "loss": math.inf, "evaluation": {"AP": math.nan, "AR": -math.inf, "AP50": 1.5}})
    text = (run.path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "loss": null, "evaluation": {"AP": null, "AR": null, "AP50": 1.5}}\n'
    assert run.records() == [{"step": 1, "loss": None, "evaluation": {"AP": None, "AR": None, "AP50": 1.5}}]


def test_metrics_that_a_resumed_run_repeats_are_dropped(tmp_path: Path) -> None:
    """The checkpoint of step 4 was written before the evaluation of that step."""
    run = RunDirectory.create(tmp_path / "run", "")
    lines: list[dict[str, Any]] = [
        {"step": 2, "loss": 1.0},
        {"step": 2, "evaluation": {"score": 1.0}},
        {"step": 4, "loss": 1.0},
        {"step": 4, "evaluation": {"score": 1.0}},
        {"step": 5, "loss": 1.0},
    ]
    for line in lines:
        run.record(line)
    run.drop_metrics_after(4, evaluated=2)
    assert run.records() == lines[:3]


def test_an_empty_directory_may_be_used_and_a_file_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = RunDirectory.create(tmp_path / "empty", "seed: 1\n")
    assert {path.name for path in run.path.iterdir()} == {"checkpoints", "environment.json", "recipe.yaml", ".lock"}
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file exists; give another --output"):
        RunDirectory.create(tmp_path / "file", "")


def test_the_environment_names_packages_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    path = RunDirectory.create(tmp_path / "run", "").path / "environment.json"
    environment = json.loads(path.read_text())
    assert set(environment) == {"packages", "python", "machine", "threads", "devices", "processes"}
    assert set(environment["packages"]) >= {"vision-longformer", "torch", "timm", "accelerate"}
    assert (environment["threads"], environment["processes"]) == (torch.get_num_threads(), 4)
