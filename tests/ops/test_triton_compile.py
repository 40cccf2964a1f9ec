"""The Triton kernels as operators: torch's contract, inductor and training, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., None]]:
    """Runs a function of ``triton_compile_worker.py`` in a process where Triton interprets."""
    command = [sys.executable, str(Path(__file__).with_name("triton_compile_worker.py"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as worker:

        def ask(name: str, **options: object) -> None:
            print((name, options), file=worker.stdin, flush=True)
            answer = worker.stdout.readline().strip()
            assert answer == "ok", answer.encode().decode("unicode_escape") or "the worker died"

        yield ask


CASES = [
    {},
    {"heads": 1},
    {"batch": 0},
    {"bias": False, "global_bias": False, "global_tokens": 0},
    {"rule": "exact", "neighbours": 3},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_results_are_as_promised(interpreted: Callable[..., None], options: dict[str, Any]) -> None:
    interpreted("promises", **{"dtype": "float32", "grid": (3, 4), "dim": 16, "batch": 1, **options})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_operators_keep_their_promises(interpreted: Callable[..., None], dtype: str) -> None:
    """By torch's own checks, with and without gradients of biases; in float16 beside float32 biases."""
    interpreted("promises", dtype=dtype, opcheck=True, grid=(2, 3), dim=16, batch=1, heads=1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"rule": "exact", "dilation": (1, 2)}], ids=str)
def test_default_backend(interpreted: Callable[..., None], options: dict[str, Any]) -> None:
    interpreted("inductor", **{"grid": (3, 4), "dim": 16, "batch": 1, **options})


@pytest.mark.slow
def test_training_by_the_default_backend(interpreted: Callable[..., None]) -> None:
    interpreted("training")


def test_log_sum_exp_has_no_gradient(interpreted: Callable[..., None]) -> None:
    interpreted("log_sum_exp")


@pytest.mark.parametrize("global_key", [False, True])
def test_biases_and_their_gradients_are_float32(interpreted: Callable[..., None], global_key: bool) -> None:
    interpreted("biases_in_float32", global_key=global_key)


@pytest.mark.parametrize("implementation", ["triton_gpu", "auto"])
def test_heads_of_different_dilation_in_one_launch(interpreted: Callable[..., None], implementation: str) -> None:
    interpreted("one_launch", implementation=implementation)
