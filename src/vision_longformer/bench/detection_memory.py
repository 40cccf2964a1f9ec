"""Peak memory of one training step of a detector, measured here."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..costs.detection import CLASSES
from ..detection.config import DetectorConfig
from ..detection.detectors import build_detector
from .attention_jobs import Job
from .fork_server import Nursery
from .memory import peak_growth, warm_up

LIMIT = 3600.0
"""Seconds that one step may take."""

OBJECTS = 8


class MemoryMeter:
    """Measures steps, each in a process of its own; make it before the process computes anything."""

    def __init__(self) -> None:
        self._nursery = Nursery(_step_peak)

    def measure(self, kind: str, backbone: str, size: tuple[int, int]) -> int | str:
        """Bytes by which memory grows at its highest in one step with one image, or a sentence why there are none.

        These are the activations and the gradients; the weights are there before.
        """
        return self._nursery.ask({"kind": kind, "backbone": backbone, "size": size}, LIMIT)


def _step_peak(request: dict[str, Any]) -> int:
    """To be called in a fresh process."""
    _end_before_others()
    size = request["size"]
    torch.manual_seed(0)
    config = DetectorConfig(request["kind"], request["backbone"], CLASSES)
    model = build_detector(config.override(min_size=(min(size),), max_size=max(size))).train()
    image, target = torch.rand(3, *size), _target(*size)
    warm_up(None)

    def step() -> None:
        sum(model([image], [target]).values()).backward()

    return peak_growth(Job(step, inputs=0, outputs=0), torch.device("cpu"))


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
