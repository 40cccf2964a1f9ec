"""Tasks of local attention, and of what it is measured beside, as something to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import local_attention, why_not
from ..ops.spec import LocalSpec
from .flops import batched_products, block_keys
from .tasks import BATCHED_MATMUL, BOTH, FULL_ATTENTION, LARGE_MATMUL, REFERENCES, AttentionWork

BATCHED_FLOATS = 1 << 27
"""Operands and results of the batched matrix products."""


class Job(NamedTuple):
    """A run, and the bytes of the tensors that are there before it and of those that it returns."""

    run: Callable[[], object]
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Inputs:
    """Of local attention; ``k`` and ``v`` begin with the global tokens, ``grad`` is the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    global_bias: Tensor | None
    grad: Tensor


Shared = dict[AttentionWork, Inputs]
"""Inputs that methods of the same shape share."""


def attention_job(work: AttentionWork, mode: str, device: torch.device, shared: Shared) -> Job:
    """``work`` ready to run; inputs are kept in ``shared``."""
    if work.method == LARGE_MATMUL:
        return _large_matmul(work, device)
    if work.method == BATCHED_MATMUL:
        return _batched_matmul(work, mode, device)
    if work.shape not in shared:
        shared[work.shape] = _inputs(work, device)
    inputs = shared[work.shape]
    leaves = [x for x in (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.global_bias) if x is not None]
    if work.method == FULL_ATTENTION:
        return _job(lambda: _full(inputs), leaves[:3], inputs.grad, mode)
    neighbours = _neighbours(work.neighbours, device)
    return _job(lambda: _local(work, inputs, next(neighbours)), leaves, inputs.grad, mode)


def refusal(work: AttentionWork, mode: str, device: torch.device) -> str | None:
    """Why the implementation cannot run this, as a sentence; None if it can."""
    if work.method in REFERENCES:
        return None
    kind = "one" if work.neighbours == "random" else work.neighbours
    spec = LocalSpec(work.grid, work.window, work.rule, kind, 1, work.dim**-0.5)
    q = torch.empty(work.batch, work.grid.tokens, work.heads, work.dim, device=device, requires_grad=mode == BOTH)
    return why_not(work.method, spec, q)


def _inputs(work: AttentionWork, device: torch.device) -> Inputs:
    """Random numbers in the layout that the projection to q, k and v leaves them in: views of one tensor."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    tokens, extra, side = work.grid.tokens, work.global_tokens, 4 * work.window - 1
    projected = draw(work.batch, extra + tokens, 3, work.heads, work.dim)
    q, k, v = (x.detach().requires_grad_() for x in (projected[:, extra:, 0], projected[:, :, 1], projected[:, :, 2]))
    bias = draw(work.heads, side, side).requires_grad_() if work.bias else None
    global_bias = draw(work.heads, extra).requires_grad_() if work.bias and extra else None
    return Inputs(q, k, v, bias, global_bias, draw(work.batch, tokens, work.heads, work.dim))


def _neighbours(neighbours: str, device: torch.device) -> Iterator[Any]:
    """What to pass from call to call; random shift passes tensors, as the model does."""
    return cycle(torch.arange(1, 9, device=device).unbind() if neighbours == "random" else (neighbours,))


def _local(work: AttentionWork, inputs: Inputs, neighbours: str | Tensor) -> Tensor:
    return local_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        work.grid,
        window=work.window,
        rule=work.rule,
        neighbours=neighbours,
        bias=inputs.bias,
        global_bias=inputs.global_bias,
        implementation=work.method,
    )


def _full(inputs: Inputs) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _job(attend: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor, mode: str) -> Job:
    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(), leaves, grad)

    inputs, output = sum(_bytes(x) for x in leaves), _bytes(grad)
    return Job(both, inputs + output, output + inputs) if mode == BOTH else Job(forward, inputs, output)


def _large_matmul(work: AttentionWork, device: torch.device) -> Job:
    a, b, c = (torch.ones(work.side, work.side, device=device) for _ in range(3))
    return Job(lambda: torch.mm(a, b, out=c), 3 * _bytes(a), 0)


def _batched_matmul(work: AttentionWork, mode: str, device: torch.device) -> Job:
    """The products of all chunks as if each had all neighbours, with operands and results in place: no copies, no
    softmax. Where there are many, the same operands serve several times."""
    count, queries, keys = batched_products(work), work.window**2, block_keys(work)
    size = max(1, min(count, BATCHED_FLOATS // (keys * (4 * work.dim + 2 * queries) + 4 * queries * work.dim)))
    q, out, grad, grad_q = (torch.ones(size, queries, work.dim, device=device) for _ in range(4))
    k, v, grad_k, grad_v = (torch.ones(size, keys, work.dim, device=device) for _ in range(4))
    scores, grads = (torch.ones(size, queries, keys, device=device) for _ in range(2))
    products = [(q, k.transpose(1, 2), scores), (scores, v, out)]
    if mode == BOTH:
        products += [(scores.transpose(1, 2), grad, grad_v), (grad, v.transpose(1, 2), grads)]
        products += [(grads, k, grad_q), (grads.transpose(1, 2), q, grad_k)]

    def run() -> None:
        for start in range(0, count, size):
            for a, b, c in products:
                part = slice(min(size, count - start))
                torch.bmm(a[part], b[part], out=c[part])

    return Job(run, sum(map(_bytes, (q, out, k, v, scores))), 0)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
