"""What several test files share: cases of local attention, how results are compared, and small models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_longformer import local_attention
from vision_longformer.geometry import Grid
from vision_longformer.ops import why_not
from vision_longformer.ops.spec import LocalSpec

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference to the float64 oracle, relative to the largest value, by dtype."""


@dataclass(frozen=True)
class Case:
    """A call of local attention but for its numbers; ``neighbours`` is "all", "self", an int or a tensor."""

    grid: tuple[int, int] = (5, 9)
    window: int = 2
    rule: str = "chunk"
    neighbours: Any = "all"
    global_tokens: int = 1
    bias: bool = True
    global_bias: bool = True
    dilation: int | tuple[int, ...] = 1
    batch: int = 2
    heads: int = 2
    dim: int = 4
    scale: float | None = None
    seed: int = 0

    def tensors(
        self, dtype: torch.dtype = torch.float64, *, grad: bool = True, precision: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Random q, k, v and biases, and ``weight``, which the output is weighted by to have gradients.

        ``precision`` rounds the numbers to another dtype on the way.
        """
        generator = torch.Generator().manual_seed(self.seed)
        tokens, side = Grid(*self.grid).tokens, 4 * self.window - 1
        shapes = {"q": (self.batch, tokens, self.heads, self.dim)}
        shapes["k"] = shapes["v"] = (self.batch, self.global_tokens + tokens, self.heads, self.dim)
        if self.bias:
            shapes["bias"] = (self.heads, side, side)
        if self.global_bias:
            shapes["global_bias"] = (self.heads, self.global_tokens)
        shapes["weight"] = shapes["q"]
        drawn = {}
        for name, shape in shapes.items():
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64).to(precision or dtype)
            drawn[name] = numbers.to(dtype).requires_grad_(grad and name != "weight")
        return drawn

    def options(self) -> dict[str, Any]:
        """The arguments of :func:`local_attention` beside the tensors and the grid."""
        return {name: getattr(self, name) for name in ("window", "rule", "neighbours", "dilation", "scale")}

    def refusal(self, implementation: str, dtype: torch.dtype = torch.float64, *, grad: bool = True) -> str | None:
        """Why the implementation cannot run this case."""
        kind = self.neighbours if isinstance(self.neighbours, str) else "one"
        steps = (self.dilation,) if isinstance(self.dilation, int) else self.dilation
        q = self.tensors(dtype, grad=grad)["q"]
        scale = self.dim**-0.5 if self.scale is None else self.scale
        specs = [LocalSpec(Grid(*self.grid), self.window, self.rule, kind, step, scale) for step in steps]
        return next((reason for spec in specs if (reason := why_not(implementation, spec, q))), None)


def run(implementation: str, case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output of a case and the gradient of every input that requires one."""
    inputs = {name: x for name, x in tensors.items() if name != "weight"}
    out = local_attention(**inputs, grid=case.grid, **case.options(), implementation=implementation)
    results = {"output": out.detach()}
    wanted = {name: x for name, x in inputs.items() if x.requires_grad}
    if wanted:
        grads = torch.autograd.grad((out * tensors["weight"]).sum(), list(wanted.values()))
        results |= {f"gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return results


def compare(implementation: str, case: Case, dtype: torch.dtype = torch.float64) -> None:
    """Outputs and gradients of an implementation agree with the float64 oracle on the same, rounded, numbers.

    An implementation that refuses inputs which require gradients is compared by its outputs alone.
    """
    grad = case.refusal(implementation, dtype, grad=True) is None
    oracle = run("masked_dense", case, case.tensors(grad=grad, precision=dtype))
    got = run(implementation, case, case.tensors(dtype, grad=grad))
    for name, expected in oracle.items():
        assert got[name].dtype == dtype
        assert_close(got[name], expected, TOLERANCES[dtype], f"{name} of {implementation} in {case}")


def assert_close(got: Tensor, expected: Tensor, tolerance: float, what: str = "result") -> None:
    """Equal shapes, and no entry further off than ``tolerance`` times the largest expected entry (1, if smaller)."""
    assert got.shape == expected.shape, f"{what} is {tuple(got.shape)}, not {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    assert torch.isfinite(got).all(), f"{what} is not finite"
    error = (got.double() - expected.double()).abs().max().item()
    largest = max(1.0, expected.abs().max().item())
    assert error <= tolerance * largest, f"{what} is off by {error:.2e}, the largest value being {largest:.2e}"
