"""How much memory and disk a streamed pass takes, and how many chunk rows at a time a limit allows."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import check_at_least
from ..geometry import Grid, ceil_div
from ..models.config import Linformer, Longformer, ModelConfig, Performer, SpatialReduction
from ..models.vision_longformer import HIDDEN_NUMBERS

STORAGE = "storage=FOLDER in Python, --storage FOLDER of 'vil encode' and 'vil detect predict'"
"""How tokens are kept in files."""

MOST_CHUNK_ROWS = 8
"""Chunk rows of a strip that a limit does not shorten: more are not faster."""

HEADROOM, FIXED = 1.3, 24_000_000
"""What a process takes beside the numbers of a strip, as measured: freed memory that it keeps, and libraries."""

ROWS_WITHOUT_CHUNKS = 8
"""Rows of tokens that strips consist of where tokens have no chunks."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What tokens can be stored as."""

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_bytes(memory: str | int) -> int:
    """``"2GB"``, ``"500 MB"`` or a number of bytes as a number."""
    if isinstance(memory, int):
        check_at_least("memory", memory, 1)
        return memory
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", str(memory), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"memory is {memory!r}; write it as 2GB, 500MB, or as a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(count: float) -> str:
    """Bytes as MB or GB, rounded up, so that what is printed is enough."""
    return f"{ceil_div(int(count), 10**6)}MB" if count < 1e9 else f"{ceil_div(int(count), 10**7) / 100:g}GB"


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, or in the machine and its container; where the system does not say (not Linux), all
    that the machine has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if match is None else int(match[1]) * 1024
    return int(min(free, *(_free_in_container(*files) for files in CONTAINER_FILES)))


CONTAINER_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"), "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        "total_inactive_file",
    ),
)
"""Where Linux keeps the limit of a container, what it uses, and under which name ``memory.stat`` beside them has the
part of it that is given back when needed; of cgroups of version 2 and of version 1."""


