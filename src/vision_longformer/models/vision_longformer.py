"""The Multi-Scale Vision Longformer: patch embedding, transformer block, stage, and the stack of stages.

The stack is a classifier and a backbone, with timm's model protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from timm.layers import DropPath, Mlp, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import checkpoint

from ..errors import check_choice
from ..geometry import Grid, Strip
from ..ops.chunks import pad_map, tokens_to_map
from ..ops.partial_softmax import PartInputs
from .attention import (
    Attention,
    LongformerAttention,
    Neighbours,
    PerformerAttention,
    Summary,
    SummaryAttention,
    build_attention,
)
from .config import ModelConfig, StageConfig, size_pair
from .position import AbsolutePosition, AbsolutePosition1d, small_normal
from .random_shift import RandomShift
from .strips import run_by_strips

fx.wrap("tokens_to_map")

HIDDEN_NUMBERS = 1 << 20
"""Numbers of an MLP's hidden layer that exist at a time, where strips of a map are computed without gradients."""


class PatchEmbed(nn.Module):
    """Non-overlapping patches of ``patch``×``patch`` to tokens of ``dim`` channels, then LayerNorm if ``norm``.

    A map that is not a multiple of the patch is padded with zeros at the bottom and right, or (``pad=False``) loses its
    last rows and columns.
    """

    def __init__(self, in_chans: int, dim: int, patch: int, *, norm: bool, pad: bool) -> None:
        super().__init__()
        self.patch, self.pad = patch, pad
        self.proj = nn.Conv2d(in_chans, dim, patch, stride=patch)
        self.norm = nn.LayerNorm(dim, eps=1e-6) if norm else nn.Identity()

    def forward(self, image: Tensor) -> tuple[Tensor, Grid]:
        """(B, C, H, W) to tokens (B, N, dim) and their grid."""
        height, width = map(int, image.shape[2:]) if torch.jit.is_tracing() else image.shape[2:]
        grid = Grid(height, width).reduced(self.patch, pad=self.pad)
        if self.pad:
            image = pad_map(image, 2, grid.height * self.patch - height, grid.width * self.patch - width)
        elif any(statically_known_true(side < 1) for side in grid):
            raise ValueError(f"a map of {height}×{width} is smaller than the patch of {self.patch}×{self.patch}")
        return self.norm(self.proj(image).flatten(2).transpose(1, 2)), grid


