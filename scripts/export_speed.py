"""Time of a forward pass: as a module, compiled, and as the files that 'vil export' writes, beside Swin-Tiny's.

    python scripts/export_speed.py [--models NAME ...] [--size 224x224] [--batch 1 8] [--rounds 15] [--clock wall]
        [--compiled] [--folder FOLDER]

Each has a process of its own: threads of one runtime that wait for work, at full speed, would slow down the next. All
run in turn on the same images, so that what else the machine does falls on all of them; medians are compared. Each turn
begins with a pass that is not timed. With ``--clock processor`` the time that processors were busy with it counts, for
machines that others use, too. With ``--folder`` the exported files are kept there, and those that are there already are
not written again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import timm
import torch
from torch import nn
from torch.export import Dim

from vision_longformer import create_model
from vision_longformer.classification.export import export_model
from vision_longformer.cli.output import print_table, size_text, track
from vision_longformer.export import export_verified, load_exported
from vision_longformer.export.writers import SUFFIXES
from vision_longformer.models.zoo import MODELS

SWIN = "swin_tiny_patch4_window7_224"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
SETTLE_SECONDS = 0.05
"""After which threads of a process that wait for work no longer do so at full speed."""


class Rival(NamedTuple):
    """What is timed: a model as it is, compiled, or the file ``path``."""

    model: str
    kind: str
    size: tuple[int, int]
    path: Path | None = None

    def load(self) -> nn.Module:
        if self.path is not None:
            return load_exported(self.path)
        model = _create(self.model, self.size)
        return torch.compile(model) if self.kind == "torch.compile" else model


def _create(name: str, size: tuple[int, int]) -> Any:
    return (create_model(name) if name in MODELS else timm.create_model(name, img_size=size)).eval()


def rivals(name: str, size: tuple[int, int], folder: Path, compiled: bool) -> list[Rival]:
    """What is timed of a model; the first one is what the others are compared with."""
    own = [Rival(name, kind, size) for kind in ("eager", *(["torch.compile"] if compiled else []))]
    for format in ("onnx", "openvino"):
        for dynamic in (False, True) if name in MODELS else (False,):
            path = folder / f"{name}_{'any' if dynamic else size_text(size)}{SUFFIXES[format]}"
            if not path.exists():
                _export(_create(name, size), path, format, None if dynamic else size, ours=name in MODELS)
            own.append(Rival(name, f"{format}, {'any size' if dynamic else 'fixed size'}", size, path))
    return own


def _export(model: nn.Module, path: Path, format: str, size: tuple[int, int] | None, *, ours: bool) -> None:
    if ours:
        export_model(model, path, format=format, dynamic=size is None, size=size)
        return
    assert size is not None
    export_verified(
        model,
        [(torch.randn(2, 3, *size),)],
        path,
        format=format,
        metadata={"format": "vision_longformer_export/1", "kind": "classifier", "dynamic": False},
        input_names=("images",),
        output_names=("logits",),
        dynamic_shapes=({0: Dim("batch", min=1)},),
    )


def _serve(connection: Connection, rival: Rival, clock: str) -> None:
    """In a process of its own: for each number of images received, the time of a pass."""
    run = rival.load()
    while batch := connection.recv():  # 0 at the end
        images = torch.randn(batch, 3, *rival.size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            run(images)
            start = CLOCKS[clock]()
            run(images)
            connection.send(CLOCKS[clock]() - start)


def seconds(connections: dict[Rival, Connection], batch: int, rounds: int) -> dict[tuple[str, str], float]:
    """The median time of each per image, all taken in turn."""
    times: dict[Rival, list[float]] = {rival: [] for rival in connections}
    for _ in track(range(rounds), f"timing, batch {batch}"):
        for rival, connection in connections.items():
            connection.send(batch)
            times[rival].append(connection.recv() / batch)
            time.sleep(SETTLE_SECONDS)
    return {(rival.model, rival.kind): median(own) for rival, own in times.items()}


def _start(context: Any, rival: Rival, clock: str) -> Connection:
    ours, theirs = context.Pipe()
    context.Process(target=_serve, args=(theirs, rival, clock), daemon=True).start()
    return ours


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
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        connections = {
            rival: _start(context, rival, options.clock)
            for name in track(options.models, "exporting")
            for rival in rivals(name, (height, width), options.folder or Path(temporary), options.compiled)
        }
        for batch in options.batch:
            times = seconds(connections, batch, options.rounds)
            rows = [
                (name, kind, f"{1e3 * own:.1f}", f"{own / times[name, 'eager']:.2f}", _beside(times, kind, own))
                for (name, kind), own in times.items()
            ]
            title = f"{batch} of {size_text((height, width))}, {torch.get_num_threads()} threads, {options.clock} time"
            print_table(title, ("model", "", "ms per image", "ratio to eager", "to Swin-Tiny"), rows, left=2)
        for connection in connections.values():
            connection.send(0)


def _beside(times: dict[tuple[str, str], float], kind: str, own: float) -> str:
    swin = times.get((SWIN, kind))
    return "" if swin is None else f"{own / swin:.2f}"


if __name__ == "__main__":
    main()
