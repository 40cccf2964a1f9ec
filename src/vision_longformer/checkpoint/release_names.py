"""What the authors' release calls things: its arch strings, and the names and layouts of its tensors.

An arch string is ``l1,h3,d96,n1,s1,g1,p4,f7,a1_l2,…``. Per stage: ``l`` its number, ``h`` heads, ``d`` width, ``n``
blocks, ``s`` 0 for full attention, ``g`` global tokens, ``p`` patch, ``a`` 1 for absolute position and 0 for relative
bias, and ``f``: chunk side, number of features or reduction ratio, according to the mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import check_choice, unknown_name
from ..geometry import Grid
from ..models import config as cfg
from ..models.config import AttentionConfig, ModelConfig, StageConfig

# Arch strings

DEFAULTS = {"l": 1, "h": 3, "d": 192, "n": 1, "s": 1, "g": 1, "p": 2, "f": 7, "a": 1}
ATTENTION_TYPES = ("full", "longformerhand", "longformerauto", "linformer", "srformer", "performer")
RULES = {0: "chunk", 1: "exact", -1: "cyclic_release"}


def parse_fields(arch: str) -> list[dict[str, int]]:
    """The letters of each stage with their numbers, validated."""
    stages = []
    for number, text in enumerate(arch.split("_"), 1):
        fields = dict(DEFAULTS, l=number)
        for item in text.split(","):
            letter, digits = item[:1], item[1:]
            if letter not in DEFAULTS:
                raise unknown_name(f"letter in {item!r}, stage {number} of the arch string,", letter, DEFAULTS)
            if not digits.isdigit():
                raise ValueError(f"{item!r} in stage {number} of the arch string needs an integer after its letter")
            fields[letter] = int(digits)
        if fields["l"] != number:
            raise ValueError(f"l{fields['l']} stands at stage {number} of the arch string; it should be l{number}")
        stages.append(fields)
    return stages


def stages_of(
    arch: str, attn_type: str, *, sharew: bool = True, share_kv: bool = True, only_glo: bool = False, sw_exact: int = 0
) -> tuple[StageConfig, ...]:
    """The stages of an arch string. After a stage with ``s0`` all later ones are full attention, as in the release."""
    check_choice("attn_type", attn_type, ATTENTION_TYPES)
    if sw_exact not in RULES:
        raise ValueError(f"sw_exact is {sw_exact}; it must be 0 (chunk), 1 (exact) or -1 (cyclic)")
    stages, full = [], attn_type == "full"
    for fields in parse_fields(arch):
        full = full or fields["s"] == 0
        attention = cfg.Full() if full else _attention(attn_type, fields["f"], sharew, share_kv, only_glo, sw_exact)
        position = "absolute" if fields["a"] else "relative" if attention.has_relative_bias else "none"
        try:
            dims = (fields["d"], fields["n"], fields["h"], fields["p"])
            stages.append(StageConfig(*dims, attention, fields["g"], position))
        except ValueError as error:
            raise ValueError(f"stage {fields['l']} of the arch string: {error}") from error
    return tuple(stages)


def _attention(attn_type: str, f: int, sharew: bool, share_kv: bool, only_glo: bool, sw_exact: int) -> AttentionConfig:
    if attn_type == "linformer":
        return cfg.Linformer(f, share_kv)
    if attn_type == "srformer":
        return cfg.SpatialReduction(f)
    if attn_type == "performer":
        return cfg.Performer(f, stabiliser="batch")
    if only_glo:
        return cfg.GlobalMemory(sharew, bias_local_queries=False)
    return cfg.Longformer(f, RULES[sw_exact], sharew)


def to_arch_string(config: ModelConfig) -> str:
    """The arch string of a configuration (what it cannot say is left to the other options of the release)."""
    texts = []
    for number, stage in enumerate(config.stages, 1):
        full = isinstance(stage.attention, cfg.Full)
        values = {
            "l": number,
            "h": stage.heads,
            "d": stage.dim,
            "n": stage.depth,
            "s": int(not full),
            "g": stage.global_tokens,
            "p": stage.patch,
            "f": _size(stage.attention),
            "a": int(stage.position == "absolute"),
        }
        texts.append(",".join(f"{letter}{value}" for letter, value in values.items()))
    return "_".join(texts)


def _size(attention: AttentionConfig) -> int:
    if isinstance(attention, cfg.Longformer):
        return attention.window
    if isinstance(attention, cfg.SpatialReduction):
        return attention.ratio
    if isinstance(attention, (cfg.Linformer, cfg.Performer)) and attention.features:
        return attention.features
    return DEFAULTS["f"]


# Names and layouts


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Source:
    """One of our tensors: release tensors stacked along their rows, then put into our layout."""

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
        """Weight and bias of a layer of ours, stacked from layers of theirs."""
        for part in ("weight", "bias") if bias else ("weight",):
            self.sources[f"{ours}.{part}"] = Source(tuple(f"{name}.{part}" for name in theirs))

    def shared(self, alias: str, canonical: str, *, bias: bool = True) -> None:
        """A layer of theirs that repeats another."""
        for part in ("weight", "bias") if bias else ("weight",):
            self.aliases[f"{alias}.{part}"] = f"{canonical}.{part}"

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
