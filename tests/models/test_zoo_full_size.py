"""Named models at full size; slow. Shapes of all models are in ``test_zoo.py``, every mechanism in small in others.

Every width, position, window and size of image that the names stand for is represented. The others have more blocks or
combine the same parts (``medium`` and ``base`` are ``small`` with more blocks): of those, one small image is run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from builders import assert_close
from torch import Tensor
from torch.nn import functional as F

from vision_longformer import MODELS, VisionLongformer, load, model_config, save

pytestmark = pytest.mark.slow

REPRESENTATIVES = [
    "vision_longformer_micro",
    "vision_longformer_tiny",
    "vision_longformer_tiny_ape_384",
    "vision_longformer_small_384",
    "vision_longformer_medium_wide_ape",
    "vision_longformer_swin_tiny",
    "evit_tiny_patch16",
]
NAMED = [name for name in MODELS if name.startswith(("vision_longformer", "evit"))]
ODD = (97, 143)


def pixels(size: tuple[int, int]) -> Tensor:
    return torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))


def gradients(model: VisionLongformer, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the loss of one image of class 3, in training mode."""
    model.train().zero_grad(set_to_none=True)
    logits = model(x)
    assert logits.shape == (1, 10)
    F.cross_entropy(logits, torch.tensor([3])).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check_gradients(model: VisionLongformer, size: tuple[int, int]) -> None:
    """All are finite, and none is zero but those of the rows of global tokens that nobody reads."""
    largest = {name: gradient.abs().max() for name, gradient in gradients(model, pixels(size)).items()}
    assert len(largest) == len(list(model.parameters()))
    assert all(torch.isfinite(value) for value in largest.values())
    unread = ("bias.global_to_local", "bias.global_to_global")
    assert [name for name, value in largest.items() if value == 0 and not name.endswith(unread)] == []


@pytest.fixture(scope="module", params=REPRESENTATIVES)
def model(request: pytest.FixtureRequest) -> Iterator[VisionLongformer]:
    torch.manual_seed(0)
    yield timm.create_model(request.param, num_classes=10)
    torch.compiler.reset()


@pytest.mark.parametrize("size", ["own", ODD], ids=str)
def test_gradients(model: VisionLongformer, size: str | tuple[int, int]) -> None:
    check_gradients(model, model.config.img_size if isinstance(size, str) else size)


def test_features(model: VisionLongformer) -> None:
    with torch.no_grad():
        maps = model.eval().forward_intermediates(pixels(ODD), intermediates_only=True)
    for features, info in zip(maps, model.feature_info, strict=True):
        stride = info["reduction"]
        assert features.shape == (1, info["num_chs"], -(-97 // stride), -(-143 // stride))
        assert torch.isfinite(features).all()
        assert features.std() > 0


def test_gradient_checkpointing(model: VisionLongformer) -> None:
    expected = gradients(model, pixels(ODD))
    model.set_grad_checkpointing()
    got = gradients(model, pixels(ODD))
    model.set_grad_checkpointing(False)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


def test_save_load_and_bfloat16(model: VisionLongformer, tmp_path: Path) -> None:
    again = load(save(model, tmp_path / "model.safetensors"))
    assert again.config == model.config
    with torch.no_grad():
        expected = model.eval()(pixels(ODD))
        assert torch.equal(again(pixels(ODD)), expected)
        with torch.autocast("cpu", torch.bfloat16):
            low = again(pixels(ODD))
    assert low.dtype == torch.bfloat16
    assert_close(low, expected, 0.05)


def test_full_graph(model: VisionLongformer) -> None:
    torch.compiler.reset()
    x = pixels(ODD)
    with torch.no_grad():
        assert_close(torch.compile(model.eval(), fullgraph=True, backend="aot_eager")(x), model(x), 1e-4)


def test_default_backend() -> None:
    torch.compiler.reset()
    model = timm.create_model("vision_longformer_tiny").eval()
    x = pixels((224, 224))
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True)(x), model(x), 1e-4)


@pytest.mark.parametrize("name", [name for name in NAMED if name not in REPRESENTATIVES])
def test_gradients_of_the_others(name: str) -> None:
    check_gradients(VisionLongformer(model_config(name), num_classes=10), ODD)


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
    """Peak resident memory of a process of its own, in kB. (getrusage would count what pytest held when it forked.)"""
    done = subprocess.run([sys.executable, "-c", LARGE_PHOTO], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 3e6
