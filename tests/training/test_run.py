"""Runs from a recipe to a directory: what every task gets set up, new runs and resumed ones."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from builders import StopAt
from torch import nn
from toy_tasks import BRIEF, LinearTask, RecipeTask, ToyRecipe, ToyTask

from vision_longformer import VisionLongformer
from vision_longformer.data.loading import Progress
from vision_longformer.errors import CheckpointError
from vision_longformer.models.attention.performer import orthogonal_features
from vision_longformer.models.vision_longformer import Stage
from vision_longformer.training.callbacks import Callback
from vision_longformer.training.loop import TrainingLoop
from vision_longformer.training.recipe import to_yaml
from vision_longformer.training.run import _parts_now, resume, train
from vision_longformer.training.run_directory import RunDirectory

# New runs and resumed ones


def test_a_new_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = train(RecipeTask, "brief", epochs=2, lr=0.002)
    assert trained.run == Path("runs/small-brief-1")
    assert trained.checkpoint == Path("runs/small-brief-1/best.safetensors")
    assert (RecipeTask.built.recipe.epochs, RecipeTask.built.recipe.seed, RecipeTask.built.recipe.lr) == (2, 6, 0.002)
    assert "epochs: 2\n" in (trained.run / "recipe.yaml").read_text()
    assert [path.name for path in trained.pictures] == ["curves.png"]
    assert RecipeTask.built.drawn[0] == trained.run
    evaluations = [line["evaluation"] for line in RunDirectory(trained.run).records() if "evaluation" in line]
    assert trained.last == evaluations[-1]
    assert trained.best == max(evaluations, key=lambda results: results["score"])
    assert any((trained.run / "tensorboard").iterdir())
    assert train(RecipeTask, "brief").run == Path("runs/small-brief-2")
    assert train(RecipeTask, BRIEF).run == Path("runs/small-toy-1")
    (tmp_path / "mine.yaml").write_text("base: brief\nseed: 9\n")
    assert train(RecipeTask, "mine.yaml", output="elsewhere").run == Path("elsewhere")
    assert RecipeTask.built.recipe.seed == 9
    assert train(RecipeTask, "mine.yaml").run == Path("runs/small-mine-1")


def test_the_callback_watches_the_run(tmp_path: Path) -> None:
    events: list[Any] = []

    class Watch(Callback):
        def on_start(self, step: int, total: int, steps_per_epoch: int) -> None:
            events.append(("start", step, total, steps_per_epoch))

        def on_step(self, step: int) -> None:
            events.append(step)

        def on_log(self, values: dict[str, Any]) -> None:
            events.append(("log", values["step"]))

        def on_eval_progress(self, done: int, total: int) -> None:
            events.append(("progress", done, total))

        def on_evaluate(self, values: dict[str, Any], best: bool) -> None:
            events.append(("evaluate", values["step"], best))

        def on_end(self) -> None:
            events.append("end")

    train(RecipeTask, BRIEF, output=tmp_path / "run", callback=Watch(), steps=3, log_every=2)
    assert events == [
        *(("start", 0, 3, 4), 1, 2, ("log", 2), 3, ("log", 3)),
        *(("progress", 1, 1), ("evaluate", 3, True), "end"),
    ]


def test_a_resumed_run_has_the_settings_it_was_started_with(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(RecipeTask, BRIEF, output=tmp_path / "run", callback=StopAt(3), seed=8, checkpoint_minutes=0.0)
    holding = RunDirectory.reopen(tmp_path / "run")
    holding.lock()
    with pytest.raises(ValueError, match="another process is training in"):
        resume(RecipeTask, tmp_path / "run")
    del holding
    started: list[int] = []

    class Watch(Callback):
        def on_start(self, step: int, total: int, steps_per_epoch: int) -> None:
            started.append(step)

    resumed = resume(RecipeTask, tmp_path / "run", callback=Watch())
    assert started == [2]
    assert RecipeTask.built.recipe == ToyRecipe(epochs=1, batch_size=2, seed=8, checkpoint_minutes=0.0)
    whole = train(RecipeTask, BRIEF, output=tmp_path / "whole", seed=8)
    assert (resumed.best, resumed.last) == (whole.best, whole.last)


# Commands that are started again


class Started(Callback):
    """Notes the step that each run starts from."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_start(self, step: int, total: int, steps_per_epoch: int) -> None:
        self.steps.append(step)


