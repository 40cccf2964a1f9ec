"""The figure of a study: every row's results with the spread of their seeds, beside the paper's or their cost."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..files import atomic_write
from .report import MIN_RANKED, Report, RowReport, measure_title

COLOURS = ("tab:red", "tab:blue", "tab:green", "tab:purple", "tab:orange", "tab:brown", "tab:pink", "tab:cyan")
"""Of measures, in order, and again from the first."""


def draw(table: Report, path: Path) -> None:
    """Write the figure as a PNG; there must be a row with a run."""
    drawn = figure(table)
    with atomic_write(path, overwrite=True) as temporary:
        drawn.savefig(temporary, format="png", dpi=120)


def figure(table: Report) -> Figure:
    """Results on the left, and beside them what they are compared with."""
    measured = [row for row in table.rows if row.measured]
    drawn = Figure(figsize=(11, 1.6 + 0.42 * len(measured)), layout="constrained")
    results, beside = drawn.subplots(1, 2, width_ratios=(3, 2))
    _draw_results(results, table, measured)
    _draw_beside(beside, table, measured)
    for axes in (results, beside):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    seeds = max(len(row.runs) for row in measured)
    drawn.suptitle(
        f"{table.study.name}, {table.scale} scale: mean and standard deviation, up to {seeds} seeds", fontsize=10
    )
    return drawn


def _draw_results(axes: Axes, table: Report, rows: list[RowReport]) -> None:
    """A line per row: a dot for each seed, the mean with the standard deviation; a colour per measure."""
    measures = table.study.measures
    for number, (name, colour) in enumerate(zip(measures, cycle(COLOURS), strict=False)):
        offset = 0.5 * (number - (len(measures) - 1) / 2) / len(measures)
        for height, row in enumerate(rows):
            measured = row.measured[name]
            seeds = [height + offset] * len(measured.values)
            axes.plot(list(measured.values.values()), seeds, ".", color=colour, alpha=0.4)
            mean, std, _ = measured.spread
            label = measure_title(name) if height == 0 else None
            axes.errorbar(mean, height + offset, xerr=std, fmt="o", color=colour, capsize=3, label=label)
    axes.set_yticks(range(len(rows)), [row.row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("%")
    if len(measures) > 1:
        axes.legend(frameon=False, fontsize=8)
    axes.set_title("ours", loc="left", fontsize=10)


def _draw_beside(axes: Axes, table: Report, rows: list[RowReport]) -> None:
    """The main measure over the paper's values, or over the training time where the paper prints too few."""
    main = table.study.measures[0]
    known = [row for row in rows if row.row.paper is not None]
    against_paper = len(known) >= MIN_RANKED
    for row in known if against_paper else rows:
        x = row.row.paper if against_paper else (row.mean("train_seconds") or 0) / 60
        assert x is not None
        mean, std, _ = row.measured[main].spread
        axes.errorbar(x, mean, yerr=std, fmt="o", color=COLOURS[0], capsize=3)
        axes.annotate(row.row.name, (x, mean), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set_xlabel("the paper's, %" if against_paper else "training, minutes")
    axes.set_ylabel(f"{measure_title(main)}, %")
    axes.margins(x=0.25, y=0.15)
    axes.set_title("ours and the paper's" if against_paper else "result and cost", loc="left", fontsize=10)
