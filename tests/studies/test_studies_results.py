"""Results in files, and the table that is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from study_builders import make_result, make_study

from vision_longformer.studies.declaration import Row
from vision_longformer.studies.plots import draw
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
    draw(report(STUDY, "small", _store()), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
