"""Models among PyTorch's own tools: ``torch.func``, ``torch.jit``, ``torch.fx``, copies, and devices without memory."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import timm
import torch
from builders import small_config
from torch import Tensor, fx, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torchvision.models.feature_extraction import create_feature_extractor

from vision_longformer import VisionLongformer
from vision_longformer.models.config import Longformer
from vision_longformer.models.vision_longformer import Stage

CONFIG = small_config(Longformer(window=2), Longformer(window=2), position="relative")
"""Local attention by chunks, then, on a map of 2×2 chunks, to all tokens."""

IMAGES = torch.randn(3, 3, 26, 19, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> VisionLongformer:
    torch.manual_seed(0)
    return VisionLongformer(CONFIG).eval()


def _loss(model: nn.Module, parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, parameters, (image[None],)), label[None])


def test_gradients_of_each_sample(model: VisionLongformer) -> None:
    """By ``torch.func`` in one call as by a backward pass for each image; biases, which samples share, included."""
    labels = torch.tensor([0, 1, 2])
    parameters = {name: x.detach() for name, x in model.named_parameters()}
    got = vmap(grad(lambda *x: _loss(model, *x)), (None, 0, 0))(parameters, IMAGES, labels)
    for index in range(3):
        alone = F.cross_entropy(model(IMAGES[index : index + 1]), labels[index : index + 1])
        expected = torch.autograd.grad(alone, list(model.parameters()))
        for name, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(got[name][index], wanted, rtol=1e-4, atol=1e-6, msg=name)


def test_second_derivatives(model: VisionLongformer) -> None:
    """Refused by the kernels, with what to use instead, which agrees with a difference of first derivatives."""
    twin = copy.deepcopy(model).double()
    image = IMAGES[:1].double().requires_grad_()
    direction = torch.randn(image.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def slope(x: Tensor, create_graph: bool) -> Tensor:
        (gradient,) = torch.autograd.grad(twin(x).square().sum(), x, create_graph=create_graph)
        return gradient

    with pytest.raises(RuntimeError, match=r"first derivatives only; .*\('sliding_chunk_autograd'\)"):
        slope(image, True).sum().backward()
    twin.set_attention_implementation("sliding_chunk_autograd")
    (got,) = torch.autograd.grad((slope(image, True) * direction).sum(), image)
    step = 1e-5
    above, below = (slope((image + sign * step * direction).detach().requires_grad_(), False) for sign in (1, -1))
    torch.testing.assert_close(got, (above - below) / (2 * step), rtol=1e-5, atol=1e-7)


def test_traced_by_torchscript(model: VisionLongformer) -> None:
    """For any number of images of the example's size, by PyTorch's own operators only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of each size that becomes a constant
        traced = torch.jit.trace(model, IMAGES, check_trace=False)
    for images in (IMAGES.flip(2), IMAGES[:1], torch.cat([IMAGES, -IMAGES])):
        torch.testing.assert_close(traced(images), model(images), rtol=1e-4, atol=1e-5)
    assert "vision_longformer::" not in str(traced.inlined_graph)


def test_traced_by_fx(model: VisionLongformer) -> None:
    """With stages as leaves: the graph serves images of any size."""

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, Stage) or super().is_leaf_module(module, name)

    graph = fx.GraphModule(model, Tracer().trace(model))
    for images in (IMAGES, IMAGES[:, :, :16, :16]):
        assert torch.equal(graph(images), model(images))
    extractor = create_feature_extractor(model, {"stages.0": "first"}, tracer_kwargs={"leaf_modules": [Stage]})
    tokens, grid = extractor(IMAGES)["first"]
    expected = model.forward_intermediates(IMAGES, indices=[0], intermediates_only=True)[0]
    local = tokens[:, tokens.shape[1] - grid.tokens :].transpose(1, 2).reshape(expected.shape)
    assert torch.equal(local, expected)


def test_copies(model: VisionLongformer) -> None:
    expected = model(IMAGES)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(IMAGES), expected)
        with torch.no_grad():
            twin.head.weight.zero_()
    assert torch.equal(model(IMAGES), expected)


def test_without_memory(model: VisionLongformer) -> None:
    """On the meta device models have shapes; with weights they are as any other."""
    with torch.device("meta"):
        empty = VisionLongformer(CONFIG).eval()
    assert empty(IMAGES.to("meta")).shape == model(IMAGES).shape
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(empty(IMAGES), model(IMAGES))


def test_output_stride_is_refused() -> None:
    """Segmentation libraries ask timm's models for it."""
    name = "vision_longformer_nano"
    with pytest.raises(ValueError, match="output_stride is 8, but the stages of vision_longformer_nano have strides 4"):
        timm.create_model(name, features_only=True, output_stride=8)
    assert timm.create_model(name, features_only=True, output_stride=16).feature_info.reduction() == [4, 8, 16]
