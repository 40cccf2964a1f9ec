"""``vil bench gpu``: instructions, occupancy and roofline counted by hand, and how it answers mistakes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from vision_longformer.bench.gpu import compile as gpu_compile
from vision_longformer.bench.gpu import measure
from vision_longformer.bench.gpu import report as gpu_report
from vision_longformer.bench.gpu.chips import CHIPS, blocks_per_multiprocessor
from vision_longformer.bench.gpu.compile import Compiled, compile_layer, repeats
from vision_longformer.bench.gpu.interpret import Counted, Work
from vision_longformer.bench.gpu.layer import Layer
from vision_longformer.bench.gpu.report import Execution, KernelReport, report_layer, roofline
from vision_longformer.bench.gpu.sass import Code, Instruction, Trace, parse
from vision_longformer.cli.bench_gpu import print_kernels, print_shares
from vision_longformer.cli.main import main


def listing(text: str, name: str = "own_kernel") -> str:
    """As nvdisasm prints: labels at the margin, instructions with their addresses."""
    lines = [f"\t.section\t.text.{name}", f".text.{name}:"]
    for number, line in enumerate(text.strip().splitlines()):
        lines.append(line.strip() if line.strip().endswith(":") else f"        /*{number:04x}*/  {line.strip()} ;")
    return "\n".join(lines)


LOOP = listing("""
    S2R R3, SR_CTAID.X
    @!P0 EXIT
    IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28]
    .L_x_2:
    LDGSTS.E.BYPASS.128 [R4], [R6.64]
    LDSM.16.M88.4 R8, [R4]
    LDS.64 R12, [R4+0x100]
    HMMA.16816.F32 R32, R36.reuse, R20, RZ
    HMMA.16816.F32 R36, R36, R16, RZ
    @P1 BRA `(.L_x_3)
    FMUL R8, R8, R9
    FADD R8, R8, R9
    BRA `(.L_x_4)
    .L_x_3:
    ISETP.GE.AND P2, PT, R1, R2, PT
    .L_x_4:
    MUFU.EX2 R8, R8
    F2FP.PACK_AB R8, R9, R8
    UIADD3 UR4, UR4, 0x1, URZ
    STL [R1], R8
    @P0 CALL.REL.NOINC `(.L_x_1)
    BRA `(.L_x_2)
    .L_x_1:
    STG.E.128 [R2.64], R8
    EXIT
    .L_x_9:
    BRA `(.L_x_9)
""")
"""Of the two branches the one with three instructions is the longer. The last loop is never reached."""


def test_instructions_of_a_loop() -> None:
    code = Code(parse(LOOP, "own_kernel"), warps=4)
    (loop,) = code.main_loops()
    outside, inside = code.levels(loop)
    assert outside.by_class() == dict.fromkeys(inside.by_class(), 0) | {
        "integer": 1, "load": 1, "control": 2, "other": 1,
    }  # fmt: skip
    assert inside.by_class() == {
        "tensor": 2, "special": 1, "load": 2, "shared": 2, "integer": 1, "float": 2, "conversion": 1, "control": 4,
        "other": 0,
    }  # fmt: skip
    assert code.spills_in_loops() == 1
    assert inside.macs(warps=4) == 2 * 16 * 8 * 16 * 4


def test_bytes_and_pipes() -> None:
    by_code = {i.code: i for block in parse(LOOP, "own_kernel") for i in block.instructions}
    bytes_ = {"LDGSTS.E.BYPASS.128": 16, "LDSM.16.M88.4": 16, "LDS.64": 8, "STL": 4, "STG.E.128": 16}
    assert {code: by_code[code].bytes_per_lane for code in bytes_} == bytes_
    assert Instruction("LDG.E.U16").bytes_per_lane == 2
    assert by_code["UIADD3"].uniform
    assert not by_code["ISETP.GE.AND"].uniform


NESTED = listing("""
    IADD3 R1, R1, 0x1, RZ
    .L_x_0:
    LDG.E R4, [R2.64]
    HMMA.1688.F32 R4, R4, R8, RZ
    .L_x_1:
    HMMA.16816.F32 R4, R4, R8, R4
    MUFU.EX2 R4, R4
    SYNCS.PHASECHK.TRANS64.TRYWAIT P5, [UR46], R17
    @!P5 BRA `(.L_x_5)
    .L_x_6:
    @!P0 BRA `(.L_x_1)
    FADD R4, R4, R4
    @P1 BRA `(.L_x_0)
    STG.E [R2.64], R4
    EXIT
    .L_x_5:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P5, [UR46], R17
    @!P5 BRA `(.L_x_5)
    BRA `(.L_x_6)
