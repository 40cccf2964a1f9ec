"""The Triton kernels: values by Triton's interpreter, registers and shared memory by compiling for real chips."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from vision_longformer.bench.gpu.chips import CHIPS, blocks_per_multiprocessor
from vision_longformer.bench.gpu.layer import intercepted
from vision_longformer.bench.gpu.sass import Code, parse
from vision_longformer.geometry import RULES, Grid
from vision_longformer.ops.spec import Inputs, LocalSpec, PackedInputs
from vision_longformer.ops.triton import TRITON_GPU

pytest.importorskip("triton")
launch = pytest.importorskip("vision_longformer.ops.triton.launch")
rows = pytest.importorskip("vision_longformer.ops.triton.rows")
gpu = pytest.importorskip("vision_longformer.bench.gpu.compile")


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
    {"grid": (8, 7), "window": 2, "dim": 16, "heads": 1},
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


@pytest.mark.parametrize("name", ["projection", "far_heads", "refusals"])
def test_contracts(interpreted: Callable[..., None], name: str) -> None:
    interpreted(name)


@pytest.mark.parametrize("programs", [1, 2, 3, 100])
def test_shares_of_partial_sums_add_up(interpreted: Callable[..., None], programs: int) -> None:
    """Eight chunks of two samples, as one share, two, three of unequal size, and each its own."""
    interpreted("shares", programs=programs)


def test_bands(interpreted: Callable[..., None]) -> None:
    interpreted("bands")


@pytest.mark.parametrize(("dtype", "grid", "dim"), [("float16", (5, 7), 16), ("float32", (8, 7), 48)])
def test_nothing_outside_the_tensors_is_read(
    interpreted: Callable[..., None], dtype: str, grid: tuple[int, int], dim: int
) -> None:
    """The second with inner chunks, and with heads of three slices of four."""
    interpreted("guarded", dtype=dtype, grid=grid, window=2, dim=dim, heads=1)


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "window"), [((22, 23), 7), ((25, 26), 12)])
def test_large_windows(interpreted: Callable[..., None], grid: tuple[int, int], window: int) -> None:
    """One global token, all biases; global and local rows from one projection."""
    interpreted("guarded_rows", grid=grid, window=window, dim=32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_sweep(interpreted: Callable[..., None], seed: int) -> None:
    draw = random.Random(seed)
    rule, heads = draw.choice(RULES), draw.choice([1, 2])
    neighbours = draw.choice(["all", "all", "self", draw.randint(1, 8)])
    dilated = rule == "exact" and neighbours == "all"
    interpreted(
        "values",
        dtype=draw.choice(["float32", "float32", "float16", "bfloat16"]),
        grid=draw.choice([(1, 1), (1, 7), (7, 1), (2, 3), (5, 6), (6, 6), (8, 3)]),
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


@cache
def compiled(chip: str, dtype: torch.dtype, dim: int, window: int, **spec: Any) -> list[Any]:
    """The kernels of a layer, forward and backward, that make products, compiled for a chip that is not here."""
    kernels = []

    def compile_only(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        if "PRECISION" in options:
            done = kernel.warmup(*arguments, grid=(programs,), **options, enable_fp_fusion=True)
            kernels.append(gpu.Launched(kernel.__name__, "", programs, options, done))

    grid, heads, side = Grid(28, 28), 2, 4 * window - 1
    biases = torch.zeros(heads, side, side), torch.zeros(heads, 1), torch.zeros(heads, 1, 2)
    rule, neighbours, dilation = spec.get("rule", "chunk"), spec.get("neighbours", "all"), spec.get("dilation", 1)
    local = LocalSpec(grid, window, rule, neighbours, dilation, dim**-0.5)
    qkv = torch.zeros(1, 1 + grid.tokens, 3, heads, dim, dtype=dtype)
    inputs = PackedInputs(qkv, *biases, torch.tensor(3) if neighbours == "one" else None)
    capability = CHIPS[chip].capability
    with gpu.compiling_for(capability), intercepted(compile_only, capability):
        out, lse = rows.forward(inputs, local)
        rows.backward(out, inputs, out, lse, local, True, True, True)
    names = ("forward", "global_rows", "query_gradient", "key_gradient", "global_sums", "global_gradient")
    assert [kernel.name for kernel in kernels] == [f"{name}_kernel" for name in names]
    return kernels


def demanded(ttgir: str) -> int:
    """Multiply-adds M·N·K of all products of a kernel as it is written, each counted once; float32 ones are three."""
    warp = r"(?:tt\.dot|warp_group_dot) .*?<(\d+)x(\d+)x\w+.*? \* .*?<\d+x(\d+)x"
    block = r"tc_gen5_mma .*?memdesc<(\d+)x(\d+)x\w+.*?memdesc<\d+x(\d+)x"
    found = [shape for line in ttgir.splitlines() for shape in re.findall(f"{warp}|{block}", line)]
    return sum(math.prod(int(side) for side in shape if side) for shape in found)


def executed(code: Code) -> float:
    """Multiply-adds of all instructions that a block has for the tensor cores; one warp issues those of all (UTC)."""
    instructions = [i for n in code.reachable for i in code.blocks[n].instructions if i.shape]
    return sum(i.macs(1 if i.name.startswith("UTC") else code.warps) for i in instructions)


MANY = 5
"""Tiles of a loop that is not unrolled."""


def check_compiled(kernels: list[Any], chip: str) -> None:
    for kernel in kernels:
        assert kernel.shared <= CHIPS[chip].shared - CHIPS[chip].reserved, kernel.name
        registers, _ = kernel.resources()
        blocks = blocks_per_multiprocessor(CHIPS[chip], registers, kernel.shared, kernel.warps, kernel.tensor_memory)
        assert blocks >= 2, kernel.name
        times = kernel.repeats()
        assert times or CHIPS[chip].tensor_memory, kernel.name  # whose products are issued once for a block
        assert set(times.values()) <= {1}, (kernel.name, times)
        code = Code(parse(kernel.listing(), kernel.name), kernel.warps)
        done, wanted = executed(code), demanded(kernel.compiled.asm["ttgir"])
        unrolled = kernel.options.get("TILES", MANY) < MANY  # such a loop's products are there once for each tile
        assert done >= wanted > 0 if unrolled else done == wanted > 0, kernel.name
        assert code.spills_in_loops() == 0, kernel.name


def test_compiles() -> None:
    check_compiled(compiled("sm_80", torch.bfloat16, 64, 7), "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "half_dim", "float_dim"),
    [
        ("sm_80", 32, 64), ("sm_86", 64, 64), ("sm_89", 64, 32), ("sm_90", 64, 64), ("sm_100", 64, 64),
        ("sm_120", 64, 32), ("sm_120", 64, 64),
    ],
)  # fmt: skip
def test_compiles_for_every_chip(chip: str, half_dim: int, float_dim: int) -> None:
    """``vil bench gpu`` looks at any other head dimension and chip."""
    check_compiled(compiled(chip, torch.float16, half_dim, 7), chip)
    check_compiled(compiled(chip, torch.float32, float_dim, 7), chip)


@pytest.mark.slow
def test_compiles_a_large_window() -> None:
    check_compiled(compiled("sm_86", torch.float16, 48, 12), "sm_86")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        {"rule": "exact", "dilation": 2}, {"neighbours": "one"}, {"neighbours": "self"},
        {"rule": "cyclic"}, {"rule": "cyclic_release", "neighbours": "one"},
    ],
    ids=str,
)  # fmt: skip
def test_compiles_rules(spec: dict[str, Any]) -> None:
    check_compiled(compiled("sm_80", torch.bfloat16, 32, 7, **spec), "sm_80")


def test_partial_sums_are_read_and_written_by_the_same_threads() -> None:
    """Else a sum could be read before another thread has written it."""
    gradient = next(k for k in compiled("sm_80", torch.bfloat16, 64, 7) if k.name == "query_gradient_kernel")
    code = gradient.compiled.asm["ttgir"]
    elements = gradient.options["BLOCK_M"] * gradient.options["BLOCK_N"]
    accesses = re.findall(rf"tt\.(load|store) .*: tensor<{elements}x!tt\.ptr<f32>, (#\w+)>", code)
    assert {kind for kind, _ in accesses} == {"load", "store"}
    assert len({layout for _, layout in accesses}) == 1


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of each kernel, by hand: 2 images, 2 heads, a 28×28 map of 16 chunks of 7×7, half precision."""
    programs: list[tuple[str, int]] = []
    monkeypatch.setattr(launch, "launch", lambda kernel, count, *_, **__: programs.append((kernel.__name__, count)))
    spec = LocalSpec(Grid(28, 28), 7, "chunk", "all", 1, 1.0)
    q, k = torch.zeros(2, 784, 2, 32, dtype=torch.float16), torch.zeros(2, 785, 2, 32, dtype=torch.float16)
    bias = torch.zeros(2, 27, 27, dtype=torch.float16)
    inputs = Inputs(q, k, k, bias, torch.zeros(2, 1, dtype=torch.float16))
    out, lse = launch.forward(inputs, spec)
    assert programs == [
        ("bias_tiles_kernel", 2 * 7),  # 441 keys in tiles of 64, for each head
        ("forward_kernel", 16 * 4),  # 49 queries fit a tile of 64
    ]
    programs.clear()
    launch.backward(out, inputs, out, lse, spec, True, True)
    assert programs == [
        ("bias_tiles_kernel", 2 * 2 * 14),  # 441 keys or queries in tiles of 32
        ("query_gradient_kernel", 2 * 32),  # a chunk each: there is room for the partial sums of 292 programs
        ("key_gradient_kernel", 16 * 4),
        ("global_sums_kernel", 4 * 4),  # 784 tokens in 4 shares of 256
        ("bias_gradient_kernel", 2 * 27),
    ]
    programs.clear()
    launch.backward(out, inputs, out, lse, spec, False, True)
    assert "bias_gradient_kernel" not in dict(programs)


