"""The streamed pass against the model itself: logits, features and maps, for every kind of model and any strip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import assert_close, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vision_longformer import ModelConfig, VisionLongformer, model_config
from vision_longformer.geometry import RULES
from vision_longformer.large import Progress, stream
from vision_longformer.models import config as cfg


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> VisionLongformer:
    """With weights so large that every token matters to those who see it."""
    model = VisionLongformer(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def longformer(rule: str = "chunk", window: int = 2, share: bool = True, **options: Any) -> ModelConfig:
    """Two stages with patches of 2, the first of two blocks."""
    attention = cfg.Longformer(window, rule, share)
    return small_config(attention, attention, **{"patches": (2, 2), "depth": (2, 1), **options})


def plain(model: VisionLongformer, image: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits, features and maps (height, width, dim) of the model itself."""
    batch = None if given is None else given[None]
    with torch.no_grad():
        tokens, maps = model.forward_intermediates(image[None], given_tokens=batch, output_fmt="NHWC")
        features = model.forward_head(tokens, pre_logits=True)
        return model.forward_head(tokens)[0], features[0], [image[0] for image in maps]


def compare(
    model: VisionLongformer, image: Tensor, tolerance: float, given: Tensor | None = None, **options: Any
) -> None:
    logits, features, maps = plain(model, image, given)
    got = stream(model, image, given_tokens=given, maps=range(len(maps)), **options)
    assert_close(got.logits, logits, tolerance, "logits")
    assert_close(got.features, features, tolerance, "features")
    for stage, expected in enumerate(maps):
        assert_close(got.maps[stage], expected, tolerance, f"map of stage {stage + 1}")


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    tokens = draw(st.sampled_from([(0, 0), (1, 0), (1, 1), (3, 2), (0, 2)]))
    options: dict[str, Any] = {
        "rule": draw(st.sampled_from(RULES)),
        "window": draw(st.integers(1, 4)),
        "share": draw(st.booleans()),
        "position": draw(st.sampled_from(cfg.POSITIONS)),
        "tokens": tokens,
        "patch_remainder": draw(st.sampled_from(["pad", "drop"])),
        "eval_neighbours": draw(st.sampled_from(["all", "all", "self"])),
        "norm_embed": draw(st.booleans()),
    }
    if tokens[0] == tokens[1] > 0:
        options["carry_global_tokens"] = draw(st.booleans())
    if tokens[1]:
        options["global_pool"] = draw(st.sampled_from(["avg", "token"]))
    return longformer(**options)


