"""A map of channels to a smaller map of tokens.

The transformer block: attention and MLP, each behind a LayerNorm, with drop path.

One E-ViT stage: patch embedding, global tokens, position, blocks.

The multi-scale stack of stages, as a classifier and as a backbone, with timm's model protocol.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from timm.layers import DropPath, Mlp, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import checkpoint

from ..geometry import Grid
from ..ops.chunks import pad_map, tokens_to_map
from .attention import FullAttention, LinformerAttention, LongformerAttention, PerformerAttention, build_attention
from .config import ModelConfig, size_pair
from .position import AbsolutePosition, AbsolutePosition1d, small_normal
from .random_shift import RandomShift


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
        height, width = image.shape[2:]
        grid = Grid(height, width).reduced(self.patch, pad=self.pad)
        if self.pad:
            image = pad_map(image, 2, grid.height * self.patch - height, grid.width * self.patch - width)
        elif any(statically_known_true(side < 1) for side in grid):
            raise ValueError(f"a map of {height}×{width} is smaller than the patch of {self.patch}×{self.patch}")
        return self.norm(self.proj(image).flatten(2).transpose(1, 2)), grid


class Block(nn.Module):
    """``x + attn(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, dim: int, attn: nn.Module, *, mlp_ratio: float, drop: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=drop)
        self.drop = nn.Dropout(drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, tokens: Tensor, grid: Grid, neighbour: Tensor | None = None) -> Tensor:
        """``neighbour`` is what random shift drew for this block, if its attention is local."""
        normed = self.norm1(tokens)
        attended = self.attn(normed, grid) if neighbour is None else self.attn(normed, grid, neighbour)
        tokens = tokens + self.drop_path(self.drop(attended))
        return tokens + self.drop_path(self.mlp(self.norm2(tokens)))


