"""The terminal during training, on a clock that only the test advances."""

from __future__ import annotations

import pytest

from vision_longformer.cli import training
from vision_longformer.cli.training import TrainingProgress, _speed, duration, print_skipped, run_training


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3600 + 12 * 60 + 50, "1 h 12 min"),
        (3 * 86400 + 4 * 3600 + 59 * 60, "3 days 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(training, "time", clock)
    return clock


def _logged(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1.23456, "accuracy": 12.34, "images_per_second": 99.6}


def test_lines_without_a_terminal(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Resumed at step 20 of 100, of 30 an epoch: 20 steps in 40 s leave 60 steps, two minutes.

    Metrics are printed if nothing was for half a minute.
    """
    progress = TrainingProgress("top1")
    progress.on_start(20, 100, 30)
    clock.now += 20
    progress.on_log(_logged(30))
    clock.now += 20
    progress.on_log(_logged(40))
    clock.now += 20
    progress.on_log(_logged(50))
    progress.on_evaluate({"step": 60, "epoch": 2, "evaluation": {"top1": 45.678, "top5": 90.0}}, best=True)
    progress.on_evaluate({"step": 100, "epoch": 4, "evaluation": {"top1": 44.0, "top5": 90.0}}, best=False)
    progress.on_end()
    metrics = "loss 1.235  accuracy 12.3%  100 images/s"
    assert capsys.readouterr().err.splitlines() == [
        "resuming from step 20 of 100",
        f"step 40 of 100  {metrics}  2 min 0 s left",
        f"epoch 2 of 4  {metrics}  top1 45.68% (best)  1 min 0 s left",
        f"epoch 4 of 4  {metrics}  top1 44.00%  done",
    ]


@pytest.mark.parametrize(
    ("recipe", "output", "changes", "refused"),
    [
        ("quickstart", None, {}, "quickstart"),
        (None, "elsewhere", {"epochs": 3}, "--output"),
        (None, None, {"min_lr": 1.0}, "--min-lr"),
    ],
)
def test_a_resumed_run_takes_nothing_but_epochs(
    recipe: str | None, output: str | None, changes: dict[str, float], refused: str
) -> None:
    from vision_longformer.classification.task import ClassificationTask

    with pytest.raises(ValueError, match=f"as it was started; only --epochs may be added; leave out {refused}$"):
        run_training(ClassificationTask, recipe, "runs/a-1", output, changes, "vil train")


@pytest.mark.parametrize(
    ("results", "line"),
    [
        ({"skipped": 0, "skipped_in_training": 0}, ""),
        ({"top1": 50.0}, ""),
        (
            {"skipped": 1, "skipped_in_training": 0},
            "skipped as unreadable: 1 image in evaluation; 'vil check' lists them",
        ),
        (
            {"skipped": 1, "skipped_in_training": 12},
            "skipped as unreadable: 12 images in training and 1 image in evaluation; 'vil check' lists them",
        ),
    ],
)
def test_skipped_images_are_counted_at_the_end(
    results: dict[str, float], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_skipped(results, "vil check")
    assert capsys.readouterr().out.strip() == line


@pytest.mark.parametrize(("speed", "text"), [(99.6, "100 images/s"), (1.4, "1 images/s"), (0.4, "40.0 s/step")])
def test_slow_runs_count_seconds(speed: float, text: str) -> None:
    """Steps of 16 images."""
    assert _speed({"images_per_second": speed, "seconds_per_step": 16 / speed}) == text
