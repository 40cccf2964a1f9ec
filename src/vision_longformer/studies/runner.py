"""Runs what a study still needs, several runs at a time, here or through Slurm; what is done is not done again."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import check_at_least, first_line
from ..files import atomic_write
from ..training.recipe import to_yaml
from .declaration import Study
from .job import Job, read_result, run_job
from .planning import PlannedRun
from .results import STORED, ResultStore, RunResult

POLL_SECONDS = 0.2


def open_store(output: Path, scale: str, *, fresh: bool = False) -> ResultStore:
    """Results in ``output`` and, unless ``fresh``, those that come with the package."""
    return ResultStore.read([output], scale, shipped=None if fresh else STORED)


class Outcome(NamedTuple):
    """A run that has ended: with a result, or with a sentence why there is none."""

    run: PlannedRun
    result: RunResult | None
    failure: str


class Handle(Protocol):
    """A run in progress, as :mod:`concurrent.futures` and submitit have it."""

    def done(self) -> bool: ...

    def exception(self) -> BaseException | None: ...


Submit = Callable[[Sequence[Job]], Sequence[Handle]]
"""Starts jobs, or queues them."""


def run_study(
    study: Study,
    scale: str,
    runs: Sequence[PlannedRun],
    *,
    output: Path,
    submit: Submit,
    store: ResultStore,
    parent: int | None = None,
) -> Iterator[Outcome]:
    """Run those that are due, and yield each when it has ended; results are in ``output`` before that."""
    due = [run for run in runs if run.is_due]
    with _locked(output / scale / study.name):
        jobs = [_prepare(study, scale, run, output, parent) for run in due]
        waiting = dict(zip(submit(jobs), zip(due, jobs, strict=True), strict=True))
        while waiting:
            for handle in [handle for handle in waiting if handle.done()]:
                run, job = waiting.pop(handle)
                error = handle.exception()
                if job.result_file.exists():
                    store.add(read_result(job))
                result = store.find(study, run.row, scale, run.seed)
                if result is not None:
                    store.write(study, scale, output)
                yield Outcome(run, result, "" if result else str(error or "it ended without a result"))
            time.sleep(POLL_SECONDS)


def _prepare(study: Study, scale: str, run: PlannedRun, output: Path, parent: int | None) -> Job:
    """The job of a run, its recipe written beside its directory."""
    directory = (output / scale / study.name / f"{study.folder(run.row)}-{run.seed}").resolve()
    job = Job(study.task, run.seed, str(directory), study.measures, study.sizes, parent)
    settings = study.settings(run.row, scale, run.seed)
    with atomic_write(job.recipe_file, overwrite=True) as temporary:
        temporary.write_text(to_yaml(settings), encoding="utf-8")
    return job


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process runs a study in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is running this study in {folder}; wait for it or stop it") from None
        yield


# Here


@contextmanager
def local_executor(jobs: int) -> Iterator[Submit]:
    """Processes on this machine, ``jobs`` at a time, with the threads divided among them.

    If this process is interrupted, what has begun saves a checkpoint and ends, and the rest is not started.
    """
    check_at_least("jobs", jobs, 1)
    threads, running, pool = threads_per_run(jobs), Processes(), ThreadPoolExecutor(jobs)
    try:
        yield lambda queue: [pool.submit(_run_process, job, threads, running) for job in queue]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        running.stop()
        pool.shutdown()


def threads_per_run(jobs: int) -> int:
    """The threads of each of several runs at a time."""
    return max(1, count_threads() // jobs)


def count_threads() -> int:
    """Threads that all runs together may use: as many as the environment says, or else one per processor."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) if stated.isdecimal() and int(stated) else len(os.sched_getaffinity(0))


class Processes:
    """Those that run now; once they are told to stop, so is any that has just begun."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopping = threading.Lock(), False

    def add(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.add(process)
            if self._stopping:
                process.terminate()

    def remove(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.remove(process)

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            for process in self._running:
                process.terminate()


class RunFailed(Exception):
    """A run ended without a result; the message says why."""


JOB_COMMAND = (sys.executable, "-m", f"{__package__}.job")


def _run_process(job: Job, threads: int, running: Processes) -> None:
    """A job to its end, among ``running`` meanwhile; its output is in a log beside its directory.

    In a session of its own, so that Ctrl-C reaches the study only, which then ends its processes once and in order.
    """
    job_file, log_file = Path(f"{job.directory}.json"), Path(f"{job.directory}.log")
    with atomic_write(job_file, overwrite=True) as temporary:
        temporary.write_text(job.to_json())
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    with log_file.open("ab") as log:
        start = log.tell()
        command, environment = [*JOB_COMMAND, str(job_file)], {**os.environ, **limits}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        running.add(process)
        code = process.wait()
        running.remove(process)
    if code < 0:
        raise RunFailed(f"the process was ended by signal {-code} (log: {log_file})")
    if code:
        lines = log_file.read_bytes()[start:].decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"the process ended with exit code {code} and did not say why"
        raise RunFailed(f"{reason} (log: {log_file})")


# Through Slurm


def slurm_executor(folder: Path, options: Mapping[str, Any], cluster: str = "slurm") -> Submit:
    """Jobs of a cluster, submitted as one array; ``options`` are submitit's, such as ``slurm_partition``.

    A job that the cluster stops is queued again and resumes. ``cluster`` is submitit's name of the kind of cluster.
    """
    try:
        import submitit
    except ImportError:
        raise ValueError(
            "--executor slurm needs submitit; install it by pip install 'vision-longformer[slurm]'"
        ) from None
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    except RuntimeError as error:
        raise ValueError(
            f"there is no Slurm here ({first_line(error)}); start this where srun is, or leave out --executor slurm"
        ) from None
    try:
        executor.update_parameters(**options)
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"--slurm: {first_line(error)}; write options as in slurm_partition=gpu,gpus_per_node=8,timeout_min=2880"
        ) from None
    return lambda jobs: executor.map_array(SlurmRun(), jobs) if jobs else []


class SlurmRun:
    """What a process of the cluster does."""

    def __call__(self, job: Job) -> None:
        import submitit

        if submitit.JobEnvironment().num_tasks > 1:
            submitit.helpers.TorchDistributedEnvironment().export()
        run_job(job)

    def checkpoint(self, job: Job) -> Any:
        """When the cluster stops the job, it is queued again as it is: the run resumes from its last checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, job)