def stopped(output: str | None = None, **changes: Any) -> None:
    """A run that saves after every step and dies in its third."""
    with pytest.raises(KeyboardInterrupt):
        train(RecipeTask, "brief", output=output, callback=StopAt(3), checkpoint_minutes=0.0, **changes)


def again(output: str | None = None, **changes: Any) -> tuple[str, list[int]]:
    """The same command: its run directory, and the step it starts from."""
    started = Started()
    trained = train(RecipeTask, "brief", output=output, callback=started, checkpoint_minutes=0.0, **changes)
    return str(trained.run), started.steps


@pytest.mark.parametrize("output", [None, "mine"])
def test_torchrun_starts_a_run_again(output: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same name of the run, also where it counts no restart; another torchrun starts another run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b7")
    stopped(output)
    run = output or "runs/small-brief-1"
    assert again(output) == (run, [2])
    assert again(output) == (run, [4])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b8")
    if output is None:
        assert again() == ("runs/small-brief-2", [0])
    else:
        with pytest.raises(FileExistsError, match=r"mine exists; give another --output, or resume that run by"):
            again(output)


def test_the_torchrun_of_older_versions_is_known_by_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They call every run "none"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    stopped()
    assert again() == ("runs/small-brief-1", [2])
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert again() == ("runs/small-brief-2", [0])


def test_slurm_requeues_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs of one job, that with the same settings; a second run of a job that was not requeued is a new one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    stopped(seed=1)
    stopped(seed=2)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert again(seed=1) == ("runs/small-brief-1", [2])
    assert again(seed=2) == ("runs/small-brief-2", [2])
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    assert again(seed=2) == ("runs/small-brief-3", [0])


def test_a_run_is_resumed_by_its_command_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stopped("mine")
    with pytest.raises(FileExistsError, match="mine exists; give another --output"):
        again("mine")
    with pytest.raises(
        ValueError, match=r"mine was started by another command \(lr is 0.5, but was not given\); give another --output"
    ):
        again("mine", resume=True, lr=0.5)
    assert again("mine", resume=True) == ("mine", [2])
    assert again("other", resume=True) == ("other", [0])
    assert again(resume=True) == ("runs/small-brief-1", [0])
    assert again(resume=True) == ("runs/small-brief-1", [4])
    assert again(resume=True, lr=0.5) == ("runs/small-brief-2", [0])


def test_a_directory_that_was_half_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the recipe was written."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b7")
    with monkeypatch.context() as context:
        context.setattr(RunDirectory, "write_recipe", lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            train(RecipeTask, "brief", output=tmp_path / "run")
    assert (tmp_path / "run" / "environment.json").exists()
    assert train(RecipeTask, "brief", output=tmp_path / "run").run == tmp_path / "run"


def test_more_epochs_that_are_started_again(tmp_path: Path) -> None:
    """The restarted command has given the run its epochs already."""
    run = train(RecipeTask, BRIEF, output=tmp_path / "run").run
    with pytest.raises(KeyboardInterrupt):
        resume(RecipeTask, run, epochs=2, callback=StopAt(6))
    started = Started()
    resume(RecipeTask, run, epochs=2, callback=started)
    assert started.steps == [4]
    assert "phase_start: 4\n" in (run / "recipe.yaml").read_text()


def test_fewer_processes_split_their_shares_into_more_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch of 12 in two parts, in each of four processes: at most two images at once, also with fewer."""
    settings = ToyRecipe(epochs=1, batch_size=12, accumulate=2)
    parts = {}
    for started, count in ((4, 4), (4, 3), (4, 1), (1, 4), (12, 1), (12, 5)):
        accelerator = SimpleNamespace(num_processes=count, is_main_process=True)
        parts[started, count] = _parts_now(settings, started, accelerator)  # type: ignore[arg-type]
    assert parts == {(4, 4): 2, (4, 3): 3, (4, 1): 8, (1, 4): 1, (12, 1): 12, (12, 5): 2}
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = RunDirectory.create(tmp_path / "run", to_yaml(settings)).path
    monkeypatch.delenv("WORLD_SIZE")
    caplog.set_level("INFO")
    resume(RecipeTask, run)
    assert RecipeTask.built.recipe.accumulate == 4
    text = "running with 1 process, but started with 2: the batch of 12 is divided again, each share into 4 parts"
    assert text in caplog.messages
    assert "accumulate: 2\n" in (run / "recipe.yaml").read_text()


# Logs


def test_the_log_tells_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(RecipeTask, BRIEF, output=tmp_path / "run", callback=StopAt(3), checkpoint_minutes=0.0)
    newest = tmp_path / "run" / "checkpoints" / "step_000000002.pt"
    newest.write_bytes(newest.read_bytes()[:-9])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resume(RecipeTask, tmp_path / "run").run == tmp_path / "run"
    (log,) = (tmp_path / "run" / "logs").iterdir()
    assert log.name == "rank0.log"
    lines = [line.split(" ", 2)[2] for line in log.read_text().splitlines() if line.startswith("20")]
    host = platform.node()
    assert lines[0] == f"started as process 0 of 1 on {host}, process id {os.getpid()}"
    assert lines[1:3] == ["starting at step 0 of 4", "ended by Traceback (most recent call last):"]
    assert lines[3].endswith(", restart 1 of torchrun")
    assert "step_000000002.pt is damaged (File is not a zip file): falling back to step_000000001.pt" in lines[4]
    assert lines[5:] == ["resuming from step 1 of 4", "finished after step 4"]


def test_a_run_without_an_intact_checkpoint_says_so(tmp_path: Path) -> None:
    """Before any callback has been told that the run starts."""
    run = train(RecipeTask, BRIEF, output=tmp_path / "run").run
    for checkpoint in (run / "checkpoints").iterdir():
        checkpoint.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact; the run cannot be resumed"):
        resume(RecipeTask, run)


# What is set up for every task


def test_random_shift_ends_at_its_fraction_of_the_run(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watch(Callback):
        def on_step(self, step: int) -> None:
            seen.append(RecipeTask.built.model.config.neighbours)

    train(RecipeTask, BRIEF, output=tmp_path / "run", callback=Watch(), epochs=2, shift_until=0.375)
    assert seen == ["random"] * 3 + ["all"] * 5


def test_features_are_drawn_from_the_seed_of_the_run(tmp_path: Path) -> None:
    """The toy task redraws before every step of the first epoch; step 3 of seed 1 is the last."""
    train(RecipeTask, BRIEF, output=tmp_path / "run", seed=1)
    generator = torch.Generator().manual_seed(5336253445118569553)
    features = RecipeTask.built.model.state_dict()["stages.1.blocks.0.attn.features"]
    assert torch.equal(features, orthogonal_features(4, 4, generator))


@pytest.mark.parametrize("enabled", [True, False, "strips"])
def test_gradient_checkpointing_reaches_every_stage(enabled: bool | str, tmp_path: Path) -> None:
    train(RecipeTask, BRIEF, output=tmp_path / "run", grad_checkpointing=enabled, steps=1)
    stages = [module for module in RecipeTask.built.model.modules() if isinstance(module, Stage)]
    assert [stage.grad_checkpointing for stage in stages] == [enabled, enabled]


class Wrapped(nn.Module):
    """Two backbones behind something that knows nothing of checkpointing, as in a detector."""

    def __init__(self, model: VisionLongformer, other: nn.Module) -> None:
        super().__init__()
        self.stem, self.backbone, self.other = nn.Identity(), model, other
        self.head = model.head

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.backbone(self.stem(images))


def test_gradient_checkpointing_reaches_backbones_inside_a_model(tmp_path: Path) -> None:
    other = VisionLongformer(ToyTask().model.config)

    class DetectorLike(RecipeTask):
        def __init__(self, recipe: ToyRecipe, accelerator: Accelerator, run: Path | None) -> None:
            super().__init__(recipe, accelerator, run)
            self.model = Wrapped(self.model, other.requires_grad_(False))  # type: ignore[assignment]

    train(DetectorLike, BRIEF, output=tmp_path / "run", grad_checkpointing=True, steps=1)
    stages = [module for module in DetectorLike.built.model.modules() if isinstance(module, Stage)]
    assert [stage.grad_checkpointing for stage in stages] == [True] * 4


class CannotCheckpoint(nn.Linear):
    """As models of timm say that they cannot."""

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        assert not enable, "gradient checkpointing not supported"


@pytest.mark.parametrize("model", [nn.Linear(2, 1), CannotCheckpoint(2, 1), nn.Sequential(CannotCheckpoint(2, 1))])
def test_models_that_cannot_checkpoint_are_refused(model: nn.Module, tmp_path: Path) -> None:
    class Unsupported(LinearTask):
        recipe_type = ToyRecipe
        curves = ("score",)

        def __init__(self, recipe: ToyRecipe, accelerator: Accelerator, run: Path | None) -> None:
            super().__init__(torch.zeros(1, 1, 2), torch.zeros(1, 1), batches_per_epoch=1)
            self.model = model  # type: ignore[assignment]

    with pytest.raises(
        ValueError, match="grad_checkpointing is on, but nothing in this model supports it; turn it off"
    ):
        train(Unsupported, BRIEF, output=tmp_path / "run", batch_size=1, grad_checkpointing=True)
    with pytest.raises(ValueError, match="grad_checkpointing is strips, which only a Vision Longformer has; set it to"):
        train(Unsupported, BRIEF, output=tmp_path / "strips", batch_size=1, grad_checkpointing="strips")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_model_is_compiled_if_asked(enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    models: list[nn.Module] = []
    monkeypatch.setattr(VisionLongformer, "compile", lambda self: compiled.append(self))
    monkeypatch.setattr(TrainingLoop, "train", lambda self: models.append(self.task.model) or ({}, {}))
    train(RecipeTask, BRIEF, output=tmp_path / "run", compile=enabled)
    assert models == [RecipeTask.built.model]
    assert compiled == (models if enabled else [])


# More epochs for a finished run


def test_a_finished_run_is_trained_further(tmp_path: Path) -> None:
    run = train(RecipeTask, BRIEF, output=tmp_path / "run", steps=3).run
    started: list[tuple[int, int]] = []

    class Watch(Callback):
        def on_start(self, step: int, total: int, steps_per_epoch: int) -> None:
            started.append((step, total))

    resumed = resume(RecipeTask, run, epochs=2, callback=Watch())
    assert started == [(3, 8)]
    assert [line["step"] for line in RunDirectory(run).records() if "evaluation" in line] == [3, 4, 8]
    assert resumed.last == RunDirectory(run).records()[-1]["evaluation"]
    text = (run / "recipe.yaml").read_text()
    assert "epochs: 2\nsteps: null\n" in text
    assert "phase_start: 3\n" in text
    assert resume(RecipeTask, run).last == resumed.last
    with pytest.raises(ValueError, match="has 2 epochs already; --epochs is the total, so give more than that"):
        resume(RecipeTask, run, epochs=2)


def test_a_run_that_is_not_finished_is_not_trained_further(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(RecipeTask, BRIEF, output=tmp_path / "run", callback=StopAt(3), checkpoint_minutes=0.0)
    with pytest.raises(ValueError, match=r"is not finished \(step 2 of 4\): resume it without --epochs, to its end"):
        resume(RecipeTask, tmp_path / "run", epochs=9)
    assert "phase_start: 0\n" in (tmp_path / "run" / "recipe.yaml").read_text()


def test_a_run_between_its_epochs_is_not_trained_further(tmp_path: Path) -> None:
    """Evaluated after step 4 of 8, and stopped in step 5."""
    with pytest.raises(KeyboardInterrupt):
        train(RecipeTask, BRIEF, output=tmp_path / "run", callback=StopAt(5), epochs=2)
    with pytest.raises(ValueError, match=r"is not finished \(step 4 of 8\)"):
        resume(RecipeTask, tmp_path / "run", epochs=9)


def test_a_run_without_its_last_evaluation_is_not_trained_further(tmp_path: Path) -> None:
    class Stopped(RecipeTask):
        def evaluate(self, progress: Progress) -> dict[str, float]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(Stopped, BRIEF, output=tmp_path / "run", steps=3, checkpoint_minutes=0.0)
    with pytest.raises(ValueError, match=r"is not finished \(step 3 of 3\)"):
        resume(RecipeTask, tmp_path / "run", epochs=9)


# What is told before the first step, and kept beside the recipe


def test_summary_and_files(tmp_path: Path) -> None:
    told: dict[str, str] = {}

    class Telling(RecipeTask):
        def summary(self) -> dict[str, str]:
            return {"data": "toys"}

        def files(self) -> dict[str, str]:
            return {"split.json": "{}\n"}

    class Watch(Callback):
        def on_summary(self, summary: Mapping[str, str]) -> None:
            told.update(summary)

    run = train(Telling, BRIEF, output=tmp_path / "run", callback=Watch(), steps=1).run
    assert told["data"] == "toys"
    assert told["run directory"] == str(run)
    assert told["device"].startswith("CPU, ") or torch.cuda.is_available()
    assert (run / "split.json").read_text() == "{}\n"