class Block(nn.Module):
    """``x + attn(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, dim: int, attn: Attention, *, mlp_ratio: float, drop: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=drop)
        self.drop = nn.Dropout(drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, tokens: Tensor, grid: Grid, neighbours: Neighbours = "all") -> Tensor:
        """(B, G + N, dim), global tokens first, to the same shape."""
        tokens = tokens + self.drop_path(self.drop(self.attn(self.norm1(tokens), grid, neighbours)))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))

    # In strips

    def forward_strip(
        self, tokens: Tensor, strip: Strip, neighbours: Neighbours, drop_paths: Sequence[Tensor] = ()
    ) -> tuple[Tensor, PartInputs | None]:
        """A strip's own tokens (B, n, dim) after the block, from (B, G + ``strip.keys``, dim), and what the rows of the
        global tokens need of the strip, if there are any.

        ``drop_paths`` are those of :meth:`draw_drop_paths`.
        """
        attended, part = self._attention().forward_strip(self.norm1(tokens), strip, neighbours)
        own = tokens[:, tokens.shape[1] - strip.keys :][:, strip.own]
        return self._add_residuals(own, attended, drop_paths), part

    def among_global(self, tokens: Tensor) -> PartInputs | None:
        """What the rows of global tokens (B, G, dim) need of themselves, if there are any."""
        return self._attention().among_global(self.norm1(tokens)) if tokens.shape[1] else None

    def finish_global(self, tokens: Tensor, rows: Tensor, drop_paths: Sequence[Tensor] = ()) -> Tensor:
        """Global tokens (B, G, dim) after the block, from the rows (B, G, heads, head_dim) that have seen all parts."""
        return self._add_residuals(tokens, self._attention().merge_global(rows.to(tokens.dtype)), drop_paths)

    def draw_drop_paths(self, tokens: Tensor) -> list[Tensor]:
        """What the two residuals of each image are multiplied by, (B, 1, 1) each, drawn as in the forward pass; none
        where nothing is dropped."""
        if not self.training or isinstance(self.drop_path, nn.Identity):
            return []
        ones = tokens.new_ones(tokens.shape[0], 1, 1)
        return [self.drop_path(ones), self.drop_path(ones)]

    # In two passes, for attention to a summary of the map

    def summarise(self, global_tokens: Tensor, parts: Iterable[Tensor], grid: Grid) -> Summary:
        """What all tokens see of the map ``grid``, from the global tokens (B, G, dim) and the local ones in parts
        (B, n, dim): whole rows, from top to bottom."""
        return self._summary_attention().summarise(self.norm1(global_tokens), map(self.norm1, parts), grid)

    def forward_local(self, tokens: Tensor, summary: Summary) -> Tensor:
        """Some local tokens (B, n, dim) after the block."""
        return self._add_residuals(tokens, self._summary_attention().attend_local(self.norm1(tokens), summary), ())

    def forward_global(self, tokens: Tensor, summary: Summary) -> Tensor:
        """The global tokens (B, G, dim) after the block."""
        return self._add_residuals(tokens, self._summary_attention().attend_global(self.norm1(tokens), summary), ())

    def _summary_attention(self) -> SummaryAttention:
        assert isinstance(self.attn, SummaryAttention), "only attention to a summary of the map goes in two passes"
        return self.attn

    def _attention(self) -> LongformerAttention:
        assert isinstance(self.attn, LongformerAttention), "only Longformer attention goes by strips"
        return self.attn

    def _add_residuals(self, tokens: Tensor, attended: Tensor, drop_paths: Sequence[Tensor]) -> Tensor:
        """Some tokens after the block, from what attention made of them, all (B, n, dim).

        Without gradients the MLP takes a piece of them at a time: its hidden layer is what would take most memory.
        """
        if not drop_paths:
            tokens = tokens + attended
            if torch.is_grad_enabled():
                return tokens + self.mlp(self.norm2(tokens))
            for piece in tokens.split(max(1, HIDDEN_NUMBERS // cast(nn.Linear, self.mlp.fc1).out_features), 1):
                piece += self.mlp(self.norm2(piece))
            return tokens
        attention, mlp = drop_paths
        tokens = tokens + attention * attended
        return tokens + mlp * self.mlp(self.norm2(tokens))


class Stage(nn.Module):
    """One scale of the model: patch embedding, global tokens, position, and blocks.

    ``in_chans`` are the channels of the map that comes in, ``grid`` is the map of tokens that the position tables are
    made for, ``drop_path`` has a rate per block. The other options are those of all stages of a model.

    The global tokens are the stage's own, or with ``carry`` the projection of those of the stage before, which have
    ``in_chans`` channels. Tokens given by the caller, of width ``given_token_dim``, join them.
    """

    def __init__(
        self,
        config: StageConfig,
        in_chans: int,
        grid: Grid,
        *,
        pad: bool,
        norm_embed: bool,
        carry: bool,
        given_token_dim: int,
        qkv_bias: bool,
        qk_scale: float | None,
        mlp_ratio: float,
        drop: float,
        drop_path: Sequence[float],
    ) -> None:
        super().__init__()
        dim, global_tokens = config.dim, config.global_tokens
        self.patch_embed = PatchEmbed(in_chans, dim, config.patch, norm=norm_embed, pad=pad)
        self.carry = nn.Linear(in_chans, dim) if carry else None
        self.global_tokens = small_normal(global_tokens, dim) if global_tokens and not carry else None
        self.given = nn.Linear(given_token_dim, dim) if given_token_dim else None
        self.position: AbsolutePosition | AbsolutePosition1d | None = None
        if config.position == "absolute":
            self.position = AbsolutePosition(dim, grid, global_tokens)
        elif config.position == "absolute_1d":
            self.position = AbsolutePosition1d(dim, grid, global_tokens)
        self.drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList()
        for rate in drop_path:
            attn = build_attention(config, grid, qkv_bias=qkv_bias, given=given_token_dim > 0, scale=qk_scale)
            self.blocks.append(Block(dim, attn, mlp_ratio=mlp_ratio, drop=drop, drop_path=rate))
        self.grad_checkpointing: bool | str = False

    def forward(
        self,
        image: Tensor,
        neighbours: Neighbours = "all",
        carried: Tensor | None = None,
        given: Tensor | None = None,
    ) -> tuple[Tensor, Grid]:
        """(B, C, H, W) to tokens (B, G + N, dim), global ones first, and the grid of the N local ones.

        ``neighbours`` may be (depth,), one for each block. ``carried`` are (B, G, ``in_chans``), ``given`` are
        (B, n, ``given_token_dim``).
        """
        local, grid = self.patch_embed(image)
        if self.position is not None:
            local = local + self.position(grid).to(local.dtype)
        tokens = self.drop(torch.cat([*self.first_global_tokens(local, carried, given), local], 1))
        for index, block in enumerate(self.blocks):
            seen = neighbours if isinstance(neighbours, str) else neighbours[index]
            if not (self.grad_checkpointing and self.training and torch.is_grad_enabled()):
                tokens = block(tokens, grid, seen)
            elif self.grad_checkpointing == "strips" and isinstance(block.attn, LongformerAttention):
                tokens = run_by_strips(cast(Block, block), tokens, grid, seen)
            else:
                tokens = checkpoint(block, tokens, grid, seen, use_reentrant=False)
        return tokens, grid

    def embed_rows(self, image: Tensor, grid: Grid, start: int) -> Tensor:
        """The local tokens (B, n, dim) of the rows from ``start`` of the map ``grid``, from the part of the image
        (B, C, H, W) that they cover."""
        local, part = self.patch_embed(image)
        if self.position is not None:
            local = local + self.position.of_rows(grid, start, start + part.height).to(local.dtype)
        return local

    def first_global_tokens(self, local: Tensor, carried: Tensor | None, given: Tensor | None) -> Iterator[Tensor]:
        """Own or carried tokens, then given ones, each (B, n, dim), in the type of ``local`` tokens."""
        own = None
        if self.carry is not None and carried is not None:
            own = self.carry(carried)
        elif self.global_tokens is not None:
            own = self.global_tokens.to(local.dtype).expand(local.shape[0], -1, -1)
        if own is not None:
            embedding = None if self.position is None else self.position.global_tokens
            yield own if embedding is None else own + embedding.to(local.dtype)
        if self.given is not None and given is not None:
            yield self.given(given).to(local.dtype)

    def set_grid(self, grid: Grid) -> None:
        """Resize the position tables and projections for another grid."""
        if self.position is not None:
            self.position.set_grid(grid)
        for block in self.blocks:
            cast(Block, block).attn.set_grid(grid)


class VisionLongformer(nn.Module):
    """A stack of E-ViT stages, a final LayerNorm and a linear head.

    Images of any height and width run. With ``patch_remainder="pad"`` the map of stage k has ``ceil(H / stride_k)`` by
    ``ceil(W / stride_k)`` cells, and cell (i, j) covers the pixels from ``(i * stride_k, j * stride_k)``.

    ``options`` override single fields of the configuration, as in ``VisionLongformer(config, num_classes=10)``.
    """

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__()
        self.config = config = config.override(**options)
        self.num_classes = config.num_classes
        self.num_features = self.head_hidden_size = config.stages[-1].dim
        rates = torch.linspace(0, config.drop_path_rate, sum(self._depths), device="cpu").split(self._depths)
        self.stages = nn.ModuleList()
        for index, (stage, grid) in enumerate(zip(config.stages, config.grids(), strict=True)):
            self.stages.append(
                Stage(
                    stage,
                    config.stages[index - 1].dim if index else config.in_chans,
                    grid,
                    pad=config.patch_remainder == "pad",
                    norm_embed=config.norm_embed,
                    carry=config.carry_global_tokens and index > 0,
                    given_token_dim=config.given_token_dim,
                    qkv_bias=config.qkv_bias,
                    qk_scale=config.qk_scale,
                    mlp_ratio=config.mlp_ratio,
                    drop=config.drop_rate,
                    drop_path=rates[index].tolist(),
                )
            )
        self.norm: nn.Module = nn.LayerNorm(self.num_features, eps=1e-6)
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = self._new_head()
        self.random_shift = RandomShift()
        self.feature_info = self._feature_info()
        self.apply(_init_linear)

    @property
    def _depths(self) -> list[int]:
        return [stage.depth for stage in self.config.stages]

    def _new_head(self) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes) if self.num_classes else nn.Identity()

    def _feature_info(self) -> list[dict[str, Any]]:
        info, stride = [], 1
        for index, stage in enumerate(self.config.stages):
            stride *= stage.patch
            info.append({"num_chs": stage.dim, "reduction": stride, "module": f"stages.{index}"})
        return info

    # Running

    def forward(self, x: Tensor, given_tokens: Tensor | None = None) -> Tensor:
        """Images (B, C, H, W), and global tokens (B, n, ``given_token_dim``) if the model takes any, to logits."""
        return self.forward_head(self.forward_features(x, given_tokens))

    def forward_features(self, x: Tensor, given_tokens: Tensor | None = None) -> Tensor:
        """The normalised tokens of the last stage, (B, G + N, dim), global tokens first."""
        last = len(self.stages) - 1
        tokens, _ = self._run_stages(x, given_tokens, {last})[last]
        return self.norm(tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens of :meth:`forward_features` to logits, or to the pooled features."""
        pooled = self.head_drop(x[:, 0] if self.config.global_pool == "token" else x.mean(1))
        return pooled if pre_logits else self.head(pooled)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        given_tokens: Tensor | None = None,
    ) -> Any:
        """The tokens of the last stage that ran, and the maps of the stages (B, dim, height, width).

        The tokens are normalised, unless ``stop_early`` left stages out: the norm is made for the last one. ``norm``
        applies it to the last map, too; the maps are otherwise as the stages leave them.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt is {output_fmt!r}; use 'NCHW' or 'NHWC'")
        take, last = feature_take_indices(len(self.stages), indices)
        last = last if stop_early else len(self.stages) - 1
        stages = self._run_stages(x, given_tokens, {*take, last})
        maps = []
        for index in take:
            tokens, grid = stages[index]
            if norm and index == len(self.stages) - 1:
                tokens = self.norm(tokens)
            image = tokens[:, tokens.shape[1] - grid.tokens :].unflatten(1, tuple(grid))
            maps.append(image if output_fmt == "NHWC" else image.permute(0, 3, 1, 2))
        if intermediates_only:
            return maps
        tokens, _ = stages[last]
        return (self.norm(tokens) if last == len(self.stages) - 1 else tokens), maps

    def _run_stages(self, x: Tensor, given_tokens: Tensor | None, wanted: set[int]) -> dict[int, tuple[Tensor, Grid]]:
        """Tokens and grid of the ``wanted`` stages; those after the last of them do not run."""
        self._check_input(x, given_tokens)
        neighbours = self._neighbours()
        results, carried = {}, None
        for index, stage in enumerate(self.stages[: max(wanted) + 1]):
            tokens, grid = stage(x, neighbours[index], carried, given_tokens)
            if index in wanted:
                results[index] = tokens, grid
            if self.config.carry_global_tokens:
                carried = tokens[:, : self.config.stages[index].global_tokens]
            x = tokens_to_map(tokens[:, tokens.shape[1] - grid.tokens :], grid)
        return results

    def _neighbours(self) -> Sequence[Neighbours]:
        """What local attention sees in each stage in this forward pass: the one place where this is decided."""
        seen = self.config.neighbours if self.training else self.config.eval_neighbours
        if seen != "random":
            return [seen] * len(self._depths)
        return self.random_shift.draw(sum(self._depths)).split(self._depths)

    def _check_input(self, x: Tensor, given_tokens: Tensor | None) -> None:
        if isinstance(x, fx.Proxy):  # torch.fx traces without values
            return
        if x.dim() != 4 or x.shape[1] != self.config.in_chans:
            raise ValueError(f"input is {tuple(x.shape)}; it must be (batch, {self.config.in_chans}, height, width)")
        if given_tokens is None:
            return
        width = self.config.given_token_dim
        if not width:
            raise ValueError("this model takes no given tokens; build it with given_token_dim=<their width>")
        if given_tokens.dim() != 3 or given_tokens.shape[0] != x.shape[0] or given_tokens.shape[2] != width:
            raise ValueError(f"given_tokens is {tuple(given_tokens.shape)}; it must be ({x.shape[0]}, n, {width})")

    # Settings

    def set_neighbours(self, neighbours: str, eval_neighbours: str | None = None) -> None:
        """What local attention sees in training: ``"all"`` neighbours, ``"self"`` or ``"random"`` (random shift).

        ``eval_neighbours``, ``"all"`` or ``"self"``, is what it sees in evaluation; None leaves that as it is.
        """
        evaluation = self.config.eval_neighbours if eval_neighbours is None else eval_neighbours
        self.config = self.config.override(neighbours=neighbours, eval_neighbours=evaluation)

    def set_attention_implementation(self, name: str) -> None:
        """Compute all local attention by a named implementation, or by the best one (``"auto"``)."""
        for module in self.modules():
            if isinstance(module, LongformerAttention):
                module.set_implementation(name)

    def redraw_features(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features in every Performer layer."""
        for module in self.modules():
            if isinstance(module, PerformerAttention):
                module.redraw(generator)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Make position tables and projections for another image size. (Without it, they are resized as needed.)"""
        self.config = replace(self.config, img_size=size_pair(img_size))
        for stage, grid in zip(self.stages, self.config.grids(), strict=False):
            cast(Stage, stage).set_grid(grid)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool | str = True) -> None:
        """Recompute each block in backward instead of keeping what is inside it.

        With ``"strips"`` blocks of Longformer attention are recomputed strip by strip, so that no more than a part of
        the map is inside a block at a time, either.
        """
        if isinstance(enable, str):
            check_choice("gradient checkpointing", enable, ("strips",))
        if enable == "strips" and self.config.drop_rate:
            raise ValueError(
                f"drop_rate is {self.config.drop_rate}, and strips cannot draw the same dropout twice; set it to 0 (a "
                "drop_path_rate is fine), or use grad_checkpointing without strips"
            )
        for stage in self.stages:
            cast(Stage, stage).grad_checkpointing = enable

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are tokens, position tables or relative biases."""
        parts = (".global_tokens", ".position.", ".attn.bias.")
        return {name for name, _ in self.named_parameters() if any(part in name for part in parts)}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer-wise learning rates."""
        stem = r"^stages\.0\.(?:patch_embed|global_tokens|position|given)"
        if coarse:
            return {"stem": stem, "blocks": [(r"^stages\.(\d+)", None), (r"^norm", (99999,))]}
        return {
            "stem": stem,
            "blocks": [
                (r"^stages\.(\d+)\.(?:patch_embed|global_tokens|position|given|carry)", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ],
        }

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for ``num_classes`` (0: none)."""
        changes = {"num_classes": num_classes, **({"global_pool": global_pool} if global_pool else {})}
        self.config = self.config.override(**changes)
        self.num_classes = num_classes
        self.head = self._new_head().to(next(self.parameters()))
        _init_linear(self.head)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last one asked for; returns the indices as positive numbers.

        The final norm and the head are made for the last stage. They go when asked to, and always when it goes.
        """
        take, last = feature_take_indices(len(self.stages), indices)
        pruned = last + 1 < len(self.stages)
        self.stages = self.stages[: last + 1]
        self.num_features = self.head_hidden_size = self.config.stages[last].dim
        if prune_norm or pruned:
            self.norm = nn.Identity()
        if prune_head or pruned:
            self.config = self.config.override(num_classes=0)
            self.num_classes, self.head = 0, nn.Identity()
        return take


def _init_linear(module: nn.Module) -> None:
    """Truncated normal weights; on the meta device, where drawing takes longer than all the rest, there are none."""
    if isinstance(module, nn.Linear) and not module.weight.is_meta:
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
