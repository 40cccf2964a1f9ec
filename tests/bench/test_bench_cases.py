"""Cases as data, and as something to run: what is computed, from which inputs, of how many bytes."""

from __future__ import annotations

import json

import pytest
import torch
from bench_builders import attention_case
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vision_longformer.bench.cases import (
    BATCHED_MATMUL,
    FORWARD,
    FORWARD_BACKWARD,
    FULL_ATTENTION,
    INFERENCE,
    LARGE_MATMUL,
    REFERENCES,
    TRAINING_STEP,
    AttentionWorkload,
    Case,
    InputCache,
    ModelWorkload,
    build_model,
    make_runnable,
    refusal,
    size_note,
)

CPU = torch.device("cpu")


def test_case_as_json() -> None:
    case = attention_case()
    assert case.to_dict() == {
        "point": "6×9",
        "variant": "sliding_chunk",
        "mode": "forward",
        "together": "6×9",
        "baseline": ("6×9", "sliding_chunk"),
        "units": 54,
        "work": {
            "kind": "attention",
            "method": "sliding_chunk",
            "height": 6,
            "width": 9,
            "batch": 1,
            "heads": 2,
            "dim": 4,
            "window": 2,
            "rule": "chunk",
            "neighbours": "all",
            "global_tokens": 1,
            "bias": True,
            "side": 32,
        },
    }
    assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_model_case_as_json() -> None:
    case = Case("64×64", "resnet18", INFERENCE, "64×64", ("64×64", "resnet18"), 2, ModelWorkload("resnet18", 64, 64, 2))
    stored = case.to_dict()
    assert stored["work"] == {
        "kind": "model",
        "model": "resnet18",
        "height": 64,
        "width": 64,
        "batch": 2,
        "neighbours": "all",
        "implementation": "auto",
        "method": "plain",
    }
    assert Case.from_dict(json.loads(json.dumps(stored))) == case


# Attention


@pytest.mark.parametrize("method", ["sliding_chunk", FULL_ATTENTION])
def test_attention_is_softmax_attention_over_drawn_inputs(method: str) -> None:
    """A map of one chunk, where every query sees all five keys; full attention has no bias."""
    workload = AttentionWorkload(method, 2, 2, batch=2, window=2, heads=2, dim=4)
    cache = InputCache()
    forward = make_runnable(workload, FORWARD, CPU, cache)
    backward = make_runnable(workload, FORWARD_BACKWARD, CPU, cache)
    (inputs,) = cache.values()
    assert inputs.bias is not None
    assert inputs.global_bias is not None
    offsets = torch.arange(2)[:, None] - torch.arange(2)
    rows, columns = offsets[:, None, :, None] + 3, offsets[None, :, None, :] + 3
    local = inputs.bias[:, rows, columns].reshape(2, 4, 4)
    bias = torch.cat([inputs.global_bias[:, None].expand(2, 4, 1), local], -1)
    scores = torch.einsum("bnhd,bmhd->bhnm", inputs.q, inputs.k) / 2 + (bias if method == "sliding_chunk" else 0)
    expected = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), inputs.v)
    torch.testing.assert_close(forward.run(), expected.detach())
    leaves = [inputs.q, inputs.k, inputs.v]
    leaves += [inputs.bias, inputs.global_bias] if method == "sliding_chunk" else []
    torch.testing.assert_close(backward.run(), torch.autograd.grad(expected, leaves, inputs.grad))


