"""Local attention over a grid of tokens with global tokens: what it means, and which implementation computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import check_at_least, check_choice
from ..geometry import RULES, Grid, is_cyclic
from .chunked.gathered_chunk import GATHERED_CHUNK
from .chunked.sliding_chunk import SLIDING_CHUNK, SLIDING_CHUNK_AUTOGRAD
from .chunked.whole_map import WHOLE_MAP
from .cpu import FUSED_CPU
from .flex import FLEX
from .operator import arithmetic_dtype
from .reference.masked_dense import MASKED_DENSE
from .reference.unfold import UNFOLD_NN, UNFOLD_TENSOR
from .spec import Implementation, Inputs, LocalSpec
from .tiled import TILED
from .triton import TRITON_GPU

IMPLEMENTATIONS: dict[str, Implementation] = {
    "triton_gpu": TRITON_GPU,
    "fused_cpu": FUSED_CPU,
    "whole_map": WHOLE_MAP,
    "tiled": TILED,
    "flex": FLEX,
    "sliding_chunk": SLIDING_CHUNK,
    "sliding_chunk_autograd": SLIDING_CHUNK_AUTOGRAD,
    "gathered_chunk": GATHERED_CHUNK,
    "unfold_tensor": UNFOLD_TENSOR,
    "unfold_nn": UNFOLD_NN,
    "masked_dense": MASKED_DENSE,
}
"""All implementations. They differ in speed and memory only."""

AUTOMATIC = ("triton_gpu", "fused_cpu", "whole_map", "tiled", "unfold_tensor")
"""``auto`` takes the first of these that can run."""

PORTABLE = ("whole_map", "gathered_chunk", "sliding_chunk_autograd", "unfold_tensor")
"""What ``auto`` takes from under ``torch.export`` and ``torch.jit.trace``: PyTorch's own operators only, the same ones
for all maps where sizes are symbols."""


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid | tuple[int, int],
    *,
    window: int,
    rule: str = "chunk",
    neighbours: str | int | Tensor = "all",
    bias: Tensor | None = None,
    global_bias: Tensor | None = None,
    dilation: int | Sequence[int] = 1,
    scale: float | None = None,
    halo: tuple[int, int] | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Attention of the tokens of a map to all global tokens and to the tokens near them, in one softmax.

    A query sees the G global keys and those local keys that ``rule`` admits (see
    :data:`~vision_longformer.geometry.RULES`) among its own chunk of ``window``×``window`` tokens and its neighbours:
    all eight (``"all"``), none (``"self"``), or one, 1..8, as a number or a 0-dimensional integer tensor. Its scores
    are ``scale * q·k`` plus a bias that depends on the relative offset, or on the global key. All tensors must be on
    one device; q, k and v must have one dtype, to which autocast casts them where it is enabled. Biases have the dtype
    of q, or float32 beside 16-bit q, k and v, and autocast leaves them alone: they are added, and their gradients
    summed, in float32 at least.

    With a ``halo`` the queries are a band of whole chunk rows of a map, and the keys are theirs and those of the chunk
    rows above and below: bands of a map, computed one by one, are the map's own result. A side of 0 rows is an edge of
    the map. Rows never wrap; for a cyclic rule the caller passes the wrapped rows (for ``cyclic_release`` with their
    padding, as rows of zeros).

    Args:
        q: queries of the local tokens, (B, N, heads, dim), N = height × width, row by row.
        k, v: keys and values, (B, G + N, heads, dim), global tokens first; G may be 0. With a halo they are
            (B, G + (above + height + below) × width, heads, dim).
        grid: height and width of the map, or of the band.
        bias: (heads, 4w-1, 4w-1), centred on offset 0; entry ``[h, 2w-1 + dy, 2w-1 + dx]`` for query − key = (dy, dx).
        global_bias: (heads, G), added to the scores of the global keys.
        dilation: steps between the keys of an ``exact`` window, one number or one per head.
        scale: of the scores; ``dim ** -0.5`` if None.
        halo: how many rows of keys there are above and below the band: the first rows of the chunk row above, w unless
            it is the last, partial one of a cyclic map, and those of the chunk row below. None for a whole map.
        implementation: a name in :data:`IMPLEMENTATIONS` or ``"auto"``.

    Returns:
        (B, N, heads, dim).
    """
    inputs, spec = read_call(
        q, k, v, grid, window=window, rule=rule, neighbours=neighbours, bias=bias, global_bias=global_bias,
        dilation=dilation, scale=scale, halo=halo,
    )  # fmt: skip
    return attend_by(implementation, inputs, spec)


