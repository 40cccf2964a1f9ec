"""The training loop: steps, averages, logs and evaluations worked out by hand; runs that stop and resume; errors."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import StopAt
from numpy.typing import NDArray
from torch import Tensor, nn
from toy_tasks import START, FixedLossTask, LinearTask, SignalAt, ToyTask, training_loop

from vision_longformer.data.loading import Progress
from vision_longformer.training import loop as loop_module
from vision_longformer.training.callbacks import Callback
from vision_longformer.training.checkpointer import Checkpointer, Counters, latest_checkpoint, load_state
from vision_longformer.training.loop import Interrupted, TrainingLoop, total_steps
from vision_longformer.training.recipe import TrainSettings
from vision_longformer.training.run_directory import METRICS, RunDirectory
from vision_longformer.training.task import TrainingError

# Steps by hand

Array = NDArray[np.float64]


def regression(micro_batches: int) -> tuple[Array, Array]:
    """Inputs (micro-batches, 2 samples, 2 features) and targets (micro-batches, 2 samples)."""
    generator = np.random.default_rng(7)
    return generator.normal(size=(micro_batches, 2, 2)), generator.normal(size=(micro_batches, 2)) + 2


def sgd_by_hand(
    inputs: Array,
    targets: Array,
    rates: Sequence[float],
    *,
    accumulate: int = 1,
    clip_norm: float = math.inf,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Array:
    """The two weights and the bias of the linear model, (steps + 1, 3), from the start on; the bias does not decay."""
    weights, velocity = np.array(START), np.zeros(3)
    path = [weights]
    for step, rate in enumerate(rates):
        gradient = np.zeros(3)
        for index in range(step * accumulate, (step + 1) * accumulate):
            x, y = inputs[index], targets[index]
            error = x @ weights[:2] + weights[2] - y
            gradient += np.array([(error * x[:, 0]).mean(), (error * x[:, 1]).mean(), error.mean()]) / accumulate
        gradient *= min(1, clip_norm / (np.sqrt(gradient @ gradient) + 1e-6))
        velocity = momentum * velocity + gradient + weight_decay * weights * [1, 1, 0]
        weights = weights - rate * velocity
        path.append(weights)
    return np.stack(path)


def linear_task(inputs: Array, targets: Array, batches_per_epoch: int) -> LinearTask:
    return LinearTask(torch.from_numpy(inputs), torch.from_numpy(targets), batches_per_epoch=batches_per_epoch)


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_of_sgd(accumulate: int, clip_norm: float | None, tmp_path: Path) -> None:
    """Three steps of warm-up from a fifth of the rate, with momentum; the bias does not decay."""
    inputs, targets = regression(3 * accumulate)
    task = linear_task(inputs, targets, 3 * accumulate)
    settings = TrainSettings(
        epochs=1,
        batch_size=2 * accumulate,
        accumulate=accumulate,
        optimizer="sgd",
        lr=0.1,
        momentum=0.9,
        weight_decay=0.3,
        clip_norm=clip_norm,
        schedule="constant",
        warmup_steps=4,
        warmup_factor=0.2,
    )
    training_loop(tmp_path / "run", task, settings).train()
    rates = [0.02, 0.04, 0.06]
    options = {"accumulate": accumulate, "momentum": 0.9, "weight_decay": 0.3}
    expected = sgd_by_hand(inputs, targets, rates, clip_norm=clip_norm or math.inf, **options)
    for path, weights in zip(expected, [*task.weights_in_loss[::accumulate], task.weights()], strict=True):
        assert weights == pytest.approx(path, abs=1e-12)
    unclipped = sgd_by_hand(inputs, targets, rates, **options)
    assert (abs(expected - unclipped).max() > 1e-2) == (clip_norm == 0.5)


def test_the_recorded_rate_is_the_one_of_the_step(tmp_path: Path) -> None:
    """With a gradient of 1, plain SGD moves the bias by the rate. 12 steps, 2 of warm-up from a half, then a cosine."""
    task = linear_task(np.zeros((12, 1, 2)), np.zeros((12, 1)), 6)
    task.loss = lambda model, batch, index: (model(batch[0]).sum(), {})  # type: ignore[method-assign]
    settings = TrainSettings(
        epochs=2, batch_size=1, optimizer="sgd", momentum=0.0, weight_decay=0.0, lr=0.4, warmup_steps=2,
        warmup_factor=0.5, min_lr=0.1, log_every=1,
    )  # fmt: skip
    biases: list[float] = [START[2]]

    class Watch(Callback):
        def on_step(self, step: int) -> None:
            biases.append(task.weights()[2])

    training_loop(tmp_path / "run", task, settings, Watch()).train()
    expected = [0.2, 0.3, *(0.1 + 0.3 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(10))]
    assert -np.diff(biases) == pytest.approx(expected, abs=1e-12)
    records = [record for record in RunDirectory(tmp_path / "run").records() if "loss" in record]
    assert [record["lr"] for record in records] == pytest.approx(expected, abs=1e-12)
    assert [(record["step"], record["epoch"]) for record in records] == [(n + 1, n // 6) for n in range(12)]


class Watched(FixedLossTask):
    """Notes what each loss sees: the micro-batch's index, torch's seed, training mode, the dtype of autocast.

    Evaluation leaves the model in evaluation mode, as those of real tasks do.
    """

    def __init__(self, losses: Sequence[float], **options: Any) -> None:
        super().__init__(losses, **options)
        self.seen: list[tuple[int, int, bool]] = []
        self.dtypes: list[torch.dtype] = []

    def loss(self, model: nn.Module, batch: Any, micro_batch_index: int) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen.append((micro_batch_index, torch.initial_seed(), model.training))
        self.dtypes.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return super().loss(model, batch, micro_batch_index)

    def evaluate(self, progress: Progress) -> dict[str, float]:
        self.model.eval()
        return super().evaluate(progress)


STEP_SEEDS = [
    *(7623466464644549296, 454759893439502008, 1790334864647875147, 4982489829425037954),
    *(8919126719189800750, 1689464650749558646, 809739369010839900, 1756621662853168443),
]
"""Of run 2, steps 0 to 3 with two parts: BLAKE2b of "(2, 'step', STEP, PART)", 8 bytes, little-endian, less a bit."""


def test_what_micro_batches_see(tmp_path: Path) -> None:
    """Two epochs of two steps of two micro-batches, which count on over the run; the seed is of step and part."""
    task = Watched([1.0] * 8, batches_per_epoch=4)
    training_loop(tmp_path / "run", task, TrainSettings(seed=2, epochs=2, batch_size=2, accumulate=2)).train()
    assert task.seen == [(index, STEP_SEEDS[index], True) for index in range(8)]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_losses_run_in_the_precision_of_the_recipe(precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    task = Watched([1.0], batches_per_epoch=1)
    training_loop(tmp_path / "run", task, TrainSettings(epochs=1, batch_size=1, precision=precision)).train()
    assert task.dtypes == [dtype]


# The average of the weights


def test_averaged_weights_are_evaluated_and_saved_and_raw_ones_trained(tmp_path: Path) -> None:
    """Decay after steps 1, 2, 3 is (1 + step) / (10 + step), at most 0.28: 2/11, 3/12, 0.28."""
    inputs, targets = regression(3)
    task = linear_task(inputs, targets, 1)
    task.scores = [1.0, 3.0, 2.0]
    settings = TrainSettings(
        epochs=3, batch_size=2, optimizer="sgd", lr=0.1, weight_decay=0.0, schedule="constant", warmup=0, ema=0.28
    )
    training_loop(tmp_path / "run", task, settings).train()
    raw = sgd_by_hand(inputs, targets, [0.1] * 3, momentum=0.9)
    averages = [raw[0]]
    for weights, decay in zip(raw[1:], (2 / 11, 3 / 12, 0.28), strict=True):
        averages.append(decay * averages[-1] + (1 - decay) * weights)
    assert abs(averages[3] - raw[3]).max() > 1e-2
    assert np.array(task.weights_in_loss) == pytest.approx(raw[:3], abs=1e-12)
    assert task.weights() == pytest.approx(raw[3], abs=1e-12)
    assert np.array(task.weights_in_evaluate) == pytest.approx(np.stack(averages[1:]), abs=1e-12)
    assert [name for name, _ in task.saved] == ["best.safetensors", "best.safetensors", "last.safetensors"]
    for (_, weights), expected in zip(task.saved, averages[1:], strict=True):
        assert weights == pytest.approx(expected, abs=1e-12)
    assert json.loads((tmp_path / "run" / "best.safetensors").read_text()) == pytest.approx(averages[2], abs=1e-12)
    path = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert path is not None
    state = load_state(path)
    for part, expected in (("model", raw[3]), ("average", averages[3])):
        weights = [*state[part]["weight"][0].tolist(), *state[part]["bias"].tolist()]
        assert weights == pytest.approx(expected, abs=1e-12)


def test_without_an_average_the_weights_themselves_are_evaluated(tmp_path: Path) -> None:
    inputs, targets = regression(2)
    task = linear_task(inputs, targets, 1)
    settings = TrainSettings(epochs=2, batch_size=2, optimizer="sgd", lr=0.1, weight_decay=0.0, warmup=0, min_lr=0.1)
    training_loop(tmp_path / "run", task, settings).train()
    assert np.array(task.weights_in_evaluate) == pytest.approx(
        sgd_by_hand(inputs, targets, [0.1, 0.1], momentum=0.9)[1:], abs=1e-12
    )


# Logs


def test_log_lines_are_means_over_steps_and_micro_batches(tmp_path: Path) -> None:
    """Five steps of two micro-batches, a line every two steps and at the end."""
    losses = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0]
    task = FixedLossTask(losses, batches_per_epoch=10)
    training_loop(tmp_path / "run", task, TrainSettings(epochs=1, batch_size=2, accumulate=2, log_every=2)).train()
    records = [record for record in RunDirectory(tmp_path / "run").records() if "loss" in record]
    lines = [(record["step"], record["loss"], record["double"]) for record in records]
    assert lines == [(2, 3.75, 7.5), (4, 60.0, 120.0), (5, 384.0, 768.0)]


def test_the_first_line_after_resuming_has_the_steps_before(tmp_path: Path) -> None:
    """And has them exactly: 2²⁴ + 1, which is kept at step 2, is no float32."""
    settings = TrainSettings(epochs=1, batch_size=1, log_every=3)
    for callback in (SignalAt(2), SignalAt(4), None):
        task = FixedLossTask([2.0**24, 1.0, 1.0, 10.0, 20.0, 60.0], batches_per_epoch=6)
        loop = training_loop(tmp_path / "run", task, settings, callback)
        if callback is None:
            loop.train()
        else:
            with pytest.raises(Interrupted):
                loop.train()
    records = [record for record in RunDirectory(tmp_path / "run").records() if "loss" in record]
    assert [(record["step"], record["loss"]) for record in records] == [(3, 5592406.0), (6, 30.0)]


def test_speed_counts_images_between_lines_but_not_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 2 s with 8 images; an evaluation takes 100 s."""
    clock = Clock(monkeypatch)
    task = FixedLossTask([1.0] * 8, batches_per_epoch=4)
    clock.advance_in(task, "loss", 2)
    clock.advance_in(task, "evaluate", 100)
    training_loop(tmp_path / "run", task, TrainSettings(epochs=2, batch_size=8, log_every=3)).train()
    records = [record for record in RunDirectory(tmp_path / "run").records() if "loss" in record]
    assert [(r["step"], r["images_per_second"]) for r in records] == [(3, 4.0), (4, 4.0), (7, 4.0), (8, 4.0)]
    assert {r["seconds_per_step"] for r in records} == {2.0}


