"""Parameters and the paper's multiply-accumulates (MACs), by closed formulas: nothing is built, and torch not needed.

The paper's "FLOPs" are MACs of matrix products and convolutions and nothing else: no LayerNorm, softmax, activation,
residual or position. Of the biases only those of the patch embedding count. A window is charged whole, (2w+1)² keys per
token, also at the border of the map; global tokens are free, except in models with global memory, where all tokens of
every stage count in the linear layers. ``executed.py`` counts what our models really do.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..geometry import Grid
from ..models import config as cfg
from ..models.config import ModelConfig, StageConfig


@dataclass(frozen=True)
class ParameterCount:
    """``trainable`` parameters, each tensor once, and the fixed ``random_features`` of Performer layers."""

    trainable: int
    random_features: int

    @property
    def paper(self) -> int:
        """What the paper's tables print: trainable parameters and random features."""
        return self.trainable + self.random_features


def count_parameters(config: ModelConfig) -> ParameterCount:
    """The parameters of the model that ``config`` describes."""
    last = config.stages[-1].dim
    trainable = 2 * last + (_linear(last, config.num_classes) if config.num_classes else 0)
    random_features, in_chans = 0, config.in_chans
    for index, (stage, grid) in enumerate(zip(config.stages, config.grids(), strict=True)):
        trainable += _embedding_parameters(config, index, in_chans, grid)
        trainable += stage.depth * _block_parameters(config, stage, grid)
        if isinstance(stage.attention, cfg.Performer):
            head_dim = stage.dim // stage.heads
            random_features += stage.depth * stage.attention.count_features(head_dim) * head_dim
        in_chans = stage.dim
    return ParameterCount(trainable, random_features)


