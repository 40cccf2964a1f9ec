"""Attention to keys that come in parts: a softmax over all of them from the results for some, and its gradients.

Global tokens attend to every token of a map. Where the map is never whole, in strips or over processes, each part is
attended to by itself, and the results are merged.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operator import arithmetic_dtype


class PartInputs(NamedTuple):
    """Queries (B, n, heads, dim), some keys and their values (B, m, heads, dim), the scale of the scores, and what is
    added to them, of a shape that broadcasts to (heads, n, m), or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    bias: Tensor | None = None

    def scores(self) -> Tensor:
        """(B, heads, n, m), in float32 at least, also under autocast."""
        dtype = arithmetic_dtype(self.q)
        with _without_autocast(self.q.device):
            scores = torch.einsum("bnhd,bmhd->bhnm", self.q.to(dtype), self.k.to(dtype)) * self.scale
        return scores if self.bias is None else scores + self.bias


class PartialSoftmax(NamedTuple):
    """Attention to some of the keys: its output (B, n, heads, dim), and the log-sum-exp (B, heads, n) of the scores."""

    out: Tensor
    lse: Tensor

    def merge(self, other: PartialSoftmax) -> PartialSoftmax:
        """Attention to the keys of both, in any order."""
        lse = torch.logaddexp(self.lse, other.lse)
        mine, others = (part.out * _per_query((part.lse - lse).exp()) for part in (self, other))
        return PartialSoftmax(mine + others, lse)


def attend_part(inputs: PartInputs, before: PartialSoftmax | None = None) -> PartialSoftmax:
    """Attention to these keys alone, or to them and those of the parts ``before``."""
    scores = inputs.scores()
    lse = scores.logsumexp(-1)
    part = PartialSoftmax(_weighted((scores - lse[..., None]).exp(), inputs.v), lse)
    return part if before is None else before.merge(part)


def share_of(inputs: PartInputs, total: PartialSoftmax) -> tuple[Tensor, Tensor]:
    """What these keys contribute to ``total``, the attention to all keys, as a function of the inputs alone: to its
    output, and of its weight.

    The shares of all parts add up to ``total.out`` and to 1, and their gradients to those of ``total.out`` and
    ``total.lse``, though each share is differentiated by itself: the weights of the part move with its scores, and the
    weighted mean of all values is subtracted because all other weights shrink as they grow.
    """
    out, lse = (x.detach() for x in total)
    weights = (inputs.scores() - lse[..., None]).exp()
    weight = weights.sum(-1)
    return _weighted(weights, inputs.v) - _per_query(weight - weight.detach()) * out, weight


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    with _without_autocast(v.device):
        return torch.einsum("bhnm,bmhd->bnhd", weights, v.to(weights.dtype))


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _per_query(x: Tensor) -> Tensor:
    """(B, heads, n) as (B, n, heads, 1)."""
    return x.transpose(1, 2)[..., None]