def read_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid | tuple[int, int],
    *,
    window: int,
    rule: str,
    neighbours: str | int | Tensor,
    bias: Tensor | None,
    global_bias: Tensor | None,
    dilation: int | Sequence[int] = 1,
    scale: float | None,
    halo: tuple[int, int] | None = None,
) -> tuple[Inputs, LocalSpec]:
    """The arguments of :func:`local_attention` checked, and brought to what implementations take."""
    grid = Grid(*grid)
    check_alike(q, {"k": k, "v": v, "bias": bias, "global_bias": global_bias})
    halo = None if halo is None else _read_halo(halo, grid, window, rule)
    _check_tensors(q, k, v, grid, window, halo or (0, 0), bias, global_bias)
    neighbour_mode, neighbour = _read_neighbours(neighbours, q.device)
    steps = _read_dilation(dilation, rule, neighbour_mode, q.shape[2])
    if halo is not None and steps != 1:
        raise ValueError(f"dilation is {dilation}, but a window with gaps reaches beyond a halo; it must be 1")
    q, k, v = (x.to(autocast_dtype(x)) for x in (q, k, v))
    bias, global_bias = (None if x is None else x.to(arithmetic_dtype(q)) for x in (bias, global_bias))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    spec = LocalSpec(grid, window, rule, neighbour_mode, steps, scale, halo)
    return Inputs(q, k, v, bias, global_bias, neighbour), spec


def automatic(spec: LocalSpec, q: Tensor) -> str:
    """The implementation that ``auto`` takes: the first that can run this; if none can, the last, to say why not."""
    candidates = PORTABLE if torch.compiler.is_exporting() or torch.jit.is_tracing() else AUTOMATIC
    return next((name for name in candidates if IMPLEMENTATIONS[name].refusal(spec, q) is None), candidates[-1])


def attend_by(implementation: str, inputs: Inputs, spec: LocalSpec) -> Tensor:
    """The output of an implementation, or of the best one (``"auto"``)."""
    name = automatic(spec, inputs.q) if implementation == "auto" else implementation
    check_choice("implementation", name, IMPLEMENTATIONS)
    reason = IMPLEMENTATIONS[name].refusal(spec, inputs.q)
    if reason is None:
        return IMPLEMENTATIONS[name].attend(inputs, spec)
    if isinstance(spec.dilation, tuple):
        return _attend_by_dilation(inputs, spec, spec.dilation, implementation)
    raise ValueError(f"implementation {name!r} cannot run this: {reason}")


def _attend_by_dilation(inputs: Inputs, spec: LocalSpec, dilation: tuple[int, ...], implementation: str) -> Tensor:
    """Heads of the same dilation together."""
    q, k, v, bias, global_bias, neighbour = inputs
    out = torch.empty_like(q)
    for step in sorted(set(dilation)):
        heads = [head for head, given in enumerate(dilation) if given == step]
        own_bias, own_global_bias = (None if x is None else x[heads] for x in (bias, global_bias))
        part = Inputs(q[:, :, heads], k[:, :, heads], v[:, :, heads], own_bias, own_global_bias, neighbour)
        out[:, :, heads] = attend_by(implementation, part, replace(spec, dilation=step))
    return out


def _read_neighbours(neighbours: str | int | Tensor, device: torch.device) -> tuple[str, Tensor | None]:
    """The neighbour mode and, for mode ``"one"``, the neighbour as a 0-dimensional tensor."""
    if isinstance(neighbours, Tensor):
        if neighbours.numel() != 1 or neighbours.is_floating_point():
            raise ValueError(f"neighbours must be one integer, not {neighbours.dtype} of {tuple(neighbours.shape)}")
        if neighbours.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_neighbour(int(neighbours))
        return "one", neighbours.reshape(()).to(device)
    if isinstance(neighbours, int):
        _check_neighbour(neighbours)
        return "one", torch.full((), neighbours, dtype=torch.int64, device=device)
    check_choice("neighbours", neighbours, ("all", "self"))
    return neighbours, None


