"""Peak memory of one run, in a process that has done nothing before."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch

from .attention_jobs import Job
from .timing import synchronise


def peak_growth(job: Job, device: torch.device) -> int:
    """Bytes by which memory grows at its highest during one run, over what was there before: outputs included.

    On a GPU what torch allocated, on a CPU the resident memory of this process.
    """
    gc.collect()
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        job.run()
        synchronise(device)
        return torch.cuda.max_memory_allocated(device) - before
    _release_free_memory()
    before = _start_peak()
    job.run()
    return max(0, _peak() - before)


def warm_up(job: Job | None) -> None:
    """Load libraries and start threads with a small job, or with small layers, so that they do not count."""
    if job is not None:
        job.run()
        return
    image = torch.ones(1, 3, 16, 16)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4), torch.nn.Flatten(), torch.nn.Linear(8 * 13 * 13, 8))
    layers(image).sum().backward()


def _release_free_memory() -> None:
    """Give freed memory back to the system, where the C library can; reusing it would not show as growth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _start_peak() -> int:
    """Begin a new peak where the system can (Linux); returns the memory of now, elsewhere the peak up to now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return _peak()


def _peak() -> int:
    if Path("/proc/self/status").exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