@pytest.mark.parametrize(
    ("per_epoch", "every", "lines"),
    [(3, 50, [3, 6]), (5, 2, [2, 4, 5, 7, 9, 10]), (5, 4, [5, 10]), (6, 4, [4, 6, 10, 12])],
)
def test_lines_end_with_their_epoch(per_epoch: int, every: int, lines: list[int], tmp_path: Path) -> None:
    """A line of a whole epoch, or of parts of it none of which is shorter than half of ``log_every``."""
    task = FixedLossTask([1.0] * 2 * per_epoch, batches_per_epoch=per_epoch)
    training_loop(tmp_path / "run", task, TrainSettings(epochs=2, batch_size=1, log_every=every)).train()
    assert [line["step"] for line in RunDirectory(tmp_path / "run").records() if "loss" in line] == lines


# Evaluations


def strict_json(line: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"epochs": 5, "eval_every": 2}, [(4, 2), (8, 4), (10, 5)]),
        ({"epochs": 4, "eval_every": 1}, [(2, 1), (4, 2), (6, 3), (8, 4)]),
        ({"epochs": 4, "eval_every": 9}, [(8, 4)]),
        ({"steps": 7, "eval_every": 1}, [(2, 1), (4, 2), (6, 3), (7, 3)]),
        ({"steps": 3, "eval_every": 2}, [(3, 1)]),
    ],
)
def test_when_a_run_is_evaluated(changes: dict[str, int], expected: list[tuple[int, int]], tmp_path: Path) -> None:
    """Steps and the epochs done, with two steps per epoch."""
    task = FixedLossTask([1.0] * 10, batches_per_epoch=2)
    training_loop(tmp_path / "run", task, TrainSettings(batch_size=1, **changes)).train()
    records = [record for record in RunDirectory(tmp_path / "run").records() if "evaluation" in record]
    assert [(record["step"], record["epoch"]) for record in records] == expected
    assert len(task.weights_in_evaluate) == len(expected)
    assert [name for name, _ in task.saved] == ["best.safetensors", "last.safetensors"]


