"""Time of a forward pass of ViL-Tiny: as a module, compiled, and as the files that 'vil export' writes.

    python scripts/export_speed.py [SIZE] [ROUNDS]

All run in turn, one image each, so that what else the machine does falls on all of them; medians are compared.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from vision_longformer import create_model
from vision_longformer.classification.export import export_model
from vision_longformer.cli.output import print_table, track
from vision_longformer.export import load_exported

MODEL = "vision_longformer_tiny"

Run = Callable[[Tensor], Tensor]


def rivals(size: int, folder: Path) -> dict[str, Run]:
    """What is timed, by name; the first one is what the others are compared with."""
    model = create_model(MODEL).eval()
    runs: dict[str, Run] = {"eager": model, "torch.compile": torch.compile(model)}
    for format in ("onnx", "pt2"):
        for dynamic in (False, True):
            name = f"{format}, {'any size' if dynamic else 'fixed size'}"
            path = folder / f"{dynamic}.{format}"
            export_model(model, path, format=format, dynamic=dynamic, size=None if dynamic else size)
            runs[name] = load_exported(path)
    return runs


def seconds(runs: dict[str, Run], images: Tensor, rounds: int) -> dict[str, list[float]]:
    """Times of each, taken in turn, after one pass to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in track(range(rounds + 1), "timing"):
        for name, run in runs.items():
            start = time.perf_counter()
            with torch.no_grad():
                run(images)
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def main(size: int = 224, rounds: int = 15) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = rivals(size, Path(folder))
        times = seconds(runs, torch.randn(1, 3, size, size), rounds)
    base = median(times["eager"])
    rows = [(name, f"{1e3 * median(own):.1f}", f"{median(own) / base:.2f}") for name, own in times.items()]
    title = f"{MODEL}, one image of {size}×{size}, {torch.get_num_threads()} threads, {rounds} rounds"
    print_table(title, ("", "ms", "ratio to eager"), rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
