"""Which tensors of the authors' release make up each of ours: the one place for their names and layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import config as cfg
from ..config import ModelConfig, StageConfig
from ..geometry import Grid


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Source:
    """One of our tensors: release tensors stacked along their rows, then brought into our layout."""

    parts: tuple[str, ...]
    layout: Callable[[Tensor], Tensor] = _as_is

    def read(self, state: dict[str, Tensor]) -> Tensor:
        return self.layout(torch.cat([state[part] for part in self.parts]))


@dataclass
class ReleaseNames:
    """Sources by our names; aliases that repeat another tensor; derived tensors that we compute ourselves."""

    sources: dict[str, Source] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    derived: set[str] = field(default_factory=set)

    def linear(self, ours: str, *theirs: str, bias: bool = True) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            self.sources[f"{ours}.{kind}"] = Source(tuple(f"{name}.{kind}" for name in theirs))

    def shared(self, alias: str, canonical: str, *, bias: bool = True) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            self.aliases[f"{alias}.{kind}"] = f"{canonical}.{kind}"

    def add(self, other: ReleaseNames, ours: str, theirs: str) -> None:
        """All names of ``other`` behind prefixes."""
        for name, source in other.sources.items():
            self.sources[ours + name] = Source(tuple(theirs + part for part in source.parts), source.layout)
        self.aliases.update({theirs + alias: theirs + name for alias, name in other.aliases.items()})
        self.derived.update(theirs + name for name in other.derived)

    def all(self) -> set[str]:
        """Every name that a release file has."""
        parts = {part for source in self.sources.values() for part in source.parts}
        return parts | set(self.aliases) | self.derived


def model_names(config: ModelConfig) -> ReleaseNames:
    """The names of a whole release model."""
    names = ReleaseNames()
    for index, (stage, grid) in enumerate(zip(config.stages, config.grids(), strict=True)):
        ours, theirs = f"stages.{index}.", f"layer{index + 1}."
        names.add(_embedding(stage, config.norm_embed), ours, f"{theirs}0.")
        attention = attention_names(stage, grid, config.qkv_bias)
        for block in range(stage.depth):
            prefix, attn, mlp = f"{ours}blocks.{block}.", f"{theirs}{2 * block + 1}.", f"{theirs}{2 * block + 2}."
            names.add(attention, f"{prefix}attn.", f"{attn}attn.")
            names.linear(f"{prefix}norm1", f"{attn}norm")
            names.linear(f"{prefix}norm2", f"{mlp}norm")
            for layer in ("fc1", "fc2"):
                names.linear(f"{prefix}mlp.{layer}", f"{mlp}mlp.{layer}")
        if isinstance(stage.attention, cfg.Performer):
            names.derived.add("calls_since_last_redraw")
    names.linear("norm", "norm")
    if config.num_classes:
        names.linear("head", "head")
    return names


def _embedding(stage: StageConfig, norm_embed: bool) -> ReleaseNames:
    names = ReleaseNames()
    names.linear("patch_embed.proj", "proj")
    if norm_embed:
        names.linear("patch_embed.norm", "norm_embed")
    if stage.global_tokens:
        names.sources["global_tokens"] = Source(("cls_token",), _first)
    if stage.position == "absolute":
        names.sources["position.rows"] = Source(("x_pos_embed",), _first)
        names.sources["position.columns"] = Source(("y_pos_embed",), _first)
        if stage.global_tokens:
            names.sources["position.global_tokens"] = Source(("cls_pos_embed",), _first)
        else:
            names.derived.add("cls_pos_embed")
    return names


def attention_names(stage: StageConfig, grid: Grid, qkv_bias: bool = True) -> ReleaseNames:
    """The names of one attention module on a map ``grid``."""
    names, attention = ReleaseNames(), stage.attention
    names.linear("proj", "proj")
    if isinstance(attention, (cfg.Full, cfg.Performer)):
        names.linear("qkv", "qkv", bias=qkv_bias)
    else:
        names.linear("qkv", "query", "kv", bias=qkv_bias)
    if isinstance(attention, cfg.Performer):
        names.sources["features"] = Source(("fast_attention.projection_matrix",))
    elif isinstance(attention, cfg.SpatialReduction):
        names.linear("reduce", "proj_sr", bias=False)
    elif isinstance(attention, cfg.Linformer):
        names.sources["project_keys"] = Source(("proj_k",))
        if attention.share_kv:
            names.aliases["proj_v"] = "proj_k"
        else:
            names.sources["project_values"] = Source(("proj_v",))
    elif isinstance(attention, (cfg.Longformer, cfg.GlobalMemory)) and stage.global_tokens:
        _add_global(names, attention.share_weights, qkv_bias)
    if stage.position == "relative":
        _add_bias(names, stage, grid)
    return names


def _add_global(names: ReleaseNames, shared: bool, qkv_bias: bool) -> None:
    if not shared:
        names.linear("qkv_global", "query_global", "kv_global", bias=qkv_bias)
        names.linear("proj_global", "proj_global")
        return
    names.shared("query_global", "query", bias=qkv_bias)
    names.shared("kv_global", "kv", bias=qkv_bias)
    names.shared("proj_global", "proj")


def _add_bias(names: ReleaseNames, stage: StageConfig, grid: Grid) -> None:
    table = "local_relative_position_bias_table"
    names.derived.add("relative_position_index")
    if isinstance(stage.attention, cfg.GlobalMemory):
        names.derived.add(table)
    else:
        shape = (2 * grid.height - 1, 2 * grid.width - 1)
        if isinstance(stage.attention, cfg.Longformer):
            shape = (4 * stage.attention.window - 1,) * 2
        names.sources["bias.table"] = Source((table,), lambda rows: _table(rows, shape))
    if stage.global_tokens:
        between = "g2l_relative_position_bias"
        names.sources["bias.global_to_local"] = Source((between,), lambda pair: pair[0])
        names.sources["bias.local_to_global"] = Source((between,), lambda pair: pair[1])
        names.sources["bias.global_to_global"] = Source(("g2g_relative_position_bias",))


def _first(tensor: Tensor) -> Tensor:
    return tensor[0]


def _table(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Rows of offsets (R·C, heads) to (heads, R, C): the expected shape, or the square one of another size."""
    if rows.shape[0] != shape[0] * shape[1]:
        side = math.isqrt(rows.shape[0])
        shape = (side, rows.shape[0] // side)
    return rows.t().unflatten(1, shape)
