"""Figures of a result, in the style of the paper's: lines of time and memory over the size of the map, a line per
variant; bars where no axis connects the points, as for shapes of models and whole models."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullLocator

from .cases import BATCHED_MATMUL, FULL_ATTENTION, LARGE_MATMUL
from .results import ALLOCATOR_TEXTS, GroupResult, Result, Row
from .timing import OUT_OF_TIME

LINE_COLOURS = ("tab:red", "tab:green", "tab:blue", "tab:purple", "tab:orange", "tab:brown", "tab:pink", "tab:olive")
REFERENCE_STYLES = {FULL_ATTENTION: ("black", "--"), BATCHED_MATMUL: ("grey", ":")}
SPEED_BARS = (("default", "tab:blue", -0.2), ("kept", "tab:cyan", 0.2))
"""Allocator, colour and offset of the bars of a row."""
MEMORY_COLOUR, FLOOR_COLOUR = "tab:orange", "0.75"
MISSING_TEXT, SINGLE_TEXT = "not measured", "timed once"

Value = Callable[[Row], float | None]


def draw(result: Result, stem: Path) -> list[Path]:
    """A PNG per group that has anything to show, named ``stem-BENCH-GROUP.png``; returns their paths."""
    machine = result.machine
    where = f"{machine.get('gpu') or machine['cpu']}, threads: {machine['threads']}, torch {machine['torch']}"
    styles = {"lines": _draw_lines, "per_token": _draw_per_token, "bars": _draw_bars}
    paths = []
    for group in result.groups:
        if not any(row.time for row in group.rows):
            continue
        figure = styles[group.style](group)
        figure.suptitle("\n".join([textwrap.fill(group.about, 150), where, *_unmeasured(group)]), fontsize=9)
        words = [*([group.bench] if result.what != group.bench else []), *group.name.replace(",", "").split()]
        path = stem.with_name("-".join((stem.name, *dict.fromkeys(words))) + ".png")
        figure.savefig(path, dpi=130)
        paths.append(path)
    return paths


def _modes(group: GroupResult) -> list[str]:
    return list(dict.fromkeys(row.case.mode for row in group.rows))


def _allocators(group: GroupResult) -> list[str]:
    return list(dict.fromkeys(name for row in group.rows for name in row.time))


def _variants(rows: Sequence[Row]) -> list[str]:
    """Those that were measured; the large matrix product does not depend on the point."""
    measured = [row.case.variant for row in rows if row.time]
    return [name for name in dict.fromkeys(measured) if name != LARGE_MATMUL]


def _unmeasured(group: GroupResult) -> list[str]:
    """A line about the variants that were not measured anywhere, which therefore are not in the figure."""
    measured = {row.case.variant for row in group.rows if row.time}
    words = {row.case.variant: missing_word(row) for row in group.rows if row.case.variant not in measured}
    texts = [f"{variant} ({word})" for variant, word in words.items()]
    return [textwrap.fill(f"not measured: {', '.join(texts)}", 150)] if texts else []


def missing_word(row: Row) -> str:
    """Why a value of a row is missing, in a word or two; the table has the whole sentence."""
    reasons = " ".join(row.reasons)
    if OUT_OF_TIME in reasons:
        return "no time"
    if re.search(r"\bmemory\b|\d GB\b", reasons):
        return "out of memory"
    return "refused" if reasons else "—"


# Lines


def _draw_lines(group: GroupResult) -> Figure:
    """Time with each allocator, and extra memory, over the size of the map; a row of panels per mode."""
    allocators = _allocators(group)
    unit = "s" if group.unit == "pixel" else "ms"
    figure, panels = _line_panels(_modes(group), len(allocators) + 1)
    for mode, row in zip(_modes(group), panels, strict=True):
        for axes, allocator in zip(row, allocators, strict=False):
            if axes is not row[0]:
                axes.sharey(row[0])
            value = partial(_time, allocator=allocator, unit=unit)
            _plot_variants(axes, group, mode, value)
            _shade_quartiles(axes, group, mode, value)
            _mark_single(axes, group, mode, value, allocator)
            _finish_lines(axes, group, f"{mode}: {unit}, {ALLOCATOR_TEXTS[allocator]}", unit)
        _plot_variants(row[-1], group, mode, partial(_megabytes, parts=("extra",)))
        if group.unit != "pixel":  # models have weights of their own
            _plot_floor(row[-1], group, mode, partial(_megabytes, parts=("inputs", "outputs")))
        _finish_lines(row[-1], group, f"{mode}: extra memory in MB", "MB")
    _line_legend(figure, panels)
    return figure


def _draw_per_token(group: GroupResult) -> Figure:
    """Time per token, the same relative to the baseline map with a band of 15%, and extra memory per token."""
    figure, panels = _line_panels(_modes(group), 3)
    for mode, (absolute, relative, memory) in zip(_modes(group), panels, strict=True):
        _plot_variants(absolute, group, mode, _nanoseconds_per_token)
        _mark_single(absolute, group, mode, _nanoseconds_per_token, "default")
        _finish_lines(absolute, group, f"{mode}: ns per token, default allocator", "ns per token")
        for allocator, style in zip(_allocators(group), ("-", "--"), strict=False):
            _plot_variants(relative, group, mode, partial(_relative_time, allocator=allocator), style)
        relative.axhspan(0.85, 1.15, color="0.9", zorder=0)
        _finish_lines(relative, group, f"{mode}: time per token, relative (dashed: memory kept)", "times the baseline")
        relative.set_yscale("linear")
        relative.yaxis.set_major_locator(AutoLocator())
        relative.set_ylim(0, max(2.0, relative.get_ylim()[1]))
        _plot_variants(memory, group, mode, partial(_bytes_per_token, parts=("extra",)))
        _plot_floor(memory, group, mode, partial(_bytes_per_token, parts=("inputs", "outputs")))
        _finish_lines(memory, group, f"{mode}: extra bytes per token", "bytes per token")
    _line_legend(figure, panels)
    return figure


def _time(row: Row, allocator: str, unit: str, statistic: str = "median") -> float | None:
    """In s or ms."""
    return {"s": 1, "ms": 1e3}[unit] * row.time[allocator][statistic] if allocator in row.time else None


def _nanoseconds_per_token(row: Row) -> float | None:
    return 1e9 * row.per_unit("default") if "default" in row.time else None


def _relative_time(row: Row, allocator: str) -> float | None:
    speedup = row.time.get(allocator, {}).get("speedup")
    return 1 / speedup if speedup else None


def _megabytes(row: Row, parts: Sequence[str]) -> float | None:
    return sum(row.memory[part] for part in parts) / 1e6 if row.memory else None


def _bytes_per_token(row: Row, parts: Sequence[str]) -> float | None:
    return sum(row.memory[part] for part in parts) / row.case.units if row.memory else None


def _line_panels(modes: Sequence[str], columns: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.6 * columns, 3.7 * len(modes) + 0.9), layout="constrained")
    return figure, figure.subplots(len(modes), columns, squeeze=False)


def _plot_variants(axes: Axes, group: GroupResult, mode: str, value: Value, style: str | None = None) -> None:
    """A line for each variant through the points where it was measured, and a mark at the bottom where it was not."""
    for variant in _variants(group.rows):
        points = _points(group, mode, variant, value)
        if style != "--":
            _mark_missing(axes, group, mode, variant, value)
        if not points:
            continue
        sides, values = zip(*points, strict=True)
        colour, own_style = _line_style(group, variant)
        label = None if style == "--" else variant
        axes.plot(sides, values, color=colour, linestyle=style or own_style, marker="o", ms=3, label=label)


def _mark_missing(axes: Axes, group: GroupResult, mode: str, variant: str, value: Value) -> None:
    """A hollow square with the reason, in the variant's colour and at its own height above the axis."""
    colour, _ = _line_style(group, variant)
    height = 0.03 + 0.05 * _variants(group.rows).index(variant)
    for row in group.rows:
        if (row.case.mode, row.case.variant) == (mode, variant) and not value(row):
            bottom = axes.get_xaxis_transform()
            style: dict[str, Any] = {"marker": "s", "linestyle": "", "ms": 4, "mfc": "none", "mec": colour}
            mark = Line2D([_side(row)], [height], transform=bottom, label=MISSING_TEXT, **style)
            axes.add_artist(mark)  # unlike plot, without a say in the limits of the axes
            axes.text(_side(row), height, f"{missing_word(row)}  ", fontsize=5, ha="right", va="center",
                      color=colour, transform=bottom)  # fmt: skip


