"""Host side of the Triton kernels: sizes of tiles, allocation, launches, last sums. Imports triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...geometry import ceil_div
from ..operator import Gradients, empty_results
from ..spec import Inputs, LocalSpec
from . import OLDEST_CAPABILITY
from .device import GlobalRows, Map, View
from .global_kernels import global_sums_kernel
from .kernels import (
    bias_gradient_kernel,
    bias_tiles_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)

MOST_PARTIAL_SUMS = 1 << 24
"""Numbers in the partial sums of the bias gradient, the same on every GPU so that results are too."""

BLOCK_G = 16
"""Global keys are few; the tensor cores take no fewer at a time."""

LEAST_SHARE = 256
MOST_SHARES = 64
"""Tokens are shared among programs for global ones in the same way on every GPU, so that results are the same, too."""


@dataclass(frozen=True)
class Tiling:
    """Outer tiles of ``block_m`` tokens of a chunk and inner tiles of ``block_n`` tokens of what they see.

    ``parts``: outer tiles of a chunk. ``tiles``: inner tiles of each.
    """

    block_m: int
    block_n: int
    parts: int
    tiles: int
    warps: int

    @property
    def elements(self) -> int:
        """Scores of an outer tile, in all its inner tiles."""
        return self.tiles * self.block_m * self.block_n


def forward(inputs: Inputs, spec: LocalSpec) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, the latter in units of log 2."""
    out, lse = empty_results(inputs.q)
    attend(inputs, spec, out, lse)
    return out, lse


def attend(inputs: Inputs, spec: LocalSpec, out: Tensor, lse: Tensor) -> None:
    """Writes the output and the log-sum-exp; both may be views, whose last dimension is dense."""
    q, k, v, _, global_bias, neighbour = inputs
    batch, _, heads, _ = q.shape
    tiling, chunks = tiling_of(q, spec, backward=False), _chunk_count(spec)
    tiles = _bias_tiles(inputs, spec, tiling, orientations=1)
    launch(
        forward_kernel, tiling.parts * chunks * batch * heads,
        *map(view, (q, k, v, out)), lse, tiles[0], _head_stride(inputs, tiling), dense(global_bias), neighbour,
        _dilations(spec, q), _area(spec, lse), spec.scale, heads, inputs.global_tokens(spec), chunks,
        **_constants(q, spec, tiling), BLOCK_G=BLOCK_G,
    )  # fmt: skip


def backward(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, spec: LocalSpec, needs_bias: bool,
    needs_global_bias: bool,
) -> Gradients:  # fmt: skip
    """Gradients of q, k, v, the bias table and the global bias, the last two in float32."""
    q, k, v, bias, global_bias, _ = inputs
    grad_q, grad_k, grad_v = grads = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    if q.shape[0] * q.shape[2] == 0:
        zero_bias, zero_global_bias = (None if x is None else torch.zeros_like(x) for x in (bias, global_bias))
        return grad_q, grad_k, grad_v, zero_bias, zero_global_bias
    parts = differentiate(grad_out, inputs, out, lse, spec, grads, needs_bias)
    global_tokens = inputs.global_tokens(spec)
    global_keys, global_values = parts.tokens.sum(3).transpose(2, 3)
    grad_k[:, :global_tokens], grad_v[:, :global_tokens] = global_keys, global_values
    return grad_q, grad_k, grad_v, parts.bias, parts.biases[0].sum((0, 2)) if needs_global_bias else None


class Parts(NamedTuple):
    """What is left to be summed of gradients: by share of the local tokens, those of global tokens (2 or 3, B, heads,
    shares, G, dim), of keys, values, and perhaps queries; and of their biases (1 or 2, B, heads, shares, G), of keys
    and perhaps queries. And the gradient of the bias table, None if it is not needed. All in float32.
    """

    tokens: Tensor
    biases: Tensor
    bias: Tensor | None


