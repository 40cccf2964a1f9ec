"""A large photo, whole, through Mask R-CNN on this machine: ``python scripts/detect_photo.py PHOTO [ROUNDS]``.

Prints, for ViL-Small and for Swin-Tiny in the same detector, the median time of rounds in which they take turns, and
the peak memory of a process of its own. The weights are random; the threshold of zero lets as many objects through as
an image may have, 100, so that all parts of the detector have their full work.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import torch
from large_photo import peak_gigabytes

from vision_longformer.bench.fork_server import ChildFailed, ForkServer
from vision_longformer.data.images import decode_image
from vision_longformer.detection import mask_rcnn
from vision_longformer.detection.dataset import image_tensor

BACKBONES = ("vision_longformer_small", "swin_tiny_patch4_window7_224")
CLASSES = 80
LIMIT = 600.0
"""Seconds that one run in a process of its own may take."""


class Run:
    """The photo and a detector that does not shrink it."""

    def __init__(self, backbone: str, photo: str) -> None:
        torch.manual_seed(0)
        self.pixels = image_tensor(decode_image(photo))
        height, width = self.pixels.shape[1:]
        sizes = {"min_size": (min(height, width),), "max_size": max(height, width)}
        self.model = mask_rcnn(backbone, CLASSES, score_threshold=0.0, **sizes).eval()

    def seconds(self) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            detections = self.model([self.pixels])[0]
        assert len(detections["masks"]) == self.model.config.detections
        return time.perf_counter() - start


def run_peak(request: dict[str, Any]) -> float:
    """Gigabytes of a new process at its highest."""
    Run(**request).seconds()
    return peak_gigabytes()


def peak_text(server: ForkServer, backbone: str, photo: str) -> str:
    try:
        return f"{server.call({'backbone': backbone, 'photo': photo}, LIMIT):.2f} GB"
    except ChildFailed as failure:
        return str(failure)


def main(photo: str, rounds: str = "5") -> None:
    server = ForkServer(run_peak)
    peaks = {backbone: peak_text(server, backbone, photo) for backbone in BACKBONES}
    runs = {backbone: Run(backbone, photo) for backbone in BACKBONES}
    times: dict[str, list[float]] = {backbone: [] for backbone in BACKBONES}
    for _ in range(int(rounds)):
        for backbone, run in runs.items():
            times[backbone].append(run.seconds())
    for backbone in BACKBONES:
        print(f"{backbone}: {median(times[backbone]):.2f} s, peak memory of the process {peaks[backbone]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
