"""Results of runs as small JSON files: those shipped with the package, and those of one's own runs.

A file per study and scale; rows in it by name, each with its settings, costs, and the runs by seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..files import write_json
from ..models.zoo import model_config
from ..training.recipe import BackboneSettings
from .catalogue import STUDY_NAMES, find_study
from .declaration import Row, Study, compared_settings

STORED = Path(__file__).parent / "results"
"""Results that come with the package, in a folder per scale."""

COMMENTS = Path(__file__).parent / "comments"
"""What people have written about them."""


class RunResult(NamedTuple):
    """What a run has come to, as its ``result.json`` states it."""

    settings: dict[str, Any]
    seed: int
    metrics: dict[str, float]
    parameters: int
    macs: int
    processor_seconds: float
    seconds: float
    peak_bytes: int
    environment: dict[str, Any]
    finished: str

    @property
    def key(self) -> tuple[str, int]:
        return run_key(self.settings, self.seed)

    @property
    def on_gpu(self) -> bool:
        return bool(self.environment["devices"])

    @property
    def train_seconds(self) -> float:
        """On a CPU processor time, which does not depend on what else is running; on a GPU time."""
        return self.seconds if self.on_gpu else self.processor_seconds


def run_key(settings: Mapping[str, Any], seed: int) -> tuple[str, int]:
    """What makes two runs the same run, whatever study and row they belong to."""
    return json.dumps({**settings, **_whole_model(settings)}, sort_keys=True), seed


def _whole_model(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The model by its whole configuration, so that a default that is spelled out makes no other run.

    Empty if its configuration is not ours, or was that of an earlier version.
    """
    try:
        config = model_config(settings.get("model", BackboneSettings.model))
        whole = config.override(**settings.get("model_options", {}))
    except (TypeError, ValueError):
        return {}
    return {"model": whole.to_dict(), "model_options": {}}


class ResultStore:
    """Results of runs, by what was run: rows of several studies that are the same run share it.

    Those that are ``shipped`` are found where there is no other of the same run, and are not written.
    """

    def __init__(self, results: Iterable[RunResult] = (), shipped: Iterable[RunResult] = ()) -> None:
        own = {result.key: result for result in results}
        self._own = set(own)
        self._results = {**{result.key: result for result in shipped}, **own}

    @classmethod
    def read(cls, folders: Sequence[Path], scale: str, *, shipped: Path | None = None) -> ResultStore:
        """All results of a scale in ``folders``; of the same run in several of them, that of the last folder.

        ``shipped`` is the folder of those that come with the package.
        """
        return cls(_read_all(folders, scale), _read_all([shipped] if shipped else [], scale))

    def add(self, result: RunResult) -> None:
        self._results[result.key] = result
        self._own.add(result.key)

    def find(self, study: Study, row: Row, scale: str, seed: int) -> RunResult | None:
        """The result of a row with a seed, if it has all that the study compares."""
        result = self._results.get(run_key(compared_settings(study.settings(row, scale, seed)), seed))
        return result if result and all(name in result.metrics for name in study.measures) else None

    def of_row(self, study: Study, row: Row, scale: str) -> dict[int, RunResult]:
        """The results of a row by seed; none of a row that cannot be run."""
        if study.problem(row, scale):
            return {}
        settings = run_key(compared_settings(study.settings(row, scale, 0)), 0)[0]
        seeds = sorted(seed for text, seed in self._results if text == settings)
        found = {seed: self.find(study, row, scale, seed) for seed in seeds}
        return {seed: result for seed, result in found.items() if result is not None}

    def write(self, study: Study, scale: str, folder: Path) -> Path:
        """All results of a study's rows, but for shipped ones, as one file, in place of an earlier one."""
        rows = {}
        for row in study.rows:
            runs = [result for result in self.of_row(study, row, scale).values() if result.key in self._own]
            if runs:
                rows[row.name] = {"settings": runs[0].settings, "runs": [*map(_run_data, runs)]}
        path = folder / scale / f"{study.name}.json"
        write_json(path, {"study": study.name, "scale": scale, "rows": rows})
        return path


def _run_data(result: RunResult) -> dict[str, Any]:
    data = result._asdict()
    del data["settings"]
    return data


def _read_all(folders: Sequence[Path], scale: str) -> Iterator[RunResult]:
    for folder in folders:
        for file in sorted((folder / scale).glob("*.json")):
            yield from _read(file)


def _read(path: Path) -> Iterator[RunResult]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known = _shipped_data(data) if path.is_relative_to(STORED) else {}
        for row in data["rows"].values():
            for run in row["runs"]:
                yield RunResult(settings={**known, **row["settings"]}, **run)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not hold results of a study ({error}); delete it, or restore it") from error


def _shipped_data(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The data that results of the package were made with, if they do not say: that which their study declares."""
    if stored["study"] not in STUDY_NAMES:
        return {}
    return {"data": find_study(stored["study"]).scales[stored["scale"]]["data"]}


def comment(name: str) -> str:
    """What is to be said about the results of a shipped study, in Markdown; empty if nothing has been written."""
    path = COMMENTS / f"{name}.md"
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""
