"""Times of a layer on the GPU of this machine."""

from __future__ import annotations

import statistics

import torch

from ...ops.triton import attend_rows
from .layer import Layer

ROUNDS, WARM_UP = 30, 5


def capability() -> int | None:
    """Of this machine's GPU, such as 90; None if there is none of NVIDIA's."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def measure(layer: Layer) -> dict[str, float]:
    """Median seconds of a forward and of a backward pass."""
    inputs, spec = layer.inputs("cuda")
    leaves = [x for x in inputs if x is not None]
    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    for number in range(WARM_UP + ROUNDS):
        before, between, after = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        before.record()
        out = attend_rows(inputs, spec)
        between.record()
        torch.autograd.grad(out, leaves, out)
        after.record()
        torch.cuda.synchronize()
        if number >= WARM_UP:
            seconds["forward"].append(before.elapsed_time(between) / 1e3)
            seconds["backward"].append(between.elapsed_time(after) / 1e3)
    return {phase: statistics.median(times) for phase, times in seconds.items()}
