"""``vil study`` and ``vil study show``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import check_at_least, check_choice, listed
from .output import print_json, print_line, print_table

if TYPE_CHECKING:
    from ..studies.declaration import Study
    from ..studies.planning import PlannedRun
    from ..studies.report import Report
    from ..studies.results import ResultStore
    from ..studies.runner import Submit

EXECUTORS = ("local", "slurm")

LISTED_ROWS = 3
"""Names of rows in a sentence."""


def study(
    name: str | None = None,
    /,
    *,
    scale: str = "small",
    seeds: int = 3,
    jobs: int = 2,
    data: str | None = None,
    init: str | None = None,
    output: str = "studies",
    executor: str = "local",
    slurm: str | None = None,
    fresh: bool = False,
    dry_run: bool = False,
) -> None:
    """Run one of the paper's comparisons, or all of them: every row with several seeds.

    What will be run and what it costs is listed first. Finished runs are not repeated, interrupted ones
    resume, and one that fails leaves a gap in the table. 'vil study show' prints the results that come with
    the package.

    Args:
        name: layer_norm_position, flat_multiscale, pooling, mechanisms, random_shift, relative_absolute, window_global
            or rules; a .yaml file of your own; all of them by default.
        scale: small, for minutes on a CPU; imagenet or coco, the paper's recipes.
        seeds: runs of each row.
        jobs: runs at a time; the processor's threads are divided among them.
        data: CIFAR-10 (cifar10.npz by default), ImageNet or COCO; the built-in garments need none. Results that come
            with the package count only for the data that they were made with.
        init: a classifier that detectors start from, as in 'vil detect train'; for --scale coco, where the paper's do.
        output: folder of the runs and their results.
        executor: local, or slurm to submit the runs to a cluster.
        slurm: options of the cluster's jobs, as in slurm_partition=gpu,gpus_per_node=8,tasks_per_node=8.
        fresh: repeat runs whose results come with the package.
        dry_run: list what would be run and its cost, and stop.
    """
    from ..studies.planning import missing_inputs, plan
    from ..studies.runner import open_store

    check_choice("executor", executor, EXECUTORS)
    check_at_least("jobs", jobs, 1)
    if slurm is not None and executor != "slurm":
        raise ValueError("--slurm is for --executor slurm")
    store, folder = open_store(Path(output), scale, fresh=fresh), Path(output)
    studies, complete = _find_studies(name, scale, data, init), True
    parent = os.getpid() if executor == "local" else None
    try:
        with nullcontext() if dry_run else _executor(executor, slurm, jobs, folder) as submit:
            for one in studies:
                runs = plan(one, scale, seeds, store)
                missing = missing_inputs(one, scale) if any(run.is_due for run in runs) else {}
                _print_plan(one, scale, runs, store, jobs, missing)
                if submit is not None:
                    complete &= _run(one, scale, runs, store, folder, submit, parent, missing)
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes what is in {output}", file=sys.stderr)
        raise
    if not complete:
        raise SystemExit(1)


def study_show(
    name: str | None = None,
    /,
    *,
    scale: str = "small",
    output: str | None = None,
    data: str | None = None,
    init: str | None = None,
    json: bool = False,
) -> None:
    """Print the table of a study from the results that come with the package.

    Args:
        name: a study; all that have results by default.
        scale: small, imagenet or coco.
        output: a folder of 'vil study', whose results are shown, too.
        data: the data of those results, if it was given to 'vil study'.
        init: the classifier that they start from, likewise.
        json: print JSON.
    """
    from ..studies.report import report
    from ..studies.results import STORED, ResultStore, comment

    if output is not None and not Path(output).is_dir():
        raise FileNotFoundError(f"there is no folder {output}; --output names that of 'vil study'")
    store = ResultStore.read([Path(output)] if output else [], scale, shipped=STORED)
    tables = [report(one, scale, store) for one in _find_studies(name, scale, data, init)]
    if name is None:
        tables = [table for table in tables if any(row.runs for row in table.rows)]
    if json:
        print_json([table.to_dict() for table in tables])
        return
    for table in tables:
        _print_report(table)
        text = comment(table.study.name) if (scale, data, init) == ("small", None, None) else ""
        if text:
            print_line("\n" + text)


def _find_studies(name: str | None, scale: str, data: str | None, init: str | None) -> list[Study]:
    """The one that is named, or all that have a scale, on the data and from the classifier that are given."""
    from ..studies.catalogue import STUDY_NAMES, find_study
    from ..studies.declaration import SCALES

    check_choice("scale", scale, SCALES)
    if name is None:
        found = [one for one in map(find_study, STUDY_NAMES) if scale in one.scales]
    else:
        found = [find_study(name)]
        found[0].check_scale(scale)
        if data is not None and found[0].is_on_built_in_data(scale):
            raise ValueError(
                f"study {found[0].name} is on built-in data only, which --data does not replace; leave it out"
            )
    return [one.with_data(data).with_init(init) for one in found]


def _print_plan(
    study: Study, scale: str, runs: Sequence[PlannedRun], store: ResultStore, jobs: int, missing: Mapping[str, str]
) -> None:
    """Rows with what a run of each costs, what is to be done, and what is ``missing`` for it."""
    from ..studies.planning import study_costs
    from ..studies.runner import threads_per_run
    from ..training.callbacks import counted, duration

    print_line(f"{study.name}: {study.about}")
    costs = study_costs(study, scale, store, threads_per_run(jobs))
    cells, total, unknown = [], 0.0, 0
    for row in study.rows:
        own = [run for run in runs if run.row is row]
        due = sum(run.is_due for run in own)
        if own[0].problem:
            cells.append([row.name, "–", "–", "–", "–", "cannot be run"])
            continue
        cost = costs[row.name]
        time_text = cost.how if cost.seconds is None else f"{duration(cost.seconds)} ({cost.how})"
        done = len(own) - due
        todo = (f"{due} to run" + (f", {done} done" if done else "")) if due else "done"
        numbers = [
            f"{cost.parameters / 1e6:.2f}",
            f"{cost.macs / 1e6:,.1f}",
            "–" if cost.flops is None else f"{cost.flops / 1e15:,.{0 if cost.flops > 1e17 else 4}f}",
        ]
        cells.append([row.name, *numbers, time_text, todo])
        total, unknown = total + due * (cost.seconds or 0), unknown + due * (cost.seconds is None)
    columns = ("row", "M parameters", "M MACs per image", "PFLOP of training", "one run", "runs")
    print_table("", columns, cells)
    _print_problems(study, scale, runs, missing)
    due = sum(run.is_due for run in runs)
    expected = f", about {duration(total / jobs)} with {counted(jobs, 'run')} at a time" if due and not unknown else ""
    print_line(f"{due} of {counted(len(runs), 'run')} to do{expected}\n")


def _print_problems(study: Study, scale: str, runs: Sequence[PlannedRun], missing: Mapping[str, str]) -> None:
    """What keeps rows from being run, or makes them less than the paper's."""
    from ..studies.planning import random_starts

    for run in runs:
        if run.problem and run.seed == 0:
            print_line(f"{run.row.name} cannot be run: {run.problem}")
    for problem in dict.fromkeys(missing.values()):
        print_line(f"{_rows(study, [row for row in missing if missing[row] == problem])} cannot be run yet: {problem}")
    if random := random_starts(study, scale):
        paper = "the paper starts from an ImageNet classifier: --init FILE"
        print_line(f"{_rows(study, random)} start from random weights; {paper}")


