"""What a model is, as data: frozen dataclasses, validated on construction, to and from JSON.

A model is a stack of stages; a stage is a patch embedding followed by blocks of one attention mechanism. Each
mechanism has its own small configuration class, so that no field has two meanings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from ..errors import check_at_least, check_choice, unknown_name
from ..geometry import RULES, Grid

POSITIONS = ("relative", "absolute", "absolute_1d", "none")
POOLS = ("avg", "token")
NEIGHBOURS = ("all", "self", "random")
REMAINDERS = ("pad", "drop")

TABLE_RESIZES = ("offset", "bilinear")
"""How a table of relative position is made for another range of offsets: ``offset`` crops it or extends it by its
border values, so that each offset keeps its meaning; ``bilinear`` stretches it, as the paper and its release do."""

PAPER_TABLE_RESIZE = "bilinear"
"""For weights used as in the paper: released checkpoints at another size, and backbones of detectors."""

ADAPT_TABLE_RESIZE = "offset"
"""For all other weights: a model whose full attention becomes local attention then computes exactly what it did."""


@dataclass(frozen=True)
class AttentionConfig:
    """Base of the six mechanisms; ``mechanism`` is the name of each, in JSON under the key ``kind``."""

    mechanism: ClassVar[str]
    has_relative_bias: ClassVar[bool] = False


@dataclass(frozen=True)
class Full(AttentionConfig):
    """Every token attends to every token."""

    mechanism = "full"
    has_relative_bias = True


@dataclass(frozen=True)
class Longformer(AttentionConfig):
    """Local attention over the 3×3 neighbouring chunks of ``window``×``window`` tokens, plus global tokens.

    ``rule`` is one of :data:`~vision_longformer.geometry.RULES`. ``share_weights`` uses the same projections for
    global and local tokens, as all models of the paper do.
    """

    mechanism = "longformer"
    has_relative_bias = True
    window: int = 7
    rule: str = "chunk"
    share_weights: bool = True

    def __post_init__(self) -> None:
        check_at_least("window", self.window, 1)
        check_choice("window rule", self.rule, RULES)


@dataclass(frozen=True)
class GlobalMemory(AttentionConfig):
    """Local tokens attend to the global tokens only; global tokens attend to all.

    ``share_weights`` uses the same projections for global and local tokens.
    ``bias_local_queries=False`` leaves the relative bias out of the local→global scores, as the release does.
    """

    mechanism = "global_memory"
    has_relative_bias = True
    share_weights: bool = True
    bias_local_queries: bool = True


@dataclass(frozen=True)
class Linformer(AttentionConfig):
    """Keys and values projected along the sequence to ``features`` positions, by one projection if ``share_kv``."""

    mechanism = "linformer"
    features: int = 256
    share_kv: bool = True

    def __post_init__(self) -> None:
        check_at_least("features", self.features, 1)


@dataclass(frozen=True)
class SpatialReduction(AttentionConfig):
    """Keys and values from a map reduced ``ratio``-fold along each axis by a strided convolution."""

    mechanism = "spatial_reduction"
    ratio: int = 8

    def __post_init__(self) -> None:
        check_at_least("ratio", self.ratio, 1)


PERFORMER_KERNELS = ("softmax", "relu", "linear")
STABILISERS = ("image", "batch")


@dataclass(frozen=True)
class Performer(AttentionConfig):
    """Softmax attention approximated by ``features`` random features (FAVOR+).

    ``features=None`` takes ``int(head_dim * ln(head_dim))``. ``kernel`` is ``"softmax"``, or in its place ``"relu"`` (a
    random projection, then ReLU) or ``"linear"`` (no random features at all). The ``stabiliser`` of the keys is taken
    per ``"image"`` (the result of an image does not depend on its batch) or over the whole ``"batch"``, as the release
    does.
    """

    mechanism = "performer"
    features: int | None = 256
    kernel: str = "softmax"
    stabiliser: str = "image"

    def __post_init__(self) -> None:
        if self.features is not None:
            check_at_least("features", self.features, 1)
        check_choice("Performer kernel", self.kernel, PERFORMER_KERNELS)
        check_choice("stabiliser", self.stabiliser, STABILISERS)

    def count_features(self, head_dim: int) -> int:
        """Random features of a head with ``head_dim`` channels."""
        return max(1, int(head_dim * math.log(head_dim))) if self.features is None else self.features


MECHANISMS: dict[str, type[AttentionConfig]] = {
    cls.mechanism: cls for cls in (Full, Longformer, GlobalMemory, Linformer, SpatialReduction, Performer)
}


@dataclass(frozen=True)
class StageConfig:
    """One E-ViT stage: a patch embedding, then ``depth`` blocks of one attention mechanism.

    What goes with what:

    - ``dim`` is a multiple of ``heads``, and even with ``position="absolute"``.
    - ``position="relative"`` needs a mechanism with a relative bias: :class:`Full`, :class:`Longformer` or
      :class:`GlobalMemory`. The others take ``"absolute"``, ``"absolute_1d"`` or ``"none"``.
    - :class:`GlobalMemory` needs ``global_tokens`` of at least 1; so does the last stage of a model with
      ``global_pool="token"``.
    - A model with ``carry_global_tokens`` needs the same ``global_tokens`` in every stage.
    - The window and its rule are fields of :class:`Longformer`, the only mechanism that the model's ``neighbours``
      concerns.
    - :class:`Linformer` is made for one number of tokens: its model takes no given tokens.

    Args:
        dim: channels of the tokens, and of the map that the stage passes on.
        depth: number of blocks.
        heads: attention heads of each block, with ``dim / heads`` channels each.
        patch: by how much the embedding reduces height and width of the image or of the map before; 1 keeps them.
        attention: the mechanism of all blocks, as an object of one of the six configuration classes.
        global_tokens: learned tokens beside the map. In :class:`Longformer` and :class:`GlobalMemory` all tokens attend
            to them and they attend to all; in :class:`SpatialReduction` their keys are not reduced; elsewhere they are
            tokens like others.
        position: ``"relative"``, a learned bias of the scores by offset; ``"absolute"``, learned embeddings of rows and
            columns, each in half of the channels; ``"absolute_1d"``, one embedding for each token of the map;
            ``"none"``.
    """

    dim: int
    depth: int
    heads: int
    patch: int
    attention: AttentionConfig
    global_tokens: int = 1
    position: str = "relative"

    def __post_init__(self) -> None:
        for name, least in (("dim", 1), ("depth", 1), ("heads", 1), ("patch", 1), ("global_tokens", 0)):
            check_at_least(name, getattr(self, name), least)
        if not isinstance(self.attention, AttentionConfig):
            raise TypeError(f"attention is {self.attention!r}; give one of {', '.join(MECHANISMS)} as a config object")
        if self.dim % self.heads:
            near = self.dim // self.heads * self.heads or self.heads
            raise ValueError(
                f"dim={self.dim} is not divisible by heads={self.heads}; use dim={near} or dim={near + self.heads}"
            )
        check_choice("position", self.position, POSITIONS)
        if self.position == "absolute" and self.dim % 2:
            raise ValueError(
                f"position='absolute' splits the width into a row half and a column half, but dim={self.dim} is odd; "
                f"use dim={self.dim + 1} or position='relative'"
            )
        if self.position == "relative" and not self.attention.has_relative_bias:
            raise ValueError(
                f"position='relative' is not defined for {self.attention.mechanism} attention; use position='absolute'"
            )
        if isinstance(self.attention, GlobalMemory) and self.global_tokens == 0:
            raise ValueError("global_memory attention needs global_tokens of at least 1: they are all the keys it has")


@dataclass(frozen=True)
class ModelConfig:
    """A whole classifier; the names of timm's arguments where timm has one.

    - ``img_size``: the size the position tables are made for; other sizes run too.
    - ``qk_scale``: of the attention scores; ``head_dim ** -0.5`` if None. (Performer has none.)
    - ``patch_remainder``: when a map is not a multiple of the patch, ``"pad"`` it bottom and right, so that cell
      ``(i, j)`` of a map of stride ``s`` covers pixels ``[i*s, (i+1)*s) × [j*s, (j+1)*s)``, or ``"drop"`` the rest.
    - ``neighbours``: what local attention sees in training (``"random"``: itself and one neighbour chunk, drawn per
      layer and step); ``eval_neighbours``: in evaluation.
    - ``carry_global_tokens``: hand the global tokens on to the next stage instead of dropping them.
    - ``given_token_dim``: width of global tokens that the caller may pass to ``forward``; 0 for none.
    """

    stages: tuple[StageConfig, ...]
    img_size: tuple[int, int] = (224, 224)
    in_chans: int = 3
    num_classes: int = 1000
    global_pool: str = "avg"
    norm_embed: bool = True
    qkv_bias: bool = True
    qk_scale: float | None = None
    mlp_ratio: float = 4.0
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    patch_remainder: str = "pad"
    neighbours: str = "all"
    eval_neighbours: str = "all"
    carry_global_tokens: bool = False
    given_token_dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "img_size", size_pair(self.img_size))
        if not self.stages:
            raise ValueError("stages is empty; a model needs at least one stage")
        for name, least in (("in_chans", 1), ("num_classes", 0), ("given_token_dim", 0)):
            check_at_least(name, getattr(self, name), least)
        check_choice("global_pool", self.global_pool, POOLS)
        check_choice("patch_remainder", self.patch_remainder, REMAINDERS)
        check_choice("neighbours", self.neighbours, NEIGHBOURS)
        check_choice("eval_neighbours", self.eval_neighbours, ("all", "self"))
        for name in ("drop_rate", "drop_path_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        if self.mlp_ratio <= 0:
            raise ValueError(f"mlp_ratio is {self.mlp_ratio}; it must be positive")
        self._check_tokens()
        self.grids()

    def _check_tokens(self) -> None:
        if self.global_pool == "token" and self.stages[-1].global_tokens == 0:
            raise ValueError("global_pool='token' needs a global token in the last stage; use global_pool='avg'")
        counts = {stage.global_tokens for stage in self.stages}
        if self.carry_global_tokens and (len(counts) > 1 or counts == {0}):
            raise ValueError(
                "carry_global_tokens needs the same number of global tokens, at least 1, in every stage, "
                f"not {sorted(counts)}"
            )
        if self.given_token_dim and any(isinstance(stage.attention, Linformer) for stage in self.stages):
            raise ValueError("linformer projects a fixed number of tokens and cannot take given tokens")

    def grids(self, size: tuple[int, int] | None = None) -> list[Grid]:
        """The map of each stage for an image of ``size`` (default: ``img_size``)."""
        grid = Grid(*(size or self.img_size))
        result = []
        for index, stage in enumerate(self.stages):
            grid = grid.reduced(stage.patch, pad=self.patch_remainder == "pad")
            if min(grid) < 1:
                raise ValueError(
                    f"an image of {size or self.img_size} leaves nothing for stage {index + 1} (patch {stage.patch}); "
                    "use a larger image or patch_remainder='pad'"
                )
            result.append(grid)
        return result

    def override(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, stages perhaps as plain data; unknown names are refused with suggestions."""
        names = [field.name for field in fields(self)]
        for name in changes:
            if name not in names:
                raise unknown_name("model option", name, names)
        if "stages" in changes:
            changes["stages"] = tuple(map(_stage, changes["stages"]))
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, each mechanism with its ``kind``."""
        data = asdict(self)
        for stage, plain in zip(self.stages, data["stages"], strict=True):
            plain["attention"] = {"kind": stage.attention.mechanism, **plain["attention"]}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_dict`; unknown fields and mechanisms are refused by name."""
        return _build(cls, {**data, "stages": tuple(map(_stage, data.get("stages", ())))})


def size_pair(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """``224`` or ``(224, 320)`` as a (height, width) pair of positive numbers."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or any(not isinstance(n, int) or n < 1 for n in pair):
        raise ValueError(f"image size is {size!r}; give one positive number or (height, width)")
    return pair[0], pair[1]


def _stage(stage: StageConfig | Mapping[str, Any]) -> StageConfig:
    """A stage that may be given as plain data, its mechanism by ``kind``."""
    if isinstance(stage, StageConfig):
        return stage
    if not isinstance(stage, Mapping) or not isinstance(stage.get("attention", {}), Mapping):
        raise ValueError(f"a stage is {stage!r}; it must have fields, and its attention a 'kind'")
    options = dict(stage.get("attention", ()))
    mechanism = options.pop("kind", None)
    check_choice("attention mechanism", mechanism, MECHANISMS)
    return _build(StageConfig, {**stage, "attention": _build(MECHANISMS[mechanism], options)})


def _build(cls: type, data: Mapping[str, Any]) -> Any:
    names = [field.name for field in fields(cls)]
    for name in data:
        if name not in names:
            raise unknown_name(f"{cls.__name__} field", name, names)
    return cls(**data)
