"""Tables of ``vil bench``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .output import print_line, print_table

if TYPE_CHECKING:
    from ..analysis.bench.result import GroupResult, Result, Row

ALLOCATOR_COLUMNS = {"default": "default allocator", "kept": "memory kept"}


def print_result(result: Result) -> None:
    """The machine, then a table per set of rows that were measured in turns, then what is missing and why."""
    machine = result.machine
    where = f"{machine['gpu']}; " if "gpu" in machine else ""
    where += f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, torch {machine['torch']}"
    print_line(f"{where}; float32; median ± half the distance of the quartiles; × is speed against the baseline")
    for group in result.groups:
        print_line("")
        print_line(f"{group.bench}: {group.about}")
        for together in dict.fromkeys(row.task.together for row in group.rows):
            _print_rows(group, [row for row in group.rows if row.task.together == together and row.time], together)
        _print_reasons(group)


def _print_rows(group: GroupResult, rows: list[Row], together: str) -> None:
    if not rows:
        return
    allocators = list(dict.fromkeys(name for row in rows for name in row.time))
    several = len({row.task.point for row in rows}) > 1
    columns = [*(["map"] if several else []), "variant", "", *(text for a in allocators for text in _heads(group, a))]
    left = len(columns) - 2 * len(allocators)
    counted = any(row.flops for row in rows) and not several
    columns += ["GFLOP/s", "of matmul"] if counted else []
    columns += ["peak MB", "weights + images"] if group.unit == "image" else ["extra MB", "in + out"]
    cells = []
    for row in rows:
        line = [row.task.point] if several else []
        line += [row.task.variant, row.task.mode]
        for allocator in allocators:
            line += _time_cells(row, allocator, group.unit)
        line += _flops_cells(group, row) if counted else []
        cells.append([*line, *_memory_cells(row, group.unit)])
    base = "; ".join(dict.fromkeys(_baseline_text(row, several) for row in rows))
    print_table(f"{together}  (1× is {base})", columns, cells, left=left)


def _baseline_text(row: Row, several: bool) -> str:
    point, variant = row.task.baseline
    return point if several else variant


def _heads(group: GroupResult, allocator: str) -> tuple[str, str]:
    what = {"call": "time", "token": "per token", "image": "images/s"}[group.unit]
    return f"{what}, {ALLOCATOR_COLUMNS[allocator]}", "×"


def _time_cells(row: Row, allocator: str, unit: str) -> list[str]:
    if allocator not in row.time:
        return ["–", ""]
    time = row.time[allocator]
    spread = f" ±{50 * (time['q3'] - time['q1']) / time['median']:2.0f}%" if time["rounds"] > 1 else "   once"
    speedup = f"{time['speedup']:.2f}×" if "speedup" in time else ""
    texts = {
        "call": f"{1e3 * time['median']:.4g} ms",
        "token": f"{1e9 * row.per_unit(allocator):.4g} ns",
        "image": f"{1 / row.per_unit(allocator):.2f}",
    }
    return [texts[unit] + spread, speedup]


def _flops_cells(group: GroupResult, row: Row) -> list[str]:
    """Useful operations with the default allocator."""
    speed, fraction = row.flops_per_second("default"), group.matmul_fraction(row, "default")
    return ["" if speed is None else f"{speed / 1e9:.1f}", "" if fraction is None else f"{100 * fraction:.0f}%"]


def _memory_cells(row: Row, unit: str) -> list[str]:
    if row.memory is None:
        return ["", ""]
    inputs, outputs, extra = (row.memory[name] / 1e6 for name in ("inputs", "outputs", "extra"))
    if unit == "image":
        return [f"{inputs + extra:.0f}", f"{inputs:.0f}"]
    return [f"{extra:.1f}", f"{inputs + outputs:.1f}"]


def _print_reasons(group: GroupResult) -> None:
    """Why something is missing, once per variant and reason; want of time is counted only."""
    from ..analysis.bench.timing import OUT_OF_TIME

    where: dict[tuple[str, str], list[str]] = {}
    for row in group.rows:
        for reason in row.reasons:
            where.setdefault((row.task.variant, reason), []).append(f"{row.task.point} {row.task.mode}")
    counts = Counter(row.task.variant for row in group.rows)
    for (variant, reason), places in where.items():
        if OUT_OF_TIME not in reason:
            at = "" if len(places) == counts[variant] else f" ({'; '.join(places)})"
            print_line(f"  {variant}: {reason}{at}")
    unfinished = sum(any(OUT_OF_TIME in reason for reason in row.reasons) for row in group.rows)
    if unfinished:
        print_line(f"  {unfinished} of {len(group.rows)} rows are not complete: {OUT_OF_TIME}; give a larger --budget")


def print_changes(earlier: Result, now: Result, path: str) -> None:
    """Ratios against an earlier result: above 1 is faster, or takes less memory, than then."""
    from ..analysis.bench.result import compare

    changes, different = compare(earlier, now)
    print_line("")
    if not changes:
        print_line(f"{path} has nothing in common with this run")
        return
    allocators = list(dict.fromkeys(name for change in changes for name in change.speed))
    columns = ["group", "point", "variant", "", *(f"speed, {ALLOCATOR_COLUMNS[a]}" for a in allocators), "memory"]
    rows = []
    for change in changes:
        task = change.row.task
        ratios = [change.speed.get(allocator) for allocator in allocators]
        numbers = ["" if ratio is None else f"{ratio:.2f}×" for ratio in (*ratios, change.memory)]
        rows.append([change.group, task.point, task.variant, task.mode, *numbers])
    print_table(f"now against {path} of {earlier.created} (above 1×: faster, leaner)", columns, rows, left=4)
    for text in different:
        print_line(f"note: {text}")
