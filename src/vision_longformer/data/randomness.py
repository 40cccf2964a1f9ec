"""Randomness without state: everything drawn in a run is a function of its seed and of where in the run it is drawn.

A resumed run therefore draws what the uninterrupted one would have drawn, with nothing to store.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*key: int | str) -> int:
    """A seed below 2⁶³ from a run's seed and a position in the run, such as ``derive_seed(seed, "mix", step)``."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's CPU generators are seeded inside, and afterwards as they were before.

    For libraries that draw from global generators, as timm's augmentation does.
    """
    python, array, tensor = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(tensor)