def test_launches_of_a_band(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of eight chunks, and keys of a row above and one below."""
    programs: dict[str, int] = {}
    monkeypatch.setattr(launch, "launch", lambda kernel, count, *_, **__: programs.update({kernel.__name__: count}))
    spec = LocalSpec(Grid(14, 56), 7, "chunk", "all", 1, 1.0, (7, 7))
    q, k = torch.zeros(1, 784, 2, 32, dtype=torch.float16), torch.zeros(1, 1568, 2, 32, dtype=torch.float16)
    out, lse = launch.forward(Inputs(q, k, k), spec)
    launch.backward(out, Inputs(q, k, k), out, lse, spec, False, False)
    assert programs == {
        "bias_tiles_kernel": 2 * 14,  # without a bias all heads have the same
        "forward_kernel": 16 * 2,
        "query_gradient_kernel": 16 * 2,
        "key_gradient_kernel": 32 * 2,
        "global_sums_kernel": 0,
    }


def test_shares_of_the_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the sums of three programs per head makes three shares of 32 chunks: every third one is of the same."""
    monkeypatch.setattr(launch, "MOST_PARTIAL_SUMS", 3 * 2 * 14 * 64 * 32)
    seen: dict[str, tuple[int, tuple[Any, ...]]] = {}
    monkeypatch.setattr(launch, "launch", lambda kernel, count, *a, **_: seen.update({kernel.__name__: (count, a)}))
    q = torch.zeros(2, 784, 2, 32, dtype=torch.float16)
    inputs = Inputs(q, q, q, torch.zeros(2, 27, 27))
    out, lse = launch.forward(inputs, spec := LocalSpec(Grid(28, 28), 7, "chunk", "all", 1, 1.0))
    launch.backward(out, inputs, out, lse, spec, True, False)
    count, arguments = seen["query_gradient_kernel"]
    assert (count, arguments[-2:]) == (3 * 2, (32, 3))


@pytest.mark.parametrize(
    ("dilation", "chunks"),
    [(1, 2 * 3), (2, (1 * 2) * 4), ((1, 2), 8), (3, (1 * 1) * 9), ((3, 1, 1), 9)],
)
def test_chunks_of_dilated_maps(dilation: int | tuple[int, ...], chunks: int) -> None:
    """A 7×9 map in chunks of 4: 2×3 of them, or those of d×d maps of 4×5, of 3×3."""
    assert launch._chunk_count(LocalSpec(Grid(7, 9), 4, "exact", "all", dilation, 1.0)) == chunks


def test_nothing_is_copied_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph cannot capture such a copy, nor keep a tensor that a cache made during capture."""
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a copy from the host"))
    spec = LocalSpec(Grid(7, 9), 4, "exact", "all", (1, 3), 1.0)
    first, second = (launch._dilations(spec, torch.zeros(1, 63, 2, 16)) for _ in range(2))
    assert first.tolist() == [1, 3]
    assert first.dtype == torch.int32
    assert first.data_ptr() != second.data_ptr()


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


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((8, 0), None, None), ((8, 6), None, None), ((8, 9), None, None), ((9, 0), None, None), ((12, 0), None, None),
        ((7, 5), None, "it needs compute capability 8.0, and this GPU has 7.5"),
        ((9, 4), "6.2", "it is written for NVIDIA's tensor cores, and this is a GPU of AMD's"),
    ],
)  # fmt: skip
def test_refusals_by_chip(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    spec = LocalSpec(Grid(2, 2), 2, "chunk", "all", 1, 1.0)
    with FakeTensorMode():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert TRITON_GPU.refusal(spec, torch.empty(1, 4, 2, 16, device="cuda", dtype=dtype)) == reason


def test_refusals_by_size() -> None:
    spec = LocalSpec(Grid(1 << 12, 1 << 13), 2, "chunk", "all", 1, 1.0)
    q = torch.zeros(1, 1 << 25, 1, 33, device="meta")
    assert TRITON_GPU.refusal(spec, q[..., :32]) is None
    assert "2³⁰ numbers" in str(TRITON_GPU.refusal(spec, q))
    assert "must be positive, not -1.0" in str(TRITON_GPU.refusal(replace(spec, scale=-1.0), q[..., :32]))


def test_tokens_that_32_bits_cannot_count_are_copied() -> None:
    """Tokens are counted in 32 bits within a head of a sample; heads may be any distance apart."""
    heads_apart = torch.empty_strided((1, 2, 3, 4), (0, 4, 1 << 40, 1), device="meta")
    assert launch.view(heads_apart)[1:] == (0, 4, 1 << 40)
    tokens_apart = torch.empty_strided((1, 2, 3, 4), (0, 1 << 30, 4, 1), device="meta")
    assert launch.view(tokens_apart)[1:] == (24, 12, 4)


@pytest.mark.parametrize(
    ("setting", "value", "precision"), [("fp32_precision", "tf32", "tf32"), ("fp32_precision", "ieee", "tf32x3")]
)
def test_precision_of_float32_products(setting: str, value: str, precision: str) -> None:
    """Also by torch's newer setting, after which the older question raises; asked in a process of its own."""
    code = f"""
import torch
from vision_longformer.geometry import Grid
from vision_longformer.ops.spec import LocalSpec
from vision_longformer.ops.triton import launch
torch.backends.cuda.matmul.{setting} = {value!r}
spec, q = LocalSpec(Grid(4, 4), 2, "chunk", "all", 1, 1.0), torch.zeros(1, 16, 1, 16)
print(launch._constants(q, spec, launch.tiling_of(q, spec, backward=False))["PRECISION"])
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == precision


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