def _free_in_container(limit: Path, used: Path, cached: str) -> float:
    """Bytes below the limit; infinite if there is none."""
    try:
        most, taken = limit.read_text().strip(), int(used.read_text())
        match = re.search(rf"^{cached} (\d+)$", (limit.parent / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return math.inf
    return math.inf if most == "max" else max(0, int(most) - taken + int(match[1] if match else 0))


class Step(NamedTuple):
    """A pass over a map: of ``stage``, counted from 0, its patch embedding (``block`` 0) or a block, counted from 1."""

    stage: int
    block: int


@dataclass(frozen=True)
class Work:
    """A streamed pass as numbers: the first ``count`` stages of a model, the size of the image, and what numbers are
    stored and computed as.

    ``kept`` are the stages whose maps stay. ``in_memory``: tokens are not in files.
    """

    config: ModelConfig
    count: int
    size: tuple[int, int]
    stored: torch.dtype
    computed: torch.dtype
    kept: tuple[int, ...] = ()
    in_memory: bool = True
    given_tokens: int = 0

    def __post_init__(self) -> None:
        if self.stored not in DTYPES:
            raise ValueError(f"dtype is {self.stored}; tokens are stored as {', '.join(map(str, DTYPES))}")
        for stage in self.kept:
            if stage not in range(self.count):
                raise ValueError(f"maps names stage {stage}; the model has stages 0 to {self.count - 1}")

    @cached_property
    def grids(self) -> list[Grid]:
        """The map of each stage."""
        return self.config.grids(self.size)[: self.count]

    @cached_property
    def steps(self) -> list[Step]:
        """All passes, in order."""
        return [
            Step(stage, block) for stage in range(self.count) for block in range(self.config.stages[stage].depth + 1)
        ]

    @property
    def kept_steps(self) -> list[Step]:
        """The last pass of each stage whose map stays."""
        return [Step(stage, self.config.stages[stage].depth) for stage in self.kept]

    def before(self, step: Step) -> Step | None:
        """The pass whose map a pass reads, None for the first, which reads the image."""
        index = self.steps.index(step)
        return self.steps[index - 1] if index else None

    def chunk_height(self, stage: int) -> int:
        """Rows of tokens that strips consist of: of a chunk, or of what a reduced map has one row for."""
        attention = self.config.stages[stage].attention
        if isinstance(attention, Longformer):
            return attention.window
        return attention.ratio if isinstance(attention, SpatialReduction) else ROWS_WITHOUT_CHUNKS

    def keys_of_token(self, stage: int) -> int:
        """Keys that a local token sees; for Performer its features, which cost as much."""
        config, grid = self.config.stages[stage], self.grids[stage]
        attention, global_tokens = config.attention, config.global_tokens + self.given_tokens
        if isinstance(attention, Longformer):
            return 9 * attention.window**2
        if isinstance(attention, Linformer):
            return attention.features
        if isinstance(attention, Performer):
            return attention.count_features(config.dim // config.heads)
        if isinstance(attention, SpatialReduction):
            return global_tokens + ceil_div(grid.height, attention.ratio) * ceil_div(grid.width, attention.ratio)
        return global_tokens

    def multiplications(self, step: Step, rows: int) -> int:
        """Of a pass over some rows of its map."""
        config, tokens = self.config.stages[step.stage], rows * self.grids[step.stage].width
        if step.block == 0:
            return tokens * config.patch**2 * self._channels(step.stage) * config.dim
        hidden = int(config.dim * self.config.mlp_ratio)
        return tokens * config.dim * (4 * config.dim + 2 * hidden + 2 * self.keys_of_token(step.stage))

    def _channels(self, stage: int) -> int:
        """Of what a stage's patches are made of."""
        return self.config.stages[stage - 1].dim if stage else self.config.in_chans

    # Tokens

    def map_bytes(self, stage: int) -> int:
        """Of the tokens of a stage's map."""
        return self.grids[stage].tokens * self.config.stages[stage].dim * self.stored.itemsize

    def token_bytes(self) -> int:
        """Of all tokens that are in memory at a time. Maps of later stages take the place of earlier ones."""
        if not self.in_memory:
            return 0
        kept, current, peak = 0, 0, 0
        for stage in range(self.count):
            if self.in_place(Step(stage, 0)):
                continue
            before, current = current, self.map_bytes(stage)
            if stage - 1 in self.kept:
                kept, before = kept + before, 0
            peak = max(peak, kept + before + current)
        return peak

    def in_place(self, step: Step) -> bool:
        """Whether a pass can write its map over the one it reads, each row after the rows that it is made of."""
        stage, before = step.stage, step.stage - 1
        if step.block or stage == 0 or before in self.kept:
            return step.block > 0
        target, source = (self.grids[each].width * self.config.stages[each].dim for each in (stage, before))
        fits = self.map_bytes(stage) <= self.map_bytes(before)  # not if padding makes its last row
        return fits and target <= self.config.stages[stage].patch * source

    def disk_bytes(self) -> int:
        """Of all files that exist at a time: a map, what is made of it, and the maps that are kept."""
        kept, peak = 0, 0
        for stage in range(self.count):
            own, before = self.map_bytes(stage), self.map_bytes(stage - 1) if stage else 0
            was_kept = stage - 1 in self.kept
            kept += before if was_kept else 0
            peak = max(peak, kept + own + (0 if was_kept else before), kept + 2 * own)
        return peak

    # Strips

    def strip_bytes(self, stage: int, chunk_rows: int, *, hidden_numbers: float = HIDDEN_NUMBERS) -> int:
        """Of what is computed for a strip: its patches while they are embedded, or its block at its highest, with so
        many numbers of the hidden layer at a time."""
        config, grid, height = self.config.stages[stage], self.grids[stage], self.chunk_height(stage)
        rows, beside = min(chunk_rows, ceil_div(grid.height, height)), 2 * isinstance(config.attention, Longformer)
        own, keys = rows * height * grid.width, (rows + beside) * height * grid.width
        dim, hidden = config.dim, int(config.dim * self.config.mlp_ratio)
        attention = keys * 4 * dim + own * 3 * dim
        if isinstance(config.attention, Performer):
            attention += 5 * own * config.heads * self.keys_of_token(stage)
        mlp = keys * 3 * dim + own * 4 * dim + 2 * min(own * hidden, hidden_numbers)
        of_global_rows = 4 * (config.global_tokens + self.given_tokens) * config.heads * own
        embedding = own * (3 * config.patch**2 * self._channels(stage) + 4 * dim)
        if config.position == "absolute_1d":
            embedding += grid.tokens * dim
        loaded = 0 if self.in_memory and self.stored == self.computed else keys * dim
        numbers = loaded + max(attention + of_global_rows, mlp, embedding) + self._summary_numbers(stage)
        return FIXED + int(HEADROOM * (numbers * self.computed.itemsize + own * dim * self.stored.itemsize))

    def _summary_numbers(self, stage: int) -> int:
        """Of what tokens see of the whole map and how it is made, where it does not fit a strip by far."""
        config = self.config.stages[stage]
        if isinstance(config.attention, SpatialReduction):
            return 4 * config.dim * self.keys_of_token(stage)
        if isinstance(config.attention, Linformer):
            return 4 * config.dim * (config.attention.features + self.config.grids()[stage].tokens)
        return 0

    def plain_bytes(self) -> int:
        """Of the model's own pass, which computes every map as one strip."""
        whole = [(stage, self.grids[stage].height) for stage in range(self.count)]
        return max(self.strip_bytes(stage, rows, hidden_numbers=math.inf) for stage, rows in whole)

    def choose_rows(self, memory: str | int, beside: int = 0) -> list[int]:
        """Chunk rows of a strip in each stage, as many as the limit allows; refused if it does not allow any.

        ``beside``: bytes that what follows needs beside the tokens.
        """
        limit, tokens = parse_bytes(memory), self.token_bytes()
        least = self.least_bytes(beside)
        if limit < least:
            in_memory, in_files = map(format_bytes, (least, replace(self, in_memory=False).least_bytes(beside)))
            remedy = "" if in_files == in_memory else f", or {in_files} with the tokens in files ({STORAGE})"
            raise ValueError(
                f"{format_bytes(limit)} of memory is too little for an image of {self.size[0]}×{self.size[1]}; at "
                f"least {in_memory} is needed, {format_bytes(tokens)} of it for tokens{remedy}"
            )
        stages, choices = range(self.count), range(MOST_CHUNK_ROWS, 0, -1)
        return [next(rows for rows in choices if tokens + self.strip_bytes(stage, rows) <= limit) for stage in stages]

    def least_bytes(self, beside: int = 0) -> int:
        """What a pass takes with strips of one chunk row."""
        return self.token_bytes() + max(beside, *(self.strip_bytes(stage, 1) for stage in range(self.count)))
