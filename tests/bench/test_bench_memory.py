"""Peak memory of a run, and of a detector's training step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import NoReturn

import pytest
import torch

from vision_longformer.bench.memory import DetectorMemoryMeter, peak_growth
from vision_longformer.detection import detectors
from vision_longformer.detection.config import DetectorConfig

MEGABYTE = 2**20


def test_peak_growth_includes_what_is_freed_again() -> None:
    """Two blocks of 64 MiB one after the other, then 64 and 32 at the same time."""

    def one_by_one() -> None:
        for _ in range(2):
            torch.ones(64 * MEGABYTE // 4)

    def together() -> float:
        a, b = torch.ones(64 * MEGABYTE // 4), torch.ones(32 * MEGABYTE // 4)
        return float(a[0] + b[0])

    for run, least, most in ((one_by_one, 63, 80), (together, 95, 112)):
        growths = [peak_growth(run, torch.device("cpu")) / MEGABYTE for _ in range(5)]
        assert least < median(growths) < most  # of a single one, the rest of the process may give memory back meanwhile


DETECTOR_STEPS = """
import json
from builders import SMALL_MODELS
from vision_longformer.bench.memory import DetectorMemoryMeter
from vision_longformer.models import zoo

zoo.MODELS["vil"] = SMALL_MODELS["vil"]
meter = DetectorMemoryMeter()
steps = [("vil", 64), ("vil", 256), ("nothing_of_that_name", 64)]
print(json.dumps([meter.measure("mask_rcnn", backbone, (side, side)) for backbone, side in steps]))
"""


@pytest.mark.slow
def test_memory_of_a_detectors_step() -> None:
    """More memory for a larger image, and a sentence where nothing can be measured; by a process that has computed
    nothing before, as the meter demands."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run([sys.executable, "-c", DETECTOR_STEPS], env=environment, check=True, capture_output=True)
    small, large, unknown = json.loads(output.stdout)
    assert large > small > 10**6
    assert "unknown backbone" in unknown


def test_a_step_that_does_not_fit_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux ends a process that takes too much memory by SIGKILL, and this one before others."""

    def out_of_memory(config: DetectorConfig) -> NoReturn:
        if "retinanet" in repr(config):
            raise ValueError(f"score {Path('/proc/self/oom_score_adj').read_text()}")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    monkeypatch.setattr(detectors, "build_detector", out_of_memory)
    meter = DetectorMemoryMeter()
    backbone = "vision_longformer_tiny"
    assert meter.measure("mask_rcnn", backbone, (64, 64)) == "the process ended with -9, perhaps out of memory"
    assert meter.measure("retinanet", backbone, (64, 64)) == "failed: score 1000"
