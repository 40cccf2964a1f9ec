"""The interface between :func:`~vision_longformer.ops.local_attention` and its implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..geometry import Grid

NEIGHBOUR_MODES = ("all", "self", "one")


class Inputs(NamedTuple):
    """The tensors of a call: q, k and v of one dtype, the biases of theirs or, beside 16-bit ones, of float32.

    ``q`` is (B, N, heads, dim), ``k`` and ``v`` (B, G + K, heads, dim) with the global tokens first and K = N but for a
    halo, ``bias`` (heads, 4w-1, 4w-1), ``global_bias`` (heads, G), ``neighbour`` an integer 1..8 of shape ().
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    global_bias: Tensor | None = None
    neighbour: Tensor | None = None

    def global_tokens(self, spec: LocalSpec) -> int:
        """How many of the keys are global."""
        return self.k.shape[1] - spec.key_grid.tokens


class PackedInputs(NamedTuple):
    """The tensors of a call for the rows of global and of local tokens, as :class:`Inputs` but for

    ``qkv`` (B, G + N, 3, heads, dim), the projection of all tokens, global tokens first, and ``from_global_bias``
    (heads, G, G + 1), of global queries for each global key, and last for every local key.
    """

    qkv: Tensor
    bias: Tensor | None = None
    global_bias: Tensor | None = None
    from_global_bias: Tensor | None = None
    neighbour: Tensor | None = None

    @property
    def q(self) -> Tensor:
        """The queries of all tokens, (B, G + N, heads, dim)."""
        return self.qkv.select(2, 0)


@dataclass(frozen=True)
class LocalSpec:
    """Which keys a local query sees, and the scale of its scores.

    ``neighbour_mode`` is one of :data:`NEIGHBOUR_MODES`. With ``"one"`` a query sees its own chunk and the neighbour
    given as a tensor in :class:`Inputs`, so that a compiled graph serves all eight. ``dilation`` is one number, or one
    per head.

    ``halo`` is None for a whole map. Else the queries are a band of chunk rows of a map, ``grid`` is the band's, and
    ``halo`` counts the rows of keys above and below it: the first rows of the chunk row above, at unwrapped rows
    ``-w, -w+1, …`` of the band, and the first rows of the chunk row below, at ``chunks.height * w, …``. Rows are then
    never wrapped, columns still are. A whole chunk row has w rows; less only where the map ends.
    """

    grid: Grid
    window: int
    rule: str
    neighbour_mode: str
    dilation: int | tuple[int, ...]
    scale: float
    halo: tuple[int, int] | None = None

    @property
    def key_grid(self) -> Grid:
        """The grid of the local keys: that of the queries, with the halo's rows above and below."""
        return Grid(self.grid.height + sum(self.halo or ()), self.grid.width)

    @property
    def chunks(self) -> Grid:
        """The grid of chunks that covers the map."""
        return self.grid.chunks(self.window)

    @property
    def padding(self) -> tuple[int, int]:
        """Rows and columns that the map lacks to be whole chunks."""
        chunks = self.chunks
        return chunks.height * self.window - self.grid.height, chunks.width * self.window - self.grid.width

    @property
    def common_dilation(self) -> int:
        """The dilation of all heads, for implementations that refuse one per head."""
        assert isinstance(self.dilation, int)
        return self.dilation


@dataclass(frozen=True)
class Implementation:
    """A way to compute local attention.

    - ``refusal(spec, q)``: why it cannot run this, as a sentence; None if it can.
    - ``attend(inputs, spec)``: the output, (B, N, heads, dim).
    """

    refusal: Callable[[LocalSpec, Tensor], str | None]
    attend: Callable[[Inputs, LocalSpec], Tensor]


def refuse_dilation(spec: LocalSpec) -> str | None:
    """The refusal of implementations that work on chunks."""
    return None if spec.dilation == 1 else "chunks hold neighbouring tokens only, so dilation must be 1"


def refuse_halo(spec: LocalSpec) -> str | None:
    return None if spec.halo is None else "it computes whole maps only, so halo must be None"


def refuse_dilation_per_head(spec: LocalSpec) -> str | None:
    return None if isinstance(spec.dilation, int) else "it takes one dilation for all heads"
