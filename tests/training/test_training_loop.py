"""The training loop on a toy task: runs that stop and go on, and what can go wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import StopAt
from torch import Tensor, nn

from vision_longformer import ModelConfig, StageConfig, VisionLongformer
from vision_longformer.classification.task import ClassificationTask
from vision_longformer.data.loading import Progress
from vision_longformer.data.randomness import derive, seeded
from vision_longformer.models import config as cfg
from vision_longformer.training.backbone_schedule import BackboneSchedule
from vision_longformer.training.callbacks import Callback
from vision_longformer.training.checkpointer import latest_checkpoint, load_state
from vision_longformer.training.distributed import make_accelerator
from vision_longformer.training.ema import WeightAverage
from vision_longformer.training.loop import Interrupted, TrainingLoop, total_steps
from vision_longformer.training.recipe import TrainSettings
from vision_longformer.training.run_directory import RunDirectory, next_free
from vision_longformer.training.task import TrainingError, TrainingTask


def small_config() -> ModelConfig:
    """A Longformer stage and a Performer stage, so that random shift and new features both matter."""
    stages = (
        StageConfig(8, 1, 2, 2, cfg.Longformer(window=2), 1),
        StageConfig(8, 1, 2, 2, cfg.Performer(4), 0, "absolute"),
    )
    return ModelConfig(stages, img_size=(8, 8), in_chans=1, num_classes=3, drop_path_rate=0.3, neighbours="random")


class ToyTask(TrainingTask):
    """Random images with random labels, a function of epoch and batch."""

    score = "score"

    def __init__(self, batches_per_epoch: int = 8) -> None:
        with seeded(5):
            self.model = VisionLongformer(small_config())
        self.batches_per_epoch = batches_per_epoch
        self.evaluations = 0
        self.spoil: int | None = None

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(start, self.batches_per_epoch):
            generator = torch.Generator().manual_seed(derive(1, epoch, index))
            images = torch.randn(2, 1, 8, 8, generator=generator)
            yield images, torch.randint(3, (2,), generator=generator)

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], micro_batch_index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * (float("nan") if micro_batch_index == self.spoil else 1), {"accuracy": torch.tensor(50.0)}

    def evaluate(self, progress: Progress) -> dict[str, float]:
        self.evaluations += 1
        return {"score": float(self.model.head.weight.detach().double().sum())}

    def save(self, path: Path) -> None:
        path.write_text(str(float(self.model.head.weight.detach().double().sum())))

    def draw(self, folder: Path) -> None:
        raise AssertionError("the loop itself draws nothing")

    redraws_features = staticmethod(ClassificationTask.redraws_features)


class SignalAt(StopAt):
    def on_step(self, step: int) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


SETTINGS = TrainSettings(
    epochs=3, batch_size=4, accumulate=2, lr=1e-2, warmup=1, ema=0.9, log_every=3, checkpoint_minutes=0, clip_norm=1.0
)


def training(
    folder: Path, task: ToyTask | None = None, callback: Callback | None = None, settings: TrainSettings = SETTINGS
) -> TrainingLoop:
    task = task or ToyTask()
    run = RunDirectory.reopen(folder) if folder.exists() else RunDirectory.create(folder, "seed: 0\n")
    steps = total_steps(settings, task.batches_per_epoch)
    schedule = BackboneSchedule(task.model, settings.seed, round(0.75 * steps), task.redraws_features)
    return TrainingLoop(task, settings, run, make_accelerator(settings), schedule, callback or Callback())


def outcome(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last state, and the metrics but for speed."""
    path = latest_checkpoint(folder / "checkpoints")
    assert path is not None
    records = RunDirectory(folder).records()
    for record in records:
        record.pop("images_per_second", None)
    return load_state(path), records


