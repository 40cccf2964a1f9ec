"""``vil doctor``."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

from .output import print_table, size_text

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "vision-longformer",
    "torch",
    "torchvision",
    "timm",
    "triton",
    "accelerate",
    "safetensors",
    "pycocotools",
)

CASES = (("chunk", (28, 28)), ("chunk", (14, 14)), ("exact", (28, 28)))
"""Window rules and maps that implementations are asked about, with chunks of 7×7; models mostly do the first."""


def doctor() -> None:
    """Show versions, device and threads, and which attention implementations can run here."""
    import torch

    device = best_device()
    versions = [("python", platform.python_version()), *((name, _version(name)) for name in PACKAGES)]
    print_table("Versions", ("", ""), versions, left=2)
    machine = [
        ("system", platform.platform()),
        ("device", _device_name(device)),
        ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"),
    ]
    print_table("Machine", ("", ""), machine, left=2)
    _print_implementations(device)


def best_device() -> torch.device:
    """The accelerator, if there is one."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def _print_implementations(device: torch.device) -> None:
    """One row per implementation: what it can run, and its reasons for what it cannot."""
    import torch

    from ..geometry import Grid
    from ..ops import IMPLEMENTATIONS
    from ..ops.spec import LocalSpec

    rows = []
    for name, implementation in IMPLEMENTATIONS.items():
        answers = []
        for rule, size in CASES:
            grid = Grid(*size)
            spec = LocalSpec(grid=grid, window=7, rule=rule, neighbour_mode="all", dilation=1, scale=32**-0.5)
            answers.append(implementation.refusal(spec, torch.empty(1, grid.tokens, 3, 32, device=device)))
        can = [f"{rule} {size_text(size)}" for (rule, size), answer in zip(CASES, answers, strict=True) if not answer]
        reasons = dict.fromkeys(answer for answer in answers if answer)
        rows.append((name, "can run here" if can else "cannot run here", ", ".join(can), "; ".join(reasons)))
    columns = ("", "", "rule and map", "why not otherwise")
    print_table(f"Local attention in float32 on {device.type}", columns, rows, left=4)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    return device.type
