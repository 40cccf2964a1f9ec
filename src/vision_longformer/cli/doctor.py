"""``vil doctor``."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .output import print_json, print_table, size_text

if TYPE_CHECKING:
    import torch

    from ..ops.spec import Implementation

MISSING = "not installed"

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


def doctor(*, json: bool = False) -> None:
    """Show versions, device and threads, and which attention implementations can run here.

    Args:
        json: print JSON; there, every rule and map has its own reason, or null if it can run.
    """
    import torch

    from ..ops import IMPLEMENTATIONS

    device = best_device()
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    machine = {"system": platform.platform(), "device": _device_name(device)}
    threads = {"threads": torch.get_num_threads(), "processors": os.cpu_count()}
    answers = {name: _refusals(implementation, device) for name, implementation in IMPLEMENTATIONS.items()}
    if json:
        known = {name: None if version == MISSING else version for name, version in versions.items()}
        print_json({"versions": known, "machine": {**machine, **threads}, "local_attention": answers})
        return
    print_table("Versions", ("", ""), list(versions.items()), left=2)
    machine["threads"] = f"{threads['threads']} of {threads['processors']} processors"
    print_table("Machine", ("", ""), list(machine.items()), left=2)
    _print_implementations(answers, device)


def best_device() -> torch.device:
    """The accelerator, if there is one."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def _refusals(implementation: Implementation, device: torch.device) -> dict[str, str | None]:
    """Of each case, why an implementation cannot run it; None if it can."""
    import torch

    from ..geometry import Grid
    from ..ops.spec import LocalSpec

    answers = {}
    for rule, size in CASES:
        grid = Grid(*size)
        spec = LocalSpec(grid=grid, window=7, rule=rule, neighbour_mode="all", dilation=1, scale=32**-0.5)
        queries = torch.empty(1, grid.tokens, 3, 32, device=device)
        answers[f"{rule} {size_text(size)}"] = implementation.refusal(spec, queries)
    return answers


def _print_implementations(answers: Mapping[str, Mapping[str, str | None]], device: torch.device) -> None:
    """One row per implementation: what it can run, and its reasons for what it cannot."""
    rows = []
    for name, refusals in answers.items():
        can = [case for case, reason in refusals.items() if reason is None]
        reasons = dict.fromkeys(reason for reason in refusals.values() if reason)
        rows.append((name, "can run here" if can else "cannot run here", ", ".join(can), "; ".join(reasons)))
    columns = ("", "", "rule and map", "why not otherwise")
    print_table(f"Local attention in float32 on {device.type}", columns, rows, left=4)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    return device.type
