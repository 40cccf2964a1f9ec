"""Training on large images by strips: ``python scripts/large_training.py gradients [SIDE]`` or ``… largest [MEMORY]``.

``gradients 2048`` compares the gradients of ViL-Tiny by strips with its plain ones, on one image of 2048×2048.

``largest 20GB`` finds the largest square image with which ViL-Tiny takes a training step by strips in a process of at
most that size. Steps with two small images are measured, the line through them gives the side, and a step with it is
measured; then again from that step, until the side changes by less than 3%. Sides are multiples of 32, the stride of
the last stage.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_longformer import VisionLongformer, model_config
from vision_longformer.bench.fork_server import ChildFailed, ForkServer
from vision_longformer.large.memory import format_bytes, free_memory, parse_bytes

MODEL, STRIDE = "vision_longformer_tiny", 32
SMALL_SIDES, CLOSE = (2048, 4096), 0.03
STEP_SECONDS = 24 * 3600.0


def gradients(side: int, checkpointing: bool | str) -> dict[str, Tensor]:
    """Of a step with one image of noise, always the same, by the names of the parameters."""
    torch.manual_seed(0)
    model = VisionLongformer(model_config(MODEL)).train()
    model.set_grad_checkpointing(checkpointing)
    F.cross_entropy(model(torch.randn(1, 3, side, side)), torch.zeros(1, dtype=torch.int64)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare_gradients(side: int) -> None:
    """Prints the norm of the difference over the norm of the plain gradient: of all parameters together, and of those
    that differ most."""
    plain, by_strips = gradients(side, False), gradients(side, "strips")
    total = math.hypot(*(float(grad.norm()) for grad in plain.values()))
    differences = {name: float((by_strips[name] - grad).norm()) for name, grad in plain.items()}
    print(f"{side}×{side}, all parameters: {math.hypot(*differences.values()) / total:.1e}")
    norms = {name: float(grad.norm()) for name, grad in plain.items() if grad.any()}
    for name in sorted(norms, key=lambda name: -differences[name] / norms[name])[:5]:
        share = f"{norms[name] / total:.0e} of the norm of all"
        print(f"{differences[name] / norms[name]:.1e}  {name} ({share})")


def step_peak(request: dict[str, Any]) -> int:
    """Bytes of a process that has taken one step."""
    gradients(request["side"], "strips")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(server: ForkServer, side: int) -> int:
    start = time.monotonic()
    try:
        peak = server.call({"side": side}, STEP_SECONDS)
    except ChildFailed as failure:
        sys.exit(f"{side}×{side}: {failure}")
    print(f"{side}×{side}: {format_bytes(peak)}, {time.monotonic() - start:.0f} s", flush=True)
    return peak


def largest_side(first: tuple[int, int], second: tuple[int, int], limit: int) -> int:
    """From (side, bytes) of two images, along the line of bytes over pixels."""
    slope = (second[1] - first[1]) / (second[0] ** 2 - first[0] ** 2)
    pixels = max(0, first[0] ** 2 + (limit - first[1]) / slope)
    return math.isqrt(int(pixels)) // STRIDE * STRIDE


def find_largest(memory: str, server: ForkServer) -> None:
    limit, free = parse_bytes(memory), free_memory(torch.device("cpu"))
    if free < limit:
        sys.exit(f"{format_bytes(free)} is free; {memory} must be, so that the step does not end other processes")
    measured = [(side, measure(server, side)) for side in SMALL_SIDES]
    while True:
        fitting = max((side for side, peak in measured if peak <= limit), default=0)
        side = largest_side(measured[0], measured[-1], limit)
        if side <= (1 + CLOSE) * fitting or side in dict(measured):
            break
        measured.append((side, measure(server, side)))
    if not fitting:
        sys.exit(f"no step fits {memory}")
    print(f"the largest square image that trained in {memory}: {fitting}×{fitting}, {fitting**2 / 1e6:.1f} megapixels")


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "gradients":
        compare_gradients(*map(int, given or ["2048"]))
    else:
        find_largest(*(given or ["20GB"]), server=ForkServer(step_peak))
