"""What commands print: tables and lines for people, JSON and CSV for programs, bars for those who wait.

rich is imported when something is printed, so that help does not wait for it.
"""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")

PIPE_WIDTH = 160
"""Columns of output that goes into a file, where nothing should wrap."""


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> None:
    """A table whose first ``left`` columns are text and whose others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, show_header=any(columns))
    for index, name in enumerate(columns):
        table.add_column(Text(name), justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    _console().print(table)


def print_line(text: str) -> None:
    """A line that is not broken, so that commands and paths in it can be copied."""
    _console().print(text, soft_wrap=True)


def _console() -> Console:
    """The terminal; text is printed as it is, without markup or guessed colours."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def print_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_csv(rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


@contextmanager
def log_lines() -> Iterator[None]:
    """Print on stderr what the package logs meanwhile."""
    logger, handler = logging.getLogger(__package__.partition(".")[0]), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def track(items: Sequence[Item], doing: str) -> Iterable[Item]:
    """The items, with a bar on stderr that vanishes at the end; no bar if stderr is no terminal."""
    from rich import progress
    from rich.console import Console

    terminal = Console(stderr=True)
    return progress.track(items, doing, console=terminal, transient=True, disable=not terminal.is_terminal)


@contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[int, int], None] | None]:
    """A function (done, total) that moves a bar on stderr; None if stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield None
        return
    columns = (TextColumn(doing), BarColumn(30), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def millions(count: int) -> str:
    return f"{count / 1e6:.2f}"


def billions(count: int) -> str:
    return f"{count / 1e9:.3f}"


def size_text(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
