"""Host side of the Triton kernels: sizes of tiles, allocation, launches, last sums. Imports triton."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...geometry import ceil_div
from ..operator import LOG2E, Gradients, empty_results
from ..spec import Inputs, LocalSpec
from .device import View
from .kernels import (
    bias_gradient_kernel,
    forward_kernel,
    global_gradient_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)

PROGRAMS_OF_A_SUM = 1024
"""How many programs share a sum over all queries: enough to fill a GPU, the same on each so that results are too."""


def forward(inputs: Inputs, spec: LocalSpec) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, the latter in units of log 2."""
    q, k, v, bias, global_bias, neighbour = inputs
    batch, _, heads, _ = q.shape
    out, lse = empty_results(q)
    tiles = _tiles(q, spec.window)
    count = _chunk_count(spec) * ceil_div(spec.window**2, tiles["BLOCK_M"])
    launch(
        forward_kernel, count * batch * heads,
        *map(_view, (q, k, v, out)), lse, *_table(bias, spec, q.device), _dense(global_bias), neighbour,
        _dilations(spec, q), spec.scale, *spec.grid, heads, inputs.global_tokens, count,
        **_window_constants(q, spec), **tiles,
    )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, spec: LocalSpec, needs_bias: bool,
    needs_global_bias: bool,
) -> Gradients:  # fmt: skip
    """Gradients of q, k, v, the bias table and the global bias, the last two in float32."""
    q, k, v, bias, global_bias, neighbour = inputs
    batch, _, heads, _ = q.shape
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    if batch * heads == 0:
        zero_bias, zero_global_bias = (None if x is None else torch.zeros_like(x) for x in (bias, global_bias))
        return grad_q, grad_k, grad_v, zero_bias, zero_global_bias
    table, dilations, delta = _table(bias, spec, q.device), _dilations(spec, q), torch.empty_like(lse)
    q_, k_, v_, grad_out_ = map(_view, (q, k, v, grad_out))
    common = (spec.scale, *spec.grid, heads, inputs.global_tokens)
    constants, tiles = _window_constants(q, spec), _tiles(q, spec.window)
    count = _chunk_count(spec) * ceil_div(spec.window**2, tiles["BLOCK_M"])
    launch(
        query_gradient_kernel, count * batch * heads,
        q_, k_, v_, _view(out), grad_out_, _view(grad_q), lse, delta, *table, _dense(global_bias), neighbour, dilations,
        *common, count, **constants, **tiles,
    )  # fmt: skip
    tiles = _tiles(q, spec.window, keys_outside=True)
    count = _chunk_count(spec) * ceil_div(spec.window**2, tiles["BLOCK_N"])
    launch(
        key_gradient_kernel, count * batch * heads,
        q_, k_, v_, grad_out_, _view(grad_k), _view(grad_v), lse, delta, *table, neighbour, dilations,
        *common, count, **constants, **tiles,
    )  # fmt: skip
    grad_bias, grad_global_bias = None, None if global_bias is None else torch.zeros_like(global_bias)
    if inputs.global_tokens:
        grad_global_bias = _global_gradients(inputs, grad_out, grad_k, grad_v, lse, delta, spec)
    if needs_bias:
        grad_bias = _bias_gradient(inputs, grad_out, lse, delta, table, spec)
    return grad_q, grad_k, grad_v, grad_bias, grad_global_bias if needs_global_bias else None


