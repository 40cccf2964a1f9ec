"""Local attention by Triton kernels, flash style: the scores of a tile live in registers only, forward and backward.

Rules, neighbour modes and dilations all run; q, k and v are read where the projection left them. Every gradient is
summed in a fixed order, so results are the same from run to run. Triton is imported when a kernel first runs.

Values are tested under ``TRITON_INTERPRET=1``, registers and shared memory by compiling ahead of time. Speed was never
measured.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from ..operator import Gradients, register
from ..spec import Implementation, Inputs, LocalSpec

MAX_HEAD_DIM = 128
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INSTALLED = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs its kernels in Python on any device; it looks at this variable once, when first imported."""


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if not INSTALLED:
        return "it needs the package triton, which is not installed"
    if q.device.type not in ("cuda", "meta") and not INTERPRETED:  # of meta tensors only the shapes are computed
        return f"it needs a CUDA tensor; here it is on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"it computes in float16, bfloat16 or float32, not in {str(q.dtype).removeprefix('torch.')}"
    if INTERPRETED and q.dtype == torch.bfloat16:
        return "Triton's interpreter does not compute in bfloat16"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"a head dimension of {q.shape[-1]} is larger than {MAX_HEAD_DIM}"
    return None


def _forward(inputs: Inputs, spec: LocalSpec) -> tuple[Tensor, Tensor]:
    from . import launch

    with torch.cuda.device_of(inputs.q):
        return launch.forward(inputs, spec)


def _backward(
    grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, spec: LocalSpec, needs_bias: bool, needs_global_bias: bool
) -> Gradients:
    from . import launch

    with torch.cuda.device_of(inputs.q):
        return launch.backward(grad, inputs, out, lse, spec, needs_bias, needs_global_bias)


TRITON_GPU = Implementation(_refusal, register("triton_gpu", _forward, _backward))
