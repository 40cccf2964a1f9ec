"""What commands print: tables and lines for people, JSON and CSV for programs, bars for those who wait.

rich is imported when something is printed, so that help does not wait for it.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..training.callbacks import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Item = TypeVar("Item")

PIPE_WIDTH = 160
"""Columns of output that goes into a file, unless the environment's COLUMNS says otherwise."""


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> None:
    """A table whose first ``left`` columns are text and whose others are numbers.

    Where it is too wide, cells wrap between words; a word, such as the name of a model, is never cut. Where not even
    single words fit beside one another, each row becomes a paragraph.
    """
    console, cells = _console(), [[str(cell) for cell in row] for row in rows]
    if title:
        print_line(title)
    for gap in (WIDE_GAP, NARROW_GAP):
        widths = _column_widths([columns, *cells], console.width - TABLE_MARGIN - gap * (len(columns) - 1))
        if widths is not None and (gap == NARROW_GAP or widths == _natural_widths([columns, *cells])):
            console.print(_table(columns, cells, widths, left, gap))
            return
    console.print("\n" + "\n".join(_paragraph(columns, row, console.width) for row in cells) + "\n", soft_wrap=True)


QUIET_SECONDS = 30
"""Without a terminal, the time between two lines of a command that takes long."""

TABLE_MARGIN, WIDE_GAP, NARROW_GAP = 4, 3, 2
"""Blanks beside a table and between its columns, which are nearer if cells have to wrap."""


def _natural_widths(lines: Sequence[Sequence[str]]) -> list[int]:
    from rich.cells import cell_len

    return [max(map(cell_len, column)) for column in zip(*lines, strict=True)]


def _column_widths(lines: Sequence[Sequence[str]], available: int) -> list[int] | None:
    """Widths that sum to ``available`` at most, the widest columns made narrower; None if words would be cut."""
    widths = _natural_widths(lines)
    least = _natural_widths([[max(cell.split() or [""], key=len) for cell in line] for line in lines])
    while sum(widths) > available:
        wider = [index for index, width in enumerate(widths) if width > least[index]]
        if not wider:
            return None
        widths[max(wider, key=widths.__getitem__)] -= 1
    return widths


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], left: int, gap: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_header=any(columns), padding=(0, 1, 0, gap - NARROW_GAP))
    for index, (name, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(Text(name), justify="left" if index < left else "right", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _paragraph(columns: Sequence[str], row: Sequence[str], width: int) -> str:
    """The first cell, and below it the others, each after the name of its column."""
    pairs = zip(columns[1:], row[1:], strict=True)
    text = "; ".join(f"{name}: {cell}" if name else cell for name, cell in pairs if cell)
    lines = textwrap.wrap(text, max(1, width - 4), break_long_words=False, break_on_hyphens=False)
    return "\n".join([f"  {row[0]}", *(f"    {line}" for line in lines)])


def print_line(text: str) -> None:
    """A line that is not broken, so that commands and paths in it can be copied."""
    _console().print(text, soft_wrap=True)


def _console() -> Console:
    """The terminal; text is printed as it is, without markup or guessed colours."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def print_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_csv(rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


@contextmanager
def log_lines(least: int = logging.INFO) -> Iterator[None]:
    """Print on stderr what the package logs meanwhile, from level ``least`` on."""
    logger, handler = logging.getLogger(__package__.partition(".")[0]), logging.StreamHandler()
    handler.setLevel(least)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def check_free(path: str | Path, overwrite: bool) -> None:
    """Refuse a file that exists before anything is computed for it, unless it is to be replaced."""
    if Path(path).exists() and not overwrite:
        raise FileExistsError(f"{path} exists; choose another name, or replace it with --overwrite")


def warn_if_outdated(exported: str | Path) -> None:
    """Say on stderr if the checkpoint beside an exported file, from which it was made by default, is newer."""
    path = Path(exported)
    checkpoint = path.with_suffix(".safetensors") if path.is_file() else None
    if checkpoint and checkpoint.is_file() and checkpoint.stat().st_mtime > path.stat().st_mtime:
        print(
            f"{path} is older than {checkpoint.name} beside it; to update it, run 'vil export' again with --overwrite",
            file=sys.stderr,
        )


def track(items: Sequence[Item], doing: str) -> Iterable[Item]:
    """The items, with a bar on stderr that vanishes at the end; no bar if stderr is no terminal."""
    from rich import progress
    from rich.console import Console

    terminal = Console(stderr=True)
    return progress.track(items, doing, console=terminal, transient=True, disable=not terminal.is_terminal)


class ShowProgress(Protocol):
    """``resumed`` of what is done were done by an earlier run."""

    def __call__(self, done: int, total: int, resumed: int = 0, /) -> None: ...


@contextmanager
def progress_bar(doing: str) -> Iterator[ShowProgress]:
    """A function that moves a bar on stderr, or writes a line now and then if stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield _progress_lines(doing)
        return
    columns = (TextColumn(doing), BarColumn(30), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, resumed=0: bar.update(task, completed=done, total=total)


def _progress_lines(doing: str) -> ShowProgress:
    """A function that writes a line to stderr where the last one is ``QUIET_SECONDS`` old."""
    started = printed = time.monotonic()

    def progress(done: int, total: int, resumed: int = 0, /) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= QUIET_SECONDS and resumed < done < total:
            printed, left = now, (now - started) / (done - resumed) * (total - done)
            print(f"{doing}: {100 * done // total}%, {duration(left)} left", file=sys.stderr, flush=True)

    return progress


@contextmanager
def step_status(steps: Sequence[str]) -> Iterator[Callable[[int, int], None]]:
    """A function (done, total) that shows on stderr which step is under way; the last of ``steps`` is all that follow.

    For steps that take so unequal a time that what is left cannot be told. Without a terminal, a step is told if the
    line before is ``QUIET_SECONDS`` old.
    """
    from rich.console import Console

    terminal, printed = Console(stderr=True), time.monotonic()

    def words(done: int, total: int) -> str:
        return f"{steps[min(done, len(steps) - 1)]} (step {done + 1} of {total})"

    def line(done: int, total: int) -> None:
        nonlocal printed
        if done < total and time.monotonic() - printed >= QUIET_SECONDS:
            printed = time.monotonic()
            print(words(done, total), file=sys.stderr, flush=True)

    if not terminal.is_terminal:
        yield line
        return
    with terminal.status(steps[0]) as status:
        yield lambda done, total: status.update(words(min(done, total - 1), total))


def millions(count: int) -> str:
    return f"{count / 1e6:.2f}"


def billions(count: int) -> str:
    return f"{count / 1e9:.3f}"


def size_text(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
