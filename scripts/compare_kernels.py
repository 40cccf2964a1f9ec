"""Time of the fused CPU kernel of two source trees, each with its kernel built.

    python scripts/compare_kernels.py OLD_TREE NEW_TREE [ROUNDS]

Each tree has a process of its own, and they run in turn, one call at a time, so that what else the machine does falls
on both; medians are compared. Chunks of 7×7, one global token, relative bias, float32.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

SHAPES = {"56×56, batch 4, 3×32": (56, 56, 4, 3, 32), "112×112, 3×32": (112, 112, 1, 3, 32)}
SHAPES["50×84, 6×64"] = (50, 84, 1, 6, 64)

WORKER = """
import sys, time
import torch
from vision_longformer import local_attention

height, width, batch, heads, dim = (int(x) for x in sys.argv[1:])
torch.manual_seed(0)
make = lambda *shape: torch.randn(shape, requires_grad=True)
q, k, v = make(batch, height * width, heads, dim), *(make(batch, 1 + height * width, heads, dim) for _ in range(2))
biases = {"bias": make(heads, 27, 27), "global_bias": make(heads, 1)}
for line in sys.stdin:
    start = time.perf_counter()
    out = local_attention(q, k, v, (height, width), window=7, **biases, implementation="fused_cpu")
    if line.strip() == "forward+backward":
        torch.autograd.grad(out.sum(), [q, k, v, *biases.values()])
    print(time.perf_counter() - start, flush=True)
"""


def worker(tree: Path, shape: tuple[int, ...]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-c", WORKER, *map(str, shape)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def seconds(process: subprocess.Popen[str], what: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    print(what, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main(old: str, new: str, rounds: int = 40) -> None:
    for name, shape in SHAPES.items():
        workers = [worker(Path(tree).resolve(), shape) for tree in (old, new)]
        for what in ("forward", "forward+backward"):
            times = [[seconds(process, what) for process in workers] for _ in range(rounds)][2:]
            before, after = (median(column) for column in zip(*times, strict=True))
            print(f"{name}, {what}: {1e3 * before:.2f} ms and {1e3 * after:.2f} ms, new to old {after / before:.3f}")
        for process in workers:
            process.communicate()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
