"""The layer whose kernels are looked at, and how its launches are intercepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...geometry import Grid
from ...ops.spec import LocalSpec, PackedInputs
from ...ops.triton import attend_rows

CHUNKS = 16
"""Along each side of the map: three of four chunks have all their neighbours."""


@dataclass(frozen=True)
class Layer:
    """The attention of one layer of a model from its packed projection, rule ``chunk``, with global tokens and biases.

    As under autocast: numbers of ``dtype`` beside float32 biases.
    """

    dim: int = 32
    window: int = 7
    dtype: str = "float16"
    heads: int = 3
    batch: int = 2
    global_tokens: int = 1

    @property
    def grid(self) -> Grid:
        return Grid(CHUNKS * self.window, CHUNKS * self.window)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key of all heads and samples, every chunk taken as an interior one."""
        local = self.grid.tokens * (9 * self.window**2 + self.global_tokens)
        return self.batch * self.heads * (local + self.global_tokens * (self.global_tokens + self.grid.tokens))

    def inputs(self, device: str = "cpu") -> tuple[PackedInputs, LocalSpec]:
        """Zeros that all need gradients."""
        side, tokens = 4 * self.window - 1, self.global_tokens + self.grid.tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device, requires_grad=True)

        qkv = zeros(self.batch, tokens, 3, self.heads, self.dim, dtype=getattr(torch, self.dtype))
        global_bias = zeros(self.heads, self.global_tokens)
        from_global_bias = zeros(self.heads, self.global_tokens, self.global_tokens + 1)
        inputs = PackedInputs(qkv, zeros(self.heads, side, side), global_bias, from_global_bias)
        return inputs, LocalSpec(self.grid, self.window, "chunk", "all", 1, self.dim**-0.5)

    def run(self) -> None:
        """Forward and backward on the CPU, which needs intercepted launches."""
        attend_rows(*self.inputs()).sum().backward()


@contextmanager
def intercepted(launch_instead: Callable[..., None], capability: int) -> Iterator[None]:
    """All launches of Triton kernels call ``launch_instead(kernel, programs, *arguments, **options)``.

    The kernels are set up for a chip of this capability, such as 90.
    """
    from ...ops.triton import launch

    replaced = {"launch": launch_instead, "capability": lambda device: divmod(capability, 10)}
    originals = {name: getattr(launch, name) for name in replaced}
    for name in originals:
        setattr(launch, name, replaced[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(launch, name, original)
