"""The Triton kernels: values by Triton's interpreter, registers and shared memory by compiling for real chips."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from vision_longformer.geometry import RULES, Grid
from vision_longformer.ops.spec import Inputs, LocalSpec
from vision_longformer.ops.triton import TRITON_GPU

triton = pytest.importorskip("triton")

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What a block may ask for, by compute capability."""

MOST_SPILLED = 256
"""Bytes of stack per thread that a kernel may use: a few registers, spilled outside of the inner loop or not at all."""

KERNELS = {"forward", "query_gradient", "key_gradient", "global_gradient", "bias_gradient"}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., None]]:
    """Runs a function of ``triton_worker.py`` in a process where Triton interprets."""
    script = Path(__file__).with_name("triton_worker.py")
    worker = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # where pytest finds the builders
    )
    assert worker.stdin
    assert worker.stdout

    def ask(name: str, **options: object) -> None:
        print((name, options), file=worker.stdin, flush=True)
        answer = worker.stdout.readline().strip()
        if answer != "ok":
            pytest.fail(answer.encode().decode("unicode_escape") or "the worker died", pytrace=False)

    yield ask
    worker.stdin.close()
    worker.wait(timeout=60)


CASES = [
    {"grid": (5, 9), "window": 3, "dim": 32, "heads": 1},
    {"grid": (1, 7), "window": 3, "global_tokens": 0, "bias": False, "dim": 16},
    {"grid": (2, 3), "window": 4, "global_tokens": 3, "dim": 48, "batch": 2},
    {"grid": (3, 4), "window": 2, "global_tokens": 18, "global_bias": False, "dim": 5, "scale": 0.3},
    {"grid": (7, 4), "window": 6, "dim": 64, "heads": 1},
    {"grid": (5, 4), "window": 2, "rule": "exact", "dim": 48, "heads": 1},
    {"grid": (5, 4), "window": 3, "rule": "exact", "bias": False, "dim": 16},
    {"grid": (5, 4), "window": 2, "rule": "exact", "dilation": 2, "dim": 16, "heads": 1},
    {"grid": (5, 4), "window": 3, "rule": "cyclic", "dim": 16},
    {"grid": (5, 7), "window": 3, "rule": "cyclic_release", "dim": 16, "heads": 1},
    {"grid": (5, 7), "window": 3, "neighbours": "self", "dim": 16},
    {"grid": (5, 7), "window": 3, "neighbours": 3, "dim": 16},
    {"grid": (5, 4), "window": 2, "rule": "exact", "neighbours": 8, "dim": 16, "heads": 1},
    {"grid": (5, 7), "window": 3, "rule": "cyclic_release", "neighbours": 5, "global_tokens": 3, "dim": 16, "heads": 1},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_values_and_gradients(interpreted: Callable[..., None], options: dict[str, Any]) -> None:
    interpreted("values", dtype="float32", **{"batch": 1, **options})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(interpreted: Callable[..., None], dtype: str) -> None:
    interpreted("values", dtype=dtype, grid=(4, 5), window=3, dim=32, batch=1)


def test_empty_batch(interpreted: Callable[..., None]) -> None:
    interpreted("values", dtype="float32", grid=(4, 5), window=3, dim=16, batch=0)


def test_dilation_per_head(interpreted: Callable[..., None]) -> None:
    interpreted("dilation_per_head", dilation=(1, 3), grid=(4, 5), window=2, dim=16, batch=1)


@pytest.mark.parametrize("name", ["projection", pytest.param("registered", marks=pytest.mark.slow), "refusals"])
def test_contracts(interpreted: Callable[..., None], name: str) -> None:
    interpreted(name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_sweep(interpreted: Callable[..., None], seed: int) -> None:
    draw = random.Random(seed)
    rule, heads = draw.choice(RULES), draw.choice([1, 2])
    neighbours = draw.choice(["all", "all", "self", draw.randint(1, 8)])
    dilated = rule == "exact" and neighbours == "all"
    interpreted(
        "values",
        dtype=draw.choice(["float32", "float32", "float16", "bfloat16"]),
        grid=draw.choice([(1, 1), (1, 7), (7, 1), (2, 3), (5, 9), (6, 6), (8, 3), (10, 11)]),
        window=draw.choice([1, 2, 3, 4, 5, 9]),
        rule=rule,
        neighbours=neighbours,
        dilation=tuple(draw.randint(1, 3) for _ in range(heads)) if dilated else 1,
        global_tokens=draw.choice([0, 1, 3, 17]),
        bias=draw.random() < 0.7,
        global_bias=draw.random() < 0.7,
        batch=draw.choice([1, 2]),
        heads=heads,
        dim=draw.choice([8, 16, 32, 48, 64, 128]),
        seed=seed,
    )


class _Chip:
    """Stands for triton's driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def compiled(
    monkeypatch: pytest.MonkeyPatch, capability: int, dtype: torch.dtype, dim: int, window: int, spec: dict[str, Any]
) -> dict[str, Any]:
    """All kernels of a forward and backward pass as they would be launched, compiled instead."""
    from triton.runtime.driver import driver

    from vision_longformer.ops.triton import launch

    kernels = {}

    def compile_only(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        kernels[kernel.__name__.removesuffix("_kernel")] = kernel.warmup(
            *arguments, grid=(programs,), **options, enable_fp_fusion=True
        )

    monkeypatch.setattr(driver, "_active", _Chip(capability))
    monkeypatch.setattr(launch, "launch", compile_only)
    grid, heads, side = Grid(28, 28), 2, 4 * window - 1
    qkv = torch.zeros(1, 1 + grid.tokens, 3, heads, dim, dtype=dtype, requires_grad=True)
    bias = torch.zeros(heads, side, side, dtype=dtype, requires_grad=True)
    q, k, v = qkv.unbind(2)
    rule, neighbours, dilation = spec.get("rule", "chunk"), spec.get("neighbours", "all"), spec.get("dilation", 1)
    neighbour = torch.tensor(3) if neighbours == "one" else None
    local = LocalSpec(grid, window, rule, neighbours, dilation, dim**-0.5)
    TRITON_GPU.attend(Inputs(q[:, 1:], k, v, bias, bias[:, 0, :1], neighbour), local).sum().backward()
    return kernels


def stack_bytes(cubin: bytes) -> int:
    """What a thread spills, as the disassembler reports."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    stack = re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)
    assert stack
    return int(stack[1])


def check_compiled(kernels: dict[str, Any], capability: int) -> None:
    assert set(kernels) == KERNELS
    for name, kernel in kernels.items():
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], name
        assert re.search(r"mma\.sync|wgmma|tcgen05\.mma", kernel.asm["ptx"]), f"{name} does without tensor cores"
        assert stack_bytes(kernel.asm["cubin"]) <= MOST_SPILLED, name


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    check_compiled(compiled(monkeypatch, capability, torch.bfloat16, 48, 7, {}), capability)


@pytest.mark.slow
@pytest.mark.parametrize("window", [7, 12])
@pytest.mark.parametrize("dim", [32, 48, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles_all(
    monkeypatch: pytest.MonkeyPatch, capability: int, dtype: torch.dtype, dim: int, window: int
) -> None:
    check_compiled(compiled(monkeypatch, capability, dtype, dim, window, {}), capability)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        {"rule": "exact", "dilation": 2}, {"neighbours": "one"}, {"neighbours": "self"},
        {"rule": "cyclic"}, {"rule": "cyclic_release", "neighbours": "one"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles_rules(monkeypatch: pytest.MonkeyPatch, capability: int, spec: dict[str, Any]) -> None:
    check_compiled(compiled(monkeypatch, capability, torch.bfloat16, 32, 7, spec), capability)


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of each kernel, by hand: 2 images, 2 heads, a 28×28 map of 16 chunks of 7×7, half precision."""
    from vision_longformer.ops.triton import launch

    programs = {}
    monkeypatch.setattr(launch, "launch", lambda kernel, count, *_, **__: programs.update({kernel.__name__: count}))
    spec = LocalSpec(Grid(28, 28), 7, "chunk", "all", 1, 1.0)
    q, k = torch.zeros(2, 784, 2, 32, dtype=torch.float16), torch.zeros(2, 785, 2, 32, dtype=torch.float16)
    bias = torch.zeros(2, 27, 27, dtype=torch.float16)
    inputs = Inputs(q, k, k, bias, torch.zeros(2, 1, dtype=torch.float16))
    out, lse = launch.forward(inputs, spec)
    launch.backward(out, inputs, out, lse, spec, True, True)
    assert programs == {
        "forward_kernel": 16 * 4,  # 49 queries fit a tile of 64
        "query_gradient_kernel": 16 * 4,
        "key_gradient_kernel": 16 * 4,
        "global_gradient_kernel": 4 * 13,  # 1024 // 4 shares of 784 queries, of whole tiles of 64
        "bias_gradient_kernel": 14 * 32 * 2,  # 441 keys in tiles of 32; 1024 // 28 shares of 32 chunks
    }
    programs.clear()
    launch.backward(out, inputs, out, lse, spec, False, True)
    assert "bias_gradient_kernel" not in programs


@pytest.mark.parametrize(
    ("dilation", "chunks"),
    [(1, 2 * 3), (2, (1 * 2) * 4), ((1, 2), 8), (3, (1 * 1) * 9), ((3, 1, 1), 9)],
)
def test_chunks_of_dilated_maps(dilation: int | tuple[int, ...], chunks: int) -> None:
    """A 7×9 map in chunks of 4: 2×3 of them, or those of d×d maps of 4×5, of 3×3."""
    from vision_longformer.ops.triton import launch

    assert launch._chunk_count(LocalSpec(Grid(7, 9), 4, "exact", "all", dilation, 1.0)) == chunks


def test_refusals_without_the_interpreter() -> None:
    spec = LocalSpec(Grid(2, 2), 2, "chunk", "all", 1, 1.0)
    assert TRITON_GPU.refusal(spec, torch.zeros(1, 4, 1, 16)) == "it needs a CUDA tensor; here it is on cpu"
    assert TRITON_GPU.refusal(spec, torch.zeros(1, 4, 1, 16, device="meta")) is None
    with FakeTensorMode():
        q = torch.empty(1, 4, 2, 16, device="cuda")
        assert TRITON_GPU.refusal(spec, q) is None
        assert TRITON_GPU.refusal(spec, q.bfloat16()) is None
        assert TRITON_GPU.refusal(replace(spec, rule="exact", dilation=(1, 2)), q) is None
        assert "not in float64" in str(TRITON_GPU.refusal(spec, q.double()))


def test_refusal_can_be_traced() -> None:
    """The choice of an implementation is part of a compiled model."""
    spec = LocalSpec(Grid(2, 2), 2, "chunk", "all", 1, 1.0)

    def doubled_if_refused(q: torch.Tensor) -> torch.Tensor:
        return q if TRITON_GPU.refusal(spec, q) is None else q * 2

    assert torch.compile(doubled_if_refused, fullgraph=True, backend="eager")(torch.ones(1, 4, 1, 16)).max() == 2


def test_importable_without_triton() -> None:
    code = """
import sys, torch
sys.modules["triton"] = None
from vision_longformer.geometry import Grid
from vision_longformer.ops import IMPLEMENTATIONS
from vision_longformer.ops.spec import LocalSpec
q = torch.zeros(1, 4, 1, 16)
spec = LocalSpec(Grid(2, 2), 2, "chunk", "all", 1, 1.0)
assert "not installed" in IMPLEMENTATIONS["triton_gpu"].refusal(spec, q)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