def _global_gradients(
    inputs: Inputs, grad_out: Tensor, grad_k: Tensor, grad_v: Tensor, lse: Tensor, delta: Tensor, spec: LocalSpec
) -> Tensor:
    """Fill the rows of the global tokens in ``grad_k`` and ``grad_v``; returns the gradient of their bias."""
    q, k, v, *_ = inputs
    batch, tokens, heads, dim = q.shape
    global_tokens = inputs.global_tokens
    tiles = _sum_tiles(q, queries=64 if q.element_size() == 2 else 32, keys=16)
    count = ceil_div(global_tokens, tiles["BLOCK_N"])
    share = ceil_div(tokens, max(1, PROGRAMS_OF_A_SUM // (count * batch * heads)))
    share = ceil_div(share, tiles["BLOCK_M"]) * tiles["BLOCK_M"]
    splits = ceil_div(tokens, share)
    keys, values = lse.new_empty(2, splits, batch, heads, global_tokens, dim)
    bias = lse.new_empty(splits, batch, heads, global_tokens)
    launch(
        global_gradient_kernel, count * splits * batch * heads,
        *map(_view, (q, k, v, grad_out)), keys, values, bias, lse, delta, _dense(inputs.global_bias),
        spec.scale, tokens, heads, global_tokens, count, share, **_constants(q), **tiles,
    )  # fmt: skip
    grad_k[:, :global_tokens] = keys.sum(0).transpose(1, 2)
    grad_v[:, :global_tokens] = values.sum(0).transpose(1, 2)
    return bias.sum((0, 1))


def _bias_gradient(
    inputs: Inputs, grad_out: Tensor, lse: Tensor, delta: Tensor, table: tuple[Tensor | None, int], spec: LocalSpec
) -> Tensor:
    q, k, v, *_ = inputs
    batch, _, heads, _ = q.shape
    window, chunks = spec.window, _chunk_count(spec)
    tiles = _sum_tiles(q, queries=min(64 if q.element_size() == 2 else 16, _padded(window**2)), keys=32)
    seen = {"all": 9, "one": 2, "self": 1}[spec.neighbour_mode] * window**2
    key_tiles = ceil_div(seen, tiles["BLOCK_N"])
    pairs = ceil_div(window**2, tiles["BLOCK_M"]) * key_tiles
    share = ceil_div(batch * chunks, max(1, PROGRAMS_OF_A_SUM // (pairs * heads)))
    splits = ceil_div(batch * chunks, share)
    partial = lse.new_zeros(splits, heads, window, window, 3 * window, 3 * window)
    launch(
        bias_gradient_kernel, pairs * splits * heads,
        *map(_view, (q, k, v, grad_out)), partial, lse, delta, *table, inputs.neighbour, _dilations(spec, q),
        spec.scale, *spec.grid, heads, inputs.global_tokens, batch, chunks, share,
        **_window_constants(q, spec), **tiles, KEY_TILES=key_tiles,
    )  # fmt: skip
    by_axis = partial.sum(0).transpose(2, 3)
    columns = _diagonals(by_axis, window).movedim(-1, 1)
    return _diagonals(columns, window).transpose(1, 2)


def _diagonals(pairs: Tensor, window: int) -> Tensor:
    """Sums over equal offsets of one axis: (..., w queries, 3w keys) to (..., 4w-1).

    Rows one longer than the result, read as rows of its length, are shifted by one against each other.
    """
    shifted = F.pad(pairs.flip(-1), (0, window)).flatten(-2)[..., :-window]
    return shifted.unflatten(-1, (window, 4 * window - 1)).sum(-2)


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """All launches pass here, so that tests can compile them instead."""
    if programs:
        kernel[(programs,)](*arguments, **options, enable_fp_fusion=True)


def _tiles(q: Tensor, window: int, *, keys_outside: bool = False) -> dict[str, int]:
    """Tile sizes, warps and stages: queries × keys, or for ``keys_outside`` as many keys × queries.

    Float32 operands are split in three for the tensor cores and need small tiles to stay in registers.
    """
    dim, half = _padded(q.shape[-1]), q.element_size() == 2
    largest, inner = (64, 64) if half else (32, 32)
    outer = min(largest, _padded(window**2))
    names = ("BLOCK_N", "BLOCK_M") if keys_outside else ("BLOCK_M", "BLOCK_N")
    wide = {"num_warps": 8 if dim > 64 else 4, "num_stages": 2 if half or dim <= 64 else 1}
    return {names[0]: outer, names[1]: inner, "BLOCK_D": dim, **wide}


def _sum_tiles(q: Tensor, queries: int, keys: int) -> dict[str, int]:
    """Tile sizes, warps and stages of the kernels that sum over queries."""
    half = q.element_size() == 2
    blocks = {"BLOCK_M": queries, "BLOCK_N": keys, "BLOCK_D": _padded(q.shape[-1])}
    return {**blocks, "num_warps": 4, "num_stages": 2 if half else 1}


def _window_constants(q: Tensor, spec: LocalSpec) -> dict[str, Any]:
    """What the kernels that know about windows are specialised on, besides tiles."""
    rule = "chunk" if spec.rule == "exact" else spec.rule
    return {"WINDOW": spec.window, "RULE": rule, "NEIGHBOURS": spec.neighbour_mode, **_constants(q)}


def _constants(q: Tensor) -> dict[str, Any]:
    """The head dimension, and the precision torch is set to for float32 products."""
    exact = torch.get_float32_matmul_precision() == "highest"
    return {"DIM": q.shape[-1], "PRECISION": "tf32x3" if exact else "tf32"}


def _view(x: Tensor) -> View:
    x = x if x.stride(-1) == 1 else x.contiguous()
    if x.shape[1] * x.stride(1) >= 2**31:
        raise ValueError(f"a sample of {tuple(x.shape)} spans 2³¹ numbers; the Triton kernels count them in 32 bits")
    return View(x, *x.stride()[:3])


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _chunk_count(spec: LocalSpec) -> int:
    """Chunks of a head. A dilation of d makes d×d maps; this is the largest number of all heads."""
    dilations = {spec.dilation} if isinstance(spec.dilation, int) else set(spec.dilation)
    return max(spec.grid.reduced(d, pad=True).chunks(spec.window).tokens * d * d for d in dilations)


def _dilations(spec: LocalSpec, q: Tensor) -> Tensor | None:
    """The dilation of each head as an int32 tensor, None if there is none."""
    if isinstance(spec.dilation, int):
        return None if spec.dilation == 1 else _on_device((spec.dilation,) * q.shape[2], q.device)
    return _on_device(spec.dilation, q.device)


def _table(bias: Tensor | None, spec: LocalSpec, device: torch.device) -> tuple[Tensor | None, int]:
    """What is added to local scores in units of log 2, float32, and its stride from head to head."""
    reach = _reach(spec.window, device) if spec.rule == "exact" else None
    if bias is None:
        return reach, 0
    table = bias.float() * LOG2E if reach is None else torch.add(reach, bias, alpha=LOG2E)
    return table.contiguous(), table.shape[1] * table.shape[2]


@lru_cache(maxsize=64)
def _reach(window: int, device: torch.device) -> Tensor:
    """A table (4w-1, 4w-1) of 0 up to w away along each axis and −∞ further."""
    near = torch.arange(1 - 2 * window, 2 * window, device=device).abs() <= window
    return torch.zeros(near.numel(), near.numel(), device=device).masked_fill_(~(near[:, None] & near), -math.inf)


@lru_cache(maxsize=64)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _padded(n: int) -> int:
    """The next power of two, at least the 16 that the tensor cores want."""
    return max(16, 1 << (n - 1).bit_length())
