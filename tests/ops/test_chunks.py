"""Tokens as maps and chunks, by hand on a 3×4 map in chunks of 2×2."""

from __future__ import annotations

import torch

from vision_longformer.geometry import Grid
from vision_longformer.ops.chunks import contiguous_copy, from_chunks, pad_map, to_chunks, tokens_to_map
from vision_longformer.ops.spec import LocalSpec

SPEC = LocalSpec(Grid(3, 4), 2, "chunk", "all", 1, 1.0)


def test_padding_of_a_map() -> None:
    image = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 2, 2, 1)
    assert pad_map(image, 1, 1, 2).squeeze().tolist() == [[1, 2, 0, 0], [3, 4, 0, 0], [0, 0, 0, 0]]
    assert pad_map(image, 1, -1, 0).flatten().tolist() == [1, 2]
    assert pad_map(image, 1, 0, 0) is image


def test_chunks_go_row_by_row_with_zeros_below() -> None:
    tokens = torch.arange(1.0, 13).view(1, 12, 1, 1)
    chunked = to_chunks(tokens, SPEC)
    assert chunked.shape == (1, 1, 4, 4, 1)
    assert chunked.flatten(3).squeeze().tolist() == [[1, 2, 5, 6], [3, 4, 7, 8], [9, 10, 0, 0], [11, 12, 0, 0]]
    assert torch.equal(from_chunks(chunked, SPEC), tokens)


def test_heads_and_images_stay_apart() -> None:
    tokens = torch.randn(2, 12, 3, 5)
    chunked = to_chunks(tokens, SPEC)
    assert chunked.shape == (2, 3, 4, 4, 5)
    assert torch.equal(chunked[1, 2, 1, 3], tokens[1, 7, 2])  # row 1, column 3 of the map
    assert torch.equal(from_chunks(chunked, SPEC), tokens)


def test_grid_of_chunks_and_what_the_map_lacks() -> None:
    spec = LocalSpec(Grid(3, 5), 4, "chunk", "all", 1, 1.0)
    assert spec.chunks == (1, 2)
    assert spec.padding == (1, 3)


def test_tokens_as_a_map_are_a_view() -> None:
    tokens = torch.randn(2, 12, 5)
    image = tokens_to_map(tokens, Grid(3, 4))
    assert image.shape == (2, 5, 3, 4)
    assert torch.equal(image[1, :, 2, 3], tokens[1, 11])
    assert image.data_ptr() == tokens.data_ptr()


def test_contiguous_copy_copies_what_is_contiguous() -> None:
    x = torch.randn(3, 4)
    assert contiguous_copy(x).data_ptr() != x.data_ptr()
    assert contiguous_copy(x.t()).is_contiguous()
    assert torch.equal(contiguous_copy(x.t()), x.t())
