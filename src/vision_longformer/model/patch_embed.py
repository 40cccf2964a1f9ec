"""A map of channels to a smaller map of tokens."""

from __future__ import annotations

from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..geometry import Grid, pad_map


class PatchEmbed(nn.Module):
    """Non-overlapping patches of ``patch``×``patch`` to tokens of ``dim`` channels, then LayerNorm if ``norm``.

    A map that is not a multiple of the patch is padded with zeros at the bottom and right, or (``pad=False``) loses its
    last rows and columns.
    """

    def __init__(self, in_chans: int, dim: int, patch: int, *, norm: bool, pad: bool) -> None:
        super().__init__()
        self.patch, self.pad = patch, pad
        self.proj = nn.Conv2d(in_chans, dim, patch, stride=patch)
        self.norm = nn.LayerNorm(dim, eps=1e-6) if norm else nn.Identity()

    def forward(self, image: Tensor) -> tuple[Tensor, Grid]:
        """(B, C, H, W) to tokens (B, N, dim) and their grid."""
        height, width = image.shape[2:]
        grid = Grid(height, width).reduced(self.patch, pad=self.pad)
        if self.pad:
            image = pad_map(image, 2, grid.height * self.patch - height, grid.width * self.patch - width)
        elif any(statically_known_true(side < 1) for side in grid):
            raise ValueError(f"a map of {height}×{width} is smaller than the patch of {self.patch}×{self.patch}")
        return self.norm(self.proj(image).flatten(2).transpose(1, 2)), grid
