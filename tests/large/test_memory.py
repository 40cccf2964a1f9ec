"""Peak memory of streamed passes, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import numpy as np, torch
from vision_longformer import VisionLongformer, model_config
from vision_longformer.bench.memory import peak_growth
from vision_longformer.large import stream
from vision_longformer.large.memory import Work

class Stripes:
    def __init__(self, height, width):
        self.shape = (height, width, 3)
    def __getitem__(self, rows):
        return np.full((rows.stop - rows.start, *self.shape[1:]), rows.start % 251, np.uint8)

torch.set_num_threads(1)
height, folder = int(sys.argv[1]), sys.argv[2] or None
model = VisionLongformer(model_config("vision_longformer_tiny")).eval()
stream(model, Stripes(64, 64))
peak = peak_growth(lambda: stream(model, Stripes(height, 512), storage=folder), torch.device("cpu"))
work = Work(model.config, 4, (height, 512), torch.float32, torch.float32, (), folder is None)
print(json.dumps([peak, work.token_bytes() + max(work.strip_bytes(stage, 8) for stage in range(4))]))
"""


def measured(height: int, folder: str = "") -> tuple[int, int]:
    """Bytes by which resident memory grew, and those that were foretold, for an image of ``height``×512.

    The C library returns freed memory to the system at once: what it would otherwise keep for later, up to twice what
    is in use, depends on the order of sizes and hides what is measured.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    words = [sys.executable, "-c", PROGRAM, str(height), folder]
    output = subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout
    peak, foretold = json.loads(output)
    return peak, foretold


@pytest.mark.slow
def test_memory_is_what_was_foretold_and_with_files_does_not_grow(tmp_path: Path) -> None:
    """ViL-Tiny stores 12 bytes per pixel: 25 MB for 4096 rows of 512, 38 MB more for 8192 rows than for 2048."""
    in_memory, foretold = measured(4096)
    assert 4096 * 512 * 12 < in_memory < foretold
    short, foretold = measured(2048, str(tmp_path / "short"))
    tall, same = measured(8192, str(tmp_path / "tall"))
    assert same == foretold
    assert max(short, tall) < foretold
    assert abs(tall - short) < 2_000_000
