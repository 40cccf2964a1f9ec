"""Figures of a result, in the style of the paper's: time and memory over the size of the map, a line per variant."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullLocator

from .plot_bars import draw_bars
from .result import GroupResult, Result, Row
from .tasks import BATCHED_MATMUL, FULL_ATTENTION, LARGE_MATMUL

COLOURS = ("tab:red", "tab:green", "tab:blue", "tab:purple", "tab:orange", "tab:brown", "tab:pink", "tab:olive")
REFERENCE_STYLES = {FULL_ATTENTION: ("black", "--"), BATCHED_MATMUL: ("grey", ":")}
ALLOCATOR_TEXTS = {"default": "default allocator", "kept": "memory kept"}

Value = Callable[[Row], float | None]


def draw(result: Result, stem: Path) -> list[Path]:
    """A PNG per group that has anything to show, named ``stem-BENCH-GROUP.png``; returns their paths."""
    machine = result.machine
    where = f"{machine.get('gpu') or machine['cpu']}, threads: {machine['threads']}, torch {machine['torch']}"
    styles = {"lines": draw_lines, "per_token": draw_per_token, "bars": draw_bars}
    paths = []
    for group in result.groups:
        if not any(row.time for row in group.rows):
            continue
        figure = styles[group.style](group)
        figure.suptitle(f"{textwrap.fill(group.about, 150)}\n{where}", fontsize=9)
        words = [*([group.bench] if result.what != group.bench else []), *group.name.replace(",", "").split()]
        path = stem.with_name("-".join((stem.name, *dict.fromkeys(words))) + ".png")
        figure.savefig(path, dpi=130)
        paths.append(path)
    return paths


def draw_lines(group: GroupResult) -> Figure:
    """Time with each allocator, and extra memory, over the side of the map; a row of panels per mode."""
    allocators = _allocators(group)
    figure, panels = _panels(_modes(group), len(allocators) + 1)
    for mode, row in zip(_modes(group), panels, strict=True):
        for axes, allocator in zip(row, allocators, strict=False):
            if axes is not row[0]:
                axes.sharey(row[0])
            _lines(axes, group, mode, partial(_milliseconds, allocator=allocator))
            _spread(axes, group, mode, allocator)
            _finish(axes, group, f"{mode}: ms, {ALLOCATOR_TEXTS[allocator]}")
        _lines(row[-1], group, mode, partial(_memory, kinds=("extra",)))
        _floor(row[-1], group, mode, partial(_memory, kinds=("inputs", "outputs")))
        _finish(row[-1], group, f"{mode}: extra memory in MB")
    _legend(figure, panels)
    return figure


def draw_per_token(group: GroupResult) -> Figure:
    """Time per token, the same relative to the baseline map with a band of 15%, and extra memory per token."""
    figure, panels = _panels(_modes(group), 3)
    for mode, (absolute, relative, memory) in zip(_modes(group), panels, strict=True):
        _lines(absolute, group, mode, _nanoseconds_per_token)
        _finish(absolute, group, f"{mode}: ns per token, default allocator")
        for allocator, style in zip(_allocators(group), ("-", "--"), strict=False):
            _lines(relative, group, mode, partial(_relative, allocator=allocator), style)
        relative.axhspan(0.85, 1.15, color="0.9", zorder=0)
        _finish(relative, group, f"{mode}: time per token, relative (dashed: memory kept)")
        relative.set_yscale("linear")
        relative.yaxis.set_major_locator(AutoLocator())
        relative.set_ylim(0, max(2.0, relative.get_ylim()[1]))
        _lines(memory, group, mode, partial(_bytes_per_token, kinds=("extra",)))
        _floor(memory, group, mode, partial(_bytes_per_token, kinds=("inputs", "outputs")))
        _finish(memory, group, f"{mode}: extra bytes per token")
    _legend(figure, panels)
    return figure


def _milliseconds(row: Row, allocator: str, which: str = "median") -> float | None:
    return 1e3 * row.time[allocator][which] if allocator in row.time else None


def _nanoseconds_per_token(row: Row) -> float | None:
    return 1e9 * row.per_unit("default") if "default" in row.time else None


def _relative(row: Row, allocator: str) -> float | None:
    speedup = row.time.get(allocator, {}).get("speedup")
    return 1 / speedup if speedup else None


def _memory(row: Row, kinds: Sequence[str]) -> float | None:
    return sum(row.memory[kind] for kind in kinds) / 1e6 if row.memory else None


def _bytes_per_token(row: Row, kinds: Sequence[str]) -> float | None:
    return sum(row.memory[kind] for kind in kinds) / row.task.units if row.memory else None


def _panels(modes: Sequence[str], columns: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.6 * columns, 3.7 * len(modes) + 0.9), layout="constrained")
    return figure, figure.subplots(len(modes), columns, squeeze=False)


def _lines(axes: Axes, group: GroupResult, mode: str, value: Value, style: str | None = None) -> None:
    """A line for each variant through the points where it was measured."""
    for variant in _variants(group):
        points = _points(group, mode, variant, value)
        colour, own_style = _line_style(group, variant)
        label = None if style == "--" else variant
        if points:
            axes.plot(
                *zip(*points, strict=True), color=colour, linestyle=style or own_style, marker="o", ms=3, label=label
            )


def _spread(axes: Axes, group: GroupResult, mode: str, allocator: str) -> None:
    """Quartiles as a shade around the lines."""
    for variant in _variants(group):
        low = _points(group, mode, variant, partial(_milliseconds, allocator=allocator, which="q1"))
        high = _points(group, mode, variant, partial(_milliseconds, allocator=allocator, which="q3"))
        if low:
            sides, lows = zip(*low, strict=True)
            colour = _line_style(group, variant)[0]
            axes.fill_between(sides, lows, [y for _, y in high], color=colour, alpha=0.15, linewidth=0)


def _floor(axes: Axes, group: GroupResult, mode: str, value: Value) -> None:
    """Inputs and outputs, the least there can be."""
    points = {point for variant in _variants(group) for point in _points(group, mode, variant, value)}
    if points:
        sides, values = zip(*sorted(points), strict=True)
        axes.plot(sides, values, color="0.5", linestyle="-.", linewidth=1, label="inputs + outputs")


def _finish(axes: Axes, group: GroupResult, title: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("feature map (tokens)", fontsize=8)
    sizes = {_side(row): f"{row.task.work.height}×{row.task.work.width}" for row in group.rows}
    sides = sorted(sizes)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sides, [sizes[side] for side in sides], rotation=30)
    axes.set_xlim(sides[0] / 1.1, sides[-1] * 1.1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=7)
    axes.grid(True, alpha=0.25, linewidth=0.5)


def _legend(figure: Figure, panels: Any) -> None:
    """One for all panels, below them."""
    entries: dict[str, Any] = {}
    for axes in panels.flat:
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = min(6, len(entries))
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns, fontsize=8)


def _points(group: GroupResult, mode: str, variant: str, value: Value) -> list[tuple[float, float]]:
    rows = [row for row in group.rows if row.task.mode == mode and row.task.variant == variant]
    pairs = [(_side(row), value(row)) for row in rows]
    return sorted((side, y) for side, y in pairs if y)


def _side(row: Row) -> float:
    return math.sqrt(row.task.work.height * row.task.work.width)


def _modes(group: GroupResult) -> list[str]:
    return list(dict.fromkeys(row.task.mode for row in group.rows))


def _variants(group: GroupResult) -> list[str]:
    """Those that were measured; the large matrix product does not depend on the map."""
    measured = [row.task.variant for row in group.rows if row.time]
    return [name for name in dict.fromkeys(measured) if name != LARGE_MATMUL]


def _line_style(group: GroupResult, variant: str) -> tuple[str, str]:
    if variant in REFERENCE_STYLES:
        return REFERENCE_STYLES[variant]
    index = [name for name in _variants(group) if name not in REFERENCE_STYLES].index(variant)
    return COLOURS[index % len(COLOURS)], "-" if index < len(COLOURS) else "--"


def _allocators(group: GroupResult) -> list[str]:
    return list(dict.fromkeys(name for row in group.rows for name in row.time))
