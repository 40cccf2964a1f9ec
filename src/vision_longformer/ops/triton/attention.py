"""Local attention by Triton kernels, flash style: the scores of a tile live in registers only, forward and backward.

Rules, neighbour modes and dilations all run; q, k and v are read where the projection left them. Every gradient is
summed in a fixed order, so results are the same from run to run. Backward keeps the output and the log-sum-exp.

Checked here for values under ``TRITON_INTERPRET=1``, and for registers and shared memory by compiling ahead of time;
how fast it is only a GPU can tell. Triton is imported when a kernel first runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...geometry import Grid
from ..spec import LocalSpec

MAX_HEAD_DIM = 128
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INSTALLED = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs its kernels in Python on any device; it looks at this variable once, when first imported."""


def refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if not INSTALLED:
        return "it needs the package triton, which is not installed"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"it needs a CUDA tensor; here it is on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"it computes in float16, bfloat16 or float32, not in {str(q.dtype).removeprefix('torch.')}"
    if INTERPRETED and q.dtype == torch.bfloat16:
        return "Triton's interpreter does not compute in bfloat16"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"a head dimension of {q.shape[-1]} is larger than {MAX_HEAD_DIM}"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    spec: LocalSpec, dilation: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Shapes as in :func:`~vision_longformer.ops.local_attention`.

    ``dilation``: one per head, in one launch, instead of that of ``spec``.
    """
    steps = [spec.dilation] * q.shape[2] if dilation is None else list(dilation)
    out, _ = _forward(
        q, k, v, bias, global_bias, neighbour,
        list(spec.grid), spec.window, spec.rule, spec.neighbours, steps, spec.scale,
    )  # fmt: skip
    return out


@torch.library.custom_op("vision_longformer::triton_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    grid: list[int], window: int, rule: str, neighbours: str, dilation: list[int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from . import launch as triton_launch

    problem = triton_launch.Problem(Grid(*grid), window, rule, neighbours, tuple(dilation), scale)
    with torch.cuda.device_of(q):
        return triton_launch.forward(q, k, v, bias, global_bias, neighbour, problem)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    grid: list[int], window: int, rule: str, neighbours: str, dilation: list[int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("vision_longformer::triton_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    grid: list[int], window: int, rule: str, neighbours: str, dilation: list[int], scale: float, bias_needed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, bias and global bias; an operator returns tensors, so what is not needed is empty."""
    from . import launch as triton_launch

    problem = triton_launch.Problem(Grid(*grid), window, rule, neighbours, tuple(dilation), scale)
    with torch.cuda.device_of(q):
        grad_q, grad_k, grad_v, grad_bias, grad_global_bias = triton_launch.backward(
            grad_out, q, k, v, out, lse, bias, global_bias, neighbour, problem, bias_needed
        )
    return (
        grad_q, grad_k, grad_v,
        q.new_empty(0) if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
        q.new_empty(0) if global_bias is None or grad_global_bias is None else grad_global_bias.to(global_bias.dtype),
    )  # fmt: skip


@_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    grid: list[int], window: int, rule: str, neighbours: str, dilation: list[int], scale: float, bias_needed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape),
        bias.new_empty(bias.shape) if bias is not None and bias_needed else q.new_empty(0),
        global_bias.new_empty(global_bias.shape) if global_bias is not None else q.new_empty(0),
    )  # fmt: skip


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.arguments = inputs[6:]


def _gradients(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bias, global_bias, neighbour, out, lse = ctx.saved_tensors
    gradients = _backward(
        grad_out, q, k, v, out, lse, bias, global_bias, neighbour, *ctx.arguments, ctx.needs_input_grad[3]
    )
    wanted = [x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
    return *wanted, None, *[None] * len(ctx.arguments)


_forward.register_autograd(_gradients, setup_context=_keep)
