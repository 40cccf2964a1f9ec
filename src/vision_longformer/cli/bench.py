"""``vil bench``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .bench_tables import print_changes, print_result
from .output import print_line
from .sizes import parse_size

if TYPE_CHECKING:
    import torch

    from ..analysis.bench.result import Result
    from ..analysis.bench.session import Tell


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

    'attention' compares implementations over map sizes, forward and backward; 'rules' the three masking rules;
    'windows' window sizes; 'shift' random shift with all neighbours; 'models' our models with others; 'scaling' the
    cost per token. Variants take turns in one process; times are medians with half the distance of the quartiles.
    Each is measured with the C library's default allocator and with memory kept (MALLOC_MMAP_THRESHOLD_ and
    MALLOC_TRIM_THRESHOLD_ large), where large blocks are not paid for again at each call. Memory is measured in a fresh
    process.

    Args:
        what: attention, rules, windows, shift, models, scaling or all.
        quick: fewer points and rounds; all of them in two minutes.
        implementations: of local attention, such as 'tiled,sliding_chunk'; 'vil doctor' lists the names.
        sizes: maps of tokens such as '56x56,112x112'; of 'models', image sizes.
        models: names from 'vil models' or of timm.
        windows: sides of the chunks, such as '7,8,12'; the window is twice that and one.
        baseline: what others are compared with: an implementation, or of 'models' a model.
        batch: maps or images per run.
        shift: of 'models', also with random shift in training.
        only: the figures with this in their name, such as 'shapes' of 'attention'.
        budget: seconds to take in all, about; rounds are adapted to it. Without 'quick' all is timed once at least.
        threads: torch's by default.
        device: cpu or cuda; cuda where there is one.
        output: folder of the results; a file that exists is not replaced, the new one gets a number.
        overwrite: replace earlier results of the same name.
        compare: an earlier JSON file to print ratios against.
    """
    from ..analysis.bench.benches import plan
    from ..analysis.bench.machine import busy_warning
    from ..analysis.bench.plans import Choices
    from ..analysis.bench.plots import draw
    from ..analysis.bench.result import load_result, new_path
    from ..analysis.bench.run import run

    choices = Choices(
        quick,
        _device(device),
        _split(implementations),
        None if sizes is None else tuple(_size(size) for size in _split(sizes) or ()),
        _split(models),
        None if windows is None else tuple(_number(window) for window in _split(windows) or ()),
        baseline,
        batch,
        shift,
    )
    _check_positive("threads", threads)
    _check_positive("budget", budget)
    plans = plan(what, choices, only)
    earlier = None if compare is None else load_result(compare)
    path = new_path(Path(output), what, overwrite=overwrite)
    with _bar() as tell:
        result = _save_all(run(what, plans, choices, threads=threads, budget=budget, tell=tell), path)
    print_result(result)
    plots = draw(result, path.with_suffix(""))
    warning = busy_warning(result.machine)
    if warning:
        print_line(f"note: {warning}")
    print_line(f"wrote {path}" + "".join(f", {plot.name}" for plot in plots))
    if earlier is not None:
        print_changes(earlier, result, str(compare))


def _save_all(results: Iterator[Result], path: Path) -> Result:
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
def _bar() -> Iterator[Tell]:
    """A bar on stderr with the time that is left; nothing if stderr is no terminal."""
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


def _split(text: str | None) -> tuple[str, ...] | None:
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


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--windows has {text!r}; write whole numbers such as 7,8,12")
    return int(text)


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{name} is {value}; it must be above 0")
