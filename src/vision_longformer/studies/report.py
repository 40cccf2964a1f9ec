"""The table of a study: results with their spread, differences to the baseline, costs, the paper's column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from .declaration import Row, Study
from .results import ResultStore, RunResult
from .statistics import CONFIDENCE, Difference, Spread, paired_difference, spearman, spread

MISSING = "–"
MIN_RANKED = 3
"""Rows with a value of the paper from which on a rank correlation is stated."""


class Measured(NamedTuple):
    """A result of a row: values by seed, their spread, and the difference to the baseline (None for that itself)."""

    values: dict[int, float]
    spread: Spread
    difference: Difference | None


@dataclass(frozen=True)
class RowReport:
    """A row of the table. ``measured`` is by measure, and empty if there is no run; ``problem`` says why."""

    row: Row
    runs: tuple[RunResult, ...]
    measured: Mapping[str, Measured]
    problem: str

    def mean(self, name: str) -> float | None:
        """The mean of a cost over the runs."""
        return fmean(getattr(run, name) for run in self.runs) if self.runs else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        data: dict[str, Any] = {"row": self.row.name, "paper": self.row.paper, "problem": self.problem}
        for name, measured in self.measured.items():
            difference = measured.difference
            data[name] = {
                **measured.spread._asdict(),
                "values": {str(seed): value for seed, value in measured.values.items()},
                "difference": None if difference is None else difference._asdict(),
            }
        costs = ("parameters", "macs", "train_seconds", "peak_bytes")
        return {**data, **{name: self.mean(name) for name in costs}}


@dataclass(frozen=True)
class Report:
    """A study with what its runs have come to."""

    study: Study
    scale: str
    rows: tuple[RowReport, ...]

    @property
    def correlation(self) -> tuple[float, int] | None:
        """Spearman's rank correlation of our means with the paper's column, and over how many rows."""
        main = self.study.measures[0]
        both = [(row.measured[main].spread.mean, row.row.paper) for row in self.rows if row.measured]
        pairs = [(ours, paper) for ours, paper in both if paper is not None]
        if len(pairs) < MIN_RANKED:
            return None
        value = spearman(*zip(*pairs, strict=True))
        return None if value is None else (value, len(pairs))

    @property
    def holes(self) -> list[str]:
        """A sentence for each row without a run, or with something missing."""
        return [f"{row.row.name}: {row.problem}" for row in self.rows if row.problem]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        correlation = self.correlation
        return {
            "study": self.study.name,
            "about": self.study.about,
            "scale": self.scale,
            "table": self.study.table,
            "baseline": self.study.baseline,
            "confidence": CONFIDENCE,
            "rows": [row.to_dict() for row in self.rows],
            "spearman": None if correlation is None else {"value": correlation[0], "rows": correlation[1]},
        }


def report(study: Study, scale: str, store: ResultStore, failures: Mapping[str, str] | None = None) -> Report:
    """The table of a study from the results that there are; ``failures`` says by row why some are missing."""
    runs = {row.name: store.of_row(study, row, scale) for row in study.rows if not study.problem(row, scale)}
    baseline = runs.get(study.baseline, {})
    rows = []
    for row in study.rows:
        own = {} if study.problem(row, scale) else runs[row.name]
        measured = {}
        for name in study.measures if own else ():
            values = {seed: run.metrics[name] for seed, run in own.items()}
            compared = {seed: run.metrics[name] for seed, run in baseline.items()}
            difference = None if row.name == study.baseline else paired_difference(values, compared)
            measured[name] = Measured(values, spread(list(values.values())), difference)
        problem = study.problem(row, scale) or (failures or {}).get(row.name, "") or ("" if own else "not run")
        rows.append(RowReport(row, tuple(own.values()), measured, problem))
    return Report(study, scale, tuple(rows))


# As text


def table_columns(study: Study) -> list[str]:
    """Titles of the columns of :func:`table_cells`."""
    columns = ["row"]
    for name in study.measures:
        columns += [f"{measure_title(name)}, %", f"vs baseline ({CONFIDENCE:.0%} CI)"]
    paper = ["paper"] if any(row.paper is not None for row in study.rows) else []
    return [*columns, "seeds", *paper, "M parameters", "M MACs", "training, min", "memory, MB"]


def table_cells(table: Report, row: RowReport) -> list[str]:
    """A row as texts, holes as dashes."""
    cells = [row.row.name]
    for name in table.study.measures:
        measured = row.measured.get(name)
        cells += [spread_text(measured and measured.spread), _difference_text(table, row, measured)]
    cells.append(str(len(row.runs)))
    if any(other.row.paper is not None for other in table.rows):
        cells.append(MISSING if row.row.paper is None else f"{row.row.paper:g}")
    for name, unit, digits in (
        ("parameters", 1e6, 2),
        ("macs", 1e6, 1),
        ("train_seconds", 60, 1),
        ("peak_bytes", 1e6, 0),
    ):
        value = row.mean(name)
        cells.append(MISSING if value is None else f"{value / unit:,.{digits}f}")
    return cells


def measure_title(name: str) -> str:
    """``top-1 at 1.5×``, ``box AP``."""
    return name.replace("top1", "top-1").replace("_", " ")


def spread_text(value: Spread | None) -> str:
    """``52.3 ± 0.4``."""
    if value is None:
        return MISSING
    return f"{value.mean:.2f}" + ("" if value.std is None else f" ± {value.std:.2f}")


def _difference_text(table: Report, row: RowReport, measured: Measured | None) -> str:
    """``+1.2 ± 0.5``; empty for the baseline."""
    if row.row.name == table.study.baseline:
        return "baseline"
    if measured is None or measured.difference is None:
        return MISSING
    difference = measured.difference
    return f"{difference.mean:+.2f}" + ("" if difference.half_width is None else f" ± {difference.half_width:.2f}")


def notes(table: Report) -> list[str]:
    """Sentences below the table: how to read it, the rank correlation, and what is missing."""
    gpu = any(run.on_gpu for row in table.rows for run in row.runs)
    lines = [
        "Mean ± standard deviation over seeds; differences to the baseline are paired by seed, with a "
        f"{CONFIDENCE:.0%} confidence interval by Student's t. Training time is "
        + ("elapsed time" if gpu else "processor time")
        + "; memory is the peak that training took on top of model and data."
    ]
    if table.study.task == "detection":
        lines.append("MACs are those of the backbone.")
    if table.correlation is not None:
        value, rows = table.correlation
        lines.append(f"Spearman's rank correlation with the paper's column: {value:.2f} over {rows} rows.")
    return [*lines, *(f"missing: {hole}" for hole in table.holes)]