def test_inputs_are_drawn_from_seed_0_in_the_projections_layout() -> None:
    cache = InputCache()
    make_runnable(AttentionWorkload("sliding_chunk", 2, 3, window=2, heads=2, dim=4), FORWARD, CPU, cache)
    (inputs,) = cache.values()
    expected = torch.randn(1, 7, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(inputs.q, expected[:, 1:, 0])
    assert torch.equal(inputs.k, expected[:, :, 1])
    assert torch.equal(inputs.v, expected[:, :, 2])
    assert inputs.q.stride() == expected[:, 1:, 0].stride()


def test_methods_of_the_same_shape_share_inputs() -> None:
    cache = InputCache()
    for method, rule in (("sliding_chunk", "chunk"), ("tiled", "exact"), (FULL_ATTENTION, "chunk")):
        make_runnable(AttentionWorkload(method, 6, 9, window=2, rule=rule, dim=4), FORWARD, CPU, cache)
    assert len(cache) == 1
    make_runnable(AttentionWorkload("sliding_chunk", 6, 9, window=2, dim=8), FORWARD, CPU, cache)
    assert len(cache) == 2


def test_bytes_of_attention() -> None:
    workload = AttentionWorkload("tiled", 6, 9, batch=2, window=2, heads=2, dim=4)
    leaves = 4 * (2 * 2 * 4 * (54 + 55 + 55) + 2 * 7 * 7 + 2 * 1)  # q, k, v; bias; global bias
    output = 4 * 2 * 54 * 2 * 4
    forward, backward = (make_runnable(workload, mode, CPU, {}) for mode in (FORWARD, FORWARD_BACKWARD))
    assert (forward.input_bytes, forward.output_bytes) == (leaves, output)
    assert (backward.input_bytes, backward.output_bytes) == (leaves + output, output + leaves)


def test_random_shift_takes_neighbours_in_turn() -> None:
    workloads = [
        AttentionWorkload("sliding_chunk", 6, 6, window=2, neighbours=name, dim=4) for name in ("random", "all", "self")
    ]
    cache = InputCache()
    random, every, own = (make_runnable(workload, FORWARD, CPU, cache) for workload in workloads)
    outputs = [random.run() for _ in range(9)]
    assert torch.equal(outputs[0], outputs[8])
    assert not any(torch.equal(outputs[0], output) for output in outputs[1:8])
    assert torch.equal(every.run(), every.run())
    assert not torch.equal(own.run(), outputs[0])


@pytest.mark.parametrize(("mode", "products"), [(FORWARD, 2), (FORWARD_BACKWARD, 6)])
@pytest.mark.parametrize("max_floats", [1 << 27, 3 * 1480])
def test_batched_matmul_multiplies_every_chunk(
    mode: str, products: int, max_floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3×5 chunks of 2×2 for two heads: 30 products of (4, 4)·(4, 37) and alike; also with operands for three only.

    The operands of a chunk are 37·(4·4 + 2·4) + 4·4·4 = 952 floats.
    """
    monkeypatch.setattr("vision_longformer.bench.cases.MAX_BATCHED_FLOATS", max_floats)
    workload = AttentionWorkload(BATCHED_MATMUL, 6, 9, window=2, heads=2, dim=4)
    runnable = make_runnable(workload, mode, CPU, {})
    with FlopCounterMode(display=False) as counter:
        runnable.run()
    assert counter.get_total_flops() == products * 30 * 2 * 4 * 4 * 37
    chunks = 30 if max_floats == 1 << 27 else 4
    assert runnable.input_bytes == 4 * chunks * (2 * 4 * 4 + 2 * 37 * 4 + 4 * 37)


def test_large_matmul() -> None:
    runnable = make_runnable(AttentionWorkload(LARGE_MATMUL, 6, 9, side=10), FORWARD, CPU, {})
    assert torch.equal(runnable.run(), torch.full((10, 10), 10.0))
    assert (runnable.input_bytes, runnable.output_bytes) == (3 * 4 * 100, 0)


def test_refusals_are_the_implementations_own() -> None:
    assert "exact" in str(refusal(AttentionWorkload("unfold_nn", 6, 9, window=2), FORWARD, CPU))
    assert refusal(AttentionWorkload("unfold_nn", 6, 9, window=2, rule="exact"), FORWARD_BACKWARD, CPU) is None
    assert "chunk" in str(refusal(AttentionWorkload("whole_map", 24, 17, window=2), FORWARD, CPU))
    assert all(refusal(AttentionWorkload(method, 6, 9), FORWARD, CPU) is None for method in REFERENCES)
    assert refusal(ModelWorkload("resnet18", 64, 64), INFERENCE, CPU) is None


# Models


def test_inference_of_a_model() -> None:
    """ResNet-18: 11,689,512 parameters; 20 batch norms with 4,800 channels in all, each with a counter."""
    runnable = make_runnable(ModelWorkload("resnet18", 32, 40, batch=2), INFERENCE, CPU, {})
    weights = 4 * 11_689_512 + 4 * 2 * 4_800 + 8 * 20
    assert runnable.input_bytes == weights + 4 * 2 * 3 * 32 * 40
    assert runnable.output_bytes == 4 * 2 * 1000
    logits = runnable.run()
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (2, 1000)
    assert not logits.requires_grad


def test_training_step_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain SGD with a rate of 0.001 on the cross entropy of labels 0, 1, …; gradients do not pile up."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 4, 1000))
    linear = model[1]
    monkeypatch.setattr("vision_longformer.bench.cases.build_model", lambda workload: (model, (4, 4)))
    runnable = make_runnable(ModelWorkload("any", 4, 4, batch=2), TRAINING_STEP, CPU, {})
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).flatten(1)
    weight, bias = linear.weight.detach().double().clone(), linear.bias.detach().double().clone()
    for _ in range(2):
        runnable.run()
        error = F.softmax(images.double() @ weight.T + bias, -1) - F.one_hot(torch.arange(2), 1000)
        weight, bias = weight - 1e-3 * error.T @ images.double() / 2, bias - 1e-3 * error.sum(0) / 2
    torch.testing.assert_close(linear.weight.detach().double(), weight, rtol=0, atol=1e-7)
    torch.testing.assert_close(linear.bias.detach().double(), bias, rtol=0, atol=1e-7)


def test_our_model_has_the_workloads_settings() -> None:
    model, size = build_model(ModelWorkload("vision_longformer_tiny", 40, 50, neighbours="random"))
    assert size == (40, 50)
    assert model.config.neighbours == "random"


@pytest.mark.parametrize(("method", "setting"), [("plain", False), ("checkpointing", True), ("strips", "strips")])
def test_our_model_has_the_gradient_checkpointing_of_the_method(method: str, setting: bool | str) -> None:
    model, _ = build_model(ModelWorkload("vision_longformer_micro", 32, 32, method=method))
    assert {stage.grad_checkpointing for stage in model.stages} == {setting}


def test_a_streamed_model_gives_its_own_logits() -> None:
    logits = []
    for method in ("plain", "streamed"):
        torch.manual_seed(0)
        workload = ModelWorkload("vision_longformer_micro", 40, 24, method=method)
        logits.append(make_runnable(workload, INFERENCE, torch.device("cpu"), {}).run())
    plain, streamed = logits
    assert (streamed - plain[0]).abs().max() < 1e-5 * plain.abs().max()


def test_models_of_fixed_size_are_padded() -> None:
    model, size = build_model(ModelWorkload("deit_tiny_patch16_224", 40, 50))
    assert size == (64, 64) == model.patch_embed.img_size
    assert build_model(ModelWorkload("resnet18", 40, 50))[1] == (40, 50)
    assert size_note(224, 224) == "224×224: all models get images of this size"
    assert "are made for and given 800×1344" in size_note(800, 1333)
