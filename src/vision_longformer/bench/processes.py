"""The worker processes, seen from the one that asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "kept": {"MALLOC_MMAP_THRESHOLD_": str(1 << 36), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)},
}
"""Environments of the C library's allocator. ``default`` returns large blocks to the system and pays for their pages
again at the next call; ``kept`` (glibc only) never does, as in a process that has tuned its allocator."""


class WorkerDied(Exception):
    """A worker ended before it answered."""


class Worker:
    """A ``worker.py`` process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vision_longformer.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment},
            text=True,
            bufsize=1,
        )

    def wait(self) -> None:
        """Until its imports are done."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise WorkerDied(self._end())

    def ask(self, request: dict[str, Any], tell: Callable[[int, int], None] = lambda done, total: None) -> Any:
        """The worker's answer; ``tell`` hears of each round that is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError:
            raise WorkerDied(self._end()) from None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "round" in answer:
                tell(*answer["round"])
            if "result" in answer:
                return answer["result"]
        raise WorkerDied(self._end())

    def _end(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        why = "killed, perhaps for want of memory" if code == -9 else f"ended with {code}"
        return f"the measuring process was {why}" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._errors.close()


class Workers:
    """One worker per allocator, restarted when it dies."""

    def __init__(self, allocators: tuple[str, ...]) -> None:
        self.allocators = allocators
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> Workers:
        self._workers = {name: Worker(ALLOCATORS[name]) for name in self.allocators}
        for worker in self._workers.values():
            worker.wait()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers.values():
            worker.close()

    def ask(self, allocator: str, request: dict[str, Any], tell: Callable[[int, int], None] = lambda *_: None) -> Any:
        """The answer of an allocator's worker. After :class:`WorkerDied` the next ask is served by a new one."""
        try:
            return self._workers[allocator].ask(request, tell)
        except WorkerDied:
            self._workers[allocator].close()
            self._workers[allocator] = Worker(ALLOCATORS[allocator])
            self._workers[allocator].wait()
            raise
