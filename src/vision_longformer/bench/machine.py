"""What a result needs to state about the machine it comes from."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

COMPARED_FACTS = ("cpu", "gpu", "cores", "threads", "torch", "device")
"""Facts that two results should share to be compared."""


def machine_facts(device: torch.device, threads: int | None) -> dict[str, Any]:
    """Processor, cores, threads, memory, versions, and how busy the machine is."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_at_start": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vision_longformer": version("vision-longformer"),
        "device": device.type,
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def _cpu_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def busy_warning(facts: dict[str, Any]) -> str | None:
    """A sentence where other processes will disturb the times; ratios suffer less, as rounds are interleaved."""
    load, cores = facts["load_at_start"], facts["cores"]
    if facts["device"] != "cpu" or load < 0.5 * cores:
        return None
    return f"the machine is busy: load {load:.1f} on {cores} cores; times are unsteady, ratios less so"


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Facts that make two results hard to compare."""
    names = [name for name in COMPARED_FACTS if earlier.get(name) != now.get(name)]
    return [f"{name} was {earlier.get(name)!r}, now {now.get(name)!r}" for name in names]
