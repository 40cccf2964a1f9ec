"""Machine code of a kernel as nvdisasm lists it: instructions, loops, and the path that a warp takes through them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

CLASSES = ("tensor", "special", "load", "shared", "integer", "float", "conversion", "control", "other")
"""Products; exponentials and their like; global memory; shared and tensor memory, shuffles; arithmetic; the rest."""

_OPERATIONS = {
    "tensor": "HMMA IMMA QMMA OMMA HGMMA IGMMA QGMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA",
    "special": "MUFU",
    "load": "LD LDG LDGSTS LDL ST STG STL RED REDG ATOM ATOMG UBLKCP UTMALDG UTMASTG",
    "shared": "LDS LDSM STS STSM ATOMS SHFL REDUX MOVM LDTM STTM UTCCP",
    "integer": "IADD IADD3 IMAD IMUL LEA LOP LOP3 ISETP SHF SHL SHR SEL PRMT VIADD VIADDMNMX VIMNMX VIMNMX3 IMNMX IABS "
    "BMSK SGXT POPC FLO BREV PLOP3 P2R R2P IDP",
    "float": "FADD FMUL FFMA FADD2 FMUL2 FFMA2 FMNMX FMNMX3 FSEL FSETP FSET FCHK HFMA2 HMUL2 HMNMX2 HSETP2",
    "conversion": "F2F F2I I2F F2FP I2FP I2I FRND F2IP I2IP HADD2",
    "control": "BRA BRX JMP CALL RET EXIT BSSY BSYNC BREAK BAR DEPBAR LDGDEPBAR WARPSYNC WARPGROUP NOP MEMBAR FENCE "
    "SYNCS ARRIVES ERRBAR CCTL ELECT VOTE VOTEU NANOSLEEP YIELD BPT UTCBAR UTCATOMSWS",
}
CLASS_OF = {name: kind for kind, names in _OPERATIONS.items() for name in names.split()}

SLOW_CONVERSIONS = {"F2F", "F2I", "I2F", "FRND"}
"""They run where the special functions do."""

FMA_PIPE = {"FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "HFMA2", "HMUL2", "HADD2", "IMAD"}
PAIRS = {"FADD2", "FMUL2", "FFMA2"}
"""Two results per lane."""

_MMA_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "1684": (16, 8, 4)}
_LOAD_BYTES = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}

_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^([.$\w]+):\s*$")
_TARGET = re.compile(r"`\(([.$\w]+)\)")


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a listing; ``code`` is the name with its suffixes, ``shape`` M, N, K of a product."""

    code: str
    operands: str = ""
    conditional: bool = False
    shape: tuple[int, int, int] | None = None

    @cached_property
    def name(self) -> str:
        return self.code.partition(".")[0]

    @cached_property
    def kind(self) -> str:
        """One of :data:`CLASSES`; an instruction of the uniform datapath is of the class of its namesake."""
        return CLASS_OF.get(self.name, CLASS_OF.get(self.name.removeprefix("U"), "other"))

    @property
    def uniform(self) -> bool:
        return self.name not in CLASS_OF and self.kind != "other"

    @property
    def bytes_per_lane(self) -> int:
        """Of a load or store, of memory of any kind."""
        if self.name in ("LDSM", "STSM"):  # of 1, 2 or 4 matrices of 8×8 numbers
            return 4 * int(self.code[-1]) if self.code.endswith((".2", ".4")) else 4
        return next((count for suffix, count in _LOAD_BYTES.items() if suffix in self.code), 4)

    def macs(self, warps: int) -> float:
        """Multiply-adds, if all warps of a block execute this: ``mma.sync`` is a warp's, ``wgmma`` of four together."""
        return 0 if self.shape is None else math.prod(self.shape) * self._products(warps)

    def operand_bytes(self, warps: int) -> float:
        """What a product reads from shared memory by itself, if all warps of a block execute it."""
        if self.shape is None or "gdesc" not in self.operands:
            return 0
        m, n, k = self.shape
        left = self.operands.split(", ")[0 if self.name.startswith("UTC") else 1]
        rows = n + (m if left.startswith("gdesc") else 0)
        return rows * k * self.element_bytes * self._products(warps)

    def _products(self, warps: int) -> float:
        return warps / 4 if self.name.endswith("GMMA") else warps

    @property
    def element_bytes(self) -> int:
        """Of a product's operands; a row of ``wgmma`` and ``tcgen05.mma`` has 32 bytes of either."""
        if self.shape is not None and "gdesc" in self.operands:
            return 32 // self.shape[2]
        return 4 if "TF32" in self.code else 2


