"""Bars, for points that no axis connects: shapes of models, and models."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .result import GroupResult, Row
from .tasks import LARGE_MATMUL

KEPT, DEFAULT, MEMORY, FLOOR = "tab:cyan", "tab:blue", "tab:orange", "0.75"


def draw_bars(group: GroupResult) -> Figure:
    """A row of panels per point: for each mode the speed with each allocator, and the memory."""
    points = list(dict.fromkeys(row.task.point for row in group.rows))
    modes = list(dict.fromkeys(row.task.mode for row in group.rows))
    most = max(len(_measured(group, point, mode)) for point in points for mode in modes)
    height = 0.3 * most + 1.0
    figure = Figure(figsize=(2.2 + 5.6 * len(modes), height * len(points) + 1.1), layout="constrained")
    panels = figure.subplots(len(points), 2 * len(modes), squeeze=False)
    for point, own in zip(points, panels, strict=True):
        for index, mode in enumerate(modes):
            rows = _measured(group, point, mode)
            speed, memory = own[2 * index], own[2 * index + 1]
            _draw_speed(speed, rows, group.unit, f"{point}\n{mode}: {'images per second' if _images(group) else 'ms'}")
            _draw_memory(memory, rows, f"{point}\n{mode}: {'peak' if _images(group) else 'extra'} memory in MB", group)
            for axes in (speed, memory):
                _finish(axes, rows, names=axes is speed)
    handles, labels = panels[0][0].get_legend_handles_labels()
    more = panels[0][1].get_legend_handles_labels()
    figure.legend([*handles, *more[0]], [*labels, *more[1]], loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _images(group: GroupResult) -> bool:
    return group.unit == "image"


def _measured(group: GroupResult, point: str, mode: str) -> list[Row]:
    rows = [row for row in group.rows if (row.task.point, row.task.mode) == (point, mode)]
    return [row for row in rows if row.time and row.task.variant != LARGE_MATMUL]


def _draw_speed(axes: Axes, rows: list[Row], unit: str, title: str) -> None:
    styles = (("default", DEFAULT, -0.2, "default allocator"), ("kept", KEPT, 0.2, "memory kept"))
    for allocator, colour, shift, label in styles:
        values = [_speed(row, allocator, unit) for row in rows]
        if any(values):
            places = [index + shift for index in range(len(rows))]
            bars = axes.barh(places, values, 0.38, color=colour, label=label)
            axes.bar_label(bars, [f"{value:.3g}" if value else "" for value in values], fontsize=6, padding=2)
    _scale(axes, unit)
    axes.set_title(title, fontsize=8)


def _speed(row: Row, allocator: str, unit: str) -> float:
    """Images per second, or milliseconds; 0 where not measured."""
    if allocator not in row.time:
        return 0.0
    return 1 / row.per_unit(allocator) if unit == "image" else 1e3 * row.time[allocator]["median"]


def _draw_memory(axes: Axes, rows: list[Row], title: str, group: GroupResult) -> None:
    """Extra memory with inputs and outputs beside it; of a model the peak, weights and images being part of it."""
    values, floors = [], []
    for row in rows:
        memory: dict[str, Any] = row.memory or {"extra": 0, "inputs": 0, "outputs": 0}
        values.append((memory["extra"] + (memory["inputs"] if _images(group) and row.memory else 0)) / 1e6)
        floors.append((memory["inputs"] + (0 if _images(group) else memory["outputs"])) / 1e6)
    bars = axes.barh([index - 0.1 for index in range(len(rows))], values, 0.5, color=MEMORY, label="memory")
    axes.bar_label(bars, [f"{value:.3g}" if value else "" for value in values], fontsize=6, padding=2)
    label = "weights and images" if _images(group) else "inputs + outputs"
    axes.barh([index + 0.27 for index in range(len(rows))], floors, 0.2, color=FLOOR, label=label)
    _scale(axes, group.unit)
    axes.set_title(title, fontsize=8)


def _scale(axes: Axes, unit: str) -> None:
    if unit != "image":
        axes.set_xscale("log")
    axes.margins(x=0.18)


def _finish(axes: Axes, rows: list[Row], *, names: bool) -> None:
    axes.set_yticks(range(len(rows)), [row.task.variant if names else "" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=6)
    axes.grid(True, axis="x", alpha=0.3, linewidth=0.5)
