"""Every registered model at full size; slow. In slices: ``pytest -m slow tests/test_zoo_full_size.py -k tiny -n 2``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from builders import assert_close

from vision_longformer import MODELS, load, model_config, save

pytestmark = pytest.mark.slow

NAMES = sorted(MODELS)


def pixels(name: str, size: tuple[int, int] | None = None) -> torch.Tensor:
    return torch.randn(1, 3, *(size or MODELS[name].img_size), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [None, (97, 143)], ids=["own size", "97×143"])
def test_forward_and_backward(name: str, size: tuple[int, int] | None) -> None:
    model = timm.create_model(name, num_classes=10).train()
    logits = model(pixels(name, size))
    assert logits.shape == (1, 10)
    torch.nn.functional.cross_entropy(logits, torch.tensor([3])).backward()
    largest = {n: p.grad.abs().max() for n, p in model.named_parameters()}
    assert all(torch.isfinite(value) for value in largest.values())
    tokens_nobody_reads = ("bias.global_to_local", "bias.global_to_global")
    assert [n for n, value in largest.items() if value == 0 and not n.endswith(tokens_nobody_reads)] == []


@pytest.mark.parametrize("name", NAMES)
def test_features(name: str) -> None:
    model = timm.create_model(name, features_only=True).eval()
    reductions = {4: [4, 8, 16, 32], 3: [8, 16, 32], 2: [4, 8], 1: [16]}[len(MODELS[name].stages)]
    assert model.feature_info.reduction() == reductions
    with torch.no_grad():
        maps = model(pixels(name, (97, 143)))
    for features, stage, stride in zip(maps, MODELS[name].stages, reductions, strict=True):
        assert features.shape == (1, stage.dim, -(-97 // stride), -(-143 // stride))
        assert torch.isfinite(features).all()
        assert features.std() > 0


@pytest.mark.parametrize("name", NAMES)
def test_full_graph(name: str) -> None:
    torch.compiler.reset()
    model = timm.create_model(name).eval()
    x = pixels(name, (97, 143))
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x), 1e-4)


@pytest.mark.parametrize("name", ["vision_longformer_tiny", "vision_longformer_small"])
def test_default_backend(name: str) -> None:
    torch.compiler.reset()
    model = timm.create_model(name).eval()
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True)(pixels(name)), model(pixels(name)), 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_save_load_and_bfloat16(name: str, tmp_path: Path) -> None:
    model = timm.create_model(name).eval()
    x = pixels(name, (97, 143))
    loaded = load(save(model, tmp_path / "model.safetensors"))
    assert loaded.config == model_config(name)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(loaded(x), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(loaded(x), expected, 0.05)


LARGE_PHOTO = """
import torch, vision_longformer
model = vision_longformer.create_model("vision_longformer_small").eval()
with torch.inference_mode():
    logits = model(torch.randn(1, 3, 1065, 1600))
assert torch.isfinite(logits).all()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1])
"""


def test_a_large_photo_needs_less_than_3_gb() -> None:
    """Peak resident memory of a fresh process, in kB. (getrusage would count what pytest held when it forked.)"""
    done = subprocess.run([sys.executable, "-c", LARGE_PHOTO], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 3e6
