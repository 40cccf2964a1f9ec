"""What watches a run: callbacks in turn, events for TensorBoard, curves and pictures in the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vision_longformer.training.callbacks import Callback, CallbackList, Pictures, TensorBoard, counted, curves
from vision_longformer.training.run_directory import RunDirectory


class Noted(Callback):
    """Notes every call with its name, the callback's own name and the arguments."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self._name, self._calls = name, calls

    def on_start(self, *arguments: Any) -> None:
        self._calls.append(("on_start", self._name, *arguments))

    def on_summary(self, *arguments: Any) -> None:
        self._calls.append(("on_summary", self._name, *arguments))

    def on_step(self, *arguments: Any) -> None:
        self._calls.append(("on_step", self._name, *arguments))

    def on_log(self, *arguments: Any) -> None:
        self._calls.append(("on_log", self._name, *arguments))

    def on_eval_progress(self, *arguments: Any) -> None:
        self._calls.append(("on_eval_progress", self._name, *arguments))

    def on_evaluate(self, *arguments: Any) -> None:
        self._calls.append(("on_evaluate", self._name, *arguments))

    def on_end(self) -> None:
        self._calls.append(("on_end", self._name))


EVENTS: dict[str, tuple[Any, ...]] = {
    "on_summary": ({"data": "photos"},),
    "on_start": (1, 9, 3),
    "on_step": (2,),
    "on_log": ({"step": 2, "loss": 1.0},),
    "on_eval_progress": (4, 8),
    "on_evaluate": ({"step": 3, "evaluation": {}}, True),
    "on_end": (),
}


def test_a_list_passes_every_event_to_each_callback_in_turn() -> None:
    assert set(EVENTS) == {name for name in vars(Callback) if name.startswith("on_")}
    calls: list[tuple[Any, ...]] = []
    both = CallbackList(Noted("first", calls), Noted("second", calls))
    for event, arguments in EVENTS.items():
        getattr(both, event)(*arguments)
        getattr(Callback(), event)(*arguments)
    assert calls == [(event, name, *arguments) for event, arguments in EVENTS.items() for name in ("first", "second")]


def test_events_for_tensorboard(tmp_path: Path) -> None:
    """A resumed run repeats step 3, whose earlier event is purged."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert TensorBoard.installed()
    for start, steps, loss in ((0, (1, 2, 3), 4.0), (2, (3, 4), 1.0)):
        board = TensorBoard(tmp_path)
        board.on_start(start, 4, 2)
        for step in steps:
            board.on_log({"step": step, "lr": 0.5, "loss": loss})
        board.on_evaluate({"step": steps[-1], "epoch": 1, "evaluation": {"top1": 10.0 * steps[-1]}}, True)
        board.on_end()
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/lr", "train/loss", "evaluation/top1"}
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4.0), (2, 4.0), (3, 1.0), (4, 1.0)]
    assert [(e.step, e.value) for e in events.Scalars("evaluation/top1")] == [(4, 40.0)]


RECORDS: list[dict[str, Any]] = [
    {"step": 10, "loss": 4.0},
    {"step": 20, "loss": 2.0},
    {"step": 20, "evaluation": {"box_AP": 5.0, "box_AP50": 12.5}},
    {"step": 30, "loss": 1.0},
    {"step": 40, "evaluation": {"box_AP": 7.0, "box_AP50": 20.0}},
]


def test_curves_show_every_logged_loss_and_the_results_asked_for() -> None:
    worse = {"step": 50, "evaluation": {"box_AP50": 15.0}}
    losses, scores = curves([*RECORDS, worse], ("box_AP50", "mask_AP50")).axes
    assert losses.lines[0].get_xydata().tolist() == [[10, 4], [20, 2], [30, 1]]
    (line,) = scores.lines
    assert line.get_xydata().tolist() == [[20, 12.5], [40, 20], [50, 15]]
    assert [text.get_text() for text in scores.get_legend().get_texts()] == ["box AP50: best 20.0, last 15.0"]


def test_values_that_are_null_are_left_out_of_curves() -> None:
    records = [{"step": 1, "loss": None}, {"step": 2, "loss": 3.0}, *RECORDS[2:3], *RECORDS[4:]]
    records[2] = {"step": 20, "evaluation": {"box_AP": None}}
    losses, scores = curves(records, ("box_AP", "mask_AP")).axes
    assert losses.lines[0].get_xydata().tolist() == [[2, 3]]
    assert [line.get_xydata().tolist() for line in scores.lines] == [[[40, 7]]]


@pytest.mark.filterwarnings("error")
def test_curves_of_a_run_without_lines() -> None:
    losses, scores = curves([], ("top1",)).axes
    assert len(losses.lines[0].get_xydata()) == 0
    assert not scores.lines


def test_there_are_curves_after_each_evaluation_and_pictures_of_each_new_best_model(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "")
    drawn: list[Path] = []
    pictures = Pictures(run, ("box_AP50",), drawn.append)
    pages = []
    for record, best in zip(RECORDS, (False, False, True, False, False), strict=True):
        run.record(record)
        if "evaluation" in record:
            pictures.on_evaluate(record, best)
            with Image.open(run.path / "curves.png") as page:
                pages.append(np.asarray(page))
    assert drawn == [run.path]
    assert len(pages) == 2
    assert (pages[0] != pages[1]).any()


def test_pictures_that_cannot_be_drawn_do_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(folder: Path) -> None:
        raise OSError("no font")

    run = RunDirectory.create(tmp_path / "run", "")
    Pictures(run, ("top1",), fail).on_evaluate({"step": 40, "evaluation": {"top1": 1.0}}, True)
    assert caplog.messages == ["the pictures of step 40 could not be drawn: no font"]
    assert (run.path / "curves.png").exists()


def test_counts_in_words() -> None:
    assert [counted(1, "step"), counted(2000, "step"), counted(0.5, "epoch"), counted(1.0, "epoch")] == [
        "1 step", "2,000 steps", "0.5 epochs", "1 epoch",
    ]  # fmt: skip
