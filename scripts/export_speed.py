"""Time of a forward pass: as a module, compiled, and as the files that 'vil export' writes, beside Swin-Tiny's.

    python scripts/export_speed.py [--models NAME ...] [--size 224x224] [--batch 1 8] [--rounds 15] [--clock wall]
        [--compiled] [--folder FOLDER]

All run in turn on the same images, so that what else the machine does falls on all of them; medians are compared. Each
turn begins with a pass that is not timed: threads of the runtime before may still be waiting for work, at full speed.
With ``--clock processor`` the time that processors were busy with it counts, for machines that others use, too. With
``--folder`` the exported files are kept there, and those that are there already are not written again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import timm
import torch
from torch import Tensor, nn
from torch.export import Dim

from vision_longformer import create_model
from vision_longformer.classification.export import export_model
from vision_longformer.cli.output import print_table, size_text, track
from vision_longformer.export import export_verified, load_exported
from vision_longformer.export.writers import SUFFIXES
from vision_longformer.models.zoo import MODELS

SWIN = "swin_tiny_patch4_window7_224"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}

Run = Callable[[Tensor], Tensor]


def rivals(name: str, size: tuple[int, int], folder: Path, compiled: bool) -> dict[str, Run]:
    """What is timed of a model; the first one is what the others are compared with."""
    ours = name in MODELS
    model = create_model(name).eval() if ours else timm.create_model(name, img_size=size).eval()
    runs: dict[str, Run] = {"eager": model}
    if compiled:
        runs["torch.compile"] = torch.compile(model)
    for format in ("onnx", "openvino"):
        for dynamic in (False, True) if ours else (False,):
            path = folder / f"{name}_{'any' if dynamic else size_text(size)}{SUFFIXES[format]}"
            if ours and not path.exists():
                export_model(model, path, format=format, dynamic=dynamic, size=None if dynamic else size)
            elif not path.exists():
                _export_foreign(model, path, format, size)
            runs[f"{format}, {'any size' if dynamic else 'fixed size'}"] = load_exported(path)
    return runs


def _export_foreign(model: nn.Module, path: Path, format: str, size: tuple[int, int]) -> None:
    export_verified(
        model,
        [(torch.randn(2, 3, *size),)],
        path,
        format=format,
        metadata={"format": "vision_longformer_export/1"},
        input_names=("images",),
        output_names=("logits",),
        dynamic_shapes=({0: Dim("batch", min=1)},),
    )


def seconds(runs: dict[str, Run], images: Tensor, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """The median time of each per image, all taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in track(range(rounds), f"timing, batch {len(images)}"):
        for name, run in runs.items():
            with torch.no_grad():
                run(images)
                start = clock()
                run(images)
            times[name].append((clock() - start) / len(images))
    return {name: median(own) for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vision_longformer_tiny", "vision_longformer_small", SWIN])
    parser.add_argument("--size", default="224x224")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--compiled", action="store_true", help="torch.compile, too")
    parser.add_argument("--folder", type=Path, help="of the exported files; a temporary one by default")
    options = parser.parse_args()
    height, width = map(int, options.size.split("x"))
    with tempfile.TemporaryDirectory() as temporary:
        runs = {
            (name, kind): run
            for name in track(options.models, "exporting")
            for kind, run in rivals(name, (height, width), options.folder or Path(temporary), options.compiled).items()
        }
        for batch in options.batch:
            images = torch.randn(batch, 3, height, width)
            times = seconds(runs, images, options.rounds, CLOCKS[options.clock])
            rows = [
                (name, kind, f"{1e3 * own:.1f}", f"{own / times[name, 'eager']:.2f}", _beside(times, kind, own))
                for (name, kind), own in times.items()
            ]
            title = f"{batch} of {size_text((height, width))}, {torch.get_num_threads()} threads, {options.clock} time"
            print_table(title, ("model", "", "ms per image", "ratio to eager", "to Swin-Tiny"), rows, left=2)


def _beside(times: dict[tuple[str, str], float], kind: str, own: float) -> str:
    swin = times.get((SWIN, kind))
    return "" if swin is None else f"{own / swin:.2f}"


if __name__ == "__main__":
    main()
