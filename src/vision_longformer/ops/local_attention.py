"""Local attention over a grid of tokens with global tokens: what it means, and who computes it."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..errors import check_at_least, check_choice
from ..geometry import RULES, Grid
from . import flex
from .chunked import shifted_chunk, sliding_chunk, sliding_chunk_autograd, whole_map
from .cpu import kernel as fused_cpu
from .reference import masked_dense, unfold_nn, unfold_tensor
from .spec import LocalSpec
from .tiled import attention as tiled
from .triton import attention as triton_gpu

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "triton_gpu": triton_gpu,
    "fused_cpu": fused_cpu,
    "whole_map": whole_map,
    "tiled": tiled,
    "flex": flex,
    "sliding_chunk": sliding_chunk,
    "sliding_chunk_autograd": sliding_chunk_autograd,
    "shifted_chunk": shifted_chunk,
    "unfold_tensor": unfold_tensor,
    "unfold_nn": unfold_nn,
    "masked_dense": masked_dense,
}
"""All implementations; ``auto`` takes the first of :data:`AUTOMATIC` that can run, or of :data:`PORTABLE`."""

AUTOMATIC = ("triton_gpu", "fused_cpu", "whole_map", "tiled", "unfold_tensor")

PORTABLE = ("whole_map", "shifted_chunk", "sliding_chunk_autograd", "unfold_tensor")
"""What ``torch.export`` gets: nothing but PyTorch's own operators, and the same ones for all sizes of a map."""


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
    dilation: int | tuple[int, ...] = 1,
    scale: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Attention of the tokens of a map to all global tokens and to the tokens near them, in one softmax.

    A query sees the G global keys and those local keys that ``rule`` admits (see
    :data:`~vision_longformer.geometry.RULES`) among its own chunk of ``window``×``window`` tokens and its neighbours:
    ``"all"`` eight, none (``"self"``), or one of 1..8, a number or a 0-dimensional integer tensor. Its scores are
    ``scale * q·k`` plus a bias that depends on the relative offset, or on the global key.

    Args:
        q: queries of the local tokens, (B, N, heads, dim), N = height × width, row by row.
        k, v: keys and values, (B, G + N, heads, dim), global tokens first; G may be 0.
        grid: height and width of the map.
        bias: (heads, 4w-1, 4w-1), centred on offset 0; entry ``[h, 2w-1 + dy, 2w-1 + dx]`` for query − key = (dy, dx).
        global_bias: (heads, G), added to the scores of the global keys.
        dilation: steps between the keys of an ``exact`` window, one number or one per head.
        scale: of the scores; ``dim ** -0.5`` if None.
        implementation: a name in :data:`IMPLEMENTATIONS` or ``"auto"``.

    Returns:
        (B, N, heads, dim).
    """
    grid = Grid(*grid)
    _check_tensors(q, k, v, grid, window, bias, global_bias)
    kind, neighbour = _neighbour_tensor(neighbours, q.device)
    _check_window(rule, dilation, kind, q.shape[2])
    q, k, v = _autocast(q), _autocast(k), _autocast(v)
    bias, global_bias = (None if x is None else x.to(q.dtype) for x in (bias, global_bias))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(dilation, int):
        spec = LocalSpec(grid, window, rule, kind, dilation, scale)
        return _choose(implementation, spec, q).attend(q, k, v, bias, global_bias, neighbour, spec)
    out = torch.empty_like(q)
    for step in sorted(set(dilation)):
        spec = LocalSpec(grid, window, rule, kind, step, scale)
        heads = [head for head, own in enumerate(dilation) if own == step]
        part = [x[:, :, heads] for x in (q, k, v)] + [None if x is None else x[heads] for x in (bias, global_bias)]
        out[:, :, heads] = _choose(implementation, spec, q).attend(*part, neighbour, spec)
    return out


def why_not(implementation: str, spec: LocalSpec, q: Tensor) -> str | None:
    """Why ``implementation`` cannot run this, as a sentence; None if it can."""
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[implementation].refusal(spec, q)


def _choose(implementation: str, spec: LocalSpec, q: Tensor) -> ModuleType:
    if implementation == "auto":
        candidates = PORTABLE if torch.compiler.is_exporting() else AUTOMATIC
        implementation = next(name for name in candidates if why_not(name, spec, q) is None)
    reason = why_not(implementation, spec, q)
    if reason is not None:
        raise ValueError(f"implementation {implementation!r} cannot run this: {reason}")
    return IMPLEMENTATIONS[implementation]


def _neighbour_tensor(neighbours: str | int | Tensor, device: torch.device) -> tuple[str, Tensor | None]:
    """``"all"``, ``"self"`` or ``"one"``, and for the latter the neighbour as a 0-dimensional tensor."""
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


def _autocast(x: Tensor) -> Tensor:
    """What a matrix product would do to its inputs under autocast, done once for all implementations."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, window: int, bias: Tensor | None, global_bias: Tensor | None
) -> None:
    check_at_least("window", window, 1)
    if q.dim() != 4 or q.shape[1] != grid.tokens or grid.tokens < 1:
        raise ValueError(
            f"q is {tuple(q.shape)}; a map of {grid.height}×{grid.width} needs (batch, {grid.tokens}, heads, dim)"
        )
    batch, tokens, heads, dim = q.shape
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


def _check_window(rule: str, dilation: int | tuple[int, ...], neighbours: str, heads: int) -> None:
    check_choice("window rule", rule, RULES)
    steps = (dilation,) if isinstance(dilation, int) else tuple(dilation)
    for step in steps:
        check_at_least("dilation", step, 1)
    if not isinstance(dilation, int) and len(steps) != heads:
        raise ValueError(f"dilation names {len(steps)} heads, but there are {heads}")
    if max(steps) > 1 and (rule != "exact" or neighbours != "all"):
        raise ValueError(
            f"dilation above 1 is defined for rule 'exact' with all neighbours only, not for {rule!r}, {neighbours!r}"
        )
