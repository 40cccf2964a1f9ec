"""Whole models as something to run: ours, and timm's, made to take images of any size."""

from __future__ import annotations

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.timm_registry import create_model
from ..models.zoo import MODELS
from .attention_jobs import Job
from .tasks import TRAINING, ModelWork

PAD = 32
"""Models of a fixed image size are made for the asked size, padded to multiples of this, as detectors pad."""


def model_job(work: ModelWork, mode: str, device: torch.device) -> Job:
    """Inference: logits of a batch. Training step: forward, cross entropy, backward, one step of plain SGD."""
    model, size = build_model(work)
    model = model.to(device)
    image = torch.randn(work.batch, 3, *size, generator=torch.Generator().manual_seed(0)).to(device)
    weights = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
    inputs, logits = weights + image.numel() * image.element_size(), 4 * 1000 * work.batch
    if mode != TRAINING:
        model.eval()

        def infer() -> Tensor:
            with torch.inference_mode():
                return model(image)

        return Job(infer, inputs, logits)
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    labels = torch.arange(work.batch, device=device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(model(image), labels).backward()
        optimiser.step()

    return Job(step, inputs, logits)


def build_model(work: ModelWork) -> tuple[nn.Module, tuple[int, int]]:
    """The model with random weights, and the image size it is given; see :func:`size_note`."""
    size = (work.height, work.width)
    if work.model in MODELS:
        ours = create_model(work.model, neighbours=work.neighbours)
        ours.set_attention_implementation(work.implementation)
        return ours, size
    padded = (_padded(work.height), _padded(work.width))
    try:
        return timm.create_model(work.model, img_size=padded), padded
    except TypeError:  # no such argument: a model of no fixed size
        return timm.create_model(work.model), size


def size_note(height: int, width: int) -> str:
    """What is done about sizes that a model cannot take, to be printed beside the results."""
    padded = (_padded(height), _padded(width))
    if padded == (height, width):
        return f"{height}×{width}: all models get images of this size"
    return (
        f"{height}×{width}: models of a fixed image size (Swin, DeiT) are made for and given {padded[0]}×{padded[1]}, "
        "as detectors pad; all others get the size itself"
    )


def _padded(length: int) -> int:
    return -(-length // PAD) * PAD