def _mark_single(axes: Axes, group: GroupResult, mode: str, value: Value, allocator: str) -> None:
    """A ring around what was timed once, of which no spread is known."""
    single = [row for row in group.rows if row.case.mode == mode and row.time.get(allocator, {}).get("rounds") == 1]
    points = [(_side(row), value(row)) for row in single if row.case.variant in _variants(group.rows)]
    if points:
        sides, values = zip(*points, strict=True)
        axes.plot(sides, values, "D", ms=7, mfc="none", mec="black", mew=0.6, label=SINGLE_TEXT)


def _shade_quartiles(axes: Axes, group: GroupResult, mode: str, value: Callable[..., float | None]) -> None:
    for variant in _variants(group.rows):
        low = _points(group, mode, variant, partial(value, statistic="q1"))
        high = _points(group, mode, variant, partial(value, statistic="q3"))
        if low:
            sides, lows = zip(*low, strict=True)
            colour, _ = _line_style(group, variant)
            axes.fill_between(sides, lows, [y for _, y in high], color=colour, alpha=0.15, linewidth=0)


def _plot_floor(axes: Axes, group: GroupResult, mode: str, value: Value) -> None:
    """Inputs and outputs, the least there can be."""
    points = {point for variant in _variants(group.rows) for point in _points(group, mode, variant, value)}
    if points:
        sides, values = zip(*sorted(points), strict=True)
        axes.plot(sides, values, color="0.5", linestyle="-.", linewidth=1, label="inputs + outputs")