@settings(max_examples=40)
@given(models(), st.integers(4, 41), st.integers(4, 23), st.integers(1, 4))
def test_streamed_is_plain(config: ModelConfig, height: int, width: int, rows: int) -> None:
    image = torch.randn(3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(height))
    compare(model_of(config), image, 1e-10, rows=rows)


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 21), st.integers(1, 21)),
    st.tuples(*[st.sampled_from([4, 8, 16, 32])] * 3),
    st.sets(st.integers(0, 2)),
    st.integers(1, 2),
)
def test_small_images_and_maps_of_any_width(
    size: tuple[int, int], dims: tuple[int, ...], maps: set[int], rows: int
) -> None:
    """Maps that grow, or that padding makes larger than what they are made of, and some of them kept."""
    config = small_config(*[cfg.Longformer(2)] * 3, patches=(2, 2, 2))
    stages = [{**stage, "dim": dim} for stage, dim in zip(config.to_dict()["stages"], dims, strict=True)]
    model = model_of(config.override(stages=stages))
    image = torch.randn(3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits, _, expected = plain(model, image)
    got = stream(model, image, maps=sorted(maps), rows=rows)
    assert_close(got.logits, logits, 1e-10, "logits")
    for stage in maps:
        assert_close(got.maps[stage], expected[stage], 1e-10, f"map of stage {stage + 1}")


TINY = model_config("vision_longformer_tiny").override(num_classes=7)


@pytest.mark.parametrize(
    ("size", "maps"),
    [
        *(((height, width), []) for height, width in [(4, 4), (4, 12), (12, 4), (8, 8), (3, 3), (4, 1001)]),
        ((16, 48), [1]),
        ((16, 16), [1]),
        ((8, 24), [0]),
    ],
)
def test_the_smallest_images_of_a_named_model(size: tuple[int, int], maps: list[int]) -> None:
    model = VisionLongformer(TINY).eval()
    image = torch.randn(3, *size, generator=torch.Generator().manual_seed(2))
    logits, _, expected = plain(model, image)
    got = stream(model, image, maps=maps)
    assert_close(got.logits, logits, 1e-5, "logits")
    for stage in maps:
        assert_close(got.maps[stage], expected[stage], 1e-5)


def test_the_mlp_goes_over_a_strip_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens of 4 · 8 hidden numbers at a time, of strips with 2 · 2 · 7 tokens."""
    monkeypatch.setattr("vision_longformer.models.vision_longformer.HIDDEN_NUMBERS", 160)
    model, sizes = model_of(longformer()), []
    for block in model.stages[0].blocks:
        block.mlp.register_forward_pre_hook(lambda _, tokens: sizes.append(tokens[0].shape[1]))
    compare(model, torch.randn(3, 16, 14, dtype=torch.float64), 1e-10, rows=2)
    assert model.config.stages[0].dim == 8
    assert sizes[2:] == 2 * [*2 * [5, 5, 5, 5, 5, 3], 1]  # blocks, strips, the global token


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [1, 2])
def test_every_rule_in_float32_on_a_map_of_partial_chunks(rule: str, rows: int) -> None:
    model = model_of(longformer(rule, position="relative", tokens=(1, 2)), torch.float32)
    compare(model, torch.randn(3, 41, 27, generator=torch.Generator().manual_seed(1)), 1e-5, rows=rows)


@pytest.mark.parametrize("share", [True, False])
def test_given_tokens(share: bool) -> None:
    config = longformer(share=share, position="relative", tokens=(1, 0), given_token_dim=3)
    image = torch.randn(3, 24, 10, dtype=torch.float64)
    compare(model_of(config), image, 1e-10, torch.randn(2, 3, dtype=torch.float64), rows=1)
    compare(model_of(config), image, 1e-10, rows=1)


@pytest.mark.parametrize("name", ["vision_longformer_tiny", "vision_longformer_nano", "vision_longformer_micro"])
def test_named_models(name: str) -> None:
    model = model_of(model_config(name).override(num_classes=7), torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)  # so many blocks would otherwise amplify the rounding of float32
    compare(model, torch.randn(3, 150, 90, generator=torch.Generator().manual_seed(2)), 1e-5, rows=1)


def test_one_strip_is_the_whole_map() -> None:
    compare(model_of(longformer("cyclic_release")), torch.randn(3, 22, 14, dtype=torch.float64), 1e-10, rows=99)


def test_a_pruned_backbone() -> None:
    model = model_of(longformer())
    model.prune_intermediate_layers([0])
    image = torch.randn(3, 20, 12, dtype=torch.float64)
    with torch.no_grad():
        (expected,) = model.forward_intermediates(image[None], intermediates_only=True, output_fmt="NHWC")
    assert_close(stream(model, image, maps=[0], rows=1).maps[0], expected[0], 1e-10)


SUMMARIES = (
    *(cfg.GlobalMemory(share, biased) for share in (True, False) for biased in (True, False)),
    *(cfg.SpatialReduction(ratio) for ratio in (2, 3, 8)),
    *(cfg.Linformer(6, share_kv) for share_kv in (True, False)),
    *(cfg.Performer(6, kernel, stabiliser) for kernel in cfg.PERFORMER_KERNELS for stabiliser in cfg.STABILISERS),
)
"""Mechanisms whose local tokens see a few keys made of the whole map."""


@settings(max_examples=25)
@given(
    st.sampled_from(SUMMARIES),
    st.sampled_from(cfg.POSITIONS),
    st.sampled_from([(0, 0), (1, 1), (3, 2)]),
    st.sampled_from([(64, 64), (41, 27), (6, 50), (63, 5), (70, 90)]),
    st.integers(1, 3),
)
def test_attention_to_a_summary_of_the_map_is_plain(
    mechanism: cfg.AttentionConfig, position: str, tokens: tuple[int, int], size: tuple[int, int], rows: int
) -> None:
    """On maps as Linformer is made for, smaller and larger ones, and ones smaller than a reduced cell."""
    if position == "relative" and not mechanism.has_relative_bias:
        position = "none"
    if isinstance(mechanism, cfg.GlobalMemory):
        tokens = max(1, tokens[0]), max(1, tokens[1])
    config = small_config(mechanism, mechanism, patches=(2, 2), depth=(2, 1), position=position, tokens=tokens)
    image = torch.randn(3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    compare(model_of(config), image, 1e-10, rows=rows)


@pytest.mark.parametrize("mechanism", SUMMARIES, ids=lambda mechanism: mechanism.mechanism)
def test_summaries_in_float32_beside_longformer(mechanism: cfg.AttentionConfig) -> None:
    model = model_of(small_config(mechanism, cfg.Longformer(2), patches=(2, 2), depth=(2, 1)), torch.float32)
    compare(model, torch.randn(3, 41, 27, generator=torch.Generator().manual_seed(1)), 1e-5, rows=1)


# Images


class Rows:
    """An image that can be sliced by rows, and remembers which."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels, self.shape, self.slices = pixels, pixels.shape, []

    def __getitem__(self, rows: slice) -> np.ndarray:
        self.slices.append((rows.start, rows.stop))
        return self.pixels[rows]


def test_an_image_is_read_once_from_top_to_bottom_and_normalised() -> None:
    model = model_of(longformer(position="none"))
    pixels = np.random.default_rng(0).integers(0, 256, (23, 9, 3), dtype=np.uint8)
    image = Rows(pixels)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    got = stream(model, image, rows=2, mean=mean, std=std)
    assert image.slices == [(0, 8), (8, 16), (16, 23)]
    normalised = torch.from_numpy(pixels).permute(2, 0, 1).double() / 255 - torch.tensor(mean).double()[:, None, None]
    logits, *_ = plain(model, normalised / torch.tensor(std).double()[:, None, None])
    assert_close(got.logits, logits, 1e-6)
    floats = stream(model, (normalised / torch.tensor(std).double()[:, None, None]).permute(1, 2, 0).numpy(), rows=2)
    assert_close(floats.logits, logits, 1e-10)


# Types, progress, errors


def test_tokens_in_bfloat16_are_near() -> None:
    model = model_of(longformer(), torch.float32)
    image = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(3))
    logits, *_ = plain(model, image)
    got = stream(model, image, rows=2, dtype=torch.bfloat16, maps=[0])
    assert got.maps[0].dtype == torch.bfloat16
    assert got.logits.dtype == torch.float32
    assert 0 < (got.logits - logits).abs().max() < 0.1 * logits.abs().max()


