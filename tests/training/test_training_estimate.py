"""What a run takes, scaled up from a trial by hand."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from vision_longformer.training.estimate import Trial, scale_up, trial_step
from vision_longformer.training.recipe import TrainSettings

MODEL = nn.Linear(3, 2)
"""8 parameters of 4 bytes."""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_run_by_hand() -> None:
    """4 steps of 2 images in each of 3 epochs, 2 s an image; 3 evaluations of 5 images at a third of that."""
    settings = TrainSettings(epochs=3, batch_size=2, workers=0, warmup=0)
    plan = scale_up(settings, MODEL, "toys", 4, 5, Trial(2.0, 10))
    assert (plan.data, plan.epochs, plan.steps, plan.images) == ("toys", 3, 12, 2)
    assert plan.seconds == pytest.approx(24 * 2 + 15 * 2 / 3)
    assert plan.fixed_bytes == 4 * 32
    assert plan.bytes == 4 * 32 + 2 * 10
    assert [epoch for epoch, _ in plan.rates] == [0, 0.75, 1.5, 2.25, 2.75]


def test_processes_that_share_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pairs, each with three of six images; a process of a pair keeps half of what an image takes."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    settings = TrainSettings(epochs=1, batch_size=6, spatial=2, workers=0)
    plan = scale_up(settings, MODEL, "", 1, 1, Trial(2.0, 10))
    assert (plan.images, plan.trial.activation_bytes, plan.bytes) == (3, 5, 4 * 32 + 15)


@pytest.mark.parametrize(("workers", "loading"), [(0, 6.0), (1, 6.0), (2, 3.0), (8, 3.0)])
def test_reading_takes_time_beside_training(workers: int, loading: float) -> None:
    """On a CPU it is added, shared by the workers as far as there are cores."""
    settings = TrainSettings(epochs=1, batch_size=1, workers=workers)
    plan = scale_up(settings, MODEL, "", 2, 1, Trial(3.0, 0, reading_seconds=6.0))
    assert plan.seconds == pytest.approx(2 * (3 + loading) + (1 + loading))


def test_on_a_gpu_the_slower_of_both_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = TrainSettings(epochs=1, batch_size=1, workers=2)
    assert scale_up(settings, MODEL, "", 2, 0, Trial(3.0, 0, reading_seconds=2.0)).seconds == 6
    assert scale_up(settings, MODEL, "", 2, 0, Trial(3.0, 0, reading_seconds=8.0)).seconds == 8


def test_processes_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    plan = scale_up(TrainSettings(epochs=1, batch_size=8, accumulate=2), MODEL, "", 6, 4, Trial(1.0, 0))
    assert (plan.steps, plan.images) == (3, 1)
    assert plan.seconds == pytest.approx((24 + 4 / 3) / 4)


def test_activations_are_what_backward_keeps() -> None:
    """exp keeps its result: of 5 images, 2 numbers each; the linear layer keeps its 15 inputs; weights do not count."""
    images = torch.randn(5, 3)
    trial = trial_step(MODEL, lambda: MODEL(images).exp().sum(), images=5)
    assert trial.activation_bytes == (5 * 2 + 15) * 4 / 5
    assert trial.seconds > 0