def assert_same(a: Any, b: Any) -> None:
    """Equal to the last bit, through dictionaries and lists."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    training(folder).train()
    return folder


def test_a_run_logs_evaluates_and_saves(uninterrupted: Path) -> None:
    state, records = outcome(uninterrupted)
    assert state["counters"]["step"] == 12
    assert [record["step"] for record in records if "loss" in record] == [3, 6, 9, 12]
    evaluations = {record["step"]: record["evaluation"]["score"] for record in records if "evaluation" in record}
    assert list(evaluations) == [4, 8, 12]
    assert float((uninterrupted / "best.safetensors").read_text()) == max(evaluations.values())
    assert float((uninterrupted / "last.safetensors").read_text()) == evaluations[12]
    assert len(list((uninterrupted / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("step", [1, 4, 7, 10, 12])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(uninterrupted: Path, tmp_path: Path, step: int) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        training(folder, callback=StopAt(step)).train()
    training(folder).train()
    for one, other in zip(outcome(uninterrupted), outcome(folder), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("step", [3, 8])
def test_a_signal_saves_and_ends(uninterrupted: Path, tmp_path: Path, step: int) -> None:
    folder, settings = tmp_path / "run", SETTINGS
    with pytest.raises(Interrupted, match=f"SIGTERM after step {step}") as caught:
        training(folder, callback=SignalAt(step), settings=settings).train()
    assert caught.value.number == signal.SIGTERM
    assert outcome(folder)[0]["counters"]["step"] == step
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    training(folder).train()
    for one, other in zip(outcome(uninterrupted), outcome(folder), strict=True):
        assert_same(one, other)


def test_going_on_with_a_finished_run_changes_nothing(uninterrupted: Path) -> None:
    before, task = outcome(uninterrupted), ToyTask()
    result = training(uninterrupted, task).train()
    assert task.evaluations == 0
    assert result == before[1][-1]["evaluation"]
    assert_same(list(before), list(outcome(uninterrupted)))


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    task = ToyTask()
    task.spoil = 11
    with pytest.raises(TrainingError, match=r"the loss is nan around step 6; the checkpoint .*000005.pt is intact"):
        training(tmp_path / "run", task).train()
    state = outcome(tmp_path / "run")[0]
    assert all(bool(value.isfinite().all()) for value in state["model"].values())


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = torch.save

    def full(state: Any, path: Path) -> None:
        if state["counters"]["step"] == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match=r"the disk is full; the checkpoint .*000001.pt is intact.*--resume"):
        training(tmp_path / "run").train()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000000001.pt"]
    assert outcome(tmp_path / "run")[0]["counters"]["step"] == 1


def test_a_dead_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(self: ToyTask, epoch: int, start: int) -> Iterator[Any]:
        raise RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed.")
        yield

    monkeypatch.setattr(ToyTask, "batches", dying)
    with pytest.raises(TrainingError, match=r"a data-loading process died .*; there is no checkpoint yet"):
        training(tmp_path / "run").train()


def test_other_errors_pass_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ToyTask, *_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ToyTask, "loss", broken)
    with pytest.raises(RuntimeError, match="a bug") as caught:
        training(tmp_path / "run").train()
    assert not isinstance(caught.value, ValueError)


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
    run.forget_after(2, 2)
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step_000000001.pt"
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"step_000000001.pt cannot be read"):
        load_state(path)


def test_average_of_weights() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    average = WeightAverage(model, decay=0.5)
    nn.init.constant_(model.weight, 3.0)
    average.update(1)  # decay 2/11 so early
    expected = 1 + (3 - 1) * 9 / 11
    torch.testing.assert_close(average.values["weight"], torch.full((1, 1), expected))
    average.update(1000)
    expected += (3 - expected) / 2
    torch.testing.assert_close(average.values["weight"], torch.full((1, 1), expected))
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), torch.full((1, 1), expected))
    assert model.weight.item() == 3


def test_schedule_of_shift_and_features() -> None:
    model = VisionLongformer(small_config())
    schedule = BackboneSchedule(model, seed=0, shift_until=30, redraws_features=ClassificationTask.redraws_features)
    features, redrawn = model.state_dict()["stages.1.blocks.0.attn.features"].clone(), []
    for step in range(36):
        epoch, of_epoch = divmod(step, 12)
        schedule.before_step(step, epoch, of_epoch)
        assert model.config.neighbours == ("random" if step < 30 else "all")
        now = model.state_dict()["stages.1.blocks.0.attn.features"]
        if not torch.equal(now, features):
            redrawn.append((epoch, of_epoch))
            features = now.clone()
    assert redrawn == [*((0, n) for n in range(12)), (1, 0), (1, 6), (2, 0), (2, 11)]


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with seeded(derive(1, "a", 2)):
        first = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(derive(1, "a", 2)):
        assert torch.equal(torch.rand(2), first)
    assert derive(1, "a", 2) != derive(1, "a", 3) != derive(2, "a", 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs is 0; it must be a whole number of at least 1"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'; did you mean 'adamw'"),
        ({"ema": 1.0}, "ema is 1.0; it must be at least 0 and below 1"),
        ({"milestones": (0.9, 0.5)}, "give rising fractions"),
        ({"lr": 0.0}, "lr is 0.0; it must be positive"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**change)


def test_batches_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="batch_size 10 is not divisible by 1 processes × accumulate 4; use 8"):
        make_accelerator(TrainSettings(batch_size=10, accumulate=4))
    with pytest.raises(ValueError, match="fewer than accumulate=4"):
        total_steps(TrainSettings(accumulate=4), 3)
    assert total_steps(TrainSettings(accumulate=2, epochs=3), 7) == 9
