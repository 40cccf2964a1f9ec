"""Pictures that a run leaves in its directory."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vision_longformer.training.callbacks import Pictures, curves
from vision_longformer.training.run_directory import RunDirectory

RECORDS = [
    {"step": 10, "loss": 4.0},
    {"step": 20, "loss": 2.0},
    {"step": 20, "evaluation": {"box_AP": 5.0, "box_AP50": 12.5}},
    {"step": 30, "loss": 1.0},
    {"step": 40, "evaluation": {"box_AP": 7.0, "box_AP50": 20.0}},
]


def test_curves_show_every_logged_loss_and_the_results_asked_for():
    losses, scores = curves(RECORDS, ("box_AP50", "mask_AP50")).axes
    assert losses.lines[0].get_xydata().tolist() == [[10, 4], [20, 2], [30, 1]]
    (line,) = scores.lines
    assert line.get_xydata().tolist() == [[20, 12.5], [40, 20]]
    assert [text.get_text() for text in scores.get_legend().get_texts()] == ["box AP50: 20.0"]


def test_there_are_curves_after_each_evaluation_and_pictures_of_each_new_best_model(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "")
    drawn = []
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
