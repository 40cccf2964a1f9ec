"""What it costs to share one image between processes: ``python scripts/spatial_cost.py`` prints two tables.

Computed, not measured: numbers that a process receives, from the bands that ``spatial_parallel`` cuts, and
multiply-accumulates as our models execute them, in proportion to the rows of a band, with those of the keys and values
that neighbouring processes both compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, cast

from vision_longformer.costs import ModelMacs, executed_macs
from vision_longformer.geometry import even_strips
from vision_longformer.models.config import Longformer, ModelConfig
from vision_longformer.models.zoo import model_config

MODEL = "vision_longformer_tiny"
SIZES, PROCESSES = (1024, 2048, 4096, 8192), (2, 4, 8)
NUMBER_BYTES = 4
FLOPS, BANDWIDTH = 0.1 * 312e12, 25e9
"""Assumed: an A100 at 10% of its peak, and a network of 25 GB/s that each process has for itself."""


class Work(NamedTuple):
    """Of one process, in the forward pass of one image through one stage."""

    stage: int
    rows: int
    of_block: int
    """Numbers received for each block."""
    of_stage: int
    """Numbers received before the first block."""
    macs: float

    def received(self, depth: int) -> int:
        return depth * self.of_block + self.of_stage


@lru_cache
def executed(config: ModelConfig, size: tuple[int, int]) -> ModelMacs:
    return executed_macs(config, size)


def work_of(config: ModelConfig, size: tuple[int, int], processes: int, process: int) -> list[Work]:
    """What a process has to do in each stage."""
    macs, before, height = executed(config, size), None, size[0]
    result = []
    for index, (stage, grid) in enumerate(zip(config.stages, config.grids(size), strict=True)):
        attention = cast(Longformer, stage.attention)
        band = even_strips(grid, attention.window, attention.rule, processes)[process]
        halo = len(band.above) + len(band.below)
        of_block = halo * grid.width * stage.dim
        of_block += (processes - 1) * stage.global_tokens * (stage.dim + stage.heads)
        covered = range(band.rows.start * stage.patch, min(band.rows.stop * stage.patch, height))
        fetched = 0 if before is None else _missing_rows(covered, before.rows) * before.width
        own = macs.stages[index].total * len(band.rows) / grid.height
        twice = stage.depth * halo * grid.width * 2 * stage.dim**2
        result.append(Work(index, len(band.rows), of_block, fetched * config.stages[index - 1].dim, own + twice))
        before, height = band, grid.height
    return result


def _missing_rows(covered: range, own: range) -> int:
    """Rows of the map before that a band covers and that its process has not."""
    return len(covered) - len(range(max(covered.start, own.start), min(covered.stop, own.stop)))


def received_numbers(config: ModelConfig, size: tuple[int, int], processes: int, process: int) -> int:
    """All that a process receives in the forward pass of one image, the sums for the pooled features included."""
    depths = [stage.depth for stage in config.stages]
    stages = work_of(config, size, processes, process)
    pooled = (processes - 1) * config.stages[-1].dim if config.global_pool == "avg" else 0
    return sum(work.received(depth) for work, depth in zip(stages, depths, strict=True)) + pooled


def block_rows(side: int, processes: int) -> Iterator[str]:
    """A line per stage: what each block of it receives and computes in a training step, in the process with most."""
    config = model_config(MODEL)
    everyone = [work_of(config, (side, side), processes, process) for process in range(processes)]
    for stage, grid, works in zip(config.stages, config.grids((side, side)), zip(*everyone, strict=True), strict=True):
        received = 2 * NUMBER_BYTES * max(work.of_block for work in works)
        macs = 3 * max(work.macs for work in works) / stage.depth
        share = max(work.rows for work in works) / grid.height
        cells = f"{share:.3f} | {received / 1e6:.2f} | {macs / 1e9:.2f} | {2 * macs / received:,.0f}"
        yield f"| {works[0].stage + 1} | {cells} |"


def image_row(side: int, processes: int) -> str:
    """A training step with one image, in the process with most to receive and in that with most to compute."""
    config, size = model_config(MODEL), (side, side)
    everyone = range(processes)
    received = 2 * NUMBER_BYTES * max(received_numbers(config, size, processes, process) for process in everyone)
    macs = 3 * max(sum(work.macs for work in work_of(config, size, processes, process)) for process in everyone)
    share = macs / (3 * executed(config, size).total)
    maps = sum(grid.tokens * stage.dim for grid, stage in zip(config.grids(size), config.stages, strict=True))
    gathered = 2 * NUMBER_BYTES * maps * (processes - 1) / processes
    times = [1e3 * 2 * macs / FLOPS, 1e3 * received / BANDWIDTH, 1e3 * gathered / BANDWIDTH]
    cells = f"{share:.3f} | {macs / 1e9:,.0f} | {received / 1e6:.1f} | {gathered / 1e6:,.0f}"
    return f"| {side}×{side} | {processes} | {cells} | {' | '.join(f'{time:.2f}' for time in times)} |"


BLOCK_HEAD = ("stage", "largest band", "MB received", "GMACs", "FLOP per byte")
IMAGE_HEAD = (
    *("image", "processes", "largest share of the work", "GMACs", "MB received", "MB of maps gathered (detection)"),
    *("ms computing", "ms receiving", "ms gathering"),
)


def head(columns: tuple[str, ...]) -> str:
    return f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|"


def main() -> None:
    print(head(BLOCK_HEAD), *block_rows(2048, 4), "", head(IMAGE_HEAD), sep="\n")
    for side in SIZES:
        for processes in PROCESSES:
            print(image_row(side, processes))


if __name__ == "__main__":
    main()