def _rows(study: Study, names: Sequence[str]) -> str:
    """Some of a study's rows, in words."""
    return "all rows" if len(names) == len(study.rows) else listed(names, LISTED_ROWS)


@contextmanager
def _executor(name: str, options: str | None, jobs: int, folder: Path) -> Iterator[Submit]:
    from ..studies.runner import local_executor, slurm_executor
    from ..training.recipe import parse_values

    if name == "local":
        with local_executor(jobs) as submit:
            yield submit
        return
    pairs = [pair.partition("=") for pair in (options or "").split(",") if pair]
    for key, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--slurm has {key!r}; write NAME=VALUE, separated by commas")
    values = parse_values({key.strip(): value for key, _, value in pairs})
    yield slurm_executor(folder / "slurm", {"slurm_array_parallelism": jobs, **values})


def _run(
    study: Study,
    scale: str,
    runs: Sequence[PlannedRun],
    store: ResultStore,
    folder: Path,
    submit: Submit,
    parent: int | None,
    missing: Mapping[str, str],
) -> bool:
    """Run what is due and not ``missing`` anything, with a line for each, and print the table; whether it is whole."""
    from ..files import write_json
    from ..studies.plots import draw
    from ..studies.report import measure_title, report
    from ..studies.runner import run_study
    from ..training.callbacks import duration

    runs = [run for run in runs if run.is_due]
    failures = {run.row.name: missing[run.row.name] for run in runs if run.row.name in missing}
    runs = [run for run in runs if run.row.name not in failures]
    due, start = len(runs), time.monotonic()
    outcomes = run_study(study, scale, runs, output=folder, submit=submit, store=store, parent=parent)
    for number, outcome in enumerate(outcomes, 1):
        if outcome.result is None:
            row, text = outcome.run.row.name, f"seed {outcome.run.seed}: {outcome.failure}"
            failures[row] = "; ".join([failures[row], text] if row in failures else [text])
        else:
            metrics = outcome.result.metrics
            text = ", ".join(f"{measure_title(name)} {metrics[name]:.2f}%" for name in study.measures)
        left = (time.monotonic() - start) / number * (due - number)
        print_line(f"{outcome.run.title}: {text}  ({number} of {due}, {duration(left)} left)")
        sys.stdout.flush()
    table = report(study, scale, store, failures)
    _print_report(table)
    own = folder / scale / study.name
    write_json(own / "table.json", table.to_dict())
    if any(row.runs for row in table.rows):
        draw(table, own / "plot.png")
    print_line(f"wrote {own}/table.json" + (", plot.png" if (own / "plot.png").exists() else "") + "\n")
    return not table.holes


def _print_report(table: Report) -> None:
    from ..studies.report import notes, table_cells, table_columns

    print_line(f"{table.study.name}, {table.scale} scale: {table.study.about}; {table.study.table}")
    print_table("", table_columns(table.study), [table_cells(table, row) for row in table.rows])
    for line in notes(table):
        print_line(line)
