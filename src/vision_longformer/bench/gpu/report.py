"""Resources, instructions per score and a roofline of every kernel: what a chip would do, predicted, not measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...files import atomic_write
from . import measure
from .chips import LANES, Chip, blocks_per_multiprocessor
from .compile import Launched, compile_layer
from .interpret import Work, count_work
from .layer import Layer
from .sass import FMA_PIPE, PAIRS, SLOW_CONVERSIONS, Code, Instruction, Loop, Trace, parse

FORMAT = "vision_longformer/bench-gpu/1"

FEWEST_BLOCKS, FEWEST_WARPS = 2, 8
"""With fewer on a multiprocessor, nothing is there to run while a block waits."""

PRODUCTS = {"forward": 2, "backward": 5}
"""Matrix products that a pass needs: scores and context; scores again, and gradients of weights, q, k and v."""


@dataclass(frozen=True)
class KernelReport:
    """A kernel on a chip. Registers and stack are of a thread, shared memory (bytes) of a block.

    ``per_score``: instructions of a thread in the inner loop by class, per score that the thread computes there.
    ``cycles`` of a program by what may limit it, as if it had a multiprocessor for itself and all else took no time.
    ``spills``: instructions of any loop that move registers to memory and back. ``repeats``: how often each
    multiply-add of a tile is done.
    """

    name: str
    phase: str
    programs: int
    warps: int
    registers: int
    stack: int
    spills: int
    shared: int
    blocks: int
    iterations: int
    tile: int
    repeats: float
    per_score: dict[str, float]
    cycles: dict[str, float]

    @property
    def bound(self) -> str:
        """What limits it."""
        return max(self.cycles, key=self.cycles.__getitem__)

    @property
    def time(self) -> float:
        """Cycles of one multiprocessor for all programs."""
        return self.programs * self.cycles[self.bound]

    def warnings(self) -> list[str]:
        """What a reader should not miss."""
        found = []
        if self.per_score and not self.per_score["tensor"]:
            found.append(f"{self.name} multiplies without tensor cores")
        if self.spills:
            found.append(f"{self.name} spills registers in a loop, by {self.spills} instructions")
        if self.blocks < FEWEST_BLOCKS or self.blocks * self.warps < FEWEST_WARPS:
            resident = f"{self.blocks} block{'s' * (self.blocks != 1)} of {self.warps} warps"
            found.append(f"{self.name} has {resident} per multiprocessor; there is nothing to run while they wait")
        if self.repeats > 1:
            found.append(f"{self.name} does each multiply-add of its tiles {self.repeats:.3g} times")
        return found


@dataclass(frozen=True)
class LayerReport:
    """All kernels of a layer on a chip, and by pass the operations that torch runs beside them.

    ``measured``: seconds by pass, empty where there is no such GPU; ``multiprocessors`` of the one that was timed.
    """

    chip: Chip
    layer: Layer
    kernels: tuple[KernelReport, ...]
    torch_operations: dict[str, int]
    measured: dict[str, float] = field(default_factory=dict)
    multiprocessors: int = 0

    def useful_macs(self, phase: str) -> int:
        """Multiply-adds that a pass needs, of real queries and keys, all chunks taken as interior ones."""
        return PRODUCTS[phase] * self.layer.dim * self.layer.pairs

    def of_phase(self, phase: str) -> list[KernelReport]:
        return [kernel for kernel in self.kernels if kernel.phase == phase]

    def predicted(self, phase: str) -> float:
        """Share of the chip's peak in 16-bit products."""
        return self.useful_macs(phase) / (self.chip.tensor * sum(kernel.time for kernel in self.of_phase(phase)))

    def measured_share(self, phase: str) -> float | None:
        """The same of the time on this machine's GPU, at the clock of the chip's data sheet; None if not timed."""
        if phase not in self.measured:
            return None
        peak = self.chip.tensor * self.multiprocessors * self.chip.clock
        return self.useful_macs(phase) / (peak * self.measured[phase])

    def to_dict(self) -> dict[str, Any]:
        kernels = [{**asdict(kernel), "bound": kernel.bound} for kernel in self.kernels]
        return {
            "chip": self.chip.name,
            "layer": asdict(self.layer),
            "predicted_share_of_peak": {phase: self.predicted(phase) for phase in PRODUCTS},
            "measured_share_of_peak": {phase: self.measured_share(phase) for phase in self.measured},
            "measured_seconds": self.measured,
            "launches": {phase: len(self.of_phase(phase)) for phase in PRODUCTS},
            "torch_operations": self.torch_operations,
            "kernels": kernels,
        }


def report_layer(layer: Layer, chip: Chip) -> LayerReport:
    """Compile, count and predict; where the machine has such a GPU, also measure."""
    compiled, works = compile_layer(layer, chip.capability), count_work(layer, chip.capability)
    names, counted = [kernel.name for kernel in compiled.kernels], [work.kernel for work in works]
    if names != counted:
        raise RuntimeError(f"the kernels compiled are {names}, those interpreted {counted}")
    kernels = tuple(report_kernel(*pair, chip) for pair in zip(compiled.kernels, works, strict=True))
    predicted = LayerReport(chip, layer, kernels, dict(compiled.torch_operations))
    if measure.capability() != chip.capability:
        return predicted
    return replace(predicted, measured=measure.measure(layer), multiprocessors=measure.multiprocessors())


