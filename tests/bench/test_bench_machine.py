"""What is said about machines."""

from __future__ import annotations

import os

import torch

from vision_longformer.bench.machine import busy_warning, differences, machine_facts


def test_facts_of_this_machine() -> None:
    facts = machine_facts(torch.device("cpu"), threads=3)
    assert facts["threads"] == 3
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"
    assert "gpu" not in facts
    assert machine_facts(torch.device("cpu"), None)["threads"] == torch.get_num_threads()


def test_busy_from_half_a_core_in_use() -> None:
    facts = {"load_at_start": 0.9, "cores": 2, "device": "cpu"}
    assert busy_warning(facts) is None
    text = "the machine is busy: load 1.0 on 2 cores; times are unsteady, ratios less so"
    assert busy_warning({**facts, "load_at_start": 1.0}) == text
    assert busy_warning({**facts, "load_at_start": 9.0, "device": "cuda"}) is None


def test_differences() -> None:
    earlier = {"cpu": "a", "threads": 2, "torch": "2.8", "load_at_start": 0.1}
    assert differences(earlier, {**earlier, "load_at_start": 3.0}) == []
    assert differences(earlier, {**earlier, "threads": 4, "gpu": "b"}) == [
        "gpu was None, now 'b'",
        "threads was 2, now 4",
    ]
