"""Bars, for points that no axis connects: shapes of models, and models."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .result import GroupResult, Row
from .tasks import LARGE_MATMUL

KEPT, DEFAULT, MEMORY, FLOOR = "tab:cyan", "tab:blue", "tab:orange", "0.75"


def draw_bars(group: GroupResult) -> Figure:
    """A row of panels per point: for each mode the speed with each allocator, and the memory."""
    points = list(dict.fromkeys(row.task.point for row in group.rows))
    modes = list(dict.fromkeys(row.task.mode for row in group.rows))
    variants = {point: _measured(group, point) for point in points}
    heights = [0.32 * len(variants[point]) + 0.9 for point in points]
    figure = Figure(figsize=(2.4 + 5.6 * len(modes), sum(heights) + 1.1), layout="constrained")
    ratios = {"height_ratios": heights}
    panels = figure.subplots(len(points), 2 * len(modes), squeeze=False, sharey="row", gridspec_kw=ratios)
    speed_text, memory_text = ("images/s", "peak memory in MB") if _images(group) else ("ms", "extra memory in MB")
    for point, own in zip(points, panels, strict=True):
        for mode, speed, memory in zip(modes, own[::2], own[1::2], strict=True):
            rows = [group.find(point, variant, mode) for variant in variants[point]]
            _draw_speed(speed, rows, group.unit)
            _draw_memory(memory, rows, group)
            speed.set_title(f"{point}\n{mode}: {speed_text}", fontsize=8)
            memory.set_title(f"{point}\n{mode}: {memory_text}", fontsize=8)
        for axes in own:
            _finish(axes, variants[point])
    entries = [axes.get_legend_handles_labels() for axes in panels[0][:2]]
    handles, labels = ([item for entry in entries for item in entry[which]] for which in (0, 1))
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _images(group: GroupResult) -> bool:
    return group.unit == "image"


def _measured(group: GroupResult, point: str) -> list[str]:
    """Variants to draw; the large matrix product does not depend on the point."""
    rows = [row for row in group.rows if row.task.point == point and row.time]
    return [name for name in dict.fromkeys(row.task.variant for row in rows) if name != LARGE_MATMUL]


def _draw_speed(axes: Axes, rows: list[Row | None], unit: str) -> None:
    styles = (("default", DEFAULT, -0.2, "default allocator"), ("kept", KEPT, 0.2, "memory kept"))
    for allocator, colour, shift, label in styles:
        values = [_speed(row, allocator, unit) for row in rows]
        if any(values):
            _bars(axes, values, shift, 0.38, colour, label)


def _speed(row: Row | None, allocator: str, unit: str) -> float:
    """Images per second, or milliseconds; 0 where not measured."""
    if row is None or allocator not in row.time:
        return 0.0
    return 1 / row.per_unit(allocator) if unit == "image" else 1e3 * row.time[allocator]["median"]


def _draw_memory(axes: Axes, rows: list[Row | None], group: GroupResult) -> None:
    """Extra memory with inputs and outputs beside it; of a model the peak, weights and images being part of it."""
    memory = [(row and row.memory) or {"extra": 0, "inputs": 0, "outputs": 0} for row in rows]
    images = _images(group)
    values = [(m["extra"] + (m["inputs"] if images else 0)) / 1e6 for m in memory]
    floors = [(m["inputs"] + (0 if images else m["outputs"])) / 1e6 for m in memory]
    _bars(axes, values, -0.1, 0.5, MEMORY, "memory")
    label = "weights and images" if images else "inputs + outputs"
    axes.barh([index + 0.27 for index in range(len(rows))], floors, 0.2, color=FLOOR, label=label)


def _bars(axes: Axes, values: list[float], shift: float, height: float, colour: str, label: str) -> None:
    """Bars with their values at the end."""
    bars = axes.barh([index + shift for index in range(len(values))], values, height, color=colour, label=label)
    texts = [(f"{value:.0f}" if value >= 100 else f"{value:.3g}") if value else "" for value in values]
    axes.bar_label(bars, texts, fontsize=6, padding=2)


def _finish(axes: Axes, variants: list[str]) -> None:
    """Names, and a logarithmic axis where the shortest bars would vanish beside the longest."""
    axes.set_yticks(range(len(variants)), variants, fontsize=7)
    axes.set_ylim(len(variants) - 0.4, -0.6)
    lengths = [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle) and bar.get_width() > 0]
    if lengths and max(lengths) > 40 * min(lengths):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(min(lengths) / 3, 4 * max(lengths))
    elif lengths:
        axes.set_xlim(0, 1.2 * max(lengths))
    axes.tick_params(axis="x", labelsize=6)
    axes.grid(True, axis="x", alpha=0.3, linewidth=0.5)
