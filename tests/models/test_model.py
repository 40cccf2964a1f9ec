"""The backbone: what it computes, at any size, and timm's protocol. Compilation is in ``test_compile.py``."""

from __future__ import annotations

import itertools

import pytest
import timm.optim
import torch
from builders import SMALL_MODELS, assert_close, build, image, small_config
from timm.models import group_parameters
from torch import Tensor, nn

from vision_longformer import ModelConfig, VisionLongformer
from vision_longformer.models import config as cfg
from vision_longformer.models.attention import LongformerAttention

SIZES = [(64, 64), (97, 143)]


def gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor | None]:
    """Gradients of a weighted sum of the logits."""
    model.zero_grad(set_to_none=True)
    logits = model(*inputs)
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits)
    (logits * weight).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def without_effect(config: ModelConfig) -> set[str]:
    """Parameters that serve only tokens nobody reads: rows of global tokens that are dropped after the last block of a
    stage, and of local tokens in the last block before a class token is read."""
    names = set()
    for index, stage in enumerate(config.stages):
        attn = f"stages.{index}.blocks.{stage.depth - 1}.attn"
        last = index == len(config.stages) - 1
        if not last and not config.carry_global_tokens:
            names |= {f"{attn}.bias.global_to_local", f"{attn}.bias.global_to_global"}
            names |= {f"{attn}.{part}_global.{name}" for part in ("qkv", "proj") for name in ("weight", "bias")}
        if last and config.global_pool == "token":
            names |= {f"{attn}.bias.table", f"{attn}.bias.local_to_global"}
            if getattr(stage.attention, "share_weights", True) is False:
                names |= {f"{attn}.{part}.{name}" for part in ("qkv", "proj") for name in ("weight", "bias")}
    return names


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_forward_and_backward(name: str, size: tuple[int, int]) -> None:
    """Every parameter has a finite gradient, which is zero only where the parameter has no effect."""
    model = build(name)
    dead = without_effect(model.config)
    assert model(image(*size)).shape == (2, 5)
    for parameter, gradient in gradients(model, image(*size)).items():
        assert gradient is not None, parameter
        assert torch.isfinite(gradient).all(), parameter
        assert (gradient.abs().max() > 0) == (parameter not in dead), parameter


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_images_do_not_see_one_another(name: str) -> None:
    model = build(name, torch.float64).eval()
    x = image(48, 80, batch=3, dtype=torch.float64)
    assert_close(model(x)[1:2], model(x[1:2]), 1e-10)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_bfloat16_is_finite_and_close(name: str) -> None:
    model = build(name).eval()
    x = image(97, 143)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(x)
    assert_close(low, expected, 0.05)
    assert low.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (5, 7)])
@pytest.mark.parametrize("name", [name for name in SMALL_MODELS if name != "dropped_rest"])
def test_tiny_images_are_finite(name: str, size: tuple[int, int]) -> None:
    assert torch.isfinite(build(name)(image(*size))).all()


def test_an_image_too_small_to_drop_the_rest_is_refused() -> None:
    with pytest.raises(ValueError, match="a map of 3×200 is smaller than the patch of 4×4"):
        build("dropped_rest")(image(3, 200))


# What a model is made of


def by_hand(model: VisionLongformer, x: Tensor, given: Tensor | None = None) -> list[Tensor]:
    """The tokens of every stage, global first, composed from blocks."""
    results, carried = [], None
    for stage, config in zip(model.stages, model.config.stages, strict=True):
        tokens, grid = stage.patch_embed(x)
        if stage.position is not None:
            tokens = tokens + stage.position(grid)
        rows = [stage.global_tokens.expand(len(x), -1, -1)] if stage.global_tokens is not None else []
        if stage.carry is not None:
            rows = [stage.carry(carried)]
        if rows and stage.position is not None:
            rows[0] = rows[0] + stage.position.global_tokens
        if given is not None:
            rows.append(stage.given(given))
        tokens = torch.cat([*rows, tokens], 1)
        for block in stage.blocks:
            tokens = tokens + block.attn(block.norm1(tokens), grid)
            mlp = block.mlp
            tokens = tokens + mlp.fc2(nn.functional.gelu(mlp.fc1(block.norm2(tokens))))
        results.append(tokens)
        carried = tokens[:, : config.global_tokens]
        x = tokens[:, -grid.tokens :].transpose(1, 2).reshape(len(x), -1, *grid)
    return results


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_stages_compose(name: str) -> None:
    """Global tokens are dropped between stages, or carried on; the head reads the class token or the mean of all."""
    model = build(name, torch.float64).eval()
    x = image(97, 143, dtype=torch.float64)
    stages = by_hand(model, x)
    tokens = model.norm(stages[-1])
    assert_close(model.forward_features(x), tokens, 1e-10)
    pooled = tokens[:, 0] if model.config.global_pool == "token" else tokens.mean(1)
    assert_close(model.forward_head(tokens, pre_logits=True), pooled, 1e-10)
    assert_close(model(x), pooled @ model.head.weight.t() + model.head.bias, 1e-10)
    for index, (tokens, features) in enumerate(zip(stages, model.forward_intermediates(x)[1], strict=True)):
        height, width = model.config.grids((97, 143))[index]
        expected = tokens[:, -height * width :].transpose(1, 2).reshape(2, -1, height, width)
        assert_close(features, expected, 1e-10)