@pytest.mark.parametrize(
    ("scores", "best_at"),
    [
        ([1.0, 3.0, 3.0, 2.0, 4.0], [1, 2, 5]),
        ([math.nan, 0.2, 0.1, math.nan, 0.5], [1, 2, 5]),
        ([math.nan, -5.0, math.nan, -6.0, math.inf], [1, 2, 5]),
        ([0.0, math.nan, -1.0, 0.0, 0.0], [1]),
    ],
)
def test_the_best_model_is_the_first_of_the_highest_score(
    scores: list[float], best_at: list[int], tmp_path: Path
) -> None:
    """A score of NaN is never better than a number, and any number is better than it."""
    task = FixedLossTask([1.0] * 5, batches_per_epoch=1, scores=scores)
    noted: list[int] = []

    class Watch(Callback):
        def on_evaluate(self, values: dict[str, Any], best: bool) -> None:
            noted.extend([values["step"]] * best)

    best, last = training_loop(tmp_path / "run", task, TrainSettings(epochs=5, batch_size=1), Watch()).train()
    assert noted == best_at
    highest = scores[best_at[-1] - 1]
    assert best["score"] == pytest.approx(highest if math.isfinite(highest) else math.nan, nan_ok=True)
    assert [name for name, _ in task.saved] == ["best.safetensors"] * len(best_at) + ["last.safetensors"]
    lines = [strict_json(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    written = [line["evaluation"]["score"] for line in lines if "evaluation" in line]
    assert written == [score if math.isfinite(score) else None for score in scores]
    assert math.isfinite(last["score"]) == math.isfinite(scores[-1])


def test_a_last_score_of_nan_is_returned_as_such(tmp_path: Path) -> None:
    """Also by a run that is resumed after its end, which reads it from the metrics."""
    for _ in range(2):
        task = FixedLossTask([1.0], batches_per_epoch=1, scores=[math.nan])
        best, last = training_loop(tmp_path / "run", task, TrainSettings(epochs=1, batch_size=1)).train()
        assert math.isnan(best["score"])
        assert math.isnan(last["score"])


# Checkpoints by the clock


class Clock:
    """What the loop takes for ``time``: it stands still but for what is added to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: self.seconds))

    def advance_in(self, task: LinearTask, method: str, seconds: float) -> None:
        """Each call of the task's method takes ``seconds``."""
        original = getattr(task, method)

        def slow(*arguments: Any) -> Any:
            self.seconds += seconds
            return original(*arguments)

        setattr(task, method, slow)


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        (6.0, [3, 6, 9, 10, 13, 16, 19, 20]),
        (20.0, [9, 10, 19, 20]),
        (60.0, [10, 20]),
        (0.0, list(range(1, 21))),
    ],
)
def test_minutes_between_checkpoints(
    minutes: float, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of ten steps of 2.5 minutes; there is a checkpoint after each epoch, too."""
    task = FixedLossTask([1.0] * 20, batches_per_epoch=10)
    Clock(monkeypatch).advance_in(task, "loss", 150)
    saved: list[int] = []
    original = Checkpointer.save

    def save(self: Checkpointer, counters: Counters) -> None:
        saved.append(counters.step)
        original(self, counters)

    monkeypatch.setattr(Checkpointer, "save", save)
    settings = TrainSettings(epochs=2, batch_size=1, checkpoint_minutes=minutes)
    training_loop(tmp_path / "run", task, settings).train()
    assert saved == expected


# Runs that stop and resume

SETTINGS = TrainSettings(
    epochs=3, batch_size=4, accumulate=2, lr=1e-2, warmup=1, ema=0.9, log_every=3, checkpoint_minutes=0, clip_norm=1.0
)


def training(folder: Path, task: ToyTask | None = None, callback: Callback | None = None) -> TrainingLoop:
    return training_loop(folder, task or ToyTask(), SETTINGS, callback)


def outcome(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last state, and the metrics but for speed."""
    path = latest_checkpoint(folder / "checkpoints")
    assert path is not None
    records = RunDirectory(folder).records()
    for record in records:
        record.pop("images_per_second", None)
        record.pop("seconds_per_step", None)
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


def test_a_run_that_died_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "")
    (run.path / METRICS).write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "lo')
    settings = TrainSettings(epochs=1, batch_size=1, log_every=1)
    training_loop(run.path, FixedLossTask([1.0, 2.0], batches_per_epoch=2), settings).train()
    assert [(line["step"], line.get("loss")) for line in run.records()] == [(1, 1.0), (2, 2.0), (2, None)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    training(folder).train()
    return folder


def test_a_run_logs_evaluates_and_saves(uninterrupted: Path) -> None:
    state, records = outcome(uninterrupted)
    assert state["counters"]["step"] == 12
    assert [record["step"] for record in records if "loss" in record] == [3, 4, 7, 8, 11, 12]
    evaluations = {record["step"]: record["evaluation"]["score"] for record in records if "evaluation" in record}
    assert list(evaluations) == [4, 8, 12]
    assert float((uninterrupted / "best.safetensors").read_text()) == max(evaluations.values())
    assert float((uninterrupted / "last.safetensors").read_text()) == evaluations[12]
    assert len(list((uninterrupted / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("step", [1, 4, 7, 10, 12])
def test_a_killed_run_resumes_as_if_nothing_had_happened(uninterrupted: Path, tmp_path: Path, step: int) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        training(folder, callback=StopAt(step)).train()
    training(folder).train()
    for one, other in zip(outcome(uninterrupted), outcome(folder), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("step", [3, 8, 12])
def test_a_signal_saves_and_ends(uninterrupted: Path, tmp_path: Path, step: int) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted, match=f"SIGTERM after step {step}") as caught:
        training(folder, callback=SignalAt(step)).train()
    assert caught.value.number == signal.SIGTERM
    assert outcome(folder)[0]["counters"]["step"] == step
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    training(folder).train()
    for one, other in zip(outcome(uninterrupted), outcome(folder), strict=True):
        assert_same(one, other)


def test_an_evaluation_that_is_repeated_is_recorded_once(tmp_path: Path) -> None:
    """Stopped by a signal before its evaluation, resumed, evaluated, killed before a checkpoint says so, resumed."""
    settings = TrainSettings(epochs=3, batch_size=1)

    class KilledAfterEvaluation(Callback):
        def on_evaluate(self, values: dict[str, Any], best: bool) -> None:
            raise KeyboardInterrupt

    for callback, error in ((SignalAt(4), Interrupted), (KilledAfterEvaluation(), KeyboardInterrupt)):
        with pytest.raises(error):
            training_loop(tmp_path / "run", FixedLossTask([1.0] * 6, batches_per_epoch=2), settings, callback).train()
    training_loop(tmp_path / "run", FixedLossTask([1.0] * 6, batches_per_epoch=2), settings).train()
    records = RunDirectory(tmp_path / "run").records()
    assert [record["step"] for record in records if "evaluation" in record] == [2, 4, 6]


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_resumes_with_its_momentum_or_with_none(momentum: float, tmp_path: Path) -> None:
    inputs, targets = regression(3)
    settings = TrainSettings(
        epochs=1, batch_size=2, optimizer="sgd", lr=0.1, momentum=momentum, weight_decay=0.0, warmup=0, min_lr=0.1
    )
    with pytest.raises(Interrupted):
        training_loop(tmp_path / "run", linear_task(inputs, targets, 3), settings, SignalAt(2)).train()
    task = linear_task(inputs, targets, 3)
    training_loop(tmp_path / "run", task, settings).train()
    assert len(task.weights_in_loss) == 1
    expected = sgd_by_hand(inputs, targets, [0.1] * 3, momentum=momentum)
    assert task.weights() == pytest.approx(expected[3], abs=1e-12)


def test_resuming_a_finished_run_changes_nothing(uninterrupted: Path) -> None:
    before, task = outcome(uninterrupted), ToyTask()
    best, last = training(uninterrupted, task).train()
    assert task.evaluations == 0
    assert last == before[1][-1]["evaluation"]
    assert best["score"] == float((uninterrupted / "best.safetensors").read_text())
    assert_same(list(before), list(outcome(uninterrupted)))


def test_a_second_interrupt_does_not_wait_for_the_step(tmp_path: Path) -> None:
    class InterruptedTwice(FixedLossTask):
        def loss(self, *arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            self.survived_the_first = True
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second signal was ignored")

    task = InterruptedTwice([1.0], batches_per_epoch=1)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            training_loop(tmp_path / "run", task, TrainSettings(epochs=1, batch_size=1)).train()
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert task.survived_the_first
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") is None


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    """In a step that never ends, a first SIGTERM waits for it, and a second one does not."""
    source = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", "from toy_tasks import train_until_stuck; train_until_stuck()"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])},
    )
    try:
        wait_until(lambda: (tmp_path / "stuck").exists() or process.poll() is not None)
        process.terminate()
        time.sleep(0.5)
        assert process.poll() is None

        def ended() -> bool:
            process.terminate()
            return process.poll() is not None

        wait_until(ended, seconds=10)
        assert process.wait() == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") is None


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# Errors


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    task = ToyTask()
    task.spoil = 11
    with pytest.raises(TrainingError, match=r"the loss is nan around step 6; the checkpoint .*000005.pt is intact"):
        training(tmp_path / "run", task).train()
    state = outcome(tmp_path / "run")[0]
    assert all(bool(value.isfinite().all()) for value in state["model"].values())


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch tells of it: by an error about positions in a file."""
    save = torch.save

    def full(state: Any, file: Any) -> None:
        if state["counters"]["step"] == 2:
            file.write(b"half")
            with open("/dev/full", "wb", buffering=0) as file:
                save(state, file)
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        TrainingError, match=r"the disk is full; the checkpoint .*000001.pt is intact: .*, then continue with --resume"
    ):
        training(tmp_path / "run").train()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000000001.pt"]
    assert outcome(tmp_path / "run")[0]["counters"]["step"] == 1


def test_a_dead_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(self: ToyTask, epoch: int, start: int) -> Iterator[Any]:
        raise RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed.")
        yield

    monkeypatch.setattr(ToyTask, "batches", dying)
    with pytest.raises(
        TrainingError, match=r"a data-loading process died .*; there is no checkpoint yet: start again with"
    ):
        training(tmp_path / "run").train()


def test_other_errors_pass_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ToyTask, *_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ToyTask, "loss", broken)
    with pytest.raises(RuntimeError, match="a bug") as caught:
        training(tmp_path / "run").train()
    assert not isinstance(caught.value, ValueError)


def test_an_epoch_needs_a_step() -> None:
    with pytest.raises(ValueError, match="fewer than accumulate=4"):
        total_steps(TrainSettings(accumulate=4), 3)
    assert total_steps(TrainSettings(accumulate=2, epochs=3), 7) == 9
    assert total_steps(TrainSettings(accumulate=2, epochs=3, steps=5), 7) == 5


# Runs that end early, and finished runs that are trained further


@pytest.mark.parametrize(
    ("scores", "patience", "evaluated"),
    [
        ([1.0, 3.0, 2.0, 2.0, 9.0], 2, 4),  # two without a better one after the second
        ([1.0, 2.0, 3.0, 4.0, 5.0], 1, 5),
        ([1.0, 1.0, 2.0, 0.0, 0.0], 1, 2),  # an equal one is not better
        ([1.0, 0.0, 0.0, 0.0, 0.0], None, 5),
    ],
)
def test_patience(scores: list[float], patience: int | None, evaluated: int, tmp_path: Path) -> None:
    settings = TrainSettings(epochs=5, batch_size=1, patience=patience)
    for _ in range(2):  # a run that has ended is not continued
        task = FixedLossTask([1.0] * 5, batches_per_epoch=1, scores=scores)
        best, last = training_loop(tmp_path / "run", task, settings).train()
        assert best["score"] == max(scores[:evaluated])
        assert last["score"] == scores[evaluated - 1]
    lines = RunDirectory(tmp_path / "run").records()
    assert [line["step"] for line in lines if "evaluation" in line] == list(range(1, evaluated + 1))
    assert (tmp_path / "run" / "last.safetensors").exists()


def test_a_phase_has_a_schedule_of_its_own(tmp_path: Path) -> None:
    """Linear from 1 to 0 with a step of warm-up from 0.5: four steps, then four more of a second phase."""
    options = {"batch_size": 1, "lr": 1.0, "schedule": "linear", "min_lr": 0.0, "warmup_steps": 1, "log_every": 1}
    rates = []
    for settings in (
        TrainSettings(epochs=1, warmup_factor=0.5, **options),
        TrainSettings(epochs=2, warmup_factor=0.5, phase_start=4, **options),
    ):
        training_loop(tmp_path / "run", FixedLossTask([1.0] * 8, batches_per_epoch=4), settings).train()
        rates = [line["lr"] for line in RunDirectory(tmp_path / "run").records() if "lr" in line]
    assert rates == pytest.approx([0.5, 1, 2 / 3, 1 / 3] * 2)


def test_patience_starts_anew_in_a_phase(tmp_path: Path) -> None:
    for epochs, start, scores, last in ((3, 0, [3.0, 2.0, 1.0], 2), (6, 2, [2.0, 4.0, 1.0, 1.0], 5)):
        settings = TrainSettings(epochs=epochs, batch_size=1, patience=1, phase_start=start)
        task = FixedLossTask([1.0] * 6, batches_per_epoch=1, scores=scores)
        training_loop(tmp_path / "run", task, settings).train()
        assert RunDirectory(tmp_path / "run").records()[-1]["step"] == (3 if start else last)
