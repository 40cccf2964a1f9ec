"""A block whose backward pass goes strip by strip: it keeps its input and the rows of its global tokens, nothing else.

Each strip is computed again and differentiated by itself. Strips share the parameters, the global tokens and the rows
at their borders, whose gradients are sums. The softmax of global rows, which goes over all strips, is known from the
forward pass, so that a strip's share in its gradient depends on that strip alone. What the few global tokens need of
themselves is differentiated as usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..geometry import Grid, Strip
from ..ops.partial_softmax import PartialSoftmax, PartInputs, attend_part, share_of
from .attention import LongformerAttention, Neighbours

STRIP_NUMBERS = 1 << 20
"""Numbers of a batch's tokens in a strip: about 128 MB while it is differentiated in float32."""


class StripBlock(Protocol):
    """What is needed of a block: its parts, as :class:`~vision_longformer.models.vision_longformer.Block` has them."""

    @property
    def attn(self) -> nn.Module: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def forward_strip(
        self, tokens: Tensor, strip: Strip, neighbours: Neighbours, drop_paths: Sequence[Tensor] = ()
    ) -> tuple[Tensor, PartInputs | None]: ...

    def among_global(self, tokens: Tensor) -> PartInputs | None: ...

    def finish_global(self, tokens: Tensor, rows: Tensor, drop_paths: Sequence[Tensor] = ()) -> Tensor: ...

    def draw_drop_paths(self, tokens: Tensor) -> list[Tensor]: ...


@torch.compiler.disable
def run_by_strips(block: StripBlock, tokens: Tensor, grid: Grid, neighbours: Neighbours) -> Tensor:
    """``block(tokens, grid, neighbours)`` for a block of Longformer attention, with less memory for its gradients."""
    count, nothing = tokens.shape[1] - grid.tokens, range(0)
    whole, drop_paths = Strip(range(grid.height), nothing, nothing, grid.width, True), block.draw_drop_paths(tokens)
    own, part = forward_by_strips(block, tokens, whole, neighbours, drop_paths)
    if part is None:
        return own
    among = block.among_global(tokens[:, :count])
    assert among is not None
    rows = attend_part(among).merge(part).out
    return torch.cat([block.finish_global(tokens[:, :count], rows, drop_paths), own], 1)


def forward_by_strips(
    block: StripBlock, tokens: Tensor, strip: Strip, neighbours: Neighbours, drop_paths: Sequence[Tensor]
) -> tuple[Tensor, PartialSoftmax | None]:
    """A block's :meth:`forward_strip` with less memory for its gradients, from (B, G + ``strip.keys``, dim), and the
    attention of the global rows to the strip, if there are any."""
    assert isinstance(block.attn, LongformerAttention)
    window, batch, dim = block.attn.window, tokens.shape[0], tokens.shape[2]
    chunk_rows = max(1, STRIP_NUMBERS // (batch * dim * strip.width * window))
    parts = strip.divided(window, block.attn.rule, chunk_rows)
    parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
    own, *part = _ByStrips.apply(block, strip, parts, neighbours, drop_paths, tokens, *parameters)
    return own, PartialSoftmax(*part) if part else None


class _ByStrips(torch.autograd.Function):
    """Parameters are inputs, so that each gets one gradient from the whole strip, as data parallelism expects."""

    @staticmethod
    def forward(
        ctx: Any,
        block: StripBlock,
        strip: Strip,
        parts: list[Strip],
        neighbours: Neighbours,
        drop_paths: Sequence[Tensor],
        tokens: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        count, top = tokens.shape[1] - strip.keys, len(strip.above)
        out, total = tokens.new_empty(tokens.shape[0], strip.grid.tokens, tokens.shape[2]), None
        for piece in parts:
            own, inputs = block.forward_strip(_seen(tokens, piece, count), piece, neighbours, drop_paths)
            total = None if inputs is None else attend_part(inputs, total)
            _rows(out, piece.rows, strip.width, -top * strip.width).copy_(own)
        ctx.save_for_backward(tokens, *(total or ()))
        ctx.block, ctx.strip, ctx.parts, ctx.parameters = block, strip, parts, parameters
        ctx.neighbours, ctx.drop_paths, ctx.autocast = neighbours, drop_paths, _autocast_state(tokens.device)
        return out, *(total or ())

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # by create_graph=True
            raise RuntimeError(
                "gradient checkpointing by strips has first derivatives only; for more, use "
                "set_grad_checkpointing(False), or set_grad_checkpointing(True) to save memory"
            )
        tokens, *saved = (tensor.detach() for tensor in ctx.saved_tensors)
        width, count, top = ctx.strip.width, tokens.shape[1] - ctx.strip.keys, len(ctx.strip.above)
        sums = _Gradients(tokens, ctx.parameters)
        for piece in ctx.parts:
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                seen = _seen(tokens, piece, count).requires_grad_()
                own, inputs = ctx.block.forward_strip(seen, piece, ctx.neighbours, ctx.drop_paths)
                shares = share_of(inputs, PartialSoftmax(*saved)) if saved else ()
            outputs, of_own = [own, *shares], _rows(grad, piece.rows, width, -top * width)
            del own, inputs, shares
            sums.add(piece, seen, outputs, [of_own, *grads])  # beyond autocast, as any backward pass
        return None, None, None, None, None, sums.tokens, *sums.parameters


class _Gradients:
    """Sums of the gradients of what goes in, and of a block's parameters."""

    def __init__(self, tokens: Tensor, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.tokens = torch.zeros_like(tokens)
        self.parameters: list[Tensor | None] = [None] * len(parameters)

    def add(self, strip: Strip, seen: Tensor, outputs: list[Tensor], grads: Sequence[Tensor]) -> None:
        """Those of what a strip has ``seen``, as :func:`_seen` puts it together, and of the parameters."""
        of_seen, *found = torch.autograd.grad(outputs, [seen, *self._parameters], grads, allow_unused=True)
        outputs.clear()
        for index, grad in enumerate(found):
            before = self.parameters[index]
            if grad is not None:
                self.parameters[index] = grad.clone() if before is None else before.add_(grad)
        count = seen.shape[1] - strip.keys
        self.tokens[:, :count] += of_seen[:, :count]
        start = count
        for rows in (strip.above, strip.rows, strip.below):
            stop = start + len(rows) * strip.width
            _rows(self.tokens, rows, strip.width, count).add_(of_seen[:, start:stop])
            start = stop


def _seen(tokens: Tensor, strip: Strip, count: int) -> Tensor:
    """The ``count`` global tokens and those of the rows that a strip sees, (B, G + ``strip.keys``, dim)."""
    parts = (_rows(tokens, rows, strip.width, count) for rows in (strip.above, strip.rows, strip.below))
    return torch.cat([tokens[:, :count], *parts], 1)


def _rows(tokens: Tensor, rows: range, width: int, count: int) -> Tensor:
    """The tokens of some rows of a map, which begins after ``count`` others."""
    return tokens[:, count + rows.start * width : count + rows.stop * width]


def _autocast_state(device: torch.device) -> dict[str, Any]:
    """Arguments of ``torch.autocast`` that make the backward pass compute as the forward pass does."""
    kind = device.type
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return {"device_type": kind, "dtype": dtype, "enabled": enabled, "cache_enabled": False}
