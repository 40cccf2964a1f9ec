"""Gradients strip by strip: those of the plain model, with nothing kept but inputs of blocks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import assert_close, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from vision_longformer import ModelConfig, VisionLongformer
from vision_longformer.geometry import RULES, Grid, Strip
from vision_longformer.models import config as cfg
from vision_longformer.models import strips as by_strips
from vision_longformer.models.attention import LongformerAttention


@pytest.fixture(autouse=True)
def _one_chunk_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_strips, "STRIP_NUMBERS", 1)


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> VisionLongformer:
    """In training mode, with weights so large that every token matters to those who see it."""
    model = VisionLongformer(config).to(dtype).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def longformer(rule: str = "chunk", window: int = 2, share: bool = True, **options: Any) -> ModelConfig:
    attention = cfg.Longformer(window, rule, share)
    return small_config(attention, attention, **{"patches": (2, 2), "depth": (2, 1), **options})


def image(height: int = 18, width: int = 10, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def results(model: VisionLongformer, mode: bool | str, x: Tensor, *given_tokens: Tensor) -> dict[str, Tensor]:
    """Logits and all gradients, with the same draws of dropped paths and neighbours whatever the mode."""
    model.set_grad_checkpointing(mode)
    model.random_shift.seed(5)
    torch.manual_seed(4)
    wanted = {
        "image": x,
        **{f"given {i}": tokens for i, tokens in enumerate(given_tokens)},
        **dict(model.named_parameters()),
    }
    wanted = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad}
    logits = model(x, *given_tokens)
    grads = torch.autograd.grad(logits.sin().sum(), list(wanted.values()))
    return {"logits": logits.detach(), **dict(zip(wanted, grads, strict=True))}


def compare(config: ModelConfig, x: Tensor, *given_tokens: Tensor, tolerance: float = 1e-10) -> None:
    model = model_of(config)
    expected, got = (results(model, mode, x, *given_tokens) for mode in (False, "strips"))
    for name, value in expected.items():
        assert_close(got[name], value, tolerance, name)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    tokens = draw(st.sampled_from([(0, 0), (1, 0), (1, 1), (3, 2)]))
    return longformer(
        draw(st.sampled_from(RULES)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        position=draw(st.sampled_from(["relative", "absolute"])),
        tokens=tokens,
        neighbours=draw(st.sampled_from(["all", "self", "random"])),
        drop_path_rate=draw(st.sampled_from([0.0, 0.4])),
        carry_global_tokens=tokens == (1, 1) and draw(st.booleans()),
    )


@settings(max_examples=25)
@given(models(), st.integers(2, 23), st.integers(2, 11))
def test_gradients_are_those_of_the_plain_model(config: ModelConfig, height: int, width: int) -> None:
    compare(config, image(height, width))


@pytest.mark.parametrize("rule", RULES)
def test_strips_of_several_chunk_rows(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps of 13×5 and 7×3 tokens of 8 numbers in chunks of 2, two images: two chunk rows of the first at a time."""
    seen = []
    cut = Strip.divided
    monkeypatch.setattr(Strip, "divided", lambda *arguments: seen.append(cut(*arguments)) or seen[-1])
    monkeypatch.setattr(by_strips, "STRIP_NUMBERS", 2 * 2 * 5 * 2 * 8)
    compare(longformer(rule, position="relative", tokens=(1, 1)), image(26, 10))
    assert [[len(strip.rows) for strip in parts] for parts in seen] == [[4, 4, 4, 1], [4, 4, 4, 1], [6, 1]]


def test_given_tokens_and_frozen_parameters() -> None:
    given_tokens = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    compare(longformer(given_token_dim=4, share=False, position="relative"), image(), given_tokens)
    model = model_of(longformer())
    model.stages[0].blocks[0].requires_grad_(False)
    expected, got = (results(model, mode, image().detach()) for mode in (False, "strips"))
    assert "stages.0.blocks.0.norm1.weight" not in got
    for name, value in expected.items():
        assert_close(got[name], value, 1e-10, name)


def test_blocks_of_other_mechanisms_are_recomputed_whole() -> None:
    config = small_config(cfg.Longformer(2), cfg.SpatialReduction(2), position="absolute", patches=(2, 2))
    compare(config, image())


def test_only_the_inputs_of_blocks_are_kept() -> None:
    """Of a block of 9×5 tokens and a global one, two images: its input, what attention gave the global rows, the
    log-sum-exp of two heads, and then nothing larger than the hidden layer of the global token's MLP or a weight."""
    kept: list[int] = []
    block = model_of(longformer(tokens=(1, 0))).stages[0].blocks[0]
    tokens = torch.randn(2, 1 + 9 * 5, 8, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        by_strips.run_by_strips(block, tokens, Grid(9, 5), "all").sum()
    assert kept[:3] == [2 * 46 * 8, 2 * 1 * 8, 2 * 2 * 1]
    assert max(kept[3:]) == 32 * 8


def test_the_backward_pass_computes_one_strip_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block sees its whole map: of 9 rows in chunks of 2 at most 2 + 2 + 2, in 5 strips, forward and once more."""
    rows = []
    forward = LongformerAttention.forward_strip

    def noting(self: LongformerAttention, tokens: Tensor, *arguments: Any) -> Any:
        rows.append(tokens.shape[1] // 5)
        return forward(self, tokens, *arguments)

    monkeypatch.setattr(LongformerAttention, "forward_strip", noting)
    monkeypatch.setattr(LongformerAttention, "forward", None)
    results(model_of(longformer(depth=(1, 1), tokens=(1, 1), patches=(2, 9))), "strips", image())
    assert max(rows[:5]) == 6
    assert len(rows) == 2 * (5 + 1)


def test_every_parameter_gets_one_gradient() -> None:
    """As data parallelism counts them."""
    model, counts = model_of(longformer()), Counter[str]()
    model.set_grad_checkpointing("strips")
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([name]))
    model(image()).sum().backward()
    assert counts == dict.fromkeys(dict(model.named_parameters()), 1)


def test_data_parallelism(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = model_of(longformer())
        expected = results(model, False, image())
        model.set_grad_checkpointing("strips")
        DistributedDataParallel(model)(image()).sin().sum().backward()
    finally:
        dist.destroy_process_group()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], 1e-10, name)


def test_autocast_is_the_same_in_both_passes() -> None:
    model = model_of(longformer(), torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = (results(model, mode, image(dtype=torch.float32)) for mode in (False, "strips"))
    exact = results(model.double(), False, image())
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        error, plain_error = ((each.double() - exact[name]).norm() for each in (got[name], value))
        assert error <= 3 * plain_error + 1e-3 * exact[name].norm(), name


def test_in_evaluation_and_without_gradients_nothing_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LongformerAttention, "forward_strip", None)
    model = model_of(longformer())
    model.set_grad_checkpointing("strips")
    with torch.no_grad():
        model(image())
    model.eval()(image())


@pytest.mark.slow
def test_a_compiled_model() -> None:
    model = model_of(longformer())
    expected = results(model, "strips", image())
    model.compile(backend="eager")
    got = results(model, "strips", image())
    torch._dynamo.reset()
    assert_close(got["stages.0.blocks.0.attn.qkv.weight"], expected["stages.0.blocks.0.attn.qkv.weight"], 1e-12)


def test_second_derivatives_are_refused() -> None:
    """They would be without the part of the blocks; the remedies have them all."""
    model = model_of(longformer(rule="cyclic"))
    model.set_attention_implementation("sliding_chunk_autograd")
    x, seconds = image(), []
    for mode in (False, True):
        model.set_grad_checkpointing(mode)
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels of the global rows have first derivatives only
            (grad,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
            seconds.append(torch.autograd.grad(grad.square().sum(), x)[0])
    assert_close(seconds[1], seconds[0], 1e-10)
    model.set_attention_implementation("auto")
    model.set_grad_checkpointing("strips")
    with pytest.raises(
        RuntimeError,
        match=r"^gradient checkpointing by strips has first derivatives only; for more, use "
        r"set_grad_checkpointing\(False\), or set_grad_checkpointing\(True\) to save memory$",
    ):
        torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"drop_rate is 0\.1, and strips cannot draw the same dropout twice; set it to 0"
    ):
        model_of(longformer(drop_rate=0.1)).set_grad_checkpointing("strips")
    with pytest.raises(ValueError, match="unknown gradient checkpointing 'strip'; did you mean 'strips'"):
        model_of(longformer()).set_grad_checkpointing("strip")
