"""One image over several processes: each has a band of every map, and together they compute what one process would.

The map of every stage is cut into bands of whole chunk rows, one per process, and as even as chunk rows allow; from
stage to stage the rows that change hands are sent. Before a block, each process fetches the chunk rows above and below
its band. These are tokens, not keys and values: half as many numbers, for which each process projects the fetched rows
by itself. Global tokens are in every process; their softmax goes over the bands, and is merged from what each has
attended to.

Everything that is sent has a gradient that is sent back. Each process computes the loss of the whole image, so the
*mean* of the processes' gradients is the gradient of one process: that of DDP or FSDP2 over all processes, those that
share an image and those that do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ..geometry import Grid, Strip, even_strips
from ..models.attention import Neighbours
from ..models.config import Longformer, ModelConfig
from ..models.strips import forward_by_strips
from ..models.vision_longformer import Block, Stage, VisionLongformer
from ..ops.chunks import tokens_to_map
from ..ops.operator import arithmetic_dtype
from ..ops.partial_softmax import PartialSoftmax, attend_part
from .stream import refuse_streaming

M = TypeVar("M", bound=nn.Module)


def spatial_parallel(model: M, mesh: DeviceMesh) -> M:
    """Let the processes of a mesh, or of one dimension of it, share every image that a model is given.

    Every Vision Longformer in ``model`` is changed in place, as FSDP2 does it; its parameters and their names stay as
    they are. All processes of the mesh must give it the same images, of any height, and get the same complete logits,
    features and maps. Where a map has fewer chunk rows than there are processes, the rest of them have nothing to do.

    For training, wrap the result in DDP, or in FSDP2, over *all* processes: those that share an image and, if the
    mesh has another dimension, those with other images. The mean of their gradients is the gradient of one process.

    Args:
        model: a Vision Longformer whose stages are Longformer, without dropout (drop path is drawn once for all
            processes), or a module that contains some.
        mesh: of one dimension, such as ``mesh["spatial"]`` of
            ``mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "spatial"))``.
    """
    if mesh.ndim != 1:
        names = ", ".join(mesh.mesh_dim_names or ())
        raise ValueError(f"the mesh has {mesh.ndim} dimensions ({names}); give the one that shares images")
    check_divisible(model, mesh.size())
    if mesh.size() == 1:
        return model
    ranks = distributed.get_process_group_ranks(mesh.get_group())
    # One of its own: DDP and FSDP2 use theirs whenever gradients are ready, in no order that all processes agree on.
    group = distributed.new_group(ranks, use_local_synchronization=True)
    for part in _backbones(model):
        part.__class__ = SpatialVisionLongformer
        cast(SpatialVisionLongformer, part).group = group
        for block in [module for module in part.modules() if isinstance(module, Block)]:
            block.__class__ = SpatialBlock
    return model


def check_divisible(model: nn.Module, processes: int, size: tuple[int, int] | None = None) -> None:
    """Refuse a model whose images, if it is known of this ``size``, cannot be divided over so many processes."""
    backbones = _backbones(model)
    if not backbones:
        raise ValueError("only images of a Vision Longformer can be divided among processes; this model contains none")
    for part in backbones:
        _check_mechanisms(part.config, len(part.stages))
        if part.config.drop_rate:
            raise ValueError(
                f"drop_rate is {part.config.drop_rate}, and the processes that share an image would each draw their "
                "own dropout; set it to 0 (a drop_path_rate is fine)"
            )
        if size is not None and processes > (most := max(_chunk_rows(part, size))):
            raise ValueError(
                f"{processes} processes cannot share images of {size[0]}×{size[1]}: each takes at least one chunk row, "
                f"and no stage has more than {most}; use at most {most} processes"
            )


def _check_mechanisms(config: ModelConfig, count: int) -> None:
    """Refuse stages, among the first ``count``, whose keys are not those of a few rows of the map."""
    refusal = refuse_streaming(config, count)
    if refusal is not None:
        raise ValueError(refusal)
    for number, stage in enumerate(config.stages[:count], 1):
        if not isinstance(stage.attention, Longformer):
            raise ValueError(
                f"stage {number} has {stage.attention.mechanism} attention, whose keys are made of the whole map; only "
                "models whose stages are Longformer can be divided among processes"
            )


def _chunk_rows(model: VisionLongformer, size: tuple[int, int]) -> list[int]:
    """How many rows of chunks there are in the map of each stage."""
    windows = [cast(Longformer, stage.attention).window for stage in model.config.stages]
    return [grid.chunks(window).height for grid, window in zip(model.config.grids(size), windows, strict=True)]


def _backbones(model: nn.Module) -> list[VisionLongformer]:
    return [module for module in model.modules() if isinstance(module, VisionLongformer)]


class _AllToAll(torch.autograd.Function):
    """Parts of a tensor along its first axis to each process of a group, and theirs from each; gradients go back."""

    @staticmethod
    def forward(ctx: Any, send: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
        ctx.outgoing, ctx.incoming, ctx.group = outgoing, incoming, group
        received = send.new_empty(sum(incoming), *send.shape[1:])
        distributed.all_to_all_single(received, send.contiguous(), incoming, outgoing, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad, ctx.incoming, ctx.outgoing, ctx.group), None, None, None


def _overlap(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def fetch_rows(
    tokens: Tensor, width: int, rows: Sequence[range], wanted: Sequence[Sequence[range]], group: Any
) -> list[Tensor]:
    """The tokens of the rows that this process wants, in pieces (B, n, dim) in the order in which it names them.

    ``rows`` says for each process which rows of a map its ``tokens`` are, ``wanted`` which it wants. Every piece must
    be used, empty ones too: gradients are sent back by all processes or none.
    """
    rank, numbers = distributed.get_rank(group), range(len(rows))

    def own(part: range) -> Tensor:
        start, stop = ((row - rows[rank].start) * width for row in (part.start, part.stop))
        return tokens[:, start:stop]

    outgoing = [[_overlap(part, rows[rank]) for part in wanted[other]] if other != rank else [] for other in numbers]
    incoming = [[_overlap(part, rows[other]) for part in wanted[rank]] if other != rank else [] for other in numbers]
    send = torch.cat([tokens[:, :0], *(own(part) for parts in outgoing for part in parts)], 1)
    counts = ([sum(map(len, parts)) * width for parts in each] for each in (outgoing, incoming))
    received = _AllToAll.apply(send.transpose(0, 1), *counts, group).transpose(0, 1)
    pieces = iter(received.split([len(part) * width for parts in incoming for part in parts], 1))
    incoming_pieces = [[next(pieces) for _ in parts] for parts in incoming]
    return [
        own(_overlap(part, rows[rank])) if other == rank else incoming_pieces[other][index]
        for index, part in enumerate(wanted[rank])
        for other in numbers
    ]


@dataclass(frozen=True)
class Bands:
    """A map of tokens over the processes of a group: the ``strips`` of all, in order of their ranks."""

    grid: Grid
    strips: list[Strip]
    group: Any

    @property
    def own(self) -> Strip:
        return self.strips[distributed.get_rank(self.group)]

    def fetch(self, local: Tensor, wanted: Sequence[Sequence[range]]) -> list[Tensor]:
        """Tokens of rows of the map, from those (B, n, dim) of each band."""
        return fetch_rows(local, self.grid.width, [strip.rows for strip in self.strips], wanted, self.group)

    def with_halo(self, local: Tensor) -> list[Tensor]:
        """The tokens of the rows that the own band sees."""
        return self.fetch(local, [(strip.above, strip.rows, strip.below) for strip in self.strips])

    def whole(self, local: Tensor) -> Tensor:
        """The tokens of the map, (B, N, dim), in every process."""
        return torch.cat(self.fetch(local, [[range(self.grid.height)]] * len(self.strips)), 1)

    def from_each(self, tensor: Tensor) -> list[Tensor]:
        """The tensors (B, n, d) of all processes, in every process."""
        count = len(self.strips)
        one_each = [range(number, number + 1) for number in range(count)]
        return fetch_rows(tensor, tensor.shape[1], one_each, [[range(count)]] * count, self.group)


class SpatialBlock(Block):
    """A block that computes a band of its map, and in every process the global tokens."""

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        bands: Bands,
        neighbours: Neighbours,
        drop_paths: Sequence[Tensor],
        checkpointing: bool | str,
    ) -> Tensor:
        """Global tokens and those of the own band, (B, G + n, dim), to the same after the block."""
        count = tokens.shape[1] - bands.own.grid.tokens
        global_tokens = tokens[:, :count]
        seen = torch.cat([global_tokens, *bands.with_halo(tokens[:, count:])], 1)
        own, *part = self._run_band(seen, bands.own, neighbours, drop_paths, checkpointing)
        if not part:
            return own
        among = self.among_global(global_tokens)
        assert among is not None
        total = attend_part(among)
        for other in self._parts_of_all(part[0], part[1], bands):
            total = total.merge(other)
        return torch.cat([self.finish_global(global_tokens, total.out, drop_paths), own], 1)

    def _run_band(
        self,
        seen: Tensor,
        strip: Strip,
        neighbours: Neighbours,
        drop_paths: Sequence[Tensor],
        checkpointing: bool | str,
    ) -> tuple[Tensor, ...]:
        """The band's own tokens after the block and, if there are global tokens, their attention to the band. Nothing
        is sent meanwhile, so that it may be computed again in backward."""
        if not strip.rows:
            return self._run_nothing(seen)
        if checkpointing == "strips":
            own, part = forward_by_strips(self, seen, strip, neighbours, drop_paths)
            return own, *(part or ())

        def run(seen: Tensor) -> tuple[Tensor, ...]:
            own, inputs = self.forward_strip(seen, strip, neighbours, drop_paths)
            return own, *(() if inputs is None else attend_part(inputs))

        return checkpoint(run, seen, use_reentrant=False) if checkpointing else run(seen)

    def _run_nothing(self, global_tokens: Tensor) -> tuple[Tensor, ...]:
        """The same for an empty band: no tokens, and attention without weight. It depends on all that other bands'
        results depend on, since gradients are exchanged among all processes or none."""
        nothing = global_tokens.sum() * 0 + sum(parameter.sum() * 0 for parameter in self.parameters())
        batch, count, dim = global_tokens.shape
        own, heads = global_tokens[:, count:] + nothing, self._attention().heads
        if count == 0:
            return (own,)
        zero = nothing.to(arithmetic_dtype(global_tokens))
        return own, zero.expand(batch, count, heads, dim // heads), zero.expand(batch, heads, count) - math.inf

    def _parts_of_all(self, out: Tensor, lse: Tensor, bands: Bands) -> Iterator[PartialSoftmax]:
        """What the global rows have attended to in each band."""
        dim, heads = out.shape[2] * out.shape[3], out.shape[2]
        packed = torch.cat([out.flatten(2), lse.transpose(1, 2)], 2)
        for part in bands.from_each(packed):
            rows, sums = part.split((dim, heads), 2)
            yield PartialSoftmax(rows.unflatten(2, (heads, -1)), sums.transpose(1, 2))


class SpatialVisionLongformer(VisionLongformer):
    """A model that shares its images with the other processes of ``group``; :func:`spatial_parallel` makes it."""

    group: Any

    def forward(self, x: Tensor, given_tokens: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W), the same in all processes, to logits."""
        last = len(self.stages) - 1
        tokens, bands = self._run_bands(x, given_tokens, {last})[last]
        return self.forward_head(self._pool(self.norm(tokens), bands))

    def _pool(self, tokens: Tensor, bands: Bands) -> Tensor:
        """What the head makes logits of, (B, 1, dim), from the own band's tokens."""
        if self.config.global_pool == "token":
            return tokens[:, :1]
        count = tokens.shape[1] - bands.own.grid.tokens
        sums = [part.sum(1, keepdim=True) for part in tokens.tensor_split([count], 1)]
        return sum(bands.from_each(sums[1]), start=sums[0]) / (count + bands.grid.tokens)

    def _run_stages(self, x: Tensor, given_tokens: Tensor | None, wanted: set[int]) -> dict[int, tuple[Tensor, Grid]]:
        """Tokens of whole maps, in every process."""
        results = {}
        for index, (tokens, bands) in self._run_bands(x, given_tokens, wanted).items():
            count = tokens.shape[1] - bands.own.grid.tokens
            results[index] = torch.cat([tokens[:, :count], bands.whole(tokens[:, count:])], 1), bands.grid
        return results

    def _run_bands(self, x: Tensor, given_tokens: Tensor | None, wanted: set[int]) -> dict[int, tuple[Tensor, Bands]]:
        """Tokens of the own bands of the ``wanted`` stages, and how their maps are divided."""
        self._check_input(x, given_tokens)
        neighbours, grids = self._neighbours(), self.config.grids((x.shape[2], x.shape[3]))
        results: dict[int, tuple[Tensor, Bands]] = {}
        tokens, before, carried = None, None, None
        for index in range(max(wanted) + 1):
            stage, attention = cast(Stage, self.stages[index]), cast(Longformer, self.config.stages[index].attention)
            processes = distributed.get_world_size(self.group)
            strips = even_strips(grids[index], attention.window, attention.rule, processes)
            after = Bands(grids[index], strips, self.group)
            local = _embed(stage, _fetch_image(x, tokens, before, after, stage.patch_embed.patch), after)
            first = stage.first_global_tokens(local, carried, given_tokens)
            tokens = self._run_blocks(stage, torch.cat([*first, local], 1), after, neighbours[index])
            if index in wanted:
                results[index] = tokens, after
            if self.config.carry_global_tokens:
                carried = tokens[:, : self.config.stages[index].global_tokens]
            before = after
        return results

    def _run_blocks(self, stage: Stage, tokens: Tensor, bands: Bands, neighbours: Neighbours) -> Tensor:
        """The blocks of a stage, one after the other."""
        drop_paths = self._draw_drop_paths(stage, tokens)
        checkpointing = stage.grad_checkpointing if stage.training and torch.is_grad_enabled() else False
        for index, block in enumerate(stage.blocks):
            seen = neighbours if isinstance(neighbours, str) else neighbours[index]
            tokens = block(tokens, bands, seen, drop_paths[index], checkpointing)
        return tokens

    def _draw_drop_paths(self, stage: Stage, tokens: Tensor) -> list[list[Tensor]]:
        """For each block, what :meth:`Block.draw_drop_paths` draws in the first process."""
        draws = [cast(Block, block).draw_drop_paths(tokens) for block in stage.blocks]
        drawn = [draw for of_block in draws for draw in of_block]
        if not drawn:
            return draws
        sent = torch.stack(drawn)
        distributed.broadcast(sent, group=self.group, group_src=0)
        those_of_first = iter(sent)
        return [[next(those_of_first) for _ in of_block] for of_block in draws]


def _fetch_image(x: Tensor, tokens: Tensor | None, before: Bands | None, after: Bands, patch: int) -> Tensor:
    """The part (B, C, h, w) of the images, or of the map ``before``, that the own band of the next map covers."""
    height = x.shape[2] if before is None else before.grid.height
    covered = [range(strip.rows.start * patch, min(strip.rows.stop * patch, height)) for strip in after.strips]
    own = covered[distributed.get_rank(after.group)]
    if tokens is None or before is None:
        return x[:, :, own.start : own.stop]
    local = tokens[:, tokens.shape[1] - before.own.grid.tokens :]
    fetched = torch.cat(before.fetch(local, [[rows] for rows in covered]), 1)
    return tokens_to_map(fetched, Grid(len(own), before.grid.width))


def _embed(stage: Stage, image: Tensor, bands: Bands) -> Tensor:
    """The tokens (B, n, dim) of the own band; of an empty one none, which depend on all that others depend on."""
    strip = bands.own
    if strip.rows:
        return stage.embed_rows(image, bands.grid, strip.rows.start)
    row = image.new_zeros(*image.shape[:2], stage.patch_embed.patch, image.shape[3])
    return stage.embed_rows(row, bands.grid, 0)[:, :0] + image.sum()
