"""Requests that are answered in a process of their own, and the reasons where there is no answer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from vision_longformer.bench.fork_server import ChildFailed, ForkServer


def _behave(request: dict[str, Any]) -> object:
    if request["do"] == "raise":
        raise RuntimeError("no\nmore")
    if request["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if request["do"] == "sleep":
        time.sleep(60)
    return {"process": os.getpid(), "text": "ä" * request.get("length", 0)}


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return ForkServer(_behave)


def test_each_request_has_a_process_of_its_own(server: ForkServer) -> None:
    processes = {server.call({"do": "answer"}, 60)["process"] for _ in range(2)}
    assert len(processes | {os.getpid()}) == 3


def test_long_answers_arrive_whole(server: ForkServer) -> None:
    """More than a pipe holds at once."""
    assert server.call({"do": "answer", "length": 200_000}, 60)["text"] == "ä" * 200_000


@pytest.mark.parametrize(
    ("request_", "seconds", "reason"),
    [
        ("raise", 60, "failed: no"),
        ("die", 60, "the process ended with -9, perhaps out of memory"),
        ("sleep", 0.2, "not done after 0 s"),
    ],
)
def test_failures_have_reasons(server: ForkServer, request_: str, seconds: float, reason: str) -> None:
    with pytest.raises(ChildFailed) as failure:
        server.call({"do": request_}, seconds)
    assert str(failure.value) == reason
    assert server.call({"do": "answer"}, 60)["text"] == ""


def test_a_child_that_is_too_slow_is_ended(tmp_path: Path) -> None:
    """It does not come to write its file."""

    def write_late(request: dict[str, Any]) -> None:
        time.sleep(1)
        (tmp_path / "late").touch()

    with pytest.raises(ChildFailed, match="not done"):
        ForkServer(write_late).call({}, 0.2)
    assert not (tmp_path / "late").exists()


def test_a_sentence_may_be_an_answer() -> None:
    assert ForkServer(lambda request: "failed: no").call({}, 60) == "failed: no"