@pytest.mark.parametrize("name", ["vil", "three_stages", "flat", "five_stages"])
def test_feature_info(name: str) -> None:
    model = build(name)
    reductions = {"vil": [4, 8, 16, 32], "three_stages": [8, 16, 32], "flat": [16], "five_stages": [2, 4, 8, 16, 32]}
    assert [info["reduction"] for info in model.feature_info] == reductions[name]
    maps = model.forward_intermediates(image(97, 143), intermediates_only=True)
    for info, features in zip(model.feature_info, maps, strict=True):
        stride = info["reduction"]
        assert features.shape == (2, info["num_chs"], -(-97 // stride), -(-143 // stride))


def test_forward_intermediates_options() -> None:
    model = build("vil", torch.float64).eval()
    x = image(dtype=torch.float64)
    tokens, maps = model.forward_intermediates(x)
    assert_close(tokens, model.forward_features(x), 1e-12)
    (last,) = model.forward_intermediates(x, indices=[3], norm=True, intermediates_only=True)
    assert_close(last, tokens.transpose(1, 2).unflatten(2, (2, 2)), 1e-12)
    second = model.forward_intermediates(x, indices=[1], stop_early=True, output_fmt="NHWC", intermediates_only=True)
    assert_close(second[0], maps[1].permute(0, 2, 3, 1), 1e-12)
    assert_close(model.forward_intermediates(x, indices=2, intermediates_only=True)[0], maps[2], 1e-12)
    early, (first,) = model.forward_intermediates(x, indices=[0], stop_early=True)
    assert_close(early[:, -first.shape[2] * first.shape[3] :].transpose(1, 2), first.flatten(2), 1e-12)
    with pytest.raises(ValueError, match="output_fmt is 'NLC'; use 'NCHW' or 'NHWC'"):
        model.forward_intermediates(x, output_fmt="NLC")


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_cells_cover_the_pixels_they_are_said_to(remainder: str) -> None:
    """When tokens see only themselves, cell (i, j) of stride s depends on pixels [is, (i+1)s) × [js, (j+1)s) alone."""
    own = cfg.Longformer(window=1)
    config = small_config(own, own, own, position="relative", tokens=(0, 0, 0), patch_remainder=remainder)
    model = VisionLongformer(config, eval_neighbours="self").eval()
    x = image(27, 38, batch=1).requires_grad_()
    for stage, stride in enumerate((4, 8, 16)):
        height, width = config.grids((27, 38))[stage]
        for row, column in {(0, 0), (height - 1, width - 1), (height // 2, width // 2), (0, width - 1)}:
            features = model.forward_intermediates(x, intermediates_only=True)[stage]
            (gradient,) = torch.autograd.grad(features[0, 0, row, column], x)
            touched = torch.zeros(27, 38, dtype=torch.bool)
            touched[row * stride : (row + 1) * stride, column * stride : (column + 1) * stride] = True
            assert torch.equal(gradient[0].abs().sum(0) > 0, touched)


@pytest.mark.parametrize(("rule", "reach"), [("chunk", None), ("exact", 2)])
def test_local_attention_is_local(rule: str, reach: int | None) -> None:
    """Without global tokens, a changed patch changes exactly the cells whose window it is in."""
    config = small_config(cfg.Longformer(window=2, rule=rule), position="relative", tokens=(0,))
    model = VisionLongformer(config).double().eval()
    x = image(97, 143, batch=1, dtype=torch.float64)
    changed = x.clone()
    changed[:, :, 45, 61] += 1.0  # cell (11, 15), chunk (5, 7)
    before, after = (model.forward_intermediates(y, intermediates_only=True)[0][0] for y in (x, changed))
    expected = torch.zeros(25, 36, dtype=torch.bool)
    if reach is None:
        expected[8:14, 12:18] = True
    else:
        expected[11 - reach : 12 + reach, 15 - reach : 16 + reach] = True
    assert torch.equal((before - after).abs().amax(0) > 1e-12, expected)


def test_padding_adds_zeros_below_and_right() -> None:
    model = build("vil", torch.float64).eval()
    x = image(97, 143, dtype=torch.float64)
    padded = nn.functional.pad(x, (0, 1, 0, 3))
    first = [model.forward_intermediates(y, indices=[0], intermediates_only=True)[0] for y in (x, padded)]
    assert_close(first[0], first[1], 1e-12)


# Global tokens


def test_tokens_given_by_the_caller() -> None:
    """They are projected per stage and join the stage's own; their order does not matter, their values do."""
    mechanisms = (cfg.Longformer(window=2), cfg.GlobalMemory(), cfg.Full())
    config = small_config(*mechanisms, position="relative", tokens=(0, 1, 2), given_token_dim=6)
    model = VisionLongformer(config).double().eval()
    x, given = image(40, 56, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    logits = model(x, given)
    assert_close(model.forward_features(x, given), model.norm(by_hand(model, x, given)[-1]), 1e-10)
    assert_close(model(x, given[:, [2, 0, 1]]), logits, 1e-10)
    for other in (given + 1, given[:, :2]):
        assert (model(x, other) - logits).abs().max() > 1e-6
    assert_close(model(x), model(x, given[:, :0]), 1e-10)
    with_maps = model.forward_intermediates(x, given_tokens=given)[0]
    assert_close(model.forward_head(with_maps), logits, 1e-10)
    for name, gradient in gradients(model, x, given).items():
        assert gradient is not None, name
        assert (gradient.abs().max() > 0) == (name not in without_effect(config)), name


def identity_block(block: nn.Module) -> None:
    """Nothing comes out of either branch, so that a block returns what it is given."""
    for layer in (block.attn.proj, block.mlp.fc2):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def test_carried_and_given_tokens_by_hand() -> None:
    """Own global tokens are carried on to the next stage, given ones are not: every stage projects those anew.

    Blocks do nothing here, and all weights are small whole numbers. Stage 1 has patches of one pixel x, embedded as
    (x, 10x); stage 2 adds up patches of 2×2 and carries tokens on with their channels swapped.
    """
    stages = [cfg.StageConfig(2, 1, 1, patch, cfg.Full(), 2, "absolute") for patch in (1, 2)]
    options = {"img_size": (2, 2), "in_chans": 1, "norm_embed": False, "given_token_dim": 1}
    model = VisionLongformer(ModelConfig(tuple(stages), num_classes=0, carry_global_tokens=True, **options)).eval()
    weights = {
        "stages.0.patch_embed.proj.weight": [[[[1]]], [[[10]]]],
        "stages.0.global_tokens": [[1, 2], [3, 4]],
        "stages.0.given.weight": [[1], [2]],
        "stages.0.position.rows": [[100], [200]],
        "stages.0.position.columns": [[1000], [2000]],
        "stages.0.position.global_tokens": [[10, 20], [30, 40]],
        "stages.1.patch_embed.proj.weight": [
            [[[1, 1], [1, 1]], [[0, 0], [0, 0]]],
            [[[0, 0], [0, 0]], [[1, 1], [1, 1]]],
        ],
        "stages.1.carry.weight": [[0, 1], [1, 0]],
        "stages.1.given.weight": [[3], [4]],
        "stages.1.position.rows": [[5]],
        "stages.1.position.columns": [[7]],
        "stages.1.position.global_tokens": [[100, 200], [300, 400]],
    }
    for stage in model.stages:
        identity_block(stage.blocks[0])
        nn.init.zeros_(stage.patch_embed.proj.bias)
    with torch.no_grad():
        for name, value in weights.items():
            model.get_parameter(name).copy_(torch.tensor(value))
    model.norm = nn.Identity()

    x, given = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), torch.tensor([[[5.0], [6.0], [7.0]]])
    own, projected = [[11, 22], [33, 44]], [[5, 10], [6, 12], [7, 14]]
    local = [[101, 1010], [102, 2020], [203, 1030], [204, 2040]]
    tokens, grid = model.stages[0](x, given=given)
    assert (tokens[0].tolist(), tuple(grid)) == ([*own, *projected, *local], (2, 2))
    carried, projected = [[22 + 100, 11 + 200], [44 + 300, 33 + 400]], [[15, 20], [18, 24], [21, 28]]
    local = [[101 + 102 + 203 + 204 + 5, 1010 + 2020 + 1030 + 2040 + 7]]
    assert model.forward_features(x, given)[0].tolist() == [*carried, *projected, *local]
    assert model.forward_features(x)[0].tolist() == [*carried, *local]


@pytest.mark.parametrize("mechanism", [cfg.Performer(8), cfg.SpatialReduction(2)], ids=lambda m: m.mechanism)
def test_tokens_given_to_other_mechanisms(mechanism: cfg.AttentionConfig) -> None:
    model = VisionLongformer(small_config(mechanism, given_token_dim=6)).double().eval()
    x, given = image(dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    assert_close(model.forward_features(x, given), model.norm(by_hand(model, x, given)[-1]), 1e-10)
    assert (model(x, given) - model(x)).abs().max() > 1e-6


def test_bad_inputs_are_named() -> None:
    model, takes = build("vil"), VisionLongformer(small_config(cfg.Full(), given_token_dim=6))
    with pytest.raises(ValueError, match=r"input is \(2, 1, 8, 8\); it must be \(batch, 3, height, width\)"):
        model(torch.zeros(2, 1, 8, 8))
    with pytest.raises(ValueError, match=r"input is \(3, 8, 8\)"):
        model(torch.zeros(3, 8, 8))
    with pytest.raises(ValueError, match="takes no given tokens; build it with given_token_dim"):
        model(image(), torch.zeros(2, 3, 6))
    with pytest.raises(ValueError, match=r"given_tokens is \(2, 3, 5\); it must be \(2, n, 6\)"):
        takes(image(), torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match=r"given_tokens is \(1, 3, 6\)"):
        takes(image(), torch.zeros(1, 3, 6))


# Training


def share_dropped(dropped: Tensor, whole: Tensor) -> float:
    """Of numbers that should be dropped or, at a rate of one half, doubled."""
    assert bool(((dropped == 0) | torch.isclose(dropped, 2 * whole)).all())
    return float((dropped == 0).double().mean())


def test_where_dropout_is() -> None:
    """After the embedding, after either branch of a block, and before the head, each of half of the numbers."""
    model = build("flat", torch.float64, drop_rate=0.5)
    stage, block = model.stages[0], model.stages[0].blocks[0]
    for one in stage.blocks:
        identity_block(one)
    x = image(batch=16, dtype=torch.float64)
    embedded, grid = stage.eval()(x)
    tokens = stage.train()(x)[0]
    assert share_dropped(tokens, embedded) == pytest.approx(0.5, abs=0.05)
    for bias in (block.attn.proj.bias, block.mlp.fc2.bias):
        nn.init.constant_(bias, 3.0)
        branch = block.train()(embedded, grid) - embedded
        nn.init.zeros_(bias)
        assert share_dropped(branch.round(decimals=9), torch.full_like(branch, 3.0)) == pytest.approx(0.5, abs=0.05)
    pooled = model.eval().forward_head(embedded, pre_logits=True)
    assert share_dropped(model.train().forward_head(embedded, pre_logits=True), pooled) == pytest.approx(0.5, abs=0.15)


def test_drop_path_rises_linearly() -> None:
    model = build("vil", drop_path_rate=0.4)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert isinstance(model.stages[0].blocks[0].drop_path, nn.Identity)


def test_drop_path_drops_branches_of_whole_images() -> None:
    """An image whose branches are dropped is as if the block were not there."""
    model = build("flat", torch.float64, drop_path_rate=0.99)
    x = image(batch=64, dtype=torch.float64)
    stage = model.stages[0]
    tokens = stage(x)[0]
    block = stage.blocks[0]
    with torch.no_grad():
        embedded, grid = stage.patch_embed(x)
        rows = (stage.global_tokens + stage.position.global_tokens).expand(64, -1, -1)
        first = block.eval()(torch.cat([rows, embedded + stage.position(grid)], 1), grid)
    untouched = (tokens - first).abs().amax((1, 2)) < 1e-12
    # Both branches of blocks of rates 0.495 and 0.99 are dropped at once for about a quarter of the images.
    assert 5 <= untouched.sum() <= 30


@pytest.mark.parametrize("name", ["vil", "partial_performer", "carried"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    options = {"drop_rate": 0.1, "drop_path_rate": 0.2, "neighbours": "random"}
    results = []
    for enable in (False, True):
        model = build(name, torch.float64, **options).train()
        model.set_grad_checkpointing(enable)
        model.random_shift.seed(5, 2)
        torch.manual_seed(4)
        results.append(gradients(model, image(80, 80, dtype=torch.float64)))
    for parameter, expected in results[0].items():
        assert_close(results[1][parameter], expected, 1e-12, parameter)


def test_gradient_checkpointing_recomputes_blocks() -> None:
    model = build("vil").train()
    calls = []
    model.stages[2].blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    gradients(model, image())
    assert len(calls) == 1
    model.set_grad_checkpointing()
    gradients(model, image())
    assert len(calls) == 3


# Settings and timm's protocol


@pytest.mark.parametrize("name", ["vil_ape", "full_relative", "linformer", "partial_linformer", "flat_1d", "vil"])
def test_set_input_size_changes_tables_not_results(name: str) -> None:
    model = build(name, torch.float64).eval()
    x = image(97, 143, dtype=torch.float64)
    before = model(x)
    model.set_input_size((97, 143))
    assert model.config.img_size == (97, 143)
    assert_close(model(x), before, 1e-10)
    built = VisionLongformer(SMALL_MODELS[name], img_size=(97, 143))
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in built.named_parameters()}


def test_reset_classifier() -> None:
    model = build("vil_ape", torch.float64).eval()
    x = image(dtype=torch.float64)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    model.reset_classifier(3)
    assert model.get_classifier() is model.head
    assert (model.num_classes, model.config.num_classes) == (3, 3)
    assert_close(model(x), pooled @ model.head.weight.t(), 1e-12)
    model.reset_classifier(0)
    assert_close(model(x), pooled, 1e-12)
    with pytest.raises(ValueError, match="global_pool='token' needs a global token in the last stage"):
        model.reset_classifier(3, "token")
    classed = build("flat", torch.float64).eval()
    tokens = classed.forward_features(x)
    classed.reset_classifier(0, "avg")
    assert_close(classed(x), tokens.mean(1), 1e-12)


def test_no_weight_decay_names_tokens_and_tables() -> None:
    model = build("vil_separate")
    expected = {f"stages.{stage}.global_tokens" for stage in range(3)}
    tables = ("table", "local_to_global", "global_to_local", "global_to_global")
    expected |= {f"stages.{stage}.blocks.0.attn.bias.{table}" for stage in range(3) for table in tables}
    assert model.no_weight_decay() == expected
    position = {f"stages.0.position.{part}" for part in ("rows", "columns", "global_tokens")}
    assert build("flat").no_weight_decay() == position | {"stages.0.global_tokens"}
    assert build("flat_1d").no_weight_decay() == {
        "stages.0.position.table", "stages.0.position.global_tokens", "stages.0.global_tokens"
    }  # fmt: skip
    groups = timm.optim.param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == (parameter.ndim > 1 and name not in expected), name


def test_no_weight_decay_names_no_buffers() -> None:
    """Performer features are drawn, not trained, and no optimiser has them."""
    model = VisionLongformer(small_config(cfg.Performer(8), cfg.Performer(8), tokens=(1, 0)))
    tables = {f"stages.{stage}.position.{axis}" for stage in (0, 1) for axis in ("rows", "columns")}
    assert model.no_weight_decay() == tables | {"stages.0.position.global_tokens", "stages.0.global_tokens"}


@pytest.mark.parametrize("name", ["vil", "flat", "carried"])
@pytest.mark.parametrize("coarse", [False, True])
def test_group_matcher_orders_layers(name: str, coarse: bool) -> None:
    """Layers from the stem to the head: each parameter in one group, deeper parts in later ones."""
    model = build(name)
    layers = group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
    assert set(layers) == {n for n, _ in model.named_parameters()}
    assert layers["stages.0.patch_embed.proj.weight"] == 0
    assert layers["head.weight"] == max(layers.values())
    depths = [stage.depth for stage in model.config.stages]
    blocks = [(stage, block) for stage, depth in enumerate(depths) for block in range(depth)]
    order = [layers[f"stages.{stage}.blocks.{block}.mlp.fc1.weight"] for stage, block in blocks]
    if coarse:
        assert all((a < b) == (s[0] < t[0]) for (a, s), (b, t) in itertools.pairwise(zip(order, blocks, strict=True)))
    else:
        assert order == sorted(set(order))
    assert layers["norm.weight"] >= order[-1]
    for stage in range(1, len(depths)):
        assert layers[f"stages.{stage}.patch_embed.proj.weight"] == layers[f"stages.{stage}.blocks.0.norm1.weight"]


def test_layer_decay_scales_grow_towards_the_head() -> None:
    model = build("vil")
    groups = timm.optim.param_groups_layer_decay(
        model, 0.1, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5
    )
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert len(scale) == len(named)
    parts = ["stages.0.patch_embed.proj", "stages.1.blocks.0.mlp.fc1", "stages.2.blocks.1.mlp.fc1", "head"]
    scales = [scale[id(named[f"{part}.weight"])] for part in parts]
    assert scales == sorted(set(scales))
    assert scales[-1] == 1.0


def test_prune_intermediate_layers() -> None:
    model = build("vil", torch.float64).eval()
    x = image(dtype=torch.float64)
    maps = model.forward_intermediates(x, intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1], prune_norm=True) == [0, 1]
    assert len(model.stages) == 2
    first = model.forward_intermediates(x, indices=[0, 1], intermediates_only=True)
    for got, expected in zip(first, maps, strict=False):
        assert_close(got, expected, 1e-12)


def test_norm_and_head_go_with_the_last_stage() -> None:
    """Stages of 8, 8, 16 and 16 channels: what was made for the last does not fit the second."""
    model = build("vil", torch.float64).eval()
    x = image(dtype=torch.float64)
    tokens = by_hand(model, x)[1]
    assert model.prune_intermediate_layers([0, 1], prune_norm=False, prune_head=False) == [0, 1]
    assert (model.num_features, model.num_classes, model.config.num_classes) == (8, 0, 0)
    assert_close(model.forward_features(x), tokens, 1e-12)
    assert_close(model(x), tokens.mean(1), 1e-12)
    features = tokens[:, 1:].transpose(1, 2).unflatten(2, (8, 8))
    assert_close(model.forward_intermediates(x, [1], norm=True, intermediates_only=True)[0], features, 1e-12)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)


def test_norm_and_head_stay_with_the_last_stage() -> None:
    model = build("vil", torch.float64).eval()
    x = image(dtype=torch.float64)
    expected = model(x)
    assert model.prune_intermediate_layers([1, -1], prune_norm=False, prune_head=False) == [1, 3]
    assert torch.equal(model(x), expected)
    model.prune_intermediate_layers([1, 3], prune_norm=False)
    assert (model.num_classes, model(x).shape) == (0, (2, 16))
    assert isinstance(model.norm, nn.LayerNorm)


def test_attention_implementation_by_name() -> None:
    model = build("vil", torch.float64).eval()
    x = image(97, 143, dtype=torch.float64)
    expected = model(x)
    for name in ("masked_dense", "sliding_chunk", "auto"):
        model.set_attention_implementation(name)
        modules = [m for m in model.modules() if isinstance(m, LongformerAttention)]
        assert [m.implementation for m in modules] == [name] * 5
        assert_close(model(x), expected, 1e-10)


def test_redraw_features_from_a_generator() -> None:
    model = build("performer", torch.float64).eval()
    x = image(dtype=torch.float64)
    before = model(x)
    model.redraw_features(torch.Generator().manual_seed(7))
    first = model(x)
    assert (first - before).abs().max() > 1e-9
    features = [module.features for module in model.modules() if hasattr(module, "features")]
    assert len(features) == 4
    assert not torch.equal(features[0], features[1])
    model.redraw_features(torch.Generator().manual_seed(7))
    assert torch.equal(model(x), first)


def test_initial_weights() -> None:
    """Linear weights and tables have standard deviation 0.02, biases are zero, LayerNorms the identity."""
    model = VisionLongformer(small_config(cfg.Longformer(), position="relative", depth=(4,)))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert torch.count_nonzero(module.bias) == 0
            if module.weight.numel() > 500:
                assert 0.015 < module.weight.std() < 0.025
        if isinstance(module, nn.LayerNorm):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
    tables = torch.stack([block.attn.bias.table for block in model.stages[0].blocks])
    assert 0.015 < tables.std() < 0.025
