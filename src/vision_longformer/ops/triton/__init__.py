"""Local attention by Triton kernels, flash style: the scores of a tile live in registers only, forward and backward.

Rules, neighbour modes and dilations all run; q, k and v are read where the projection left them. Every gradient is
summed in a fixed order, so results are the same from run to run. Triton is imported when a kernel first runs.

Values are tested under ``TRITON_INTERPRET=1``; registers, shared memory and instructions by compiling ahead of time
(``vil bench gpu``). Speed was never measured.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from ..operator import Gradients, PackedGradients, register
from ..spec import Implementation, Inputs, LocalSpec, PackedInputs

MAX_HEAD_DIM = 128
MAX_NUMBERS = 1 << 30
"""Numbers in a sample of q; the kernels count them in 32 bits, and k and v have more tokens."""
OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INSTALLED = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs its kernels in Python on any device; it looks at this variable once, when first imported."""


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if not INSTALLED:
        return "it needs the package triton, which is not installed"
    if q.device.type not in ("cuda", "meta") and not INTERPRETED:  # of meta tensors only the shapes are computed
        return f"it needs a CUDA tensor; here it is on {q.device.type}"
    return _refuse_chip(q.device) or _refuse_numbers(q) or _refuse_spec(spec)


def _refuse_chip(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        return "it is written for NVIDIA's tensor cores, and this is a GPU of AMD's"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    return None


def _refuse_numbers(q: Tensor) -> str | None:
    if q.dtype not in DTYPES:
        return f"it computes in float16, bfloat16 or float32, not in {str(q.dtype).removeprefix('torch.')}"
    if INTERPRETED and q.dtype == torch.bfloat16:
        return "Triton's interpreter does not compute in bfloat16"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"a head dimension of {q.shape[-1]} is larger than {MAX_HEAD_DIM}"
    if q.shape[1] * q.shape[2] * q.shape[3] > MAX_NUMBERS:
        return "a sample of q has more than 2³⁰ numbers, and the kernels count them in 32 bits"
    return None


def _refuse_spec(spec: LocalSpec) -> str | None:
    if spec.scale <= 0:
        return f"the scale of the scores must be positive, not {spec.scale}"
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


def refuse_rows(spec: LocalSpec, qkv: Tensor) -> str | None:
    """Why :func:`attend_rows` cannot run this, as a sentence; None if it can."""
    if qkv.shape[1] * qkv.shape[2] * qkv.shape[3] * qkv.shape[4] >= 1 << 31:
        return "a sample of qkv has 2³¹ numbers or more, and the kernels count them in 32 bits"
    return _refusal(spec, qkv.select(2, 0))


def _forward_rows(inputs: PackedInputs, spec: LocalSpec) -> tuple[Tensor, Tensor]:
    from . import rows

    with torch.cuda.device_of(inputs.qkv):
        return rows.forward(inputs, spec)


def _backward_rows(
    grad: Tensor, inputs: PackedInputs, out: Tensor, lse: Tensor, spec: LocalSpec, *needs: bool
) -> PackedGradients:
    from . import rows

    with torch.cuda.device_of(inputs.qkv):
        return rows.backward(grad, inputs, out, lse, spec, *needs)


attend_rows = register("triton_rows", _forward_rows, _backward_rows, inputs_type=PackedInputs)
"""The rows of global and of local tokens, (B, G + N, heads, dim), from :class:`PackedInputs` and a spec."""

TRITON_GPU = Implementation(_refusal, register("triton_gpu", _forward, _backward))
