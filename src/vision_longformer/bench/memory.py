"""Peak memory of one run in a process that has done nothing before, and of one training step of a detector."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..training.meter import peak, start_peak
from .fork_server import ChildFailed, ForkServer
from .timing import synchronize

STEP_SECONDS = 3600.0
"""After which a training step of a detector is given up."""

OBJECTS = 8


def peak_growth(run: Callable[[], object], device: torch.device) -> int:
    """Bytes by which memory grows at its highest during one run, over what was there before: outputs included.

    On a GPU what torch allocated, on a CPU the resident memory of this process.
    """
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _release_free_memory()
    before = start_peak()
    run()
    return max(0, peak() - before)


def warm_up_layers() -> None:
    """Load libraries and start threads with small layers, so that they do not count."""
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4), torch.nn.Flatten(), torch.nn.Linear(8 * 13 * 13, 8))
    layers(torch.ones(1, 3, 16, 16)).sum().backward()


class DetectorMemoryMeter:
    """Measures training steps, each in a process of its own; make it before the process computes anything."""

    def __init__(self) -> None:
        # Imported here, since workers of 'vil bench' need no detectors; and before the fork, so that no child does it.
        from ..costs.detection import CLASSES
        from ..detection.config import DetectorConfig
        from ..detection.detectors import build_detector

        def step_peak(request: dict[str, Any]) -> int:
            _end_before_others()
            torch.manual_seed(0)
            height, width = request["size"]
            config = DetectorConfig(request["detector"], request["backbone"], CLASSES)
            sizes = {"min_size": (min(height, width),), "max_size": max(height, width)}
            model = build_detector(config.override(**sizes)).train()
            image, target = torch.rand(3, height, width), _target(height, width)
            warm_up_layers()
            return peak_growth(lambda: sum(model([image], [target]).values()).backward(), torch.device("cpu"))

        self._server = ForkServer(step_peak)

    def measure(self, detector: str, backbone: str, size: tuple[int, int]) -> int | str:
        """Bytes by which memory grows at its highest in one step with one image, or a sentence why there are none.

        These are the activations and the gradients; the weights are there before.
        """
        try:
            return self._server.call({"detector": detector, "backbone": backbone, "size": size}, STEP_SECONDS)
        except ChildFailed as failure:
            return str(failure)


def _end_before_others() -> None:
    """If memory runs out, Linux shall end this process and no other; the meter then says so."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _target(height: int, width: int) -> dict[str, Tensor]:
    """Objects of growing size along the diagonal, with full masks."""
    corners = torch.linspace(0, 0.5, OBJECTS)[:, None] * torch.tensor([width, height])
    sides = torch.linspace(0.05, 0.45, OBJECTS)[:, None] * torch.tensor([width, height])
    labels = torch.arange(1, OBJECTS + 1)
    masks = torch.ones(OBJECTS, height, width, dtype=torch.uint8)
    return {"boxes": torch.cat([corners, corners + sides], 1), "labels": labels, "masks": masks}


def _release_free_memory() -> None:
    """Give freed memory back to the system, where the C library can; reusing it would not show as growth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
