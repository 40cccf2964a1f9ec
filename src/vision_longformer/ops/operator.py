"""Registration of implementations with ``torch.library``, so that compilers and exporters see each as one operator.

An implementation gives two functions. Its forward keeps the log-sum-exp of each query's scores, from which its backward
recomputes the scores. Schemas, fake results and autograd are the same for all and live here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry import Grid
from .spec import Inputs, LocalSpec

LOG2E = math.log2(math.e)
"""Natural logarithms times this are logarithms to base 2: exponentials are computed as powers of two."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
Forward = Callable[[Inputs, LocalSpec], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Inputs, Tensor, Tensor, LocalSpec, bool, bool], Gradients]

OPERATORS: dict[str, Any] = {}
"""Forward operators by name, as ``torch.ops`` has them. :func:`spec_of` reads their arguments."""

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? global_bias, Tensor? neighbour"
_SETTINGS = "SymInt height, SymInt width, SymInt window, str rule, str neighbour_mode, SymInt[] dilation, float scale"
_SAVED = "Tensor out, Tensor lse, bool needs_bias, bool needs_global_bias"
_FORWARD_SCHEMA = f"({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor)"
_BACKWARD_SCHEMA = f"(Tensor grad, {_INPUTS}, {_SETTINGS}, {_SAVED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
_TENSORS = len(Inputs._fields)


def register(
    name: str, forward: Forward, backward: Backward, device_types: str | None = None
) -> Callable[[Inputs, LocalSpec], Tensor]:
    """Register ``vision_longformer::name`` and ``vision_longformer::name_backward``; returns a function to attend by.

    - ``forward(inputs, spec)`` returns the output and the log-sum-exp, as :func:`empty_results` makes them, the latter
      in the unit that ``backward`` reads.
    - ``backward(grad, inputs, out, lse, spec, needs_bias, needs_global_bias)`` returns the gradients of q, k, v, bias
      and global bias, the last two None where they are not needed.

    Both run on ``device_types`` only, or on any device if None.
    """

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        return forward(Inputs(*arguments[:_TENSORS]), spec_of(arguments))

    def run_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        inputs, (out, lse, *needs) = Inputs(*arguments[:_TENSORS]), arguments[-4:]
        grads = backward(grad, inputs, out, lse, spec_of(arguments), *needs)
        return tuple(
            inputs.q.new_empty(0) if x is None or like is None else x.to(like.dtype).contiguous()
            for x, like in zip(grads, inputs, strict=False)
        )

    def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors  # read once: gradient checkpointing allows no more
        needs = ctx.needs_input_grad[:5]
        grads = backward_operator(grad, *tensors, *ctx.settings, out, lse, *needs[3:])
        wanted = [x if needed else None for x, needed in zip(grads, needs, strict=True)]
        return *wanted, None, *(None for _ in ctx.settings)

    qualified = f"vision_longformer::{name}"
    definition = torch.library.custom_op(
        qualified, run, mutates_args=(), device_types=device_types, schema=_FORWARD_SCHEMA
    )
    definition.register_fake(lambda q, *_: empty_results(q))
    definition.register_autograd(differentiate, setup_context=_save_for_backward)
    backward_operator = torch.library.custom_op(
        f"{qualified}_backward", run_backward, mutates_args=(), device_types=device_types, schema=_BACKWARD_SCHEMA
    )
    backward_operator.register_fake(_empty_gradients)
    operator = OPERATORS[name] = getattr(torch.ops.vision_longformer, name)

    def attend(inputs: Inputs, spec: LocalSpec) -> Tensor:
        dilation = [spec.dilation] if isinstance(spec.dilation, int) else spec.dilation
        out, _ = operator.default(
            *inputs, *spec.grid, spec.window, spec.rule, spec.neighbour_mode, dilation, spec.scale
        )
        return out

    return attend


def spec_of(arguments: Sequence[Any]) -> LocalSpec:
    """What the arguments of a forward operator, or those of a backward operator after ``grad``, say beside tensors."""
    height, width, window, rule, neighbour_mode, steps, scale = arguments[_TENSORS : _TENSORS + 7]
    dilation = steps[0] if len(steps) == 1 else tuple(steps)
    return LocalSpec(Grid(height, width), window, rule, neighbour_mode, dilation, scale)


def arithmetic_dtype(q: Tensor) -> torch.dtype:
    """What scores and sums are computed in: float32 at least."""
    return torch.promote_types(q.dtype, torch.float32)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the output (B, N, heads, dim) and the log-sum-exp (B, heads, N)."""
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, tokens, dtype=arithmetic_dtype(q))


def _empty_gradients(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    needs = (True, True, True, *arguments[-2:])
    empty = arguments[0].new_empty
    return tuple(x.new_empty(x.shape) if needed else empty(0) for x, needed in zip(arguments, needs, strict=False))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*inputs[:_TENSORS], out, lse)
    ctx.settings = inputs[_TENSORS:]