@dataclass
class GpuResult:
    """One run of ``vil bench gpu``."""

    reports: list[LayerReport] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write to a name that ``new_path`` gave; the file is replaced whole or not at all."""
        data = {
            "format": FORMAT,
            "created": datetime.now().astimezone().isoformat(timespec="seconds"),
            "versions": {name: version(name) for name in ("vision-longformer", "torch", "triton")},
            "reports": [report.to_dict() for report in self.reports],
        }
        with atomic_write(path, overwrite=True) as temporary:
            temporary.write_text(json.dumps(data, indent=1))


def report_layers(cases: Iterable[tuple[Layer, Chip]]) -> Iterator[GpuResult]:
    """The result so far, after each case."""
    result = GpuResult()
    for case in cases:
        result.reports.append(report_layer(*case))
        yield result


def report_kernel(kernel: Launched, work: Work, chip: Chip) -> KernelReport:
    """Of a choice between loops the shorter one counts, that of chunks inside the map."""
    code = Code(parse(kernel.listing(), kernel.name), kernel.warps)
    loops: list[Loop | None] = [*code.main_loops()] or [None]
    ways = [Execution(code.levels(loop), work, kernel.warps, kernel.repeats()) for loop in loops]
    way = min(ways, key=lambda way: way.total.instructions)
    registers, stack = kernel.resources()
    return KernelReport(
        kernel.name.removesuffix("_kernel"),
        kernel.phase,
        kernel.programs,
        kernel.warps,
        registers,
        stack,
        code.spills_in_loops(),
        kernel.shared,
        blocks_per_multiprocessor(chip, registers, kernel.shared, kernel.warps, kernel.tensor_memory),
        way.times[-1],
        round(way.tile),
        way.repeats,
        way.per_score(),
        roofline(way.total, kernel.warps, work.bytes, chip),
    )


class Execution:
    """How often a program runs each level of nested loops (``times``), and all that it executes (``total``).

    ``tile``: scores of an iteration of the innermost loop.
    """

    def __init__(self, levels: list[Trace], work: Work, warps: int, repeats: dict[str, float]) -> None:
        self.inner, self.warps = levels[-1], warps
        demanded, executed = sum(work.macs.values()), sum(repeats.get(own, 1) * work.macs[own] for own in work.macs)
        self.times = _times(levels, executed, work.calls, warps)
        self.total = Trace()
        for level, times in zip(levels, self.times, strict=True):
            self.total.add(level, times)
        self.repeats, self.tile = executed / demanded if demanded else 1.0, work.scores / self.times[-1]
        if self.inner.macs(warps) and work.macs_per_score:
            main = max(work.macs, key=work.macs.__getitem__)
            self.tile = self.inner.macs(warps) / repeats.get(main, 1) / work.macs_per_score

    def per_score(self) -> dict[str, float]:
        if not self.tile:
            return {}
        return {kind: count * self.warps * LANES / self.tile for kind, count in self.inner.by_class().items()}


def _times(levels: list[Trace], macs: float, calls: dict[int, int], warps: int) -> list[int]:
    """The innermost loop runs for the products that are not done outside of it, or as often as anything is called.

    A loop around it runs as often as most calls that are neither made once nor most often.
    """
    times, most = [1], max(calls, default=1)
    for _ in levels[1:-1]:
        between = {count: places for count, places in calls.items() if times[-1] < count < most}
        times.append(max(between, key=between.__getitem__, default=times[-1]))
    if len(levels) > 1:
        outside = sum(level.macs(warps) * count for level, count in zip(levels, times, strict=False))
        inside = levels[-1].macs(warps)
        times.append(max(1, math.ceil((macs - outside) / inside)) if inside else most)
    return times


def roofline(trace: Trace, warps: int, traffic: float, chip: Chip) -> dict[str, float]:
    """Clocks that a multiprocessor takes for a block, by each part of it that could be the limit.

    ``traffic`` is in bytes between first- and second-level cache.
    """
    clocks = dict.fromkeys(("tensor", "special", "load/store", "integer", "float", "issue", "cache"), 0.0)
    integer_products = 0.0
    for instruction, count in trace.counts.items():
        lanes = count * warps * LANES
        clocks["issue"] += lanes / LANES / chip.schedulers
        if instruction.shape:
            clocks["tensor"] += count * instruction.macs(warps) / tensor_rate(instruction, chip)
            clocks["load/store"] += count * instruction.operand_bytes(warps) / chip.shared_bandwidth
        elif instruction.kind == "special" or instruction.name in SLOW_CONVERSIONS:
            clocks["special"] += lanes / chip.special
        elif instruction.kind in ("load", "shared") and instruction.name not in ("LDTM", "STTM"):
            width = instruction.bytes_per_lane / chip.shared_bandwidth
            clocks["load/store"] += lanes * max(width, 1 / chip.load_store)
        elif instruction.name in FMA_PIPE:
            clocks["float"] += lanes * (2 if instruction.name in PAIRS else 1) / chip.fma
            integer_products += lanes / chip.imad if instruction.name == "IMAD" else 0
        elif instruction.kind in ("integer", "float", "conversion") and not instruction.uniform:
            clocks["integer"] += lanes / chip.alu
    clocks["float"] = max(clocks["float"], integer_products)
    clocks["cache"] = traffic / chip.l2
    return clocks


def tensor_rate(instruction: Instruction, chip: Chip) -> float:
    """Multiply-adds per clock: half for 32-bit operands, and for tiles of 64 rows of the fifth generation (E)."""
    rate = float(chip.tensor if instruction.name == chip.own_tensor else chip.mma_sync)
    rate /= 2 if instruction.element_bytes == 4 else 1
    few_rows = instruction.name.startswith("UTC") and instruction.shape is not None and instruction.shape[0] < 128
    return rate / 2 if few_rows else rate
