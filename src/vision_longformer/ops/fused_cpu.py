"""One fused kernel in C++ (``csrc/``), flash style: scores live in registers and caches only, backward recomputes them.

Queries, keys and values are read where the projection left them. Only the log-sum-exp of every query is kept for
backward. Threads are torch's; sums are made in an order that does not depend on their number, so results are the same
to the bit for any of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..geometry import BLOCKS, RULES, SELF_BLOCK
from .fused_cpu_library import DATA_TYPES, Library, Problem, load
from .spec import LocalSpec, refuse_dilation

KINDS = ("all", "self", "one")
UNAVAILABLE = problem if isinstance(problem := load(), str) else None
"""Why the library cannot be used, a constant to compiled graphs."""


def refusal(spec: LocalSpec, q: Tensor) -> str | None:
    if UNAVAILABLE is not None:
        return UNAVAILABLE
    if q.device.type != "cpu":
        return f"the kernel runs on the CPU, but the tensors are on {q.device.type!r}"
    if q.dtype not in DATA_TYPES:
        return f"the kernel knows float32, float64, bfloat16 and float16, not {q.dtype}"
    return refuse_dilation(spec)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    spec: LocalSpec,
) -> Tensor:  # fmt: skip
    """Shapes as in :func:`~vision_longformer.ops.local_attention`."""
    out, _ = fused_local_attention(
        q, k, v, bias, global_bias, neighbour, spec.grid.height, spec.grid.width, spec.window, spec.rule,
        spec.neighbours, spec.scale,
    )  # fmt: skip
    return out


@torch.library.custom_op("vision_longformer::fused_local_attention", mutates_args=(), device_types="cpu")
def fused_local_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    height: int, width: int, window: int, rule: str, neighbours: str, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Local attention (B, N, heads, dim) and the log-sum-exp of its scores (B, heads, N)."""
    spec = (height, width, window, rule, neighbours, scale)
    problem, kept = _problem(q, k, v, bias, global_bias, neighbour, *spec)
    out, lse = _empty_results(q)
    problem.set_tensors(out=out, lse=lse)
    if q.numel():
        _library().run(problem, backward=False)
    del kept
    return out, lse


@fused_local_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(q)


@torch.library.custom_op("vision_longformer::fused_local_attention_backward", mutates_args=(), device_types="cpu")
def fused_local_attention_backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    global_bias: Tensor | None, neighbour: Tensor | None, height: int, width: int, window: int, rule: str,
    neighbours: str, scale: float, needs_bias: bool, needs_global_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, bias and global_bias; the latter two are empty where not needed."""
    spec = (height, width, window, rule, neighbours, scale)
    problem, kept = _problem(q, k, v, bias, global_bias, neighbour, *spec)
    grads = _empty_gradients(q, k, bias, global_bias, needs_bias, needs_global_bias, _arithmetic(q))
    grad_q, grad_k, grad_v, grad_bias, grad_global_bias = grads
    grad_out, out, lse = _rows(grad_out), out.contiguous(), lse.contiguous()
    problem.set_tensors(grad_out=grad_out, out=out, lse=lse, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v)
    if needs_bias:
        problem.set_tensors(grad_bias=grad_bias)
    if needs_global_bias:
        problem.set_tensors(grad_global_bias=grad_global_bias)
    if q.numel():
        _library().run(problem, backward=True)
    else:
        for grad in grads:
            grad.zero_()
    del kept
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), _like(grad_bias, bias), _like(grad_global_bias, global_bias)


@fused_local_attention_backward.register_fake
def _(
    grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    global_bias: Tensor | None, neighbour: Tensor | None, height: int, width: int, window: int, rule: str,
    neighbours: str, scale: float, needs_bias: bool, needs_global_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _empty_gradients(q, k, bias, global_bias, needs_bias, needs_global_bias, q.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.spec = inputs[:6], inputs[6:]
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(out, lse, *tensors)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    needs_bias, needs_global_bias = ctx.needs_input_grad[3:5]
    grads = list(fused_local_attention_backward(grad_out, out, lse, *tensors, *ctx.spec, needs_bias, needs_global_bias))
    for index, needed in enumerate(ctx.needs_input_grad[:5]):
        if not needed:
            grads[index] = None
    return (*grads, None, *(None for _ in ctx.spec))


fused_local_attention.register_autograd(_backward, setup_context=_setup_context)


def _library() -> Library:
    library = load()
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


def _arithmetic(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous last dimension; itself if it has one already, as slices of a projection do."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=_arithmetic(q))


def _empty_gradients(
    q: Tensor, k: Tensor, bias: Tensor | None, global_bias: Tensor | None, needs_bias: bool, needs_global_bias: bool,
    summed: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Memory for gradients; those that are summed up in place have the data type ``summed``."""
    small = [
        q.new_empty(tensor.shape if needed and tensor is not None else (0,), dtype=summed)
        for tensor, needed in ((bias, needs_bias), (global_bias, needs_global_bias))
    ]
    grad_k, grad_v = (k.new_empty(k.shape, dtype=summed) for _ in range(2))
    return q.new_empty(q.shape), grad_k, grad_v, small[0], small[1]


def _like(grad: Tensor, tensor: Tensor | None) -> Tensor:
    return grad if tensor is None else grad.to(tensor.dtype)


def _problem(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    height: int, width: int, window: int, rule: str, neighbours: str, scale: float,
) -> tuple[Problem, list[Tensor | None]]:  # fmt: skip
    """The call as a structure, checked, and the tensors that must live as long as its pointers are used."""
    batch, tokens, heads, dim = q.shape
    global_tokens = k.shape[1] - tokens
    _check(q, k, v, bias, global_bias, height, width, window)
    row, column = 0, 0
    if neighbours == "one":
        if neighbour is None or not 1 <= int(neighbour) <= 8:
            raise ValueError(f"neighbour is {neighbour}; it must be 1..8")
        number = int(neighbour)
        row, column = BLOCKS[number - (number <= SELF_BLOCK)]
    problem = Problem(
        batch, heads, dim, height, width, window, global_tokens, RULES.index(rule), KINDS.index(neighbours), row,
        column, DATA_TYPES[q.dtype], 1, scale,
    )  # fmt: skip
    q, k, v = _rows(q), _rows(k), _rows(v)
    bias, global_bias = (None if x is None else x.detach().to(_arithmetic(q)).contiguous() for x in (bias, global_bias))
    problem.set_tensors(q=q, k=k, v=v, bias=bias, global_bias=global_bias)
    return problem, [q, k, v, bias, global_bias]


def _check(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, height: int, width: int,
    window: int,
) -> None:  # fmt: skip
    """Nothing that a pointer will be computed from is taken on trust."""
    batch, tokens, heads, dim = q.shape
    global_tokens, side = k.shape[1] - tokens, 4 * window - 1
    fits = height >= 1 and width >= 1 and window >= 1 and tokens == height * width
    fits = fits and k.shape == v.shape == (batch, global_tokens + tokens, heads, dim) and global_tokens >= 0
    fits = fits and (bias is None or bias.shape == (heads, side, side))
    fits = fits and (global_bias is None or global_bias.shape == (heads, global_tokens))
    fits = fits and q.dtype == k.dtype == v.dtype and q.dtype in DATA_TYPES
    if not fits:
        shapes = [None if x is None else (tuple(x.shape), x.dtype) for x in (q, k, v, bias, global_bias)]
        raise ValueError(f"q, k, v, bias and global_bias do not fit a {height}×{width} map, window {window}: {shapes}")