def _embedding_parameters(config: ModelConfig, index: int, in_chans: int, grid: Grid) -> int:
    """Of a stage before its blocks: patch embedding, global tokens, and absolute position."""
    stage = config.stages[index]
    dim, tokens = stage.dim, stage.global_tokens
    count = _linear(stage.patch**2 * in_chans, dim) + (2 * dim if config.norm_embed else 0)
    is_carried = config.carry_global_tokens and index > 0
    count += _linear(in_chans, dim) if is_carried else tokens * dim
    if config.given_token_dim:
        count += _linear(config.given_token_dim, dim)
    if stage.position == "absolute":
        count += (grid.height + grid.width) * (dim // 2) + tokens * dim
    elif stage.position == "absolute_1d":
        count += (grid.tokens + tokens) * dim
    return count


def _block_parameters(config: ModelConfig, stage: StageConfig, grid: Grid) -> int:
    """Of one block: two LayerNorms, the MLP, the projections of the attention, and what the mechanism adds to them."""
    dim, attention = stage.dim, stage.attention
    hidden = int(dim * config.mlp_ratio)
    projections = _linear(dim, 3 * dim, bias=config.qkv_bias) + _linear(dim, dim)
    count = 4 * dim + _linear(dim, hidden) + _linear(hidden, dim) + projections
    if isinstance(attention, cfg.Linformer):
        count += (stage.global_tokens + grid.tokens) * attention.features * (1 if attention.share_kv else 2)
    elif isinstance(attention, cfg.SpatialReduction):
        count += attention.ratio**2 * dim**2
    elif isinstance(attention, (cfg.Longformer, cfg.GlobalMemory)):
        has_global = stage.global_tokens > 0 or config.given_token_dim > 0
        count += projections if has_global and not attention.share_weights else 0
    if stage.position == "relative":
        count += stage.heads * _bias_entries(config, stage, grid)
    return count


def _bias_entries(config: ModelConfig, stage: StageConfig, grid: Grid) -> int:
    """Entries of one head's relative bias: the table of offsets, and those of pairs with a global token.

    All tokens that the caller gives share one entry.
    """
    offsets = 0
    if isinstance(stage.attention, cfg.Full):
        offsets = (2 * grid.height - 1) * (2 * grid.width - 1)
    elif isinstance(stage.attention, cfg.Longformer):
        offsets = (4 * stage.attention.window - 1) ** 2
    tokens = stage.global_tokens + (1 if config.given_token_dim else 0)
    return offsets + 2 * tokens + tokens**2


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


@dataclass(frozen=True)
class StageMacs:
    """MACs of a stage with all its blocks, for one image: the map of its tokens, and MACs by part."""

    grid: Grid
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class ModelMacs:
    """MACs of a whole model, for one image."""

    stages: tuple[StageMacs, ...]
    head: int

    @property
    def total(self) -> int:
        return sum(stage.total for stage in self.stages) + self.head


def paper_macs(config: ModelConfig, size: tuple[int, int] | None = None) -> ModelMacs:
    """The cost of an image of ``size`` (default: the model's own) as the paper counts it.

    Of the parts, ``projections`` are the linear layers and convolutions of the attention, ``products`` its products of
    tokens with tokens or features.
    """
    has_memory = any(isinstance(stage.attention, cfg.GlobalMemory) for stage in config.stages)
    stages, in_chans = [], config.in_chans
    for index, (stage, grid) in enumerate(zip(config.stages, config.grids(size), strict=True)):
        tokens = grid.tokens + (stage.global_tokens if has_memory else 0)
        later_stages = len(config.stages) - 1 - index
        hidden = int(stage.dim * config.mlp_ratio)
        parts = {
            "patch_embedding": _linear(stage.patch**2 * in_chans, stage.dim) * grid.tokens,
            "projections": stage.depth * _projection_macs(stage, grid, tokens),
            "products": stage.depth * _products(stage, grid, later_stages) * stage.dim,
            "mlp": stage.depth * 2 * tokens * stage.dim * hidden,
        }
        stages.append(StageMacs(grid, parts))
        in_chans = stage.dim
    return ModelMacs(tuple(stages), head=in_chans * config.num_classes)


def _projection_macs(stage: StageConfig, grid: Grid, tokens: int) -> int:
    """Query, key, value and output of one block, of which the paper charges for ``tokens``.

    Global memory is charged twice for keys and values, once for its local and once for its global rows.
    """
    if isinstance(stage.attention, cfg.SpatialReduction):
        reduced = _reduced_tokens(grid, stage.attention.ratio)
        return (2 * tokens + (stage.attention.ratio**2 + 2) * reduced) * stage.dim**2
    times = 6 if isinstance(stage.attention, cfg.GlobalMemory) else 4
    return times * tokens * stage.dim**2


def _products(stage: StageConfig, grid: Grid, later_stages: int) -> int:
    """How many products of two vectors of the stage's width one block takes.

    The paper states the cost of a window where the map is larger; where it is not, it uses full attention, so that a
    token is never charged for more keys than the map has.
    """
    attention, tokens = stage.attention, grid.tokens
    if isinstance(attention, cfg.Full):
        return 2 * tokens**2
    if isinstance(attention, cfg.Longformer):
        return 2 * tokens * min((2 * attention.window + 1) ** 2, tokens)
    if isinstance(attention, cfg.GlobalMemory):
        return 2 * tokens * (2 * 2**later_stages + 1) ** 2  # windows of 17, 9, 5, 3: not what it computes
    if isinstance(attention, cfg.Linformer):
        return 4 * tokens * attention.features
    if isinstance(attention, cfg.SpatialReduction):
        return 2 * tokens * _reduced_tokens(grid, attention.ratio)
    if isinstance(attention, cfg.Performer):
        head_dim = stage.dim // stage.heads
        return 6 * tokens * (head_dim if attention.kernel == "linear" else attention.count_features(head_dim))
    raise TypeError(f"the paper states no cost of {attention!r}")


def _reduced_tokens(grid: Grid, ratio: int) -> int:
    """Tokens of the reduced map, at least one along each axis."""
    return max(1, grid.height // ratio) * max(1, grid.width // ratio)
