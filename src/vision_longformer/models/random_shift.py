"""Which neighbour chunk each layer sees at each training step, from an explicit, seedable, resumable source."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RandomShift(nn.Module):
    """Draws one neighbour 1..8 per layer and step as a hash of (seed, step, layer).

    A hash has no hidden state: the draw is the same on every device and process, a resumed run continues it by
    restoring ``state``, and a compiled graph computes it itself, so that no draw causes a recompilation. The buffer is
    not part of the model's state dict, which holds weights only.
    """

    state: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("state", torch.tensor([seed, 0], dtype=torch.int64), persistent=False)

    def seed(self, seed: int, step: int = 0) -> None:
        """Start the sequence of ``seed``, at ``step``."""
        self.state.copy_(torch.tensor([seed, step], dtype=torch.int64))

    def draw(self, layers: int) -> Tensor:
        """The neighbours of all layers for this step, (layers,) integers in 1..8; the next call is of the next step."""
        layer = torch.arange(layers, device=self.state.device)
        mixed = _mix(_mix(_mix(self.state[0] & _MASK) ^ (self.state[1] & _MASK)) ^ layer)
        self.state[1] += 1
        return mixed % 8 + 1


_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit hash in int64; every product stays below 2⁶³."""
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    return x ^ (x >> 16)
