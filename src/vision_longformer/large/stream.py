"""A model's forward pass over one image of any size, strip by strip: its own result, in bounded memory.

In a block of Vision Longformer the tokens of a chunk row see those of the chunk rows above and below, and the global
tokens. So a block goes over its map once, strip by strip, and keeps aside the rows that the next strip still has to see
as they were. Global tokens see every token: their softmax goes on from strip to strip, and they are updated at the end.

Mechanisms whose tokens see a few keys made of the whole map take two passes: one makes the keys, the other attends to
them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from ..errors import check_at_least
from ..geometry import Grid, Strip, strips
from ..models.attention import LongformerAttention, SummaryAttention
from ..models.config import Full, ModelConfig
from ..models.vision_longformer import Block, Stage, VisionLongformer
from ..ops.chunks import tokens_to_map
from ..ops.partial_softmax import attend_part
from .memory import Step, Work
from .pixels import Pixels
from .storage import FileStorage, Storage, TokenFolder, TokenMap, token_folder


class Progress(NamedTuple):
    """How far a streamed pass is: ``done`` of ``total`` multiplications, now in a ``step``; ``resumed`` of those that
    are done were done by an earlier run."""

    step: Step
    done: int
    total: int
    resumed: int = 0


@dataclass(frozen=True)
class Streamed:
    """What a model makes of an image: logits (classes,), the pooled features they are made of (dim,), and the maps that
    were asked for, (height, width, dim) by the number of their stage, in the type that tokens are stored as."""

    logits: Tensor
    features: Tensor
    maps: dict[int, Tensor]


def stream(
    model: VisionLongformer,
    image: Any,
    *,
    memory: str | int = "2GB",
    rows: int | None = None,
    storage: str | Path | TokenFolder | None = None,
    dtype: torch.dtype | None = None,
    maps: Sequence[int] = (),
    given_tokens: Tensor | None = None,
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
    identity: str | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Streamed:
    """The model's evaluation of one image, computed strip by strip.

    Args:
        image: a tensor (channels, height, width), or anything that :func:`open_image` takes or has opened: a file, or
            an array (height, width, channels). Numbers of type uint8 are divided by 255, of type uint16 by 65535, and
            normalised by ``mean`` and ``std``; others are taken as they are.
        memory: how much tokens and strips may take, on top of the model and the image: ``"2GB"``, or a number of bytes.
        rows: chunk rows of a strip, in place of those that ``memory`` allows.
        storage: a folder for the tokens; None for memory. If the folder holds the tokens of a run that ended early, the
            run is resumed after its last finished block. A folder that another process works in is refused.
        dtype: what tokens are stored as, the model's own type if None; bfloat16 halves them.
        maps: numbers of the stages whose maps are returned, counted from 0. With ``storage`` they are memory-mapped.
        given_tokens: (n, ``given_token_dim``), for models that take any.
        identity: what tells the image from others when a run is resumed. By default a file's path, size and time, or a
            hash of an array's numbers, for which the array is read once more.
        progress: called after every strip.
    """
    pixels = Pixels(image, model.config.in_chans, mean, std)
    computed = next(model.parameters()).dtype
    check_model(model, given_tokens)
    given = 0 if given_tokens is None else len(given_tokens)
    work = Work(
        model.config, len(model.stages), pixels.size, dtype or computed, computed, tuple(sorted(set(maps))),
        in_memory=storage is None, given_tokens=given,
    )  # fmt: skip
    if rows is not None:
        check_at_least("rows", rows, 1)
    chunk_rows = work.choose_rows(memory) if rows is None else [rows] * len(model.stages)
    with torch.no_grad(), token_folder(storage) as folder:
        place = Storage(work)
        if folder is not None:
            settings = [model.config.to_dict(), pixels.size, str(work.stored), work.kept, [*mean], [*std]]
            settings.append(pixels.identity() if identity is None else identity)
            place = FileStorage(work, folder, _digest(model, given_tokens, settings))
        return _Run(model, pixels, work, chunk_rows, place, given_tokens, progress).result()


def check_model(model: VisionLongformer, given_tokens: Tensor | None = None) -> None:
    """Refuse a model that cannot be streamed."""
    if model.training:
        raise ValueError("the model is in training mode; stream evaluates it: call model.eval() first")
    width = model.config.given_token_dim
    if given_tokens is not None and (given_tokens.dim() != 2 or not width or given_tokens.shape[1] != width):
        raise ValueError(f"given_tokens is {tuple(given_tokens.shape)}; it must be (n, {width}), or None if that is 0")
    refusal = refuse_streaming(model.config, len(model.stages))
    if refusal is not None:
        raise ValueError(refusal)


def refuse_streaming(config: ModelConfig, count: int) -> str | None:
    """Why the first ``count`` stages of a model cannot be streamed, or None."""
    for number, stage in enumerate(config.stages[:count], 1):
        if isinstance(stage.attention, Full):
            return (
                f"stage {number} has full attention, in which every token sees every other at once; make it a "
                "Longformer stage with adapt_model, or run the model on a smaller image"
            )
    return None


def _digest(model: VisionLongformer, given_tokens: Tensor | None, settings: object) -> str:
    """A fingerprint of everything that the tokens of a run depend on, but for the pixels."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    tensors = [*model.state_dict().values(), *(() if given_tokens is None else (given_tokens,))]
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class _Run:
    """One streamed pass: steps over maps, one after the other, from the first that an earlier run has not finished."""

    def __init__(
        self,
        model: VisionLongformer,
        pixels: Pixels,
        work: Work,
        chunk_rows: Sequence[int],
        storage: Storage,
        given_tokens: Tensor | None,
        progress: Callable[[Progress], None],
    ) -> None:
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.model, self.pixels, self.work, self.chunk_rows, self.storage = model, pixels, work, chunk_rows, storage
        self.given = None if given_tokens is None else given_tokens[None].to(parameter)
        self.progress, self.done, self.resumed = progress, 0, 0
        self.total = sum(work.multiplications(step, work.grids[step.stage].height) for step in work.steps)

    def result(self) -> Streamed:
        """Run all steps that are left, and pool."""
        finished, maps, global_tokens = self.storage.resume()
        for step in self.work.steps:
            if finished is not None and step <= finished:
                self.resumed += self.work.multiplications(step, self.work.grids[step.stage].height)
                self.done = self.resumed
                continue
            before = self.work.before(step)
            source, target = None if before is None else maps[before], self.storage.target(step)
            run = self._run_block if step.block else self._embed
            global_tokens = run(step, source, target, global_tokens.to(self.device, self.dtype))
            self.storage.commit(step, target, global_tokens)
            maps = {kept: maps[kept] for kept in maps if kept in self.work.kept_steps} | {step: target}
        pooled = self._pool(maps[self.work.steps[-1]], global_tokens.to(self.device, self.dtype))
        features, logits = (self.model.forward_head(pooled, pre_logits=only)[0] for only in (True, False))
        return Streamed(logits, features, {step.stage: maps[step].tensor() for step in self.work.kept_steps})

    def _embed(self, step: Step, source: TokenMap | None, target: TokenMap, global_tokens: Tensor) -> Tensor:
        """Make a stage's map of the image or of the last map; returns the global tokens that the stage begins with."""
        stage, config = cast(Stage, self.model.stages[step.stage]), self.model.config
        patch, height = stage.patch_embed.patch, self.pixels.size[0] if source is None else source.grid.height
        for rows in self._row_ranges(step.stage):
            covered = range(rows.start * patch, min(rows.stop * patch, height))
            if source is None:
                image = self.pixels.read(covered, self.device, self.dtype)
            else:
                image = tokens_to_map(self._load(source.read(covered)), Grid(len(covered), source.grid.width))
            local = stage.embed_rows(image, target.grid, rows.start)
            target.write(rows, local[0])
            self._advance(step, len(rows))
        carried = (
            global_tokens[:, : config.stages[step.stage - 1].global_tokens] if config.carry_global_tokens else None
        )
        return torch.cat([local[:, :0], *stage.first_global_tokens(local, carried, self.given)], 1)

    def _run_block(self, step: Step, source: TokenMap | None, target: TokenMap, global_tokens: Tensor) -> Tensor:
        """One block, from one map to another or in place; returns the global tokens after it."""
        assert source is not None
        block = cast(Block, cast(Stage, self.model.stages[step.stage]).blocks[step.block - 1])
        if isinstance(block.attn, SummaryAttention):
            return self._run_summary_block(block, step, source, target, global_tokens)
        attention, part = cast(LongformerAttention, block.attn), block.among_global(global_tokens)
        total = None if part is None else attend_part(part)
        for strip, (above, below) in _with_untouched_rows(source, attention, self.chunk_rows[step.stage]):
            parts = (self._load(rows) for rows in (above, source.read(strip.rows), below))
            tokens = torch.cat([global_tokens, *parts], 1)
            own, part = block.forward_strip(tokens, strip, self.model.config.eval_neighbours)
            total = None if part is None else attend_part(part, total)
            target.write(strip.rows, own[0])
            del tokens, own, part
            self._advance(step, len(strip.rows))
        return global_tokens if total is None else block.finish_global(global_tokens, total.out)

    def _run_summary_block(
        self, block: Block, step: Step, source: TokenMap, target: TokenMap, global_tokens: Tensor
    ) -> Tensor:
        """A block in two passes: what tokens see of the whole map, then each strip."""
        row_ranges = self._row_ranges(step.stage)
        parts = (self._load(source.read(rows)) for rows in row_ranges)
        summary = block.summarise(global_tokens, parts, source.grid)
        for rows in row_ranges:
            target.write(rows, block.forward_local(self._load(source.read(rows)), summary)[0])
            self._advance(step, len(rows))
        return block.forward_global(global_tokens, summary) if global_tokens.shape[1] else global_tokens

    def _pool(self, tokens: TokenMap, global_tokens: Tensor) -> Tensor:
        """The token that the head makes logits of, (1, 1, dim)."""
        normed = self.model.norm(global_tokens)
        if self.model.config.global_pool == "token":
            return normed[:, :1]
        total = normed.double().sum(1, keepdim=True)
        for rows in self._row_ranges(len(self.model.stages) - 1):
            total += self.model.norm(self._load(tokens.read(rows))).double().sum(1, keepdim=True)
        return (total / (tokens.grid.tokens + global_tokens.shape[1])).to(self.dtype)

    def _row_ranges(self, stage: int) -> list[range]:
        """The rows of a stage's map, as many at a time as a strip has."""
        height, count = self.work.grids[stage].height, self.chunk_rows[stage] * self.work.chunk_height(stage)
        return [range(start, min(start + count, height)) for start in range(0, height, count)]

    def _load(self, tokens: Tensor) -> Tensor:
        """Stored tokens (n, dim) as the model takes them, (1, n, dim)."""
        return tokens.to(self.device, self.dtype)[None]

    def _advance(self, step: Step, rows: int) -> None:
        self.done += self.work.multiplications(step, rows)
        self.progress(Progress(step, self.done, self.total, self.resumed))


def _with_untouched_rows(
    source: TokenMap, attention: LongformerAttention, chunk_rows: int
) -> Iterator[tuple[Strip, list[Tensor]]]:
    """Each strip of a map with the tokens of the rows above and below it, as they were before any strip was written."""
    parts = strips(source.grid, attention.window, attention.rule, chunk_rows)
    aside: dict[range, Tensor] = {}
    for index, strip in enumerate(parts):
        beside = [aside[rows] if rows in aside else source.read(rows) for rows in (strip.above, strip.below)]
        later = [rows for part in (*parts[index + 1 : index + 2], parts[-1]) for rows in (part.above, part.below)]
        mine = [rows for rows in later if rows and rows.start in strip.rows]
        aside = {rows: aside[rows] for rows in later if rows in aside} | {
            rows: source.read(rows).clone() for rows in mine
        }
        yield strip, beside
