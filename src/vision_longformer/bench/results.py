"""What was measured and on which machine: rows by group, their ratios, JSON files, comparison with earlier ones."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..files import atomic_write
from .cases import LARGE_MATMUL, Case, Group
from .timing import Samples, summary

FORMAT = "vision_longformer/bench/1"
ALLOCATOR_TEXTS = {"default": "default allocator", "kept": "memory kept"}

COMPARED_FACTS = ("cpu", "gpu", "cores", "threads", "torch", "device")
"""Facts that two results should share to be compared."""


@dataclass
class Row:
    """What is known of a case. ``time`` is by allocator: median, quartiles, best, samples, page faults, speed-up.

    ``memory``: bytes of ``inputs``, of ``outputs``, and ``extra``, the peak over the inputs with the outputs in it.
    ``reasons``: why something is missing.
    """

    case: Case
    flops: int | None = None
    time: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, int] | None = None
    reasons: list[str] = field(default_factory=list)

    def add_samples(self, allocator: str, samples: Samples) -> None:
        """Their statistics, or the reason why there are none."""
        if samples.seconds:
            self.time[allocator] = {
                **summary(samples.seconds),
                "rounds": len(samples.seconds),
                "page_faults": statistics.median(samples.page_faults),
                "samples": samples.seconds,
            }
        if samples.reason is not None:
            self.add_reason(samples.reason)

    def add_reason(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def per_unit(self, allocator: str) -> float:
        """Seconds per token or image."""
        return self.time[allocator]["median"] / self.case.units

    def flops_per_second(self, allocator: str) -> float | None:
        """Of the operations that the result requires."""
        return self.flops / self.time[allocator]["median"] if self.flops and allocator in self.time else None

    def to_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "case"}
        return {**self.case.to_dict(), **own}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        own = {name: data[name] for name in ("flops", "time", "memory", "reasons")}
        return cls(Case.from_dict({name: value for name, value in data.items() if name not in own}), **own)


@dataclass
class GroupResult:
    """A group with rows in place of its cases."""

    bench: str
    name: str
    about: str
    style: str
    unit: str
    rows: list[Row]

    @classmethod
    def of(cls, group: Group) -> GroupResult:
        return cls(group.bench, group.name, group.about, group.style, group.unit, [Row(case) for case in group.cases])

    def find(self, point: str, variant: str, mode: str) -> Row | None:
        wanted = (point, variant, mode)
        return next((row for row in self.rows if (row.case.point, row.case.variant, row.case.mode) == wanted), None)

    def compute_speedups(self) -> None:
        """Of each row against its baseline, per token or image: the median over rounds, whose runs are neighbours in
        time, so that a slow minute of the machine falls out."""
        for row in self.rows:
            baseline = self.find(*row.case.baseline, row.case.mode)
            for allocator, time in row.time.items():
                if baseline is None or allocator not in baseline.time:
                    continue
                pairs = zip(baseline.time[allocator]["samples"], time["samples"], strict=False)
                ratio = statistics.median(other / own for other, own in pairs)
                time["speedup"] = ratio * row.case.units / baseline.case.units

    def expected_extra(self, row: Row) -> float:
        """Bytes of extra memory of a model's row, in proportion to the pixels of the largest image below its own with
        which the same has been measured; 0 if there is none."""
        case = row.case
        same = [own for own in self.rows if (own.case.variant, own.case.mode) == (case.variant, case.mode)]
        known = [(own.case.units, own.memory["extra"]) for own in same if own.memory and own.case.units < case.units]
        units, extra = max(known, default=(1, 0))
        return extra * case.units / units

    def memory_ratio(self, row: Row) -> float | None:
        """Extra memory of a row over that of its baseline."""
        baseline = self.find(*row.case.baseline, row.case.mode)
        if baseline is None or not baseline.memory or not row.memory:
            return None
        return row.memory["extra"] / max(1, baseline.memory["extra"])

    def matmul_fraction(self, row: Row, allocator: str) -> float | None:
        """Operations per second as a fraction of those of the large matrix product timed in the same rounds."""
        matmul = self.find(row.case.point, LARGE_MATMUL, row.case.mode)
        own, peak = row.flops_per_second(allocator), matmul and matmul.flops_per_second(allocator)
        return own / peak if own and peak else None


@dataclass
class Result:
    """One run of ``vil bench``; ``complete`` is false if it was interrupted."""

    what: str
    created: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    groups: list[GroupResult] = field(default_factory=list)
    complete: bool = False

    def rows(self) -> Iterator[tuple[GroupResult, Row]]:
        for group in self.groups:
            for row in group.rows:
                yield group, row

    def to_dict(self) -> dict[str, Any]:
        groups = [{**vars(group), "rows": [row.to_dict() for row in group.rows]} for group in self.groups]
        return {"format": FORMAT, **vars(self), "groups": groups}

    def save(self, path: Path) -> None:
        """Write to a name that :func:`new_path` gave; the file is replaced whole or not at all."""
        with atomic_write(path, overwrite=True) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1))


def load_result(path: str | Path) -> Result:
    """A file written by :meth:`Result.save`."""
    try:
        data = json.loads(Path(path).read_text())
        if data.pop("format") != FORMAT:
            raise ValueError
        groups = [GroupResult(**{**g, "rows": [Row.from_dict(row) for row in g["rows"]]}) for g in data.pop("groups")]
        return Result(**data, groups=groups)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not a result of 'vil bench'") from None


def new_path(folder: Path, name: str, *, overwrite: bool) -> Path:
    """``name.json`` or, if it exists and may not be overwritten, ``name-2.json`` and so on; the file is created empty,
    so that no other run takes the name."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10000):
        path = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            path.open("a" if overwrite else "x").close()
            return path
        except FileExistsError:
            continue
    raise ValueError(f"{folder} is full of results; give another --output")


class Change(NamedTuple):
    """A row now against the same one earlier: above 1 is faster, or leaner."""

    group: str
    row: Row
    speed: dict[str, float]
    memory: float | None


def compare(earlier: Result, now: Result) -> tuple[list[Change], list[str]]:
    """Changes of the rows that both have measured, and what makes them hard to compare."""
    earlier_rows = {_row_key(group, row): row for group, row in earlier.rows()}
    changes = []
    for group, row in now.rows():
        old = earlier_rows.get(_row_key(group, row))
        if old is None:
            continue
        allocators = [name for name in row.time if name in old.time]
        speed = {name: old.time[name]["median"] / row.time[name]["median"] for name in allocators}
        memory = None
        if old.memory and row.memory and row.memory["extra"]:
            memory = old.memory["extra"] / row.memory["extra"]
        if speed or memory is not None:
            changes.append(Change(f"{group.bench}: {group.name}", row, speed, memory))
    return changes, differences(earlier.machine, now.machine)


def _row_key(group: GroupResult, row: Row) -> tuple[str, ...]:
    return group.bench, group.name, row.case.point, row.case.variant, row.case.mode


# The machine


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
