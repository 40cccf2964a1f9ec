"""What one multiprocessor of each NVIDIA architecture can do per clock, and how many blocks it holds.

Sources of the numbers: G, the CUDA programming guide (technical specifications, arithmetic throughput); W, white paper
or data sheet of the product named; E, an estimate of ours from published microbenchmarks or by analogy. The paper of
FlashAttention-4 has the same products, exponentials and bytes of shared memory per clock for H100 and B200. Cards for
gaming of sm_86, sm_89 and sm_120 do half of ``tensor`` when they sum in float32 (W).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import unknown_name

LANES = 32
"""Threads of a warp."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Limits of what is resident on a multiprocessor (G), and what it does per clock.

    ``tensor``: 16-bit multiply-adds with float32 sums by the architecture's own instructions, its peak (W);
    ``mma_sync``: by ``mma.sync``, which all have. ``fma``, ``imad``, ``alu``, ``special`` and ``load_store`` are lanes:
    float32 multiply-adds, integer ones, comparisons and other integer arithmetic, exponentials (G), addresses (W).
    ``shared_bandwidth``: bytes of shared memory or first-level cache (W); ``l2``: bytes of the second-level cache, one
    multiprocessor's share (E). ``clock`` in Hz, at which the data sheet's peak is reached (W).
    """

    name: str
    product: str
    clock: float
    warps: int
    blocks: int
    shared: int
    tensor: int
    mma_sync: int
    l2: float
    own_tensor: str = "HMMA"
    fma: int = 128
    imad: int = 64
    alu: int = 64
    special: int = 16
    load_store: int = 32
    shared_bandwidth: int = 128
    registers: int = 64 * 1024
    schedulers: int = 4
    tensor_memory: int = 0

    @property
    def capability(self) -> int:
        return int(self.name.removeprefix("sm_"))

    @property
    def reserved(self) -> int:
        """Bytes of shared memory that the system takes for each block, from sm_80 on (G)."""
        return 1024 if self.capability >= 80 else 0


def _table(*chips: Chip) -> dict[str, Chip]:
    return {chip.name: chip for chip in chips}


CHIPS = _table(
    Chip(
        name="sm_75", product="T4", clock=1.59e9, warps=32, blocks=16, shared=64 << 10, tensor=512, mma_sync=512,
        l2=20, fma=64, load_store=16, shared_bandwidth=64,
    ),
    Chip(
        name="sm_80", product="A100", clock=1.41e9, warps=64, blocks=32, shared=164 << 10, tensor=1024, mma_sync=1024,
        l2=5120 / 108, fma=64,
    ),
    Chip(
        name="sm_86", product="A40", clock=1.74e9, warps=48, blocks=16, shared=100 << 10, tensor=512, mma_sync=512,
        l2=36,
    ),
    Chip(
        name="sm_89", product="L40S", clock=2.52e9, warps=48, blocks=24, shared=100 << 10, tensor=512, mma_sync=512,
        l2=36,
    ),
    Chip(  # mma_sync (E): published microbenchmarks reach 62% of the peak with it
        name="sm_90", product="H100", clock=1.83e9, warps=64, blocks=32, shared=228 << 10, tensor=2048, mma_sync=1270,
        l2=5120 / 132, own_tensor="HGMMA",
    ),
    Chip(  # mma_sync (E): as an A100
        name="sm_100", product="B200", clock=1.85e9, warps=64, blocks=32, shared=228 << 10, tensor=4096, mma_sync=1024,
        l2=60, own_tensor="UTCHMMA", tensor_memory=512,
    ),
    Chip(
        name="sm_120", product="RTX PRO 6000", clock=2.6e9, warps=48, blocks=24, shared=100 << 10, tensor=512,
        mma_sync=512, l2=32, imad=128,
    ),
)  # fmt: skip


def chip_of(name: str) -> Chip:
    if name not in CHIPS:
        raise unknown_name("chip", name, CHIPS)
    return CHIPS[name]


def blocks_per_multiprocessor(chip: Chip, registers: int, shared: int, warps: int, tensor_memory: int = 0) -> int:
    """Blocks of ``warps`` warps that are resident at once; registers of a thread, bytes of shared memory of a block.

    Registers are given to warps by 256, and warps to the schedulers in turn; columns of tensor memory by powers of two,
    at least 32.
    """
    per_warp = -(-registers * LANES // 256) * 256
    resident = chip.registers // chip.schedulers // per_warp * chip.schedulers
    limits = [chip.blocks, chip.warps // warps, resident // warps, chip.shared // max(1, shared + chip.reserved)]
    if tensor_memory:
        limits.append(chip.tensor_memory // max(32, 1 << (tensor_memory - 1).bit_length()))
    return min(limits)
