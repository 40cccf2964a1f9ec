"""Seeds from positions in a run, by values worked out without the package; generators left as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from vision_longformer.data.randomness import derive_seed, seeded


def test_derived_seeds_are_those_of_every_earlier_run() -> None:
    """BLAKE2b of the key as Python writes it, eight bytes, little end first, without the last bit.

    The digests are those of ``printf "(0, 'order', 3)" | b2sum -l 64``.
    """
    assert derive_seed(0, "order", 3) == int.from_bytes(bytes.fromhex("0ab773f00dadd2e4"), "little") >> 1
    assert derive_seed(7, "mix", 0, 1) == int.from_bytes(bytes.fromhex("c23f150b5cc3a337"), "little") >> 1


def test_derived_seeds_differ() -> None:
    keys = [(seed, name, step) for seed in range(4) for name in ("mix", "shift") for step in range(50)]
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeded_draws_and_restores() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    seed = 2**40 + 5
    drawn: list[float] = []

    def draw_and_fail() -> None:
        with seeded(seed):
            drawn.extend((random.random(), np.random.rand(), torch.rand(()).item()))
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    own = torch.Generator().manual_seed(seed)
    assert drawn == [
        random.Random(seed).random(),
        np.random.RandomState(5).rand(),
        torch.rand((), generator=own).item(),
    ]
