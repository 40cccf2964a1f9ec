"""Processes that measure: one per allocator, since an allocator is chosen when a process starts.

:class:`Workers` is the side that asks. Run as a program, this module is the other side: it reads a JSON request per
line on stdin and answers on stdout. Times are taken in the worker itself, memory in children of its fork server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, TextIO

import torch

from ..errors import first_line
from .cases import AttentionWorkload, Case, InputCache, make_runnable, refusal
from .fork_server import ChildFailed, ForkServer
from .memory import peak_growth, warm_up_layers
from .timing import Budget, Samples, time_interleaved

ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "kept": {"MALLOC_MMAP_THRESHOLD_": str(1 << 36), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)},
}
"""Environments of the C library's allocator. ``default`` returns large blocks to the system and pays for their pages
again at the next call; ``kept`` (glibc only) never does, as in a process that has tuned its allocator."""

MEMORY_SECONDS = 1800.0
"""After which a run that measures memory is given up."""

RoundProgress = Callable[[int, int], None]
"""Called with the rounds done and their total."""


class WorkerError(Exception):
    """A worker has no answer; the message is the reason as a sentence."""


class WorkerDied(WorkerError):
    """A worker ended before it answered."""


# The side that asks


class Workers:
    """One worker per allocator, restarted when it dies; for ``threads`` None is torch's own number."""

    def __init__(self, allocators: tuple[str, ...], device: torch.device, threads: int | None) -> None:
        self.allocators = allocators
        self._settings = {"device": str(device), "threads": threads}
        self._processes: dict[str, _Process] = {}

    def __enter__(self) -> Workers:
        self._processes = {name: _Process(ALLOCATORS[name]) for name in self.allocators}
        try:
            for process in self._processes.values():
                process.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, error_type: type | None, error: BaseException | None, error_traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def refusals(self, cases: Sequence[Case]) -> list[str | None]:
        """Why each case cannot run at all, or None."""
        return self._ask("default", {"do": "refusals", "cases": [case.to_dict() for case in cases]})

    def time(
        self, allocator: str, cases: Sequence[Case], budget: Budget, progress: RoundProgress = lambda done, total: None
    ) -> list[Samples]:
        """Samples of each case, taken in interleaved rounds."""
        request = {"do": "time", "cases": [case.to_dict() for case in cases], "budget": budget._asdict()}
        return [Samples(**data) for data in self._ask(allocator, request, progress)]

    def memory(self, case: Case) -> dict[str, int]:
        """Bytes of the ``inputs`` and ``outputs`` of a case, and ``extra``, the peak over the inputs."""
        return self._ask("default", {"do": "memory", "case": case.to_dict()})

    def _ask(self, allocator: str, request: dict[str, Any], progress: RoundProgress = lambda done, total: None) -> Any:
        try:
            return self._processes[allocator].ask({**request, **self._settings}, progress)
        except WorkerDied:
            self._processes[allocator].close()
            self._processes[allocator] = _Process(ALLOCATORS[allocator])
            self._processes[allocator].wait_until_ready()
            raise


class _Process:
    """A process that runs :func:`main`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **environment},
            text=True,
            bufsize=1,
        )

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise WorkerDied(self._death())

    def ask(self, request: dict[str, Any], progress: RoundProgress) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError:
            raise WorkerDied(self._death()) from None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "round" in answer:
                progress(*answer["round"])
            elif "reason" in answer:
                raise WorkerError(answer["reason"])
            else:
                return answer["result"]
        raise WorkerDied(self._death())

    def _death(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        end = "was killed, perhaps because it ran out of memory" if code == -9 else f"ended with {code}"
        return f"the measuring process {end}" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._stderr.close()


# The side that measures


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer, nor in children
    fork_server = ForkServer(_measure_memory)
    _send(answers, {"ready": True})
    for line in sys.stdin:
        _send(answers, _answer(json.loads(line), answers, fork_server))


def _send(stream: TextIO, data: Any) -> None:
    stream.write(json.dumps(data) + "\n")


def _answer(request: dict[str, Any], answers: TextIO, fork_server: ForkServer) -> dict[str, Any]:
    try:
        if request["do"] == "memory":
            return {"result": fork_server.call(request, MEMORY_SECONDS)}
        return {"result": _time(request, answers) if request["do"] == "time" else _refusals(request)}
    except ChildFailed as failure:
        return {"reason": f"memory: {failure}"}
    except Exception as error:
        traceback.print_exc()
        return {"reason": f"{type(error).__name__}: {first_line(error)}"}


def _refusals(request: dict[str, Any]) -> list[str | None]:
    device, cases = _device(request), [Case.from_dict(data) for data in request["cases"]]
    return [refusal(case.workload, case.mode, device) for case in cases]


def _time(request: dict[str, Any], answers: TextIO) -> list[dict[str, Any]]:
    device, cases = _device(request), [Case.from_dict(data) for data in request["cases"]]
    samples, runnables, cache = {}, {}, InputCache()
    for index, case in enumerate(cases):
        try:
            runnables[index] = make_runnable(case.workload, case.mode, device, cache)
        except Exception as error:
            samples[index] = Samples(reason=f"failed: {first_line(error)}")
    indices = {(case.point, case.variant): index for index, case in enumerate(cases)}
    baselines = {indices.get(case.baseline, index) for index, case in enumerate(cases)}

    def progress(done: int, total: int) -> None:
        _send(answers, {"round": (done, total)})

    samples |= time_interleaved(runnables, Budget(**request["budget"]), device, progress, baselines)
    return [asdict(samples[index]) for index in range(len(cases))]


def _measure_memory(request: dict[str, Any]) -> dict[str, int]:
    device, case = _device(request), Case.from_dict(request["case"])
    if isinstance(case.workload, AttentionWorkload):
        make_runnable(case.workload.small(), case.mode, device, {}).run()
    else:
        warm_up_layers()
    runnable = make_runnable(case.workload, case.mode, device, {})
    extra = peak_growth(runnable.run, device)
    return {"extra": extra, "inputs": runnable.input_bytes, "outputs": runnable.output_bytes}


def _device(request: dict[str, Any]) -> torch.device:
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    return torch.device(request["device"])


if __name__ == "__main__":
    main()
