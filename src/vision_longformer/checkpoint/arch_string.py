"""The arch strings of the authors' release, in and out: ``l1,h3,d96,n1,s1,g1,p4,f7,a1_l2,…``.

Per stage: ``l`` its number, ``h`` heads, ``d`` width, ``n`` blocks, ``s`` 0 for full attention, ``g`` global tokens,
``p`` patch, ``a`` 1 for absolute position and 0 for relative bias, and ``f``: chunk side, number of features or
reduction ratio, according to the mechanism.
"""

from __future__ import annotations

from .. import config as cfg
from ..config import AttentionConfig, ModelConfig, StageConfig
from ..errors import check_choice, unknown_name

DEFAULTS = {"l": 1, "h": 3, "d": 192, "n": 1, "s": 1, "g": 1, "p": 2, "f": 7, "a": 1}
ATTENTION_TYPES = ("full", "longformerhand", "longformerauto", "linformer", "srformer", "performer")
RULES = {0: "chunk", 1: "exact", -1: "cyclic_release"}


def parse_fields(arch: str) -> list[dict[str, int]]:
    """The letters of each stage with their numbers, checked."""
    stages = []
    for number, text in enumerate(arch.split("_"), 1):
        fields = dict(DEFAULTS, l=number)
        for item in text.split(","):
            letter, digits = item[:1], item[1:]
            if letter not in DEFAULTS:
                raise unknown_name(f"letter in {item!r}, stage {number} of the arch string,", letter, DEFAULTS)
            if not digits.isdigit():
                raise ValueError(f"{item!r} in stage {number} of the arch string needs a whole number after its letter")
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
