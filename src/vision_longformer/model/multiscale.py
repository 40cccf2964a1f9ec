"""The multi-scale stack of stages, as a classifier and as a backbone, with timm's model protocol."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from timm.layers import trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..attention import LongformerAttention, PerformerAttention
from ..config import ModelConfig, size_pair
from ..geometry import tokens_to_map
from .random_shift import RandomShift
from .stage import Stage


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
