"""What several files about operators share: a process in which Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., None]]:
    """Runs a function of ``triton_worker.py`` in a process where Triton interprets."""
    script = Path(__file__).with_name("triton_worker.py")
    worker = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # where pytest finds the builders
    )
    assert worker.stdin
    assert worker.stdout

    def ask(name: str, **options: object) -> None:
        print((name, options), file=worker.stdin, flush=True)
        answer = worker.stdout.readline().strip()
        if answer != "ok":
            pytest.fail(answer.encode().decode("unicode_escape") or "the worker died", pytrace=False)

    yield ask
    worker.stdin.close()
    worker.wait(timeout=60)
