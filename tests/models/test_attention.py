"""Attention modules against the plain formula: projections, softmax, projection."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

from vision_longformer.geometry import Grid
from vision_longformer.models import config as cfg
from vision_longformer.models.attention import (
    FullAttention,
    GlobalMemoryAttention,
    LinformerAttention,
    LongformerAttention,
    PerformerAttention,
    SpatialReductionAttention,
    build_attention,
)
from vision_longformer.models.attention.performer import orthogonal_features
from vision_longformer.models.config import StageConfig
from vision_longformer.ops.tables import map_bias

DIM, HEADS = 12, 3


def drawn(module: nn.Module) -> nn.Module:
    """In float64, every parameter drawn large enough to matter."""
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def tokens_of(count: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, DIM, dtype=torch.float64, requires_grad=True)


def heads_of(x: Tensor, linear: nn.Linear, part: int) -> Tensor:
    """Query (0), key (1) or value (2) of every token and head, (B, heads, tokens, head_dim)."""
    rows = slice(part * DIM, (part + 1) * DIM)
    bias = None if linear.bias is None else linear.bias[rows]
    return F.linear(x, linear.weight[rows], bias).unflatten(2, (HEADS, -1)).transpose(1, 2)


def formula(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0, scale: float = (DIM // HEADS) ** -0.5
) -> Tensor:
    """softmax(scale q·k + bias) v, heads side by side."""
    weights = (scale * q @ k.transpose(-1, -2) + bias).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def self_attention(x: Tensor, module: nn.Module, bias: Tensor | float = 0.0) -> Tensor:
    """What full attention with these projections is."""
    q, k, v = (heads_of(x, module.qkv, part) for part in range(3))
    return module.proj(formula(q, k, v, bias, module.scale))


def whole_bias(module: nn.Module, grid: Grid, global_tokens: int) -> Tensor:
    """Every entry of a relative bias where it belongs, (heads, G + N, G + N)."""
    bias, g = module.bias, global_tokens
    result = torch.zeros(HEADS, g + grid.tokens, g + grid.tokens, dtype=torch.float64)
    result[:, g:, g:] = map_bias(bias.table, grid)
    for i in range(g):
        result[:, g:, i] = bias.local_to_global[:, i, None]
        result[:, i, g:] = bias.global_to_local[:, i, None]
        for j in range(g):
            result[:, i, j] = bias.global_to_global[:, i, j]
    return result


# Full


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize(("qkv_bias", "scale"), [(True, None), (False, 0.2)])
def test_full_attention(global_tokens: int, qkv_bias: bool, scale: float | None) -> None:
    grid = Grid(3, 4)
    options = {"qkv_bias": qkv_bias, "scale": scale, "global_tokens": global_tokens}
    module = drawn(FullAttention(DIM, HEADS, grid, relative=True, **options))
    plain = drawn(FullAttention(DIM, HEADS, grid, relative=False, **options))
    assert module.scale == (0.5 if scale is None else scale)
    x = tokens_of(global_tokens + 12)
    assert_close(module(x, grid), self_attention(x, module, whole_bias(module, grid, global_tokens)), 1e-12)
    assert_close(plain(x, grid), self_attention(x, plain), 1e-12)


def test_full_attention_on_other_maps_keeps_each_offset() -> None:
    """A smaller map uses the middle of the table; a larger one its border beyond; ``set_grid`` changes nothing."""
    module = drawn(FullAttention(DIM, HEADS, Grid(3, 3), relative=True, global_tokens=1))
    for grid in (Grid(2, 3), Grid(4, 5), Grid(1, 1)):
        x = tokens_of(1 + grid.tokens)
        before = module(x, grid)
        assert_close(before, self_attention(x, module, whole_bias(module, grid, 1)), 1e-12)
        resized = drawn(FullAttention(DIM, HEADS, Grid(3, 3), relative=True, global_tokens=1))
        resized.load_state_dict(module.state_dict())
        resized.set_grid(grid)
        assert resized.bias.table.shape == (HEADS, 2 * grid.height - 1, 2 * grid.width - 1)
        assert_close(resized(x, grid), before, 1e-12)


# Vision Longformer


def longformer(global_tokens: int, *, window: int = 2, relative: bool = True, **options: object) -> LongformerAttention:
    names = ("given", "qkv_bias", "scale")
    module_options = {name: options.pop(name) for name in names if name in options}
    settings = cfg.Longformer(window=window, **options)
    return drawn(
        LongformerAttention(DIM, HEADS, settings, relative=relative, global_tokens=global_tokens, **module_options)
    )


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("size", [(4, 4), (3, 4), (1, 2), (1, 1)])
def test_longformer_is_full_attention_on_maps_of_two_windows(
    global_tokens: int, relative: bool, size: tuple[int, int]
) -> None:
    """Same parameters, same table: 2w × 2w tokens are all within reach. Gradients of the tokens too."""
    module = longformer(global_tokens, relative=relative)
    full = FullAttention(DIM, HEADS, Grid(4, 4), relative=relative, global_tokens=global_tokens).double()
    full.load_state_dict(module.state_dict())
    grid = Grid(*size)
    x = tokens_of(global_tokens + grid.tokens)
    got, expected = module(x, grid), full(x, grid)
    assert_close(got, expected, 1e-10)
    weight = torch.randn_like(got)
    (gradient,) = torch.autograd.grad((got * weight).sum(), x)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), x)
    assert_close(gradient, wanted, 1e-10)


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize("rule", ["chunk", "exact"])
@pytest.mark.parametrize("neighbours", ["all", "self", 6])
def test_longformer_on_larger_maps_masks_what_is_far(global_tokens: int, rule: str, neighbours: str | int) -> None:
    """Full attention with the same bias, where local queries do not see local keys outside their window."""
    grid, window, g = Grid(5, 7), 2, global_tokens
    module = longformer(g, window=window, rule=rule)
    seen = torch.ones(g + grid.tokens, g + grid.tokens, dtype=torch.bool)
    places = list(itertools.product(range(5), range(7)))
    for (i, (y, x)), (j, (ky, kx)) in itertools.product(enumerate(places), enumerate(places)):
        block = ky // window - y // window, kx // window - x // window
        near = max(map(abs, block)) <= 1 if rule == "chunk" else max(abs(y - ky), abs(x - kx)) <= window
        allowed = neighbours == "all" or block in ((0, 0), *([(1, -1)] if neighbours == 6 else []))
        seen[g + i, g + j] = near and allowed
    bias = whole_bias(module, grid, g).masked_fill(~seen, float("-inf"))
    tokens = tokens_of(g + grid.tokens)
    neighbours = neighbours if isinstance(neighbours, str) else torch.tensor(neighbours)
    assert_close(module(tokens, grid, neighbours), self_attention(tokens, module, bias), 1e-10)


@pytest.mark.parametrize("cls", ["longformer", "global_memory"])
def test_separate_weights_for_global_tokens(cls: str) -> None:
    """Global rows use the global projections throughout; local rows see global keys through the local ones."""
    grid, g = Grid(4, 3), 2
    if cls == "longformer":
        module = longformer(g, share_weights=False)
        bias = whole_bias(module, grid, g)
    else:
        options = cfg.GlobalMemory(share_weights=False)
        module = drawn(GlobalMemoryAttention(DIM, HEADS, options, relative=False, global_tokens=g))
        bias = torch.zeros(HEADS, g + 12, g + 12, dtype=torch.float64)
        bias[:, g:, g:] = float("-inf")
    x = tokens_of(g + grid.tokens)
    q, k, v = (heads_of(x, module.qkv, part) for part in range(3))
    local = module.proj(formula(q, k, v, bias)[:, g:])
    q, k, v = (heads_of(x, module.qkv_global, part) for part in range(3))
    rows = module.proj_global(formula(q, k, v, bias)[:, :g])
    assert_close(module(x, grid), torch.cat([rows, local], 1), 1e-10)


def test_no_separate_weights_without_global_tokens() -> None:
    assert longformer(0, share_weights=False).qkv_global is None
    assert longformer(0, share_weights=False, given=True).qkv_global is not None


@pytest.mark.parametrize("given", [0, 3])
@pytest.mark.parametrize(
    ("mechanism", "own"),
    [
        *((mechanism, own) for mechanism in (cfg.Longformer(window=2), cfg.Full()) for own in (0, 1, 2)),
        *((cfg.GlobalMemory(), own) for own in (1, 2)),
    ],
)
def test_given_tokens_share_one_bias(own: int, given: int, mechanism: cfg.AttentionConfig) -> None:
    """A module that takes given tokens equals one with as many own tokens and repeated entries."""
    grid = Grid(3, 4)
    module = drawn(build_attention(StageConfig(DIM, 1, HEADS, 1, mechanism, own), grid, given=True))
    entries = [*range(own), *[own] * given]
    x = tokens_of(len(entries) + grid.tokens)
    if not entries:
        assert_close(module(x, grid), self_attention(x, module, map_bias(module.bias.table, grid)), 1e-10)
        return
    plain = build_attention(StageConfig(DIM, 1, HEADS, 1, mechanism, len(entries)), grid).double()
    state = module.state_dict()
    for name in ("local_to_global", "global_to_local"):
        state[f"bias.{name}"] = state[f"bias.{name}"][:, entries]
    state["bias.global_to_global"] = state["bias.global_to_global"][:, entries][:, :, entries]
    plain.load_state_dict(state)
    assert_close(module(x, grid), plain(x, grid), 1e-10)


def test_every_implementation_is_refused_or_obeyed_by_name() -> None:
    module = longformer(1)
    x = tokens_of(26)
    expected = module(x, Grid(5, 5))
    module.set_implementation("masked_dense")
    assert_close(module(x, Grid(5, 5)), expected, 1e-10)
    module.set_implementation("unfold_nn")
    with pytest.raises(ValueError, match="'unfold_nn' cannot run this"):
        module(x, Grid(5, 5))
    with pytest.raises(ValueError, match="unknown implementation 'masked'; did you mean 'masked_dense'"):
        module.set_implementation("masked")


# Global memory


@pytest.mark.parametrize("global_tokens", [1, 3])
@pytest.mark.parametrize("bias_local", [True, False])
def test_global_memory(global_tokens: int, bias_local: bool) -> None:
    """Local queries see the global keys only; the release leaves out their bias."""
    grid, g = Grid(3, 3), global_tokens
    options = cfg.GlobalMemory(bias_local_queries=bias_local)
    module = drawn(GlobalMemoryAttention(DIM, HEADS, options, relative=True, global_tokens=g))
    bias = torch.full((HEADS, g + 9, g + 9), float("-inf"), dtype=torch.float64)
    bias[:, :g, :g] = module.bias.global_to_global
    bias[:, :g, g:] = module.bias.global_to_local[..., None]
    bias[:, g:, :g] = module.bias.local_to_global[:, None] if bias_local else 0.0
    x = tokens_of(g + 9)
    assert_close(module(x, grid), self_attention(x, module, bias), 1e-12)


def test_global_memory_needs_a_global_token() -> None:
    with pytest.raises(ValueError, match="needs global_tokens of at least 1"):
        GlobalMemoryAttention(DIM, HEADS, cfg.GlobalMemory(), relative=False, global_tokens=0)


# Linformer


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize("share_kv", [True, False])
def test_linformer(global_tokens: int, share_kv: bool) -> None:
    grid = Grid(3, 4)
    module = drawn(LinformerAttention(DIM, HEADS, cfg.Linformer(5, share_kv), grid, global_tokens))
    x = tokens_of(global_tokens + 12)
    q, k, v = (heads_of(x, module.qkv, part) for part in range(3))
    project_values = module.project_keys if share_kv else module.project_values
    expected = module.proj(formula(q, module.project_keys.t() @ k, project_values.t() @ v))
    assert_close(module(x, grid), expected, 1e-12)


@pytest.mark.parametrize("share_kv", [True, False])
@pytest.mark.parametrize("size", [(5, 6), (2, 3), (1, 1), (3, 9), (4, 3)])
def test_linformer_on_another_map_is_its_set_grid_version(share_kv: bool, size: tuple[int, int]) -> None:
    """Resizing keys and values to the trained map, or the projection to the new map, is the same."""
    module = drawn(LinformerAttention(DIM, HEADS, cfg.Linformer(5, share_kv), Grid(3, 4), 2))
    grid = Grid(*size)
    x = tokens_of(2 + grid.tokens)
    before = module(x, grid)
    module.set_grid(grid)
    assert module.project_keys.shape == (2 + grid.tokens, 5)
    assert_close(module(x, grid), before, 1e-10)


def test_linformer_resize_keeps_constant_maps() -> None:
    """On a larger map of equal tokens nothing changes: a resize of a constant is that constant."""
    module = drawn(LinformerAttention(DIM, HEADS, cfg.Linformer(5), Grid(3, 4), 0))
    token = tokens_of(1)
    small, large = (module(token.expand(-1, grid.tokens, -1), grid) for grid in (Grid(3, 4), Grid(6, 5)))
    assert_close(large[:, :1], small[:, :1], 1e-12)


def test_linformer_refuses_another_number_of_global_tokens() -> None:
    module = drawn(LinformerAttention(DIM, HEADS, cfg.Linformer(5), Grid(3, 4), 1))
    with pytest.raises(ValueError, match="made for 1 global tokens, not 3"):
        module(tokens_of(15), Grid(3, 4))


# Spatial reduction


def reduced(local: Tensor, module: SpatialReductionAttention, grid: Grid, ratio: int) -> Tensor:
    """Each patch of ratio × ratio tokens to one, then zero mean and unit variance per channel over the map."""
    rows, columns = max(1, grid.height // ratio), max(1, grid.width // ratio)
    image = local.unflatten(1, tuple(grid))
    cells = torch.zeros(local.shape[0], rows, columns, DIM, dtype=torch.float64)
    for row, column, y, x in itertools.product(range(rows), range(columns), range(ratio), range(ratio)):
        if row * ratio + y < grid.height and column * ratio + x < grid.width:
            token = image[:, row * ratio + y, column * ratio + x]
            cells[:, row, column] += token @ module.reduce.weight[:, :, y, x].t()
    flat = cells.flatten(1, 2)
    if rows * columns == 1:
        return flat
    centred = flat - flat.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize(
    ("size", "ratio"), [((4, 6), 2), ((5, 7), 2), ((3, 3), 1), ((2, 3), 2), ((1, 1), 2), ((3, 9), 4), ((1, 1), 1)]
)
def test_spatial_reduction(global_tokens: int, size: tuple[int, int], ratio: int) -> None:
    """Also where the reduced map is 1×1, and where the map is smaller than the ratio."""
    grid, g = Grid(*size), global_tokens
    module = drawn(SpatialReductionAttention(DIM, HEADS, ratio))
    x = tokens_of(g + grid.tokens)
    source = torch.cat([x[:, :g], reduced(x[:, g:], module, grid, ratio)], 1)
    q, k, v = heads_of(x, module.qkv, 0), heads_of(source, module.qkv, 1), heads_of(source, module.qkv, 2)
    assert_close(module(x, grid), module.proj(formula(q, k, v)), 1e-10)


# Performer


def performer(features: int | None = 16, **options: str) -> PerformerAttention:
    return drawn(PerformerAttention(DIM, HEADS, cfg.Performer(features, **options)))


def test_features_are_orthogonal_in_blocks() -> None:
    """Rows of a block of ``dim`` are orthogonal; a last block is cut; lengths are those of Gaussian vectors."""
    features = orthogonal_features(11, 4, torch.Generator().manual_seed(0)).double()
    assert features.shape == (11, 4)
    for start in (0, 4, 8):
        block = features[start : start + 4]
        directions = block / block.norm(dim=1, keepdim=True)
        assert_close(directions @ directions.t(), torch.eye(len(block), dtype=torch.float64), 1e-6)
    many = orthogonal_features(4000, 4, torch.Generator().manual_seed(0))
    assert_close(many.square().sum(1).mean(), torch.tensor(4.0), 0.03)
    assert_close(many.mean(0), torch.zeros(4), 0.05)


def test_the_default_number_of_features() -> None:
    assert performer(None).features.shape == (5, 4)  # 4 ln 4 = 5.5


def test_redraw_is_reproducible_and_new() -> None:
    module = performer()
    before = module.features.clone()
    module.redraw(torch.Generator().manual_seed(3))
    first = module.features.clone()
    assert not torch.equal(first, before)
    module.redraw(torch.Generator().manual_seed(4))
    assert not torch.equal(module.features, first)
    module.redraw(torch.Generator().manual_seed(3))
    assert torch.equal(module.features, first)


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
def test_performer_formula(global_tokens: int) -> None:
    """Positive features of queries and keys: exp(w·x − |x|²/2 − peak) + 1e-4, then a normalised weighted mean."""
    grid = Grid(2, 3)
    module = performer()
    x = tokens_of(global_tokens + 6)
    q, k, v = (heads_of(x, module.qkv, part) for part in range(3))
    w = module.features

    def positive(y: Tensor, per_token: bool) -> Tensor:
        y = y * (DIM // HEADS) ** -0.25
        projected = y @ w.t()
        peak = projected.amax(3 if per_token else (1, 2, 3), keepdim=True)
        return (projected - y.square().sum(-1, keepdim=True) / 2 - peak).exp() + 1e-4

    weights = positive(q, True) @ positive(k, False).transpose(-1, -2)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = module.proj((weights @ v).transpose(1, 2).flatten(2))
    assert_close(module(x, grid), expected, 1e-10)


def test_performer_computes_features_in_full_precision_under_autocast() -> None:
    """Projections are in bfloat16; what is between them is the formula in float32, rounded once at its end."""
    module = performer(64).float()
    with torch.no_grad():
        module.proj.weight.copy_(torch.eye(DIM))
        module.proj.bias.zero_()
    x = tokens_of(200, batch=1).detach().float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        got = module(x, Grid(10, 20))
        q, k, v = (part.transpose(1, 2).double() for part in module.project(x))
    projected = [y * 4**-0.25 @ module.features.double().t() for y in (q, k)]
    peaks = projected[0].amax(-1, keepdim=True), projected[1].amax((1, 2, 3), keepdim=True)
    q, k = (
        (p - (y * 4**-0.25).square().sum(-1, keepdim=True) / 2 - peak).exp() + 1e-4
        for p, y, peak in zip(projected, (q, k), peaks, strict=True)
    )
    weights = q @ k.transpose(-1, -2)
    expected = ((weights / weights.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2).to(torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert (got == expected).double().mean() > 0.98


def test_other_kernels() -> None:
    x = tokens_of(7)
    relu, linear = performer(kernel="relu"), performer(kernel="linear")
    q, k, v = (heads_of(x, relu.qkv, part) for part in range(3))
    normaliser = (DIM // HEADS) ** -0.25
    maps = [(normaliser * y @ relu.features.t()).relu() + 1e-3 for y in (q, k)]
    weights = maps[0] @ maps[1].transpose(-1, -2)
    expected = relu.proj(((weights / weights.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2))
    assert_close(relu(x, Grid(1, 7)), expected, 1e-10)
    q, k, v = (heads_of(x, linear.qkv, part) for part in range(3))
    expected = linear.proj((q.softmax(-1) @ (k.softmax(2).transpose(-1, -2) @ v)).transpose(1, 2).flatten(2))
    assert_close(linear(x, Grid(1, 7)), expected, 1e-10)


def test_an_image_does_not_depend_on_its_batch_unless_asked_to() -> None:
    x = tokens_of(6, batch=3).detach()
    x[1] *= 4
    image, batch = performer(), performer(stabiliser="batch")
    batch.load_state_dict(image.state_dict())
    alone = image(x[:1], Grid(2, 3))
    assert_close(image(x, Grid(2, 3))[:1], alone, 1e-12)
    assert_close(batch(x[:1], Grid(2, 3)), alone, 1e-12)
    assert (batch(x, Grid(2, 3))[:1] - alone).abs().max() > 1e-3


def test_many_features_approximate_softmax_attention() -> None:
    """The error to exact attention falls with the number of features."""
    x = 0.3 * tokens_of(10).detach()
    few, many = performer(8), performer(20000)
    for module in (few, many):
        generator = torch.Generator().manual_seed(5)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
    exact = self_attention(x, few)
    errors = [(module(x, Grid(2, 5)) - exact).abs().max() for module in (few, many)]
    spread = (exact - exact.mean(1, keepdim=True)).abs().max()
    assert errors[1] < 0.15 * spread
    assert errors[1] < errors[0] / 10


# All


MECHANISMS = [
    cfg.Full(),
    cfg.Longformer(),
    cfg.Longformer(window=1, rule="exact"),
    cfg.Longformer(window=2, rule="cyclic"),
    cfg.GlobalMemory(),
    cfg.Linformer(4),
    cfg.SpatialReduction(8),
    cfg.Performer(8),
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.mechanism)
@pytest.mark.parametrize("global_tokens", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_map_of_one_token_is_finite(mechanism: cfg.AttentionConfig, global_tokens: int, dtype: torch.dtype) -> None:
    """Also with no global token, also for large inputs; gradients too."""
    if isinstance(mechanism, cfg.GlobalMemory):
        global_tokens += 1
    position = "relative" if mechanism.has_relative_bias else "none"
    stage = StageConfig(DIM, 1, HEADS, 1, mechanism, global_tokens, position)
    module = build_attention(stage, Grid(3, 3)).to(dtype)
    x = (100 * torch.randn(2, global_tokens + 1, DIM)).to(dtype).requires_grad_()
    out = module(x, Grid(1, 1))
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if isinstance(m, cfg.Full | cfg.Longformer)])
def test_one_token_attends_to_itself(mechanism: cfg.AttentionConfig) -> None:
    """With no global token, a map of one token returns its projected value."""
    module = drawn(build_attention(StageConfig(DIM, 1, HEADS, 1, mechanism, 0), Grid(3, 3)))
    x = tokens_of(1)
    value = heads_of(x, module.qkv, 2).transpose(1, 2).flatten(2)
    assert_close(module(x, Grid(1, 1)), module.proj(value), 1e-12)


def test_width_must_be_divisible_by_heads() -> None:
    with pytest.raises(ValueError, match="dim=10 is not divisible by heads=3"):
        FullAttention(10, 3, Grid(2, 2), relative=False, global_tokens=0)