def _points(group: GroupResult, mode: str, variant: str, value: Value) -> list[tuple[float, float]]:
    """(side of the map, value) where there is one, by side."""
    rows = [row for row in group.rows if row.case.mode == mode and row.case.variant == variant]
    pairs = [(_side(row), value(row)) for row in rows]
    return sorted((side, y) for side, y in pairs if y)


def _side(row: Row) -> float:
    """Of a square with as many tokens as the map."""
    return math.sqrt(row.case.workload.height * row.case.workload.width)


def _size_text(row: Row, unit: str) -> str:
    workload = row.case.workload
    return f"{row.case.units / 1e6:.3g}" if unit == "pixel" else f"{workload.height}×{workload.width}"


def _line_style(group: GroupResult, variant: str) -> tuple[str, str]:
    if variant in REFERENCE_STYLES:
        return REFERENCE_STYLES[variant]
    index = [name for name in _variants(group.rows) if name not in REFERENCE_STYLES].index(variant)
    return LINE_COLOURS[index % len(LINE_COLOURS)], "-" if index < len(LINE_COLOURS) else "--"


def _finish_lines(axes: Axes, group: GroupResult, title: str, unit: str) -> None:
    """Title and logarithmic axes, the sizes of the maps below."""
    axes.set_ylabel(unit, fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("megapixels" if group.unit == "pixel" else "feature map (tokens)", fontsize=8)
    sizes = {_side(row): _size_text(row, group.unit) for row in group.rows}
    sides = sorted(sizes)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sides, [sizes[side] for side in sides], rotation=30)
    axes.set_xlim(sides[0] / 1.1, sides[-1] * 1.1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=7)
    axes.grid(True, alpha=0.25, linewidth=0.5)


def _line_legend(figure: Figure, panels: Any) -> None:
    """One for all panels, below them."""
    entries: dict[str, Any] = {}
    for axes in panels.flat:
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    entries |= {label: entries.pop(label) for label in (SINGLE_TEXT, MISSING_TEXT) if label in entries}  # to the end
    columns = min(len(entries), max(1, int(14 * figure.get_figwidth() / (8 + max(map(len, entries))))))
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns, fontsize=8)


# Bars