@dataclass(frozen=True)
class Block:
    """Instructions that run one after the other; ``following`` are the blocks that may run next."""

    instructions: tuple[Instruction, ...]
    following: tuple[int, ...]

    @property
    def elected(self) -> bool:
        """Only one warp runs it: ``tcgen05.mma`` and bulk copies are issued once for the whole block of threads."""
        return any(i.name.startswith(("UTC", "UBLKCP", "UTMA")) for i in self.instructions)


def parse(listing: str, function: str) -> list[Block]:
    """The blocks of a function; the first one is where it starts."""
    instructions, labels = _read(listing, function)
    if not instructions:
        raise ValueError(f"the listing has no function {function!r}")
    jumps = [_jump(instruction, labels) for instruction in instructions]
    after_jumps = (n + 1 for n, (falls, targets) in enumerate(jumps) if targets or not falls)
    starts = sorted({0, *labels.values(), *after_jumps} - {len(instructions)})
    number = {start: index for index, start in enumerate(starts)}
    blocks = []
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        falls, targets = jumps[end - 1]
        following = [*targets, end] if falls else targets
        blocks.append(Block(tuple(instructions[start:end]), tuple(number[n] for n in following if n in number)))
    return blocks


def _read(listing: str, function: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a function, and by label the index of the instruction that follows it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    constants: dict[str, int] = {}
    inside = False
    for line in listing.splitlines():
        label, match = _LABEL.match(line), _LINE.match(line)
        if label:
            inside = label[1] == f".text.{function}" or (inside and not label[1].startswith(".text."))
        if label and inside:
            labels[label[1]] = len(instructions)
        if match and inside:
            guard, code, operands = match.groups()
            moved = re.fullmatch(r"(UR\d+), (0x[0-9a-f]+)", operands)
            if moved and code == "UMOV":
                constants[moved[1]] = int(moved[2], 16)
            conditional = guard is not None or re.match(r"BRA.*!?U?P\d", f"{code} {operands}") is not None
            instructions.append(Instruction(code, operands, conditional, _shape(code, operands, constants)))
    return instructions, labels


def _shape(code: str, operands: str, constants: dict[str, int]) -> tuple[int, int, int] | None:
    """M, N, K of a product: from its name or, for ``tcgen05.mma``, from the bits of the constant that describes it."""
    name, _, suffixes = code.partition(".")
    size = suffixes.partition(".")[0]
    if CLASS_OF.get(name) != "tensor":
        return None
    if name.startswith("UTC"):
        register = re.search(r"idesc\[(UR\d+)\]", operands)
        if register is None or register[1] not in constants:
            raise ValueError(f"the shape of the product {code} {operands} is not a constant")
        bits = constants[register[1]]
        return (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8, 8 if bits >> 7 & 7 == 2 else 16
    if name.endswith("GMMA"):
        m, n, k = map(int, size.split("x"))
        return m, n, k
    if size not in _MMA_SHAPES:
        raise ValueError(f"the product {code} has an unknown shape; known are {', '.join(_MMA_SHAPES)}")
    return _MMA_SHAPES[size]


def _jump(instruction: Instruction, labels: dict[str, int]) -> tuple[bool, list[int]]:
    """Whether the next instruction may follow, and which others may. A call to a label inside is a jump."""
    falls = instruction.conditional or instruction.code.startswith("BRA.DIV")
    if instruction.name in ("EXIT", "RET"):
        return falls, []
    found = _TARGET.search(instruction.operands)
    target = "" if found is None else found[1]
    if instruction.name in ("BRA", "JMP") or (instruction.name == "CALL" and target.startswith(".L")):
        return falls, [labels[target]] if target in labels else []
    return True, []


@dataclass
class Trace:
    """How often a warp executes each instruction; a fraction for those that one warp of the block executes."""

    counts: Counter[Instruction] = field(default_factory=Counter)

    def add(self, other: Trace, times: float = 1) -> None:
        for instruction, count in other.counts.items():
            self.counts[instruction] += count * times  # type: ignore[assignment]

    @property
    def instructions(self) -> float:
        return sum(self.counts.values())

    def macs(self, warps: int) -> float:
        """Multiply-adds of a block of ``warps`` warps."""
        return sum(count * instruction.macs(warps) for instruction, count in self.counts.items())

    def by_class(self) -> dict[str, float]:
        totals = dict.fromkeys(CLASSES, 0.0)
        for instruction, count in self.counts.items():
            totals[instruction.kind] += count
        return totals


@dataclass(frozen=True)
class Loop:
    """Blocks that can run again and again, entered through ``header``."""

    header: int
    blocks: frozenset[int]
    inner: tuple[Loop, ...]


class Code:
    """The blocks of a kernel and their loops. Of two ways through it the longer one counts."""

    def __init__(self, blocks: list[Block], warps: int) -> None:
        self.blocks, self.warps = blocks, warps
        reachable, waiting = {0}, [0]
        while waiting:
            new = set(blocks[waiting.pop()].following) - reachable
            reachable |= new
            waiting += new
        self.reachable = frozenset(reachable)
        self.loops = self._find_loops(self.reachable, None)

    def _find_loops(self, nodes: frozenset[int], header: int | None) -> tuple[Loop, ...]:
        """Loops among these blocks, jumps back to ``header`` aside."""
        edges = {n: [m for m in self.blocks[n].following if m in nodes and m != header] for n in nodes}
        found = []
        for component in _components(edges):
            if any(m in component for n in component for m in edges[n]):
                entered = {m for n in nodes - component for m in edges[n]} & component
                start = min(entered or component)
                found.append(Loop(start, component, self._find_loops(component, start)))
        return tuple(found)

    def main_loops(self) -> list[Loop]:
        """The innermost loops with products; in a kernel without any, those that load from global memory."""
        if any(i.shape for n in self.reachable for i in self.blocks[n].instructions):
            return self._innermost(self.loops, lambda instruction: instruction.shape is not None)
        return self._innermost(self.loops, lambda instruction: instruction.kind == "load")

    def _innermost(self, loops: tuple[Loop, ...], wanted: Callable[[Instruction], bool]) -> list[Loop]:
        found = []
        for loop in loops:
            has_it = any(wanted(i) for n in loop.blocks for i in self.blocks[n].instructions)
            found += self._innermost(loop.inner, wanted) or ([loop] if has_it else [])
        return found

    def spills_in_loops(self) -> int:
        """Instructions in any loop that move registers to memory and back."""
        repeated = frozenset[int]().union(*(loop.blocks for loop in self.loops))
        return sum(i.name in ("STL", "LDL") for n in repeated for i in self.blocks[n].instructions)

    def levels(self, loop: Loop | None) -> list[Trace]:
        """What runs outside of all loops around ``loop``, once in each of these from outside to inside, and in it."""
        nodes, start, header, loops = self.reachable, 0, None, self.loops
        traces = []
        while True:
            through = next((own for own in loops if loop is not None and loop.blocks <= own.blocks), None)
            traces.append(self._longest(nodes, start, header, loops, through))
            if through is None:
                return traces
            nodes, start, header, loops = through.blocks, through.header, through.header, through.inner

    def _longest(
        self, nodes: frozenset[int], start: int, header: int | None, loops: tuple[Loop, ...], through: Loop | None
    ) -> Trace:
        """The longest way from ``start``, through a loop whose own instructions are left out. Other loops run once."""
        traces = {loop.header: self._longest(loop.blocks, loop.header, loop.header, loop.inner, None) for loop in loops}
        home = {n: n for n in nodes} | {n: loop.header for loop in loops for n in loop.blocks}
        following: dict[int, set[int]] = {n: set() for n in home.values()}
        for n in nodes:
            following[home[n]] |= {home[m] for m in self.blocks[n].following if m in home and m != header} - {home[n]}
            if home[n] not in traces:
                traces[n] = self._straight(self.blocks[n])
        if through is not None:
            traces[through.header] = Trace()
        length: dict[int, float] = {}
        choice: dict[int, int | None] = {}
        for component in _components({n: sorted(others) for n, others in following.items()}):
            (n,) = component  # what follows has been seen before
            best = max(following[n], key=length.__getitem__, default=None)
            own = math.inf if through is not None and n == through.header else traces[n].instructions
            length[n], choice[n] = own + (0 if best is None else length[best]), best
        total, at = Trace(), home.get(start)
        while at is not None:
            total.add(traces[at])
            at = choice[at]
        return total

    def _straight(self, block: Block) -> Trace:
        times = 1 / self.warps if block.elected else 1
        trace = Trace()
        trace.add(Trace(Counter(block.instructions)), times)
        return trace


def _components(edges: dict[int, list[int]]) -> Iterable[frozenset[int]]:
    """Strongly connected components, each after all that can be reached from it (Tarjan's algorithm)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []

    def visit(node: int) -> Iterable[frozenset[int]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                yield from visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            yield frozenset(stack[stack.index(node) :])
            del stack[stack.index(node) :]

    for root in sorted(edges):
        if root not in index:
            yield from visit(root)
