"""Studies and results for the tests of studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vision_longformer.studies.declaration import Row, Study, compared_settings
from vision_longformer.studies.results import RunResult

SHORT: dict[str, Any] = {
    "recipe": "cifar10",
    "data": "arrays.npz",
    "steps": 3,
    "warmup_steps": 1,
    "batch_size": 8,
    "eval_every": 1000,
    "log_every": 1,
}
"""Three steps on :func:`write_arrays`."""


def write_arrays(folder: Path) -> Path:
    """32 images of 32×32 and ten classes in each split."""
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 255, (32, 32, 32, 3), dtype=np.uint8), np.arange(32) % 10
    path = folder / "arrays.npz"
    np.savez(path, train_x=images, train_y=labels, validation_x=images, validation_y=labels)
    return path


def make_study(*rows: Row, sizes: tuple[float, ...] = (), **changes: Any) -> Study:
    """A small study of classifiers, by default of two learning rates."""
    rows = rows or (Row("slow", 70.0), Row("fast", 71.5, {"small": {"lr": 5e-3}}))
    settings = {**SHORT, **changes}
    return Study("rates", "Learning rates", "classification", "Table 0", rows[0].name, {"small": settings}, rows, sizes)


def make_result(study: Study, row: Row, seed: int, **metrics: float) -> RunResult:
    """What a run of a row might have come to; its costs are round numbers."""
    return RunResult(
        settings=compared_settings(study.settings(row, "small", seed)),
        seed=seed,
        metrics=metrics,
        parameters=2_000_000,
        macs=30_000_000,
        processor_seconds=120.0,
        seconds=999.0,
        peak_bytes=50_000_000,
        environment={"devices": []},
        finished="2026-11-17T12:00:00+00:00",
    )
