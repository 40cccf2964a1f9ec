"""Logs of processes, and which of them are silent, by the times of the files."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from vision_longformer.training.process_log import ProcessLog, describe_silent, log_path

logger = logging.getLogger("vision_longformer.something")


def test_which_processes_are_silent(tmp_path: Path) -> None:
    """Twenty signs of life in 100 s; four that are missing are too many."""
    for rank, at in enumerate((1000, 985, 979, 900)):
        log_path(tmp_path, rank).touch()
        os.utime(log_path(tmp_path, rank), (at, at))
    assert describe_silent(tmp_path, 2, 100) == f"all processes show signs of life; their logs are {tmp_path}/rank*.log"
    log = tmp_path / "rank2.log"
    assert describe_silent(tmp_path, 3, 100) == f"process 2 has shown no sign of life for 21 s; the log is {log}"
    words = f"processes 2, 3 have shown no sign of life for 1 min 40 s; the log is {log}"
    assert describe_silent(tmp_path, 5, 100) == words


def test_a_process_gives_signs_of_life_and_says_what_it_waits_for(tmp_path: Path) -> None:
    log_path(tmp_path, 1).touch()
    os.utime(log_path(tmp_path, 1), (1000, 1000))
    with ProcessLog(tmp_path, 0, 2, timeout=0.2, announce=True) as log:
        log.on_start(7, 9, 3)
        os.utime(log_path(tmp_path, 0), (1000, 1000))
        time.sleep(0.5)
    text = log_path(tmp_path, 0).read_text()
    assert log_path(tmp_path, 0).stat().st_mtime > 1000
    assert "resuming from step 7 of 9" in text
    assert text.count("nothing has happened since step 7: process 1 has shown no sign of life for") == 1


def test_a_full_disk_does_not_end_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_path(tmp_path, 0).symlink_to("/dev/full")
    with ProcessLog(tmp_path, 0, 1, timeout=60):
        logger.info("a line")
    assert capsys.readouterr().err == ""


def test_what_others_log_is_as_before(tmp_path: Path) -> None:
    package = logging.getLogger("vision_longformer")
    before = (package.level, list(package.handlers))
    with ProcessLog(tmp_path / "logs", 3, 4, timeout=60):
        logger.debug("a line")
    assert (package.level, list(package.handlers)) == before
    assert "a line" in (tmp_path / "logs" / "rank3.log").read_text()
