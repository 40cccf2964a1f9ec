"""Settings of all tests: one torch thread per worker, and reproducible hypothesis runs without deadlines."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch
from torch.nn.attention import flex_attention

hypothesis.settings.register_profile(
    "house",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
)
hypothesis.settings.load_profile("house")

flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # eager FlexAttention would be compiled for every case

os.environ["COLUMNS"] = "160"  # pytest-xdist sets the terminal's, and tables would depend on it
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for programs that tests start


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Weights and images drawn in a test do not depend on the tests before it."""
    torch.manual_seed(0)
