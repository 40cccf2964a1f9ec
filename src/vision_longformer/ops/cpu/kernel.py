"""One fused kernel in C++ (``csrc/``), flash style: scores live in registers and caches only, backward recomputes them.

Queries, keys and values are read where the projection left them. Only the log-sum-exp of every query is kept for
backward. Threads are torch's; sums are made in an order that does not depend on their number, so results are the same
to the bit for any of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...geometry import BLOCKS, RULES, SELF_BLOCK
from ..spec import LocalSpec, refuse_dilation
from .library import DATA_TYPES, GRADIENTS, Library, Problem, load

KINDS = ("all", "self", "one")
UNAVAILABLE = problem if isinstance(problem := load(), str) else None
"""Why the library cannot be used, a constant to compiled graphs."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


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
    """Local attention (B, N, heads, dim), and the log-sum-exp of its scores (B, heads, N)."""
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
    grad_out, out, lse = _rows(grad_out), out.contiguous(), lse.contiguous()
    problem.set_tensors(grad_out=grad_out, out=out, lse=lse)
    needs = (needs_bias, needs_global_bias)
    grads = _empty_gradients(q, k, v, bias, global_bias, needs, summed=_arithmetic(q))
    wanted = [grad if needed else None for grad, needed in zip(grads, (True, True, True, *needs), strict=True)]
    problem.set_tensors(**dict(zip(GRADIENTS, wanted, strict=True)))
    if q.numel():
        _library().run(problem, backward=True)
    else:
        for grad in grads:
            grad.zero_()
    del kept
    types = (q, k, v, q if bias is None else bias, q if global_bias is None else global_bias)
    grad_q, grad_k, grad_v, grad_bias, grad_global_bias = (g.to(x.dtype) for g, x in zip(grads, types, strict=True))
    return grad_q, grad_k, grad_v, grad_bias, grad_global_bias


@fused_local_attention_backward.register_fake
def _(
    grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    global_bias: Tensor | None, neighbour: Tensor | None, height: int, width: int, window: int, rule: str,
    neighbours: str, scale: float, needs_bias: bool, needs_global_bias: bool,
) -> Gradients:  # fmt: skip
    return _empty_gradients(q, k, v, bias, global_bias, (needs_bias, needs_global_bias))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.spec = inputs[:6], inputs[6:]
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(out, lse, *tensors)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    needed = ctx.needs_input_grad[:5]
    grads = fused_local_attention_backward(grad_out, out, lse, *tensors, *ctx.spec, *needed[3:])
    wanted = [grad if need else None for grad, need in zip(grads, needed, strict=True)]
    return (*wanted, None, *(None for _ in ctx.spec))


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
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, needs: tuple[bool, bool],
    summed: torch.dtype | None = None,
) -> Gradients:  # fmt: skip
    """Memory for gradients. All but that of q are summed up in place, in the data type ``summed`` if it is given."""
    small = []
    for tensor, needed in zip((bias, global_bias), needs, strict=True):
        like = q if tensor is None else tensor
        small.append(like.new_empty(like.shape if needed else (0,), dtype=summed))
    grad_k, grad_v = (x.new_empty(x.shape, dtype=summed) for x in (k, v))
    return q.new_empty(q.shape), grad_k, grad_v, small[0], small[1]


def _problem(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
    height: int, width: int, window: int, rule: str, neighbours: str, scale: float,
) -> tuple[Problem, list[Tensor | None]]:  # fmt: skip
    """The call as a structure, checked, and the tensors that must live as long as its pointers are used."""
    _check(q, k, v, bias, global_bias, height, width, window)
    batch, tokens, heads, dim = q.shape
    row, column = 0, 0
    if neighbours == "one":
        number = 0 if neighbour is None else int(neighbour)
        if not 1 <= number <= 8:
            raise ValueError(f"neighbour is {number}; it must be 1..8")
        row, column = BLOCKS[number - (number <= SELF_BLOCK)]
    problem = Problem(
        batch, heads, dim, height, width, window, k.shape[1] - tokens, RULES.index(rule), KINDS.index(neighbours), row,
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
    fits = q.dim() == 4 and k.dim() == 4 and height >= 1 and width >= 1 and window >= 1
    if fits:
        batch, tokens, heads, dim = q.shape
        global_tokens, side = k.shape[1] - tokens, 4 * window - 1
        fits = tokens == height * width and global_tokens >= 0
        fits = fits and k.shape == v.shape == (batch, global_tokens + tokens, heads, dim)
        fits = fits and (bias is None or bias.shape == (heads, side, side))
        fits = fits and (global_bias is None or global_bias.shape == (heads, global_tokens))
    if not fits or not q.dtype == k.dtype == v.dtype or q.dtype not in DATA_TYPES:
        given = [None if x is None else (tuple(x.shape), x.dtype) for x in (q, k, v, bias, global_bias)]
        raise ValueError(f"q, k, v, bias and global_bias do not fit a {height}×{width} map, window {window}: {given}")
