"""Results in files, and the table that is made of them."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from PIL import Image
from study_builders import make_result, make_study

from vision_longformer.studies.declaration import Row
from vision_longformer.studies.plots import draw, figure
from vision_longformer.studies.report import notes, report, table_cells, table_columns
from vision_longformer.studies.results import ResultStore

STUDY = make_study(
    Row("a", 70.0),
    Row("b", 72.0, {"small": {"lr": 5e-3}}),
    Row("c", 71.0, {"small": {"lr": 6e-3}}),
    Row("d", None, {"small": {"lr": 7e-3}}),
    Row("e", 60.0, {"small": {"learning_rate": 7e-3}}),
)
A, B, C, *_ = STUDY.rows


def _store() -> ResultStore:
    """b is 1 and 3 above a; c has one seed; d and e have none."""
    values = (A, 0, 40.0), (A, 1, 41.0), (B, 0, 41.0), (B, 1, 44.0), (C, 1, 39.0)
    return ResultStore(make_result(STUDY, row, seed, top1=value) for row, seed, value in values)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    store = _store()
    store.write(STUDY, "small", tmp_path)
    again = ResultStore.read([tmp_path], "small")
    assert again.of_row(STUDY, B, "small") == store.of_row(STUDY, B, "small")
    assert sorted(json.loads((tmp_path / "small" / "rates.json").read_text())["rows"]) == ["a", "b", "c"]


def test_own_results_come_before_shipped_ones(tmp_path: Path) -> None:
    for folder, value in (("shipped", 1.0), ("own", 2.0)):
        ResultStore([make_result(STUDY, A, 0, top1=value)]).write(STUDY, "small", tmp_path / folder)
    found = ResultStore.read([tmp_path / "shipped", tmp_path / "own"], "small").find(STUDY, A, "small", 0)
    assert found is not None
    assert found.metrics["top1"] == 2.0


def test_the_same_run_in_another_study_counts() -> None:
    """By what was run, not by the names of study and row; a study that needs more of it runs it again."""
    other = make_study(Row("usual"))
    assert _store().find(other, other.rows[0], "small", 1) is not None
    larger = make_study(Row("usual"), sizes=(2,))
    assert _store().find(larger, larger.rows[0], "small", 1) is None


def test_a_changed_declaration_has_no_results() -> None:
    longer = make_study(*STUDY.rows, steps=4)
    assert _store().of_row(longer, longer.rows[0], "small") == {}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "rates.json").write_text('{"rows": {"a": {}}}')
    with pytest.raises(ValueError, match=r"rates\.json does not hold results of a study"):
        ResultStore.read([tmp_path], "small")


def test_table() -> None:
    """b - a is 1 and 3: mean 2, standard deviation √2, half-width 12.706 · √2 / √2. Costs are 120 s and 50 MB."""
    table = report(STUDY, "small", _store(), {"d": "seed 0: the loss is nan"})
    costs = ["2.00", "30.0", "2.0", "50"]
    assert [table_cells(table, row) for row in table.rows] == [
        ["a", "40.50 ± 0.71", "baseline", "2", "70", *costs],
        ["b", "42.50 ± 2.12", "+2.00 ± 12.71", "2", "72", *costs],
        ["c", "39.00", "-2.00", "1", "71", *costs],
        ["d", "–", "–", "0", "–", "–", "–", "–", "–"],
        ["e", "–", "–", "0", "60", "–", "–", "–", "–"],
    ]
    assert len(table_columns(STUDY)) == 9
    assert table.holes[0] == "d: seed 0: the loss is nan"
    assert "unknown key 'learning_rate'" in table.holes[1]


def test_rank_correlation() -> None:
    """Ours rank c, a, b and the paper a, c, b: d² of 1, 1 and 0, so 1 - 6 · 2 / 24; d has no value of the paper."""
    table = report(STUDY, "small", _store())
    assert table.correlation == pytest.approx((0.5, 3))
    assert any("0.50 over 3 rows" in line for line in notes(table))
    two = make_study(A, B)
    assert report(two, "small", _store()).correlation is None


def test_table_as_data() -> None:
    data = report(STUDY, "small", _store()).to_dict()
    assert data["spearman"] == {"value": pytest.approx(0.5), "rows": 3}
    difference = data["rows"][1]["top1"]["difference"]
    assert difference == {"mean": 2.0, "half_width": pytest.approx(12.7062, abs=1e-4), "samples": 2}
    assert data["rows"][1]["top1"]["values"] == {"0": 41.0, "1": 44.0}
    assert json.loads(json.dumps(data)) == data


def test_figure(tmp_path: Path) -> None:
    """A dot for each seed on the left, the means on both sides; two rows have a deviation, √½ of 40 and 41, and √4.5 of
    41 and 44."""
    table = report(STUDY, "small", _store())
    results, beside = figure(table).axes
    assert [label.get_text() for label in results.get_yticklabels()] == ["a", "b", "c"]
    dots = [line for line in results.lines if line.get_marker() == "."]
    assert [np.asarray(dot.get_xydata()).tolist() for dot in dots] == [
        [[40, 0], [41, 0]], [[41, 1], [44, 1]], [[39, 2]],
    ]  # fmt: skip
    assert _means(results) == [(40.5, 0), (42.5, 1), (39.0, 2)]
    assert _bars(results) == [pytest.approx([40.5 - sqrt(0.5), 40.5 + sqrt(0.5)]),
                              pytest.approx([42.5 - sqrt(4.5), 42.5 + sqrt(4.5)])]  # fmt: skip
    assert _means(beside) == [(70.0, 40.5), (72.0, 42.5), (71.0, 39.0)]
    assert [text.get_text() for text in beside.texts] == ["a", "b", "c"]
    assert (results.get_xlabel(), beside.get_xlabel(), beside.get_ylabel()) == ("%", "the paper's, %", "top-1, %")
    draw(table, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (11 * 120, round((1.6 + 3 * 0.42) * 120))


def test_figure_of_results_and_cost() -> None:
    """Two values of the paper are too few: the x axis is minutes of training, 120 seconds of each."""
    beside = figure(report(make_study(A, B), "small", _store())).axes[1]
    assert _means(beside) == [(2.0, 40.5), (2.0, 42.5)]
    assert beside.get_xlabel() == "training, minutes"


def test_figure_of_many_sizes() -> None:
    """Nine measures lie side by side, over half of the row's height."""
    study = make_study(Row("a"), sizes=(1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3))
    metrics = {name: 40.0 + number for number, name in enumerate(study.measures)}
    results = figure(report(study, "small", ResultStore([make_result(study, study.rows[0], 0, **metrics)]))).axes[0]
    assert _means(results) == [pytest.approx((40 + number, (number - 4) / 18)) for number in range(9)]


def _bars(axes: Axes) -> list[list[float]]:
    """The ends of the error bars along x."""
    bars = [bar.lines[2][0] for bar in axes.containers if isinstance(bar, ErrorbarContainer) and bar.has_xerr]
    return [[float(x) for x, _ in bar.get_segments()[0]] for bar in bars]


def _means(axes: Axes) -> list[tuple[float, float]]:
    """The points with error bars."""
    points = [bar.lines[0] for bar in axes.containers if isinstance(bar, ErrorbarContainer)]
    return [tuple(np.asarray(point.get_xydata())[0].tolist()) for point in points]
