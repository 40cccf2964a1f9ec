"""Kernels compiled for a chip that need not be there, and their machine code. Imports triton."""

from __future__ import annotations

import re
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from .layer import Layer, intercepted

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NOT_LAUNCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "promote_types"}
"""Operations of torch that start nothing on a GPU, beside those that return views."""


class _Driver:
    """Stands for triton's driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Triton compiles for this capability, such as 90, whether or not there is such a GPU."""
    original = driver._active
    driver._active = _Driver(capability)
    try:
        yield
    finally:
        driver._active = original


@dataclass(frozen=True)
class Launched:
    """A kernel as launched in a ``phase``, forward or backward, with its options: tile sizes and others."""

    name: str
    phase: str
    programs: int
    options: dict[str, Any]
    compiled: Any = field(repr=False)

    @property
    def warps(self) -> int:
        return int(self.compiled.metadata.num_warps)

    @property
    def shared(self) -> int:
        """Bytes per block."""
        return int(self.compiled.metadata.shared)

    @property
    def tensor_memory(self) -> int:
        """Columns per block."""
        return int(getattr(self.compiled.metadata, "tmem_size", None) or 0)

    def repeats(self) -> dict[str, float]:
        """How often each multiply-add of a product is done, by shape; see :func:`repeats`."""
        return repeats(self.compiled.asm["ttgir"])

    def listing(self) -> str:
        """The machine code."""
        return _output("nvdisasm", "-c", self.compiled.asm["cubin"])

    def resources(self) -> tuple[int, int]:
        """Registers and bytes of stack of a thread."""
        usage = _output("cuobjdump", "-res-usage", self.compiled.asm["cubin"])
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        if found is None:
            raise RuntimeError(f"cuobjdump does not tell the registers of {self.name}, but: {usage}")
        return int(found[1]), int(found[2])


@dataclass
class Compiled:
    """The launches of a forward and a backward pass, and how many operations of torch run beside them, by phase."""

    kernels: list[Launched] = field(default_factory=list)
    torch_operations: Counter[str] = field(default_factory=Counter)


def compile_layer(layer: Layer, capability: int) -> Compiled:
    """Run a layer with every launch compiled instead."""
    from ...ops.triton import rows

    found, phase = Compiled(), ""

    def compile_only(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        compiled = kernel.warmup(*arguments, grid=(programs,), **options, enable_fp_fusion=True)
        found.kernels.append(Launched(kernel.__name__, phase, programs, options, compiled))

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal phase
            phase = name
            with _Operations() as operations:
                result = function(*arguments)
            found.torch_operations[name] += operations.count
            return result

        return run

    originals = {name: getattr(rows, name) for name in ("forward", "backward")}
    with compiling_for(capability), intercepted(compile_only, capability):
        try:
            for name, function in originals.items():
                setattr(rows, name, watched(name, function))
            layer.run()
        finally:
            for name, function in originals.items():
                setattr(rows, name, function)
    return found


class _Operations(TorchDispatchMode):
    """Counts operations that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(own.alias_info and not own.alias_info.is_write for own in func._schema.returns)
        self.count += not views and func.__name__.partition(".")[0] not in NOT_LAUNCHED
        return func(*args, **(kwargs or {}))


def repeats(ttgir: str) -> dict[str, float]:
    """How often the warps of a block do each multiply-add of a product, by its shape M×N×K, as their layout says.

    Above 1, several warps compute the same rows or columns; 0 for products without tensor cores. Those of the fifth
    generation, ``tcgen05.mma``, are issued once for a block and are not listed.
    """
    layouts = {}
    for name, warps, tile in re.findall(r"(#mma\d*) = .*?warpsPerCTA = \[(.*?)\], instrShape = \[(.*?)\]", ttgir):
        layouts[name] = [int(count) * int(side) for count, side in zip(warps.split(","), tile.split(","), strict=False)]
    found: dict[str, list[float]] = {}
    product = r"(?:tt\.dot|warp_group_dot) .*?<\d+x(\d+)x\w+.*? \* .* -> tensor<(\d+)x(\d+)x\w+, (#\w+)>"
    for k, m, n, layout in re.findall(product, ttgir):
        factor = 0.0
        if layout in layouts:
            rows, columns = layouts[layout]
            factor = max(1.0, rows / int(m)) * max(1.0, columns / int(n))
        found.setdefault(f"{m}x{n}x{k}", []).append(factor)
    return {shape: statistics.mean(factors) for shape, factors in found.items()}


def _output(tool: str, option: str, cubin: bytes) -> str:
    """What a tool of Triton's package prints about a compiled kernel."""
    path = TOOLS / tool
    if not path.exists():
        raise ValueError(f"{path} is missing, which Triton's package for NVIDIA GPUs has; install triton again")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout
