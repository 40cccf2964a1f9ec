"""One fused kernel in C++ (``csrc/``), flash style: scores live in registers and caches only, backward recomputes them.

Queries, keys and values are read where the projection left them. Threads are torch's; sums are made in an order that
does not depend on their number, so results are the same to the bit for any of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry import NEIGHBOURS, RULES
from ..operator import Gradients, arithmetic_dtype, empty_results, register
from ..spec import NEIGHBOUR_MODES, Implementation, Inputs, LocalSpec, refuse_dilation
from .library import DATA_TYPES, GRADIENTS, NO_OPENMP, Library, Problem, load


def _refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if UNAVAILABLE is not None:
        return UNAVAILABLE
    if not THREADED and torch.get_num_threads() > 1:
        return NO_OPENMP
    if q.device.type not in ("cpu", "meta"):  # of meta tensors only the shapes are computed
        return f"the kernel runs on the CPU, but the tensors are on {q.device.type!r}"
    if q.dtype not in DATA_TYPES:
        return f"the kernel knows float32, float64, bfloat16 and float16, not {q.dtype}"
    return refuse_dilation(spec)


_LOADED = load()
UNAVAILABLE = _LOADED if isinstance(_LOADED, str) else None
"""Why the kernel cannot be used, None if it can: a constant to compiled graphs, as is the next."""

THREADED = isinstance(_LOADED, Library) and _LOADED.threaded
"""Whether the kernel runs in torch's threads."""


def _forward(inputs: Inputs, spec: LocalSpec) -> tuple[Tensor, Tensor]:
    problem = _problem(inputs, spec)
    out, lse = empty_results(inputs.q)
    problem.set_tensors(out=out, lse=lse)
    if out.numel():
        _run(problem, backward=False)
    return out, lse


def _backward(
    grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, spec: LocalSpec, needs_bias: bool, needs_global_bias: bool
) -> Gradients:
    q, k, v, bias, global_bias, _ = inputs
    problem = _problem(inputs, spec)
    problem.set_tensors(grad_out=_rows(grad), out=out.contiguous(), lse=lse.contiguous())
    grads = (  # all but that of q are summed up in place, in the type of the arithmetic
        q.new_empty(q.shape),
        lse.new_empty(k.shape),
        lse.new_empty(v.shape),
        lse.new_empty(bias.shape) if bias is not None and needs_bias else None,
        lse.new_empty(global_bias.shape) if global_bias is not None and needs_global_bias else None,
    )
    problem.set_tensors(**dict(zip(GRADIENTS, grads, strict=True)))
    if q.numel():
        _run(problem, backward=True)
    else:
        for empty in grads:
            if empty is not None:
                empty.zero_()
    return grads


def _run(problem: Problem, *, backward: bool) -> None:
    library = load()
    if isinstance(library, str):
        raise RuntimeError(library)
    library.run(problem, backward=backward)


def _problem(inputs: Inputs, spec: LocalSpec) -> Problem:
    """The call as a structure for the library, its shapes checked."""
    _check(inputs, spec)
    q, k, v, bias, global_bias, neighbour = inputs
    batch, _, heads, dim = q.shape
    row, column = 0, 0
    if spec.neighbour_mode == "one":
        number = 0 if neighbour is None else int(neighbour)
        if not 1 <= number <= 8:
            raise ValueError(f"neighbour is {number}; it must be 1..8")
        row, column = NEIGHBOURS[number - 1]
    band = (0, 0, 0) if spec.halo is None else (1, *spec.halo)
    problem = Problem(
        batch, heads, dim, *spec.grid, spec.window, inputs.global_tokens(spec), *band, RULES.index(spec.rule),
        NEIGHBOUR_MODES.index(spec.neighbour_mode), row, column, DATA_TYPES[q.dtype], 1, spec.scale,
    )  # fmt: skip
    dtype = arithmetic_dtype(q)
    bias, global_bias = (None if x is None else x.to(dtype).contiguous() for x in (bias, global_bias))
    problem.set_tensors(q=_rows(q), k=_rows(k), v=_rows(v), bias=bias, global_bias=global_bias)
    return problem


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous last dimension; itself if it has one already, as slices of a projection do."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _check(inputs: Inputs, spec: LocalSpec) -> None:
    """Nothing that a pointer will be computed from is taken on trust."""
    q, k, v, bias, global_bias, _ = inputs
    (height, width), window = spec.grid, spec.window
    fits = q.dim() == 4 and k.dim() == 4 and height >= 1 and width >= 1 and window >= 1
    fits = fits and all(0 <= rows <= window for rows in spec.halo or ())
    if fits:
        batch, tokens, heads, dim = q.shape
        global_tokens, side = inputs.global_tokens(spec), 4 * window - 1
        fits = tokens == spec.grid.tokens and global_tokens >= 0
        fits = fits and k.shape == v.shape == (batch, global_tokens + spec.key_grid.tokens, heads, dim)
        fits = fits and (bias is None or bias.shape == (heads, side, side))
        fits = fits and (global_bias is None or global_bias.shape == (heads, global_tokens))
    if not fits or not q.dtype == k.dtype == v.dtype or q.dtype not in DATA_TYPES:
        given = [None if x is None else (tuple(x.shape), x.dtype) for x in (q, k, v, bias, global_bias)]
        shape = f"{height}×{width} map, window {window}, halo {spec.halo}"
        raise ValueError(f"q, k, v, bias and global_bias do not fit a {shape}: {given}")


FUSED_CPU = Implementation(_refusal, register("fused_cpu", _forward, _backward, device_types="cpu"))
