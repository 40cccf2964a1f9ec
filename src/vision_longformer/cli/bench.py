"""``vil bench``: runs benchmarks, prints their tables, writes JSON and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from .output import print_line, print_table
from .parser import parse_size

if TYPE_CHECKING:
    import torch

    from ..bench.results import GroupResult, Result, Row
    from ..bench.run import Progress as ProgressCallback


def bench(
    what: str = "all",
    /,
    *,
    quick: bool = False,
    implementations: str | None = None,
    sizes: str | None = None,
    models: str | None = None,
    windows: str | None = None,
    baseline: str | None = None,
    batch: int | None = None,
    shift: bool = False,
    only: str | None = None,
    budget: float | None = None,
    threads: int | None = None,
    device: str | None = None,
    output: str = "bench-results",
    overwrite: bool = False,
    compare: str | None = None,
) -> None:
    """Measure speed and memory on this machine: a table, a JSON file and plots.

    'attention' compares implementations over map sizes, forward and backward; 'rules' compares the three masking rules,
    'windows' window sizes, 'shift' random shift and attention to all neighbours, 'models' our models and others;
    'scaling' measures the cost per token; 'large', which is not part of 'all', measures one large image, whole and
    strip by strip. Variants take turns in one process; times are medians, with half the interquartile range. Each
    variant is timed with the C library's default allocator and (but for 'large') with one that does not return memory
    to the system ('memory kept': MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ are large), so that large blocks are
    not paid for again at each call. Memory is measured in a new process. For predictions for GPUs that need not be
    present, see 'vil bench gpu --help'.

    Args:
        what: attention, rules, windows, shift, models, scaling, large or all.
        quick: fewer points and rounds; all benchmarks together take about two minutes.
        implementations: implementations of local attention, such as 'tiled,sliding_chunk'; 'vil doctor' lists them.
        sizes: maps of tokens such as '56x56,112x112'; for 'models' and 'large', image sizes.
        models: names from 'vil models' or timm.
        windows: sides of the chunks, such as '7,8,12'; the window is twice as wide, plus one.
        baseline: what others are compared with: an implementation or, for 'models', a model.
        batch: maps or images per run.
        shift: for 'models', also time random shift in training.
        only: run only figures whose name contains this, such as 'shapes' of 'attention'.
        budget: approximate time in seconds; the number of rounds is adapted to it. Without --quick, everything is timed
            at least once.
        threads: number of threads; torch's by default.
        device: cpu or cuda; cuda by default where there is one.
        output: folder for the results; an existing file is not replaced; the new one gets a number.
        overwrite: replace earlier results of the same name.
        compare: an earlier JSON file to print ratios against.
    """
    from ..bench.plans import Options, plan
    from ..bench.plots import draw
    from ..bench.results import busy_warning, load_result, new_path
    from ..bench.run import run

    options = Options(
        quick,
        _device(device),
        split_names(implementations),
        None if sizes is None else tuple(_size(size) for size in split_names(sizes) or ()),
        split_names(models),
        None if windows is None else split_numbers("windows", windows),
        baseline,
        batch,
        shift,
    )
    _check_positive("threads", threads)
    _check_positive("budget", budget)
    plans = plan(what, options, only)
    earlier = None if compare is None else load_result(compare)
    path = new_path(Path(output), what, overwrite=overwrite)
    with _progress_bar() as progress:
        result = save_all(run(what, plans, options, threads=threads, budget=budget, progress=progress), path)
    print_result(result)
    plots = draw(result, path.with_suffix(""))
    warning = busy_warning(result.machine)
    if warning:
        print_line(f"note: {warning}")
    print_line(f"wrote {path}" + "".join(f", {plot.name}" for plot in plots))
    if earlier is not None:
        print_changes(earlier, result, str(compare))


class Savable(Protocol):
    """A result, or the part of it that there is."""

    def save(self, path: Path) -> None: ...


S = TypeVar("S", bound=Savable)


def save_all(results: Iterator[S], path: Path) -> S:
    """The last of the results; each is saved as it comes, so that an interrupted run leaves what it has measured."""
    try:
        for result in results:
            result.save(path)
    except BaseException:
        if path.stat().st_size == 0:
            path.unlink()
        raise
    return result


@contextmanager
def _progress_bar() -> Iterator[ProgressCallback]:
    """A bar on stderr with the remaining time; nothing if stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    terminal = Console(stderr=True)
    columns = (BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda text, done, total: progress.update(task, description=text, completed=done, total=total)


def _device(name: str | None) -> torch.device:
    import torch

    from ..errors import check_choice

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_choice("device", name, ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; leave --device out to measure on the CPU")
    return torch.device(name)


def split_names(text: str | None) -> tuple[str, ...] | None:
    """``"a,b"`` as names."""
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError(f"a list of names is {text!r}; write them separated by commas")
    return names


def _size(text: str) -> tuple[int, int]:
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError(f"--sizes has {text!r}; write HEIGHTxWIDTH such as 56x56, separated by commas") from None


def split_numbers(option: str, text: str) -> tuple[int, ...]:
    """``"7,8"`` as integers."""
    names = split_names(text) or ()
    for name in names:
        if not name.isdecimal():
            raise ValueError(f"--{option} has {name!r}; write integers such as 7,8,12")
    return tuple(map(int, names))


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{name} is {value}; it must be above 0")


def print_result(result: Result) -> None:
    """The machine, then a table per set of rows that were timed in the same rounds, then what is missing and why."""
    machine = result.machine
    where = f"{machine['gpu']}; " if "gpu" in machine else ""
    where += f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, torch {machine['torch']}"
    print_line(f"{where}; float32; median ± half the interquartile range; × is speed against the baseline")
    for group in result.groups:
        print_line("")
        print_line(f"{group.bench}: {group.about}")
        for round_key in dict.fromkeys(row.case.round_key for row in group.rows):
            _print_rows(group, [row for row in group.rows if row.case.round_key == round_key and row.time], round_key)
        if group.unit == "pixel":
            _print_shares(group)
        _print_reasons(group)


def _print_rows(group: GroupResult, rows: list[Row], title: str) -> None:
    if not rows:
        return
    allocators = list(dict.fromkeys(name for row in rows for name in row.time))
    several = len({row.case.point for row in rows}) > 1
    columns = [*(["map"] if several else []), "variant", "", *(text for a in allocators for text in _heads(group, a))]
    left = len(columns) - 2 * len(allocators)
    counted = any(row.flops for row in rows) and not several
    columns += ["GFLOP/s", "of matmul"] if counted else []
    columns += ["peak MB", "weights + images"] if group.unit == "image" else ["extra MB", "in + out"]
    cells = []
    for row in rows:
        line = [row.case.point] if several else []
        line += [row.case.variant, row.case.mode]
        for allocator in allocators:
            line += _time_cells(row, allocator, group.unit)
        line += _flops_cells(group, row) if counted else []
        cells.append([*line, *_memory_cells(row, group.unit)])
    baselines = "; ".join(dict.fromkeys(_baseline_text(row, several) for row in rows))
    print_table(f"{title}  (1× is {baselines})", columns, cells, left=left)


def _baseline_text(row: Row, several: bool) -> str:
    point, variant = row.case.baseline
    return point if several else variant


def _heads(group: GroupResult, allocator: str) -> tuple[str, str]:
    from ..bench.results import ALLOCATOR_TEXTS

    what = {"call": "time", "token": "per token", "image": "images/s", "pixel": "time"}[group.unit]
    return f"{what}, {ALLOCATOR_TEXTS[allocator]}", "×"


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
        "pixel": f"{time['median']:.4g} s",
    }
    return [texts[unit] + spread, speedup]


def _flops_cells(group: GroupResult, row: Row) -> list[str]:
    """Operations per second with the default allocator."""
    speed, fraction = row.flops_per_second("default"), group.matmul_fraction(row, "default")
    return ["" if speed is None else f"{speed / 1e9:.1f}", "" if fraction is None else f"{100 * fraction:.0f}%"]


def _memory_cells(row: Row, unit: str) -> list[str]:
    if row.memory is None:
        return ["", ""]
    inputs, outputs, extra = (row.memory[name] / 1e6 for name in ("inputs", "outputs", "extra"))
    if unit == "image":
        return [f"{inputs + extra:.0f}", f"{inputs:.0f}"]
    return [f"{extra:.1f}", f"{inputs + outputs:.1f}"]


def _print_shares(group: GroupResult) -> None:
    """What each row takes of its baseline's time and memory."""
    for row in group.rows:
        speedup, memory = row.time.get("default", {}).get("speedup"), group.memory_ratio(row)
        if speedup is not None and memory is not None and row.case.variant != row.case.baseline[1]:
            shares = f"{1 / speedup:.2f} of the time and {memory:.2f} of the extra memory of {row.case.baseline[1]}"
            print_line(f"  {row.case.point}, {row.case.mode}: {row.case.variant} takes {shares}")


def _print_reasons(group: GroupResult) -> None:
    """Why something is missing, once per variant and reason; want of time is counted only."""
    from ..bench.timing import OUT_OF_TIME

    where: dict[tuple[str, str], list[str]] = {}
    for row in group.rows:
        for reason in row.reasons:
            where.setdefault((row.case.variant, reason), []).append(f"{row.case.point} {row.case.mode}")
    counts = Counter(row.case.variant for row in group.rows)
    for (variant, reason), places in where.items():
        if OUT_OF_TIME not in reason:
            at = "" if len(places) == counts[variant] else f" ({'; '.join(places)})"
            print_line(f"  {variant}: {reason}{at}")
    unfinished = sum(any(OUT_OF_TIME in reason for reason in row.reasons) for row in group.rows)
    if unfinished:
        print_line(f"  {unfinished} of {len(group.rows)} rows are not complete: {OUT_OF_TIME}; give a larger --budget")


def print_changes(earlier: Result, now: Result, path: str) -> None:
    """Ratios against an earlier result: above 1 is faster, or takes less memory, than then."""
    from ..bench.results import ALLOCATOR_TEXTS, compare

    changes, different = compare(earlier, now)
    print_line("")
    if not changes:
        print_line(f"{path} has no case in common with this run")
        return
    allocators = list(dict.fromkeys(name for change in changes for name in change.speed))
    columns = ["group", "point", "variant", "", *(f"speed, {ALLOCATOR_TEXTS[a]}" for a in allocators), "memory"]
    rows = []
    for change in changes:
        case = change.row.case
        ratios = [change.speed.get(allocator) for allocator in allocators]
        numbers = ["" if ratio is None else f"{ratio:.2f}×" for ratio in (*ratios, change.memory)]
        rows.append([change.group, case.point, case.variant, case.mode, *numbers])
    print_table(f"now against {path} of {earlier.created} (above 1×: faster, leaner)", columns, rows, left=4)
    for text in different:
        print_line(f"note: {text}")