def _draw_bars(group: GroupResult) -> Figure:
    """A row of panels per point: for each mode the speed with each allocator, and the memory."""
    points, modes = list(dict.fromkeys(row.case.point for row in group.rows)), _modes(group)
    asked = {(row.case.point, row.case.variant) for row in group.rows}
    variants = {point: [name for name in _variants(group.rows) if (point, name) in asked] for point in points}
    heights = [0.32 * len(variants[point]) + 0.9 for point in points]
    figure = Figure(figsize=(2.4 + 5.6 * len(modes), sum(heights) + 1.1), layout="constrained")
    ratios = {"height_ratios": heights}
    panels = figure.subplots(len(points), 2 * len(modes), squeeze=False, sharey="row", gridspec_kw=ratios)
    speed_text, memory_text = ("images/s", "peak memory in MB") if _images(group) else ("ms", "extra memory in MB")
    for point, point_panels in zip(points, panels, strict=True):
        for mode, speed, memory in zip(modes, point_panels[::2], point_panels[1::2], strict=True):
            rows = [group.find(point, variant, mode) for variant in variants[point]]
            _speed_bars(speed, rows, group)
            _memory_bars(memory, rows, group)
            speed.set_title(f"{point}\n{mode}: {speed_text}", fontsize=8)
            memory.set_title(f"{point}\n{mode}: {memory_text}", fontsize=8)
        _finish_bars(point_panels[::2], variants[point], "images/s" if _images(group) else "ms")
        _finish_bars(point_panels[1::2], variants[point], "MB")
    entries = [axes.get_legend_handles_labels() for axes in panels[0][:2]]
    handles, labels = ([item for entry in entries for item in entry[index]] for index in (0, 1))
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _images(group: GroupResult) -> bool:
    return group.unit == "image"


def _speed_bars(axes: Axes, rows: list[Row | None], group: GroupResult) -> None:
    for allocator, colour, offset in SPEED_BARS:
        values = [_speed(row, allocator, group) for row in rows]
        if any(values):
            single = [row is not None and row.time.get(allocator, {}).get("rounds") == 1 for row in rows]
            notes = [missing_word(row) if row else "—" for row in rows]
            _bars(axes, values, offset, 0.38, colour, ALLOCATOR_TEXTS[allocator], notes, single)


def _speed(row: Row | None, allocator: str, group: GroupResult) -> float:
    """Images per second, or milliseconds; 0 where not measured."""
    if row is None or allocator not in row.time:
        return 0.0
    return 1 / row.per_unit(allocator) if _images(group) else 1e3 * row.time[allocator]["median"]


def _memory_bars(axes: Axes, rows: list[Row | None], group: GroupResult) -> None:
    """Extra memory with inputs and outputs beside it; of a model the peak, weights and images being part of it."""
    memory = [(row and row.memory) or {"extra": 0, "inputs": 0, "outputs": 0} for row in rows]
    images = _images(group)
    values = [(m["extra"] + (m["inputs"] if images else 0)) / 1e6 for m in memory]
    floors = [(m["inputs"] + (0 if images else m["outputs"])) / 1e6 for m in memory]
    notes = ["" if row and row.memory else missing_word(row) if row else "—" for row in rows]
    _bars(axes, values, -0.1, 0.5, MEMORY_COLOUR, "memory", notes, [False] * len(rows))
    label = "weights and images" if images else "inputs + outputs"
    axes.barh([index + 0.27 for index in range(len(rows))], floors, 0.2, color=FLOOR_COLOUR, label=label)


def _bars(
    axes: Axes, values: list[float], offset: float, height: float, colour: str, label: str, notes: list[str],
    single: list[bool],
) -> None:  # fmt: skip
    """Bars with their values at the end; in place of a missing one its note."""
    bars = axes.barh([index + offset for index in range(len(values))], values, height, color=colour, label=label)
    texts = [(f"{value:.0f}" if value >= 100 else f"{value:.3g}") if value else "" for value in values]
    axes.bar_label(
        bars, [text + " (once)" * one for text, one in zip(texts, single, strict=True)], fontsize=6, padding=2
    )
    for index, (value, note) in enumerate(zip(values, notes, strict=True)):
        if not value:
            left = axes.get_yaxis_transform()
            axes.text(0.01, index + offset, note, fontsize=6, va="center", color=colour, transform=left)


def _finish_bars(panels: Sequence[Axes], variants: list[str], unit: str) -> None:
    """Names, and the same axis in all panels: logarithmic where the shortest bars would vanish beside the longest."""
    patches = [patch for axes in panels for patch in axes.patches]
    lengths = [bar.get_width() for bar in patches if isinstance(bar, Rectangle) and bar.get_width() > 0]
    for axes in panels:
        axes.set_yticks(range(len(variants)), variants, fontsize=7)
        axes.set_ylim(len(variants) - 0.4, -0.6)
        axes.set_xlabel(unit, fontsize=7)
        if lengths and max(lengths) > 40 * min(lengths):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlim(min(lengths) / 3, 4 * max(lengths))
        elif lengths:
            axes.set_xlim(0, 1.35 * max(lengths))
        axes.tick_params(axis="x", labelsize=6)
        axes.grid(True, axis="x", alpha=0.3, linewidth=0.5)