""")
"""Products in a loop of a loop; inside, a place where a warp waits, which is listed after the end."""


def test_nested_loops() -> None:
    code = Code(parse(NESTED, "own_kernel"), warps=1)
    (loop,) = code.main_loops()
    levels = code.levels(loop)
    assert [level.instructions for level in levels] == [3, 4, 8]
    assert [level.macs(1) for level in levels] == [0, 16 * 8 * 8, 16 * 8 * 16]
    work = Work("own_kernel", {"16x8x16": 12 * 2048 + 3 * 1024}, calls={1: 9, 3: 4, 12: 2}, macs_per_score=16)
    run = Execution(levels, work, 1, {})
    assert run.times == [1, 3, 12]
    assert run.total.instructions == 3 + 3 * 4 + 12 * 8
    assert run.tile == 128  # scores: 16 × 8


def test_peeled_iterations_do_not_count_twice() -> None:
    """Five products in all, one before the loop: four iterations; without a loop, what there is."""
    product = Instruction("HMMA.16816.F32", shape=(16, 8, 16))
    once = Trace(Counter({product: 1}))
    work = Work("own_kernel", {"16x8x16": 5 * 2048}, macs_per_score=32)
    assert Execution([once, once], work, 1, {}).times == [1, 4]
    twice = Trace(Counter({product: 2}))
    assert Execution([twice, twice], work, 1, {}).times == [1, 2]  # the last one runs half
    assert Execution([Trace(Counter({product: 5}))], work, 1, {}).times == [1]


def test_duplicated_rows_do_not_halve_the_iterations() -> None:
    """Two warps that compute the same 16 rows: 2 × 2,048 multiply-adds for 2,048, four times, for 128 scores each."""
    product = Instruction("HMMA.16816.F32", shape=(16, 8, 16))
    work = Work("own_kernel", {"16x8x16": 4 * 2048}, macs_per_score=16)
    run = Execution([Trace(), Trace(Counter({product: 1}))], work, 2, {"16x8x16": 2.0})
    assert (run.times, run.repeats, run.tile) == ([1, 4], 2.0, 128)


def test_products_without_tensor_cores() -> None:
    """As many iterations as calls; what is left of the scores is theirs."""
    levels = [Trace(), Trace(Counter({Instruction("FFMA"): 64}))]
    work = Work("own_kernel", {"16x16x16": 7 * 4096}, calls={1: 2, 7: 3}, scores=7 * 256, macs_per_score=16)
    run = Execution(levels, work, 1, {})
    assert (run.times, run.tile) == ([1, 7], 256)
    assert run.per_score()["float"] == 64 * 32 / 256


def test_of_two_loops_the_shorter_counts() -> None:
    """Chunks inside the map take one, chunks at its border the other."""
    text = """
        @P0 BRA `(.L_x_3)
        .L_x_1:
        HMMA.16816.F32 R4, R4, R8, R4
        SEL R4, R4, RZ, P0
        @P1 BRA `(.L_x_1)
        BRA `(.L_x_4)
        .L_x_3:
        HMMA.16816.F32 R4, R4, R8, R4
        @P1 BRA `(.L_x_3)
        .L_x_4:
        EXIT
    """
    kernel = _Kernel(listing(text), warps=1)
    found = gpu_report.report_kernel(
        kernel, Work("own_kernel", {"16x8x16": 2048 * 6}, macs_per_score=16), CHIPS["sm_80"]
    )
    assert found.iterations == 6
    assert found.cycles["issue"] == (2 + 6 * 2) / 4
    assert found.per_score["tensor"] == 32 / 128


TCGEN05 = listing("""
    UMOV UR27, 0x4100010
    BRA.U UP0, `(.L_x_6)
    UTCHMMA gdesc[UR6], gdesc[UR18], tmem[UR16], tmem[UR26], idesc[UR27], !UPT
    UTCHMMA tmem[UR20], gdesc[UR22], tmem[UR10], tmem[UR26], idesc[UR27], UPT
    .L_x_6:
    EXIT
""")
"""The constant's fields: M / 16 = 4 from bit 24, N / 8 = 8 from bit 17, 16-bit operands. One warp issues for all."""


def test_products_of_later_generations() -> None:
    (trace,) = Code(parse(TCGEN05, "own_kernel"), warps=4).levels(None)
    assert trace.macs(4) == 2 * 64 * 64 * 16
    assert trace.by_class()["tensor"] == 2 / 4
    first, second = (i for i in trace.counts if i.shape)
    assert first.operand_bytes(4) / 4 == (64 + 64) * 32
    assert second.operand_bytes(4) / 4 == 64 * 32
    hopper = listing("""
        HGMMA.64x32x16.F32 R24, gdesc[UR8], RZ, !UPT
        HGMMA.64x32x8.F32.TF32 R24, R88, gdesc[UR8].tnspB, R24
        EXIT
    """)
    (block,) = parse(hopper, "own_kernel")
    assert [i.macs(8) for i in block.instructions] == [2 * 64 * 32 * 16, 2 * 64 * 32 * 8, 0]
    assert [i.operand_bytes(4) for i in block.instructions] == [(64 + 32) * 32, 32 * 32, 0]


def test_unknown_listings() -> None:
    with pytest.raises(ValueError, match=r"no function 'other_kernel'"):
        parse(LOOP, "other_kernel")
    with pytest.raises(ValueError, match=r"IMMA.9999 has an unknown shape; known are 16816"):
        parse(listing("IMMA.9999 R1, R2, R3, R4"), "own_kernel")
    with pytest.raises(ValueError, match="is not a constant"):
        parse(listing("UTCHMMA gdesc[UR6], gdesc[UR8], tmem[UR1], tmem[UR2], idesc[UR3], UPT"), "own_kernel")


@pytest.mark.parametrize(
    ("chip", "registers", "shared", "warps", "columns", "blocks"),
    [
        ("sm_80", 32, 0, 4, 0, 16),  # 64 warps
        ("sm_80", 180, 40960, 4, 0, 2),  # 5,760 registers of a warp are 23 × 256 = 5,888; two of 16,384 per scheduler
        ("sm_80", 168, 40960, 4, 0, 3),  # 5,376, three per scheduler; four blocks by shared memory
        ("sm_80", 255, 0, 8, 0, 1),  # 8,192: two per scheduler, eight in all
        ("sm_80", 32, 0, 1, 0, 32),
        ("sm_80", 32, 41 << 10, 4, 0, 3),  # 164 / (41 + 1)
        ("sm_86", 32, 50 << 10, 4, 0, 1),  # 100 / (50 + 1)
        ("sm_86", 32, 49 << 10, 4, 0, 2),
        ("sm_86", 32, 0, 2, 0, 16),
        ("sm_89", 32, 0, 4, 0, 12),  # 48 warps
        ("sm_90", 32, 100 << 10, 4, 0, 2),
        ("sm_75", 32, 32 << 10, 4, 0, 2),  # nothing reserved
        ("sm_75", 32, 0, 4, 0, 8),
        ("sm_100", 32, 0, 4, 256, 2),  # 512 columns of tensor memory
        ("sm_100", 32, 0, 4, 96, 4),  # 128 of them
        ("sm_80", 32, 200 << 10, 4, 0, 0),
    ],
)
def test_blocks_per_multiprocessor(
    chip: str, registers: int, shared: int, warps: int, columns: int, blocks: int
) -> None:
    assert blocks_per_multiprocessor(CHIPS[chip], registers, shared, warps, columns) == blocks


def test_roofline() -> None:
    """Four warps on an A100: clocks per part by hand."""
    counts = {
        Instruction("HMMA.16816.F32", shape=(16, 8, 16)): 10,
        Instruction("MUFU.EX2"): 3,
        Instruction("F2I.TRUNC.NTZ"): 1,
        Instruction("LDS.128"): 2,
        Instruction("LDG.E"): 1,
        Instruction("ISETP.GE.AND"): 5,
        Instruction("UIADD3"): 7,
        Instruction("FFMA"): 6,
        Instruction("IMAD"): 2,
    }
    found = roofline(Trace(Counter(counts)), 4, 5120, CHIPS["sm_80"])
    assert found == pytest.approx(
        {
            "tensor": 4 * 10 * 2048 / 1024,
            "special": 4 * 4 * 32 / 16,
            "load/store": 4 * (2 * 4 + 1),
            "integer": 4 * 5 * 32 / 64,
            "float": 4 * 8 * 32 / 64,
            "issue": 37,
            "cache": 108,
        }
    )
    later = roofline(Trace(Counter(counts)), 4, 0, CHIPS["sm_90"])
    assert later["tensor"] == pytest.approx(4 * 10 * 2048 / 1270)  # not by its own instructions
    assert later["float"] == 4 * 8 * 32 / 128
    pairs = roofline(Trace(Counter({Instruction("FFMA2"): 8})), 4, 0, CHIPS["sm_100"])
    assert pairs["float"] == 4 * 8 * 64 / 128
    integers = roofline(Trace(Counter({Instruction("IMAD.IADD"): 8})), 4, 0, CHIPS["sm_90"])
    assert integers["float"] == 4 * 8 * 32 / 64


def test_rates_of_products() -> None:
    def rate(code: str, chip: str, shape: tuple[int, int, int], operands: str = "") -> float:
        return gpu_report.tensor_rate(Instruction(code, operands, shape=shape), CHIPS[chip])

    assert rate("HMMA.1688.F32.TF32", "sm_80", (16, 8, 8)) == 512
    assert rate("HGMMA.64x64x16.F32", "sm_90", (64, 64, 16), "R24, gdesc[UR8], RZ") == 2048
    assert rate("UTCHMMA", "sm_100", (128, 64, 16), "gdesc[UR6], gdesc[UR8]") == 4096
    assert rate("UTCHMMA", "sm_100", (64, 64, 16), "gdesc[UR6], gdesc[UR8]") == 2048


def test_repeated_rows() -> None:
    """Warps × rows of an instruction, against the rows and columns of the result."""
    ttgir = """
#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 8]}>
#mma1 = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 2], instrShape = [16, 32, 16]}>
%1 = tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<64x32xf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 2}>> * tensor<32x64xf16, #ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = 2}>> -> tensor<64x64xf32, #mma> loc(#loc1)
%2 = tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<32x16xf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 2}>> * tensor<16x64xf16, #ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = 2}>> -> tensor<32x64xf32, #mma> loc(#loc2)
%3 = ttng.warp_group_dot %a, %b, %c {isAsync = true} : !ttg.memdesc<64x64xf16, #shared, #smem> * !ttg.memdesc<64x32xf16, #shared2, #smem, mutable> -> tensor<64x32xf32, #mma1> loc(#loc3)
%5 = tt.dot %a, %b, %c : tensor<64x16xf32, #ttg.dot_op<{opIdx = 0, parent = #blocked}>> * tensor<16x16xf32, #ttg.dot_op<{opIdx = 1, parent = #blocked}>> -> tensor<64x16xf32, #blocked> loc(#loc3)
%4:2 = ttng.warp_group_dot_wait %3, %a {pendings = 0 : i32} : tensor<64x32xf32, #mma1>, !ttg.memdesc<64x64xf16, #shared, #smem> loc(#loc3)
"""  # noqa: E501
    assert repeats(ttgir) == {"64x64x32": 1.0, "32x64x16": 2.0, "64x32x64": 2.0, "64x16x16": 0.0}


def test_work_of_a_program() -> None:
    """Products, scores and sectors of 32 bytes, from what Triton's interpreter is asked to do."""
    builder = SimpleNamespace(
        create_dot=lambda *_: "product", create_exp2=lambda x: x, create_masked_load=print, create_masked_store=print
    )
    counted = Counted(builder)

    def array(*shape: int, dtype: Any = np.float16) -> SimpleNamespace:
        return SimpleNamespace(data=np.zeros(shape, dtype))

    counted.start("own_kernel")
    pointers, mask = SimpleNamespace(data=np.arange(0, 256, 4)), SimpleNamespace(data=np.arange(64) < 40)
    for _ in range(3):
        assert builder.create_dot(array(16, 64), array(64, 32), None, "tf32x3", 0) == "product"
        builder.create_exp2(array(16, 32))
    builder.create_dot(array(16, 8, dtype=np.float32), array(8, 16, dtype=np.float32), None, "TF32x3", 0)
    builder.create_exp2(array(16))
    for _ in range(2):
        builder.create_masked_load(pointers, mask, None, None, None)
    for _ in range(2):
        builder.create_masked_store(pointers, None, mask, None)
    assert counted.finish() == Work(
        "own_kernel",
        {"16x32x64": 3 * 16 * 32 * 64, "16x16x8": 3 * 16 * 16 * 8},
        bytes=3 * 5 * 32,  # 40 numbers of 4 bytes, read once and found again, written twice
        calls={3: 2, 2: 2, 1: 1},
        scores=3 * 16 * 32,
        macs_per_score=64,
    )


def test_caches() -> None:
    """Of 20 KB read again and again, the oldest 4 KB are gone each time, and with them what is needed next."""
    names = ("create_dot", "create_exp2", "create_masked_load", "create_masked_store")
    builder = SimpleNamespace(**dict.fromkeys(names, lambda *_: None))
    counted = Counted(builder)

    def read(first: int, count: int) -> int:
        before = counted.work.bytes
        pointers = SimpleNamespace(data=np.arange(first, first + count, 4))
        builder.create_masked_load(pointers, SimpleNamespace(data=np.ones(len(pointers.data), bool)))
        return counted.work.bytes - before

    assert [read(0, 16 << 10), read(0, 16 << 10)] == [16 << 10, 0]
    assert [read(16 << 10, 4 << 10), read(4 << 10, 12 << 10), read(0, 4 << 10)] == [4 << 10, 0, 4 << 10]
    store = SimpleNamespace(data=np.arange(0, 64, 4))
    builder.create_masked_store(store, None, SimpleNamespace(data=np.ones(16, bool)))
    assert read(0, 64) == 64  # what was written is read from the second level


class _Kernel:
    """A kernel that need not be compiled."""

    name, phase, programs, shared, tensor_memory = "own_kernel", "forward", 6, 1000, 0

    def __init__(self, text: str = LOOP, warps: int = 4, phase: str = "forward") -> None:
        self.text, self.warps, self.phase = text, warps, phase

    def listing(self) -> str:
        return self.text

    def resources(self) -> tuple[int, int]:
        return 255, 8

    def repeats(self) -> dict[str, float]:
        return {"64x8x16": 1.0}


@pytest.fixture
def _two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forward and a backward pass; 64 × 8 scores take two products of 16 numbers, ten times."""
    kernels = [_Kernel(), _Kernel(phase="backward")]
    work = Work("own_kernel", {"64x8x16": 10 * 2 * 64 * 8 * 16}, bytes=3200, macs_per_score=32)
    compiled = Compiled(kernels, Counter(forward=2, backward=5))  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_report, "compile_layer", lambda layer, capability: compiled)
    monkeypatch.setattr(gpu_report, "count_work", lambda layer, capability: [work, work])


LAYER = Layer(dim=16, window=2, heads=1, batch=1)
PAIRS = 1024 * (36 + 1) + (1024 + 1)
"""Of 32×32 local queries with nine chunks of 2×2 keys and a global key, and of the global query with all keys."""


@pytest.mark.usefixtures("_two_kernels")
def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    """An iteration has 512 scores, four for each thread; loads and stores are the slowest part."""
    found = report_layer(LAYER, CHIPS["sm_80"])
    own = found.kernels[0]
    assert (own.iterations, own.tile, own.spills, own.blocks, own.repeats) == (10, 512, 1, 2, 1.0)
    assert own.per_score["tensor"] == 2 / 4
    assert own.per_score["special"] == 1 / 4
    # 128 bytes per clock for 32 lanes: 4 + 4 + 2 + 1 in the loop, 4 at the end
    assert own.cycles["load/store"] == 4 * (10 * (4 + 4 + 2 + 1) + 4)
    assert own.cycles["issue"] == 5 + 10 * 15
    assert own.bound == "load/store"
    assert found.predicted("forward") == pytest.approx(2 * 16 * PAIRS / (1024 * 6 * 456))
    assert found.predicted("backward") == pytest.approx(5 * 16 * PAIRS / (1024 * 6 * 456))
    assert found.measured_share("forward") is None
    print_kernels(found)
    printed = capsys.readouterr().out
    assert "predicted, not measured" in printed
    assert "launches per layer: forward 1 and 2 of torch, backward 1 and 5 of torch" in printed
    assert "spills registers in a loop, by 1 instructions" in printed
    cells = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["own"])
    assert " ".join(cells) == "own forward load/store 100% 255 8 1 2 0.50 0.25 0.50 0.50 0.25 0.50 0.25 3.8"


@pytest.mark.usefixtures("_two_kernels")
def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []
    monkeypatch.setattr(measure, "capability", lambda: 80)
    monkeypatch.setattr(measure, "multiprocessors", lambda: 100)
    monkeypatch.setattr(measure, "measure", lambda layer: asked.append(layer) or {"forward": 1e-6, "backward": 4e-6})
    found, other = report_layer(LAYER, CHIPS["sm_80"]), report_layer(LAYER, CHIPS["sm_90"])
    assert asked == [LAYER]
    assert other.measured == {}
    useful = 2 * 16 * PAIRS
    assert found.measured_share("forward") == pytest.approx(useful / (1024 * 100 * 1.41e9 * 1e-6))
    assert found.measured_share("backward") == pytest.approx(2.5 * useful / (1024 * 100 * 1.41e9 * 4e-6))
    assert found.to_dict()["measured_seconds"] == {"forward": 1e-6, "backward": 4e-6}
    print_shares([found, other])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "sm_" in line]
    assert [line[-2:] for line in lines] == [["0.9%", "0.5%"], ["–", "–"]]


def test_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes are timed by events, and the first rounds are not counted."""
    clock = iter(range(10_000))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock) * (1 if len(calls) > measure.WARM_UP else 1000)

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    calls = []

    def attend(inputs: Any, spec: Any) -> torch.Tensor:
        calls.append(spec)
        return inputs.qkv.prod(2) + inputs.bias.sum() + inputs.global_bias.sum() + inputs.from_global_bias.sum()

    inputs = LAYER.inputs()
    monkeypatch.setattr(measure, "ROUNDS", 3)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Layer, "inputs", lambda self, device: inputs if device == "cuda" else None)
    monkeypatch.setattr(measure, "attend_rows", attend)
    assert measure.measure(LAYER) == {"forward": 1e-3, "backward": 1e-3}
    assert len(calls) == measure.WARM_UP + measure.ROUNDS


def test_no_gpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure.capability() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert measure.capability() == 120
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert measure.capability() is None


def test_warnings() -> None:
    kernel = KernelReport("own", "forward", 1, 4, 255, 0, 0, 0, 1, 7, 64, 1.5, {}, {"issue": 1.0})
    assert replace(kernel, per_score={"tensor": 0.0}).warnings()[0] == "own multiplies without tensor cores"
    assert kernel.warnings() == [
        "own has 1 block of 4 warps per multiprocessor; there is nothing to run while they wait",
        "own does each multiply-add of its tiles 1.5 times",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chips", "sm_80,sm_81"], "unknown chip 'sm_81'; did you mean 'sm_89' or 'sm_86' or 'sm_80'"),
        (["--dims", "32,x"], "--dims has 'x'; write integers"),
        (["--dims", "256"], "a head dimension is 256; the Triton kernels take 1 to 128"),
        (["--windows", "0"], "window is 0; it must be an integer of at least 1"),
        (["--dtype", "float64"], "unknown dtype 'float64'"),
    ],
)
def test_mistakes(options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "gpu", *options, "--output", str(tmp_path)])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_triton_or_its_tools(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_compile, "TOOLS", tmp_path)
    with pytest.raises(ValueError, match="nvdisasm is missing, which Triton's package for NVIDIA GPUs has"):
        gpu_compile._output("nvdisasm", "-c", b"")
    monkeypatch.setattr("vision_longformer.ops.triton.INSTALLED", False)
    with pytest.raises(SystemExit):
        main(["bench", "gpu", "--output", str(tmp_path / "results")])
    assert "needs the package triton, which is not installed: pip install triton" in capsys.readouterr().err


@pytest.mark.slow
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A score takes 2 products of 32 numbers forward; an instruction of a warp does 16×8×16 multiply-adds."""
    main(["bench", "gpu", "--chips", "sm_80", "--dims", "32", "--output", str(tmp_path)])
    assert "predicted, not measured" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "gpu.json").read_text())["reports"]
    kernels = {kernel["name"]: kernel for kernel in found["kernels"]}
    products = {"forward": 2, "query_gradient": 3, "key_gradient": 4}
    for name, count in products.items():
        own = kernels[name]
        assert own["repeats"] == 1, name
        assert own["per_score"]["tensor"] == pytest.approx(count * 32 / (16 * 8 * 16) * 32), name
        assert own["per_score"]["special"] == pytest.approx(1, abs=0.1), name
        assert own["spills"] == 0, name
    assert 0.1 < found["predicted_share_of_peak"]["forward"] < 1
    assert 0.1 < found["predicted_share_of_peak"]["backward"] < 1


def test_launches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiling: every launch has its phase, and torch's own operations are counted beside."""
    from vision_longformer.ops.triton import launch, rows

    def warmup(*arguments: Any, grid: tuple[int], **options: Any) -> Any:
        assert options["enable_fp_fusion"]
        return SimpleNamespace(metadata=SimpleNamespace(num_warps=4, shared=0))

    names = {name: module for module in (launch, rows) for name in vars(module) if name.endswith("_kernel")}
    for name, module in names.items():
        monkeypatch.setattr(module, name, SimpleNamespace(warmup=warmup, __name__=name))
    original = launch.launch
    found = compile_layer(LAYER, 80)
    assert launch.launch is original
    assert {kernel.name for kernel in found.kernels} == set(names)
    phases = {kernel.name: kernel.phase for kernel in found.kernels}
    assert (phases["forward_kernel"], phases["global_rows_kernel"]) == ("forward", "forward")
    assert (phases["key_gradient_kernel"], phases["global_sums_kernel"]) == ("backward", "backward")
    assert found.torch_operations == {"forward": 0, "backward": 6}  # zeros and sums, see test_longformer.py