class Stage(nn.Module):
    """A map in, tokens and their grid out; a stage knows nothing of its neighbours.

    Its global tokens are its own, or the projection of those ``carried`` on from the stage before; tokens ``given`` by
    the caller join them.
    """

    def __init__(self, config: ModelConfig, index: int, grid: Grid, drop_path: list[float]) -> None:
        super().__init__()
        stage = config.stages[index]
        previous = config.stages[index - 1] if index else None
        in_chans = previous.dim if previous else config.in_chans
        pad = config.patch_remainder == "pad"
        self.patch_embed = PatchEmbed(in_chans, stage.dim, stage.patch, norm=config.norm_embed, pad=pad)
        carried = config.carry_global_tokens and previous is not None
        self.carry = nn.Linear(in_chans, stage.dim) if carried else None
        own = stage.global_tokens if not carried else 0
        self.global_tokens = small_normal(own, stage.dim) if own else None
        self.given = nn.Linear(config.given_token_dim, stage.dim) if config.given_token_dim else None
        self.position: AbsolutePosition | AbsolutePosition1d | None = None
        if stage.position == "absolute":
            self.position = AbsolutePosition(stage.dim, grid, stage.global_tokens)
        elif stage.position == "absolute_1d":
            self.position = AbsolutePosition1d(stage.dim, grid, stage.global_tokens)
        self.drop = nn.Dropout(config.drop_rate)
        self.blocks = nn.ModuleList()
        for rate in drop_path:
            given = self.given is not None
            attn = build_attention(stage, grid, qkv_bias=config.qkv_bias, given=given, scale=config.qk_scale)
            if isinstance(attn, LongformerAttention):
                attn.neighbours = "self" if config.neighbours == "self" else "all"
                attn.eval_neighbours = config.eval_neighbours
            self.blocks.append(
                Block(stage.dim, attn, mlp_ratio=config.mlp_ratio, drop=config.drop_rate, drop_path=rate)
            )
        self.is_local = stage.attention.kind == "longformer"
        self.grad_checkpointing = False

    def forward(
        self,
        image: Tensor,
        carried: Tensor | None = None,
        given: Tensor | None = None,
        neighbours: Tensor | None = None,
    ) -> tuple[Tensor, Grid]:
        """(B, C, H, W) to tokens (B, G + N, dim), global first, and the grid of the N local ones.

        ``neighbours`` (depth,) is what random shift drew for the blocks.
        """
        tokens, grid = self.patch_embed(image)
        tokens = self.drop(torch.cat([*self._global_rows(tokens, carried, given), self._placed(tokens, grid)], 1))
        for index, block in enumerate(self.blocks):
            neighbour = neighbours[index] if neighbours is not None and self.is_local else None
            if self.grad_checkpointing and self.training:
                tokens = checkpoint(block, tokens, grid, neighbour, use_reentrant=False)
            else:
                tokens = block(tokens, grid, neighbour)
        return tokens, grid

    def _placed(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens if self.position is None else tokens + self.position(grid).to(tokens.dtype)

    def _global_rows(self, tokens: Tensor, carried: Tensor | None, given: Tensor | None) -> list[Tensor]:
        """The global tokens that precede the local ones, as a list of (B, n, dim)."""
        rows = []
        if self.carry is not None and carried is not None:
            rows.append(self.carry(carried))
        elif self.global_tokens is not None:
            rows.append(self.global_tokens.to(tokens.dtype).expand(tokens.shape[0], -1, -1))
        if rows and self.position is not None and self.position.global_tokens is not None:
            rows[0] = rows[0] + self.position.global_tokens.to(tokens.dtype)
        if given is not None and self.given is not None:
            rows.append(self.given(given).to(tokens.dtype))
        return rows

    def set_grid(self, grid: Grid) -> None:
        """Make everything that depends on the size of the map for another one."""
        for module in self.modules():
            if isinstance(module, (AbsolutePosition, AbsolutePosition1d, FullAttention, LinformerAttention)):
                module.set_grid(grid)


class VisionLongformer(nn.Module):
    """A stack of E-ViT stages, a final LayerNorm and a linear head.

    Images of any height and width run. With ``patch_remainder="pad"`` the map of stage k has ``ceil(H / stride_k)`` by
    ``ceil(W / stride_k)`` cells, and cell (i, j) covers the pixels from ``(i * stride_k, j * stride_k)``.

    ``options`` override single fields of the configuration, as in ``VisionLongformer(config, num_classes=10)``.
    """

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__()
        self.config = config.override(**options)
        self.num_classes = self.config.num_classes
        self.num_features = self.head_hidden_size = self.config.stages[-1].dim
        depth = [stage.depth for stage in self.config.stages]
        rates = torch.linspace(0, self.config.drop_path_rate, sum(depth), device="cpu").split(depth)
        self.stages = nn.ModuleList(
            Stage(self.config, index, grid, rates[index].tolist()) for index, grid in enumerate(self.config.grids())
        )
        self.norm: nn.Module = nn.LayerNorm(self.num_features, eps=1e-6)
        self.head_drop = nn.Dropout(self.config.drop_rate)
        self.head = self._new_head()
        self.random_shift = RandomShift()
        self.feature_info = self._feature_info()
        self.apply(_init_linear)

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
        tokens, _ = self._run(x, given_tokens, len(self.stages))[-1]
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
        """The maps of the stages (B, dim, height, width), and the normalised tokens of the last stage.

        ``norm`` applies the final LayerNorm to the last map; the maps are otherwise as the stages leave them.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt is {output_fmt!r}; use 'NCHW' or 'NHWC'")
        take, last = feature_take_indices(len(self.stages), indices)
        stages = self._run(x, given_tokens, last + 1 if stop_early else len(self.stages))
        maps = []
        for index in take:
            tokens, grid = stages[index]
            if norm and index == len(self.stages) - 1:
                tokens = self.norm(tokens)
            image = tokens[:, tokens.shape[1] - grid.tokens :].unflatten(1, tuple(grid))
            maps.append(image if output_fmt == "NHWC" else image.permute(0, 3, 1, 2))
        if intermediates_only:
            return maps
        return self.norm(stages[-1][0]), maps

    def _run(self, x: Tensor, given_tokens: Tensor | None, stages: int) -> list[Any]:
        """Tokens and grid of each of the first ``stages`` stages."""
        self._check_input(x, given_tokens)
        drawn = self._draw_neighbours()
        results, carried = [], None
        for index, stage in enumerate(self.stages[:stages]):
            tokens, grid = stage(x, carried, given_tokens, None if drawn is None else drawn[index])
            results.append((tokens, grid))
            count = tokens.shape[1] - grid.tokens
            carried = tokens[:, : self.config.stages[index].global_tokens] if self.config.carry_global_tokens else None
            x = tokens_to_map(tokens[:, count:], grid)
        return results

    def _draw_neighbours(self) -> tuple[Tensor, ...] | None:
        if not self.training or self.config.neighbours != "random":
            return None
        depth = [stage.depth for stage in self.config.stages]
        return self.random_shift.draw(sum(depth)).split(depth)

    def _check_input(self, x: Tensor, given_tokens: Tensor | None) -> None:
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

    def set_neighbours(self, neighbours: str, eval_neighbours: str = "all") -> None:
        """What local attention sees: ``"all"``, ``"self"`` or ``"random"`` in training, ``"all"``, ``"self"`` else."""
        self.config = self.config.override(neighbours=neighbours, eval_neighbours=eval_neighbours)
        for module in self._local_attentions():
            module.neighbours = "self" if neighbours == "self" else "all"
            module.eval_neighbours = eval_neighbours

    def set_attention_implementation(self, name: str) -> None:
        """Compute all local attention by a named implementation, or by the best one (``"auto"``)."""
        for module in self._local_attentions():
            module.set_implementation(name)

    def _local_attentions(self) -> list[LongformerAttention]:
        return [module for module in self.modules() if isinstance(module, LongformerAttention)]

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
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in backward instead of keeping what is inside it."""
        for stage in self.stages:
            cast(Stage, stage).grad_checkpointing = enable

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Tokens, position tables, relative biases and Performer features."""
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
        """Drop the stages after the last one asked for, and the head; returns the indices as positive numbers."""
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.config = self.config.override(num_classes=0)
            self.num_classes, self.head = 0, nn.Identity()
        return take


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