def differentiate(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, spec: LocalSpec, grads: tuple[Tensor, Tensor, Tensor],
    needs_bias: bool, global_rows: GlobalRows | None = None,
) -> Parts:  # fmt: skip
    """Writes the gradients of q, and of local keys and values, into ``grads``, which may be views.

    With ``global_rows`` the gradients of local keys and values have the parts of global queries.
    """
    q, k, v, _, global_bias, neighbour = inputs
    batch, _, heads, _ = q.shape
    tiling, chunks, global_tokens = tiling_of(q, spec, backward=True), _chunk_count(spec), inputs.global_tokens(spec)
    by_query, by_key = _bias_tiles(inputs, spec, tiling, orientations=2)
    items, splits = batch * chunks, batch * chunks
    if needs_bias:
        splits = min(items, max(1, MOST_PARTIAL_SUMS // (heads * tiling.parts * tiling.elements)))
    partial = lse.new_zeros(splits, heads, tiling.parts * tiling.elements) if needs_bias else None
    delta, stride = lse.new_empty(batch, heads, lse.stride(1)), _head_stride(inputs, tiling)
    views = tuple(map(view, (q, k, v)))
    grad_q, grad_k, grad_v = map(view, grads)
    common = (neighbour, _dilations(spec, q), _area(spec, lse), spec.scale, heads, global_tokens)
    launch(
        query_gradient_kernel, tiling.parts * heads * splits,
        *views, *map(view, (out, grad_out)), grad_q, lse, delta, by_query, stride, partial, dense(global_bias),
        *common, chunks, items, splits, **_constants(q, spec, tiling, float_stages=2), BLOCK_G=BLOCK_G,
    )  # fmt: skip
    key_chunks = _key_chunk_count(spec)
    launch(
        key_gradient_kernel, tiling.parts * key_chunks * batch * heads,
        *views, view(grad_out), grad_k, grad_v, lse, delta, by_key, stride, *common, key_chunks,
        global_rows, **_constants(q, spec, tiling, float_slice=32), BLOCK_G=BLOCK_G,
    )  # fmt: skip
    tokens, biases = _global_sums(grad_out, inputs, lse, delta, spec, global_rows)
    grad_bias = None if partial is None else _bias_gradient(partial.sum(0), neighbour, spec, tiling)
    return Parts(tokens, biases, grad_bias)


def _global_sums(
    grad_out: Tensor, inputs: Inputs, lse: Tensor, delta: Tensor, spec: LocalSpec, global_rows: GlobalRows | None
) -> tuple[Tensor, Tensor]:
    """What each share of the local tokens adds to the gradients of global tokens and of their biases."""
    q, k, v, *_ = inputs
    (batch, count, heads, dim), global_tokens, both = q.shape, inputs.global_tokens(spec), global_rows is not None
    share = share_of(count)
    shares = ceil_div(count, share)
    tokens = lse.new_empty(2 + both, batch, heads, shares, global_tokens, dim)
    biases = lse.new_empty(1 + both, batch, heads, shares, global_tokens)
    launch(
        global_sums_kernel, shares * ceil_div(global_tokens, BLOCK_G) * batch * heads,
        global_rows, *map(view, (q, k, v, grad_out)), lse, delta, lse.stride(1), dense(inputs.global_bias), tokens,
        biases, spec.scale, batch * heads, heads, global_tokens, count, shares, share, **global_constants(q),
    )  # fmt: skip
    return tokens, biases


def share_of(tokens: int) -> int:
    """How many tokens a program takes for global ones: whole tiles."""
    return max(LEAST_SHARE, ceil_div(ceil_div(tokens, MOST_SHARES), 64) * 64)


def global_constants(q: Tensor) -> dict[str, Any]:
    """What the kernels of global tokens are specialised on that share all tokens among programs."""
    rows = row_constants(q, most=64 if half(q) else 32)
    return {
        **rows, "BLOCK_N": 64 if half(q) else 32, "BLOCK_G": BLOCK_G, "num_warps": 4, "num_stages": 2 if half(q) else 1
    }  # fmt: skip


def _bias_tiles(inputs: Inputs, spec: LocalSpec, tiling: Tiling, *, orientations: int) -> Tensor:
    """What raw scores start from, (orientations, heads or 1, parts, inner tiles and their elements), float32."""
    bias = dense(inputs.bias)
    heads = 1 if bias is None else bias.shape[0]
    tiles = inputs.q.new_empty(orientations, heads, tiling.parts, tiling.elements, dtype=torch.float32)
    launch(
        bias_tiles_kernel, orientations * heads * tiling.parts * tiling.tiles,
        bias, tiles, inputs.neighbour, 1 / spec.scale, tiling.tiles, tiling.parts, heads,
        EXACT=spec.rule == "exact", **_window_constants(spec, tiling),
    )  # fmt: skip
    return tiles


def _head_stride(inputs: Inputs, tiling: Tiling) -> int:
    """From head to head of the bias tiles; without a bias all heads share them."""
    return 0 if inputs.bias is None else tiling.parts * tiling.elements


def _bias_gradient(sums: Tensor, neighbour: Tensor | None, spec: LocalSpec, tiling: Tiling) -> Tensor:
    """The gradient of the table from those of all score tiles, (heads, parts, inner tiles and their elements)."""
    heads, side = sums.shape[0], 4 * spec.window - 1
    table = sums.new_empty(heads, side, side)
    launch(
        bias_gradient_kernel, heads * side, sums, table, neighbour, tiling.parts,
        **_window_constants(spec, tiling), TILES=tiling.tiles, BLOCK_W=padded(side),
    )  # fmt: skip
    return table


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """All launches pass here, so that they can be compiled instead, or counted."""
    if programs:
        kernel[(programs,)](*arguments, **options, enable_fp_fusion=True)


def tiling_of(q: Tensor, spec: LocalSpec, *, backward: bool) -> Tiling:
    """Tiles and warps. Each warp has rows of its own, so that none is computed twice.

    Chips whose products read shared memory themselves (compute capabilities 9.x and 10.x) take them from four warps
    together. Others load operands into the registers of each warp, which then had better have 32 rows. Float32 operands
    are split in parts for the tensor cores and need small tiles to stay in registers.
    """
    dim, chip = padded(q.shape[-1]), capability(q.device)
    seen = spec.window**2 * (9 if spec.neighbour_mode == "all" else 1)
    squares = 2 if spec.neighbour_mode == "one" else 1
    block_m = min(64, padded(spec.window**2))
    together = chip[0] in (9, 10)
    roomy = chip == (8, 0) or dim <= 32  # elsewhere wider tiles spill registers
    block_n = 32 if half(q) or (dim <= 32 and not backward) else 16
    if half(q) and dim <= 64 and (together or (roomy and not backward)):
        block_n = 64
    rows = 32 if half(q) and dim <= 64 and not together and (roomy or not backward) else 16
    return Tiling(
        block_m, block_n, ceil_div(spec.window**2, block_m), squares * ceil_div(seen, block_n),
        warps=max(1, block_m // rows),
    )  # fmt: skip


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; without one, where kernels are interpreted, that of the oldest."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else OLDEST_CAPABILITY


def _constants(
    q: Tensor, spec: LocalSpec, tiling: Tiling, *, float_slice: int = 16, float_stages: int = 1
) -> dict[str, Any]:
    """What the kernels that compute scores are specialised on. Columns of a slice and stages of float32 operands are a
    kernel's own: with these its loops spill no registers.
    """
    return {
        **_window_constants(spec, tiling),
        "RULE": "chunk" if spec.rule == "exact" else spec.rule,
        "BAND": spec.halo is not None,
        "TILES": tiling.tiles,
        **row_constants(q, most=128 if half(q) else float_slice),
        "num_stages": 2 if half(q) else float_stages,
    }


def row_constants(q: Tensor, *, most: int) -> dict[str, Any]:
    """How rows are multiplied, in slices of ``most`` columns. Float32 operands take more registers: they are split in
    parts for the tensor cores.
    """
    dim, width, precision = q.shape[-1], padded(q.shape[-1]), "tf32" if _allows_tf32() else "tf32x3"
    return {"DIM": dim, "BLOCK_D": width, "SLICE": min(width, most), "PRECISION": precision}


def half(q: Tensor) -> bool:
    return q.element_size() == 2


def _allows_tf32() -> bool:
    """Whether torch is set to round the operands of float32 products, by its older settings or its newer ones."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # since torch 2.9, where the older name may raise
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def _window_constants(spec: LocalSpec, tiling: Tiling) -> dict[str, Any]:
    blocks = {"BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "num_warps": tiling.warps}
    return {"WINDOW": spec.window, "NEIGHBOURS": spec.neighbour_mode, **blocks}


def view(x: Tensor) -> View:
    if x.stride(-1) != 1 or x.shape[1] * x.stride(1) >= 1 << 31:  # tokens are counted in 32 bits
        x = x.contiguous()
    return View(x, *x.stride()[:3])


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _area(spec: LocalSpec, lse: Tensor) -> Map:
    return Map(*spec.grid, *(spec.halo or (0, 0)), lse.stride(1))


def _chunk_count(spec: LocalSpec) -> int:
    """Chunks of a head. A dilation of d makes d×d maps; this is the largest number of all heads."""
    dilations = {spec.dilation} if isinstance(spec.dilation, int) else set(spec.dilation)
    return max(spec.grid.reduced(d, pad=True).chunks(spec.window).tokens * d * d for d in dilations)


def _key_chunk_count(spec: LocalSpec) -> int:
    """Chunks of keys of a head, those of the halo included."""
    return _chunk_count(spec) + sum(rows > 0 for rows in spec.halo or ()) * spec.chunks.width


def _dilations(spec: LocalSpec, q: Tensor) -> Tensor | None:
    """The dilation of each head as an int32 tensor, None if there is none."""
    if spec.dilation == 1:
        return None
    steps = (spec.dilation,) * q.shape[2] if isinstance(spec.dilation, int) else spec.dilation
    filled = [torch.full((1,), step, dtype=torch.int32, device=q.device) for step in steps]
    return torch.cat(filled)  # made on the device: a copy from the host cannot be captured in a CUDA graph


def padded(n: int) -> int:
    """The next power of two, at least the 16 that the tensor cores want."""
    return max(16, 1 << (n - 1).bit_length())
