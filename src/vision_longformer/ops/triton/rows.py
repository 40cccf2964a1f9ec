"""Host side of the Triton kernels for the rows of global and of local tokens of one packed projection. Imports triton.

The local kernels read slices of the projection and write slices of one output, or of one gradient of the projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry import ceil_div
from ..operator import PackedGradients, empty_results
from ..spec import Inputs, LocalSpec, PackedInputs
from . import launch
from .device import GlobalRows
from .global_kernels import global_gradient_kernel, global_rows_kernel, merge_shares_kernel


def forward(inputs: PackedInputs, spec: LocalSpec) -> tuple[Tensor, Tensor]:
    """The output (B, G + N, heads, dim) and the log-sum-exp (B, heads, G + N), the latter in units of log 2."""
    out, lse = empty_results(inputs.q)
    count = inputs.qkv.shape[1] - spec.grid.tokens
    launch.attend(_local(inputs, count), spec, out[:, count:], lse[:, :, count:])
    _attend_globally(inputs, count, spec.scale, out, lse)
    return out, lse


def backward(
    grad_out: Tensor, inputs: PackedInputs, out: Tensor, lse: Tensor, spec: LocalSpec, needs_bias: bool,
    needs_global_bias: bool, needs_from_global_bias: bool,
) -> PackedGradients:  # fmt: skip
    """Gradients of qkv, and in float32 those of the bias table, the global bias and the bias of global queries."""
    qkv = inputs.qkv
    grad_qkv = qkv.new_empty(qkv.shape)
    if qkv.shape[0] * qkv.shape[3] == 0:
        bias, global_bias, from_global_bias = (None if x is None else torch.zeros_like(x) for x in inputs[1:4])
        return grad_qkv, bias, global_bias, from_global_bias
    count = qkv.shape[1] - spec.grid.tokens
    rows = _global_rows(inputs, out, grad_out, lse)
    grad_q, grad_k, grad_v = grad_qkv.unbind(2)
    parts = launch.differentiate(
        grad_out[:, count:], _local(inputs, count), out[:, count:], lse[:, :, count:], spec,
        (grad_q[:, count:], grad_k, grad_v), needs_bias, rows,
    )  # fmt: skip
    bias_sums = parts.biases.sum(3)
    from_global = _differentiate_globally(inputs, rows, parts.tokens.sum(3), bias_sums[1], grad_qkv, spec.scale, count)
    return (
        grad_qkv,
        parts.bias,
        bias_sums[0].sum(0) if needs_global_bias else None,
        from_global.sum(0) if needs_from_global_bias else None,
    )


def _local(inputs: PackedInputs, count: int) -> Inputs:
    q, k, v = inputs.qkv.unbind(2)
    return Inputs(q[:, count:], k, v, inputs.bias, inputs.global_bias, inputs.neighbour)


def _global_rows(inputs: PackedInputs, out: Tensor, grad_out: Tensor, lse: Tensor) -> GlobalRows:
    q, rows, grads = map(launch.view, (inputs.q, out, grad_out))
    return GlobalRows(q, rows, grads, lse, lse.stride(1), launch.dense(inputs.from_global_bias))


def _attend_globally(inputs: PackedInputs, count: int, scale: float, out: Tensor, lse: Tensor) -> None:
    """Writes the rows of ``count`` global tokens: each share of the keys by itself, then all together."""
    q, k, v = inputs.qkv.unbind(2)
    batch, tokens, heads, dim = q.shape
    share = launch.share_of(tokens)
    shares = ceil_div(tokens, share)
    parts, lse_parts = lse.new_empty(batch, heads, count, shares, dim), lse.new_empty(batch, heads, count, shares)
    rows = _global_rows(inputs, out, out, lse)
    launch.launch(
        global_rows_kernel, shares * ceil_div(count, launch.BLOCK_G) * batch * heads,
        rows, launch.view(k), launch.view(v), parts, lse_parts, scale, heads, count, tokens, shares, share,
        **launch.global_constants(q),
    )  # fmt: skip
    launch.launch(
        merge_shares_kernel, batch * heads * count,
        parts, lse_parts, launch.view(out), lse, lse.stride(1), heads, count, shares,
        DIM=dim, BLOCK_D=launch.padded(dim), BLOCK_S=launch.padded(shares), num_warps=4,
    )  # fmt: skip


def _differentiate_globally(
    inputs: PackedInputs, rows: GlobalRows, sums: Tensor, bias_sums: Tensor, grad_qkv: Tensor, scale: float, count: int
) -> Tensor:
    """Writes the gradients of global tokens; returns those of the bias of their queries, (B, heads, G, G + 1)."""
    _, k, v = inputs.qkv.unbind(2)
    batch, _, heads, _ = k.shape
    grad_bias = sums.new_empty(batch, heads, count, count + 1)
    launch.launch(
        global_gradient_kernel, ceil_div(count, launch.BLOCK_G) * batch * heads,
        rows, launch.view(k), launch.view(v), *map(launch.view, grad_qkv.unbind(2)), sums, bias_sums, grad_bias,
        scale, batch * heads, heads, count,
        **launch.row_constants(k, most=64 if launch.half(k) else 32), BLOCK_G=launch.BLOCK_G, num_warps=2, num_stages=1,
    )  # fmt: skip
    return grad_bias