def _check_neighbour(number: int) -> None:
    if isinstance(number, bool) or not 1 <= number <= 8:
        raise ValueError(f"neighbours is {number}; a neighbour is 1..8, or use 'all' or 'self'")


def _read_dilation(dilation: int | Sequence[int], rule: str, neighbour_mode: str, heads: int) -> int | tuple[int, ...]:
    """One number if all heads have the same, else one per head."""
    check_choice("window rule", rule, RULES)
    steps = (dilation,) if isinstance(dilation, int) else tuple(dilation)
    for step in steps:
        check_at_least("dilation", step, 1)
    if not isinstance(dilation, int) and len(steps) != heads:
        raise ValueError(f"dilation names {len(steps)} heads, but there are {heads}")
    if max(steps) > 1 and (rule != "exact" or neighbour_mode != "all"):
        raise ValueError(
            "dilation above 1 is defined for rule 'exact' with all neighbours only, "
            f"not for {rule!r}, {neighbour_mode!r}"
        )
    return steps[0] if len(set(steps)) == 1 else steps


def _read_halo(halo: Sequence[int], grid: Grid, window: int, rule: str) -> tuple[int, int]:
    """The rows of keys above and below a band."""
    check_at_least("window", window, 1)
    if len(halo) != 2 or not all(0 <= rows <= window for rows in halo):
        raise ValueError(f"halo is {tuple(halo)}; it must be two numbers of rows, above and below, of 0..{window} each")
    above, below = halo
    if not is_cyclic(rule) and above not in (0, window):
        raise ValueError(f"halo has {above} rows above; with rule {rule!r} a chunk row above is whole, {window} rows")
    if not is_cyclic(rule) and below and grid.height % window:
        raise ValueError(
            f"halo has {below} rows below a band of {grid.height} rows, which is no multiple of the window {window}; "
            f"with rule {rule!r} only the last chunk row of a map is partial"
        )
    return above, below


def autocast_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product would bring its input to under autocast, done here once for all implementations."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def check_alike(q: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """One device, and the dtype of q after autocast; biases may also be as wide as the arithmetic."""
    own = autocast_dtype(q)
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} is on {tensor.device}; move all to one device")
        allowed = dict.fromkeys((own, torch.promote_types(own, torch.float32) if name.endswith("bias") else own))
        if autocast_dtype(tensor) not in allowed:
            mine, other, *right = (str(dtype).removeprefix("torch.") for dtype in (own, tensor.dtype, *allowed))
            raise ValueError(
                f"q is {mine} but {name} is {other}; convert it to {' or '.join(right)}, or use torch.autocast"
            )


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, window: int, halo: tuple[int, int], bias: Tensor | None,
    global_bias: Tensor | None,
) -> None:  # fmt: skip
    check_at_least("window", window, 1)
    if q.dim() != 4 or q.shape[1] != grid.tokens or grid.tokens < 1:
        raise ValueError(
            f"q is {tuple(q.shape)}; a map of {grid.height}×{grid.width} needs (batch, {grid.tokens}, heads, dim)"
        )
    batch, _, heads, dim = q.shape
    tokens = grid.tokens + sum(halo) * grid.width
    if k.shape != v.shape or k.dim() != 4 or k.shape[0] != batch or k.shape[1] < tokens or k.shape[2:] != q.shape[2:]:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}; both must be ({batch}, G + {tokens}, {heads}, {dim}), "
            "G global tokens first"
        )
    side, global_tokens = 4 * window - 1, k.shape[1] - tokens
    if bias is not None and bias.shape != (heads, side, side):
        raise ValueError(f"bias is {tuple(bias.shape)}; window {window} needs ({heads}, {side}, {side})")
    if global_bias is not None and global_bias.shape != (heads, global_tokens):
        raise ValueError(f"global_bias is {tuple(global_bias.shape)}; it must be ({heads}, {global_tokens})")
