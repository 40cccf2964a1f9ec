"""An implementation as one operator that compilers and exporters see from outside, with its own backward.

The forward keeps the log-sum-exp of each query's scores; the backward recomputes the scores from it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..geometry import Grid
from .spec import LocalSpec

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]


def opaque(name: str, forward: Forward, backward: Backward) -> Callable[..., Tensor]:
    """``attend`` of an implementation, registered as ``vision_longformer::name`` and ``…_backward``.

    - ``forward(q, k, v, bias, global_bias, neighbour, spec)`` returns the output and its log-sum-exp (B, N, heads), in
      float32 at least.
    - ``backward(grad, q, k, v, bias, global_bias, neighbour, out, lse, spec)`` returns the gradients of q, k, v, bias
      and global bias, the last two empty where there is none.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None,
        neighbour: Tensor | None, height: int, width: int, window: int, rule: str, neighbours: str, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        spec = LocalSpec(Grid(height, width), window, rule, neighbours, 1, scale)
        return forward(q, k, v, bias, global_bias, neighbour, spec)

    def run_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None,
        neighbour: Tensor | None, out: Tensor, lse: Tensor,
        height: int, width: int, window: int, rule: str, neighbours: str, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        spec = LocalSpec(Grid(height, width), window, rule, neighbours, 1, scale)
        return backward(grad, q, k, v, bias, global_bias, neighbour, out, lse, spec)

    op = torch.library.custom_op(f"vision_longformer::{name}", run, mutates_args=())
    grad_op = torch.library.custom_op(f"vision_longformer::{name}_backward", run_backward, mutates_args=())
    op.register_fake(_fake)
    grad_op.register_fake(_fake_backward)
    op.register_autograd(lambda ctx, *grads: _differentiate(grad_op, ctx, grads[0]), setup_context=_keep)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, neighbour: Tensor | None,
        spec: LocalSpec,
    ) -> Tensor:  # fmt: skip
        """Shapes as in :func:`~vision_longformer.ops.local_attention`."""
        settings = (*spec.grid, spec.window, spec.rule, spec.neighbours, spec.scale)
        return op(q, k, v, bias, global_bias, neighbour, *settings)[0]

    return attend


def _fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, global_bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    sizes = [x.shape if x is not None else (0,) for x in (q, k, v, bias, global_bias)]
    return tuple(q.new_empty(size) for size in sizes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.settings = inputs[6:]


def _differentiate(grad_op: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *inputs, out, lse = ctx.saved_tensors  # read once: gradient checkpointing allows no more
    grads = grad_op(grad, *inputs, out, lse, *ctx.settings)
    given = [g if x is not None else None for g, x in zip(grads, inputs[:5], strict=True)]
    return (*given, None, *(None for _ in ctx.settings))