def test_progress_goes_to_the_end() -> None:
    """A map of 8×4 tokens in chunks of 2, one chunk row at a time: 4 strips; then one of 4×2, 2 strips."""
    seen: list[Progress] = []
    stream(model_of(longformer()), torch.zeros(3, 16, 8, dtype=torch.float64), rows=1, progress=seen.append)
    assert [tuple(each.step) for each in seen] == [(0, 0)] * 4 + [(0, 1)] * 4 + [(0, 2)] * 4 + [(1, 0)] * 2 + [
        (1, 1)
    ] * 2
    embedding, block = 8 * 4 * 2**2 * 3 * 8, 8 * 4 * 8 * (4 * 8 + 2 * 32 + 2 * 9 * 4)
    last_embedding, last_block = 4 * 2 * 2**2 * 8 * 8, 4 * 2 * 8 * (4 * 8 + 2 * 32 + 2 * 9 * 4)
    total = embedding + 2 * block + last_embedding + last_block
    assert {each.total for each in seen} == {total}
    assert [each.done for each in seen[3:5]] == [embedding, embedding + block // 4]
    assert seen[-1].done == total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": torch.zeros(1, 3, 8, 8)}, r"\(1, 3, 8, 8\); it must be one image, \(channels, height, width\)"),
        ({"image": np.zeros((8, 8, 4), np.uint8)}, r"\(8, 8, 4\), with 4 channels; the model takes 3"),
        ({"image": np.zeros((0, 8, 3), np.uint8)}, "it has no pixels"),
        ({"image": np.zeros((8, 8, 3), np.int16)}, "the image is of int16; give uint8, uint16 or floating-point"),
        ({"mean": (0.5,)}, "give one value for each of 3 channels"),
        ({"rows": 0}, "rows is 0; it must be an integer of at least 1"),
        ({"maps": [2]}, "maps names stage 2; the model has stages 0 to 1"),
        ({"dtype": torch.int8}, "dtype is torch.int8; tokens are stored as torch.float64, "),
        ({"given_tokens": torch.zeros(1, 4)}, r"given_tokens is \(1, 4\); it must be \(n, 0\), or None if that is 0"),
        ({"memory": "2 Gibberish"}, "memory is '2 Gibberish'; write it as 2GB, 500MB"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(options: dict, message: str) -> None:
    options = {"image": torch.zeros(3, 8, 8), **options}
    with pytest.raises(ValueError, match=message):
        stream(model_of(longformer(), torch.float32), **options)


def test_models_that_cannot_be_streamed() -> None:
    image = torch.zeros(3, 64, 64, dtype=torch.float64)
    local = cfg.Longformer(2)
    with pytest.raises(ValueError, match=r"stage 2 has full attention.*make it a Longformer stage with adapt_model"):
        stream(model_of(small_config(local, cfg.Full())), image)
    with pytest.raises(ValueError, match=r"the model is in training mode; .* call model.eval\(\) first"):
        stream(model_of(longformer()).train(), image)
