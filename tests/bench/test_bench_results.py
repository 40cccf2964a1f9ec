"""Ratios of stated times, and results in files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_builders import attention_case, result, row

from vision_longformer.bench.cases import FORWARD_BACKWARD, LARGE_MATMUL
from vision_longformer.bench.results import (
    GroupResult,
    Result,
    Row,
    busy_warning,
    compare,
    differences,
    load_result,
    machine_facts,
    new_path,
)
from vision_longformer.bench.timing import OUT_OF_TIME, Samples


def test_statistics_of_samples() -> None:
    made = row()
    assert made.time["default"] == {
        "median": 0.3,
        "q1": 0.25,
        "q3": 0.35,
        "best": 0.2,
        "rounds": 3,
        "page_faults": 2,
        "samples": [0.2, 0.4, 0.3],
    }
    assert made.per_unit("default") == pytest.approx(0.3 / 54)
    assert made.flops_per_second("default") == pytest.approx(1000 / 0.3)
    assert made.flops_per_second("absent") is None


def test_reasons_are_noted_once() -> None:
    made = Row(attention_case())
    for allocator in ("default", "kept"):
        made.add_samples(allocator, Samples(reason=OUT_OF_TIME))
    assert made.time == {}
    assert made.reasons == [OUT_OF_TIME]


def test_speedups_against_the_baseline() -> None:
    base, fast, other_point = row(), row("tiled", 0.25), row("tiled", 0.5, point="12×18", units=216)
    other_point.case = replace(other_point.case, baseline=("6×9", "tiled"))
    result(base, fast, other_point)
    assert base.time["default"]["speedup"] == 1
    assert fast.time["default"]["speedup"] == fast.time["kept"]["speedup"] == pytest.approx(4)
    assert other_point.time["default"]["speedup"] == pytest.approx(0.5 * 216 / 54)  # twice the time for 4 times as many


def test_speedup_is_the_median_over_rounds() -> None:
    """Of 0.2/0.1, 0.4/4 and 0.3/0.1 it is 2, though the ratio of the medians is 3."""
    base, other = row(), Row(attention_case("tiled"))
    other.add_samples("default", Samples([0.1, 4.0, 0.1], [0, 0, 0]))
    result(base, other)
    assert other.time["default"]["speedup"] == pytest.approx(2)


def test_no_speedup_without_the_baseline() -> None:
    other = row("tiled")
    result(Row(attention_case()), other)
    assert "speedup" not in other.time["default"]


def test_expected_memory_is_in_proportion_to_the_pixels() -> None:
    """200 bytes at 54 pixels and 300 at 100 are known; 400 pixels would take 1200."""
    known = [row(point="a"), row(factor=1.5, point="b", units=100), row("tiled", 9.0, point="b", units=100)]
    large, other = Row(attention_case(point="c", units=400)), Row(attention_case("flex", point="c", units=400))
    (group,) = result(*known, large, other, unit="pixel").groups
    assert group.expected_extra(large) == 1200
    assert group.expected_extra(other) == group.expected_extra(known[0]) == 0


def test_memory_ratio() -> None:
    (group,) = result(row(), row("tiled", 0.25), Row(attention_case("flex"))).groups
    assert [group.memory_ratio(own) for own in group.rows] == [1, 0.25, None]


def test_fraction_of_the_matrix_product() -> None:
    base, fast, matmul = row(), row("tiled", 0.25), row(LARGE_MATMUL, 2.0)
    group = result(base, fast, matmul).groups[0]
    assert group.matmul_fraction(fast, "default") == pytest.approx(8)
    assert group.matmul_fraction(matmul, "default") == 1
    assert group.matmul_fraction(row(point="elsewhere"), "default") is None


def test_results_survive_a_file(tmp_path: Path) -> None:
    made = result(row(), row("tiled", 0.5), Row(attention_case("flex"), reasons=["it cannot"]))
    path = new_path(tmp_path / "new", "attention", overwrite=False)
    made.save(path)
    assert load_result(path) == made
    assert [p.name for p in path.parent.iterdir()] == ["attention.json"]


def test_file_format(tmp_path: Path) -> None:
    """A file of the first version, written by hand."""
    work = {"kind": "model", "model": "resnet18", "height": 64, "width": 64, "batch": 2}
    work |= {"neighbours": "all", "implementation": "auto"}
    stored = {
        "format": "vision_longformer/bench/1",
        "what": "models",
        "created": "2026-01-01T00:00:00+00:00",
        "machine": {"cpu": "a cpu"},
        "settings": {"quick": True},
        "groups": [
            {
                "bench": "models",
                "name": "models",
                "about": "whole models",
                "style": "bars",
                "unit": "image",
                "rows": [
                    {
                        "point": "64×64, batch 2",
                        "variant": "resnet18",
                        "mode": "inference",
                        "together": "64×64, batch 2",
                        "baseline": ["64×64, batch 2", "resnet18"],
                        "units": 2,
                        "work": work,
                        "flops": None,
                        "time": {"kept": {"median": 0.5, "samples": [0.5]}},
                        "memory": {"extra": 3, "inputs": 2, "outputs": 1},
                        "reasons": ["the time budget was used up"],
                    }
                ],
            }
        ],
        "complete": False,
    }
    path = tmp_path / "models.json"
    path.write_text(json.dumps(stored))
    stored_result = load_result(path)
    ((group, only),) = stored_result.rows()
    assert isinstance(group, GroupResult)
    assert only.case.workload.model == "resnet18"
    assert only.per_unit("kept") == 0.25
    stored_result.save(path)
    work["method"] = "plain"  # which it had no name for
    assert json.loads(path.read_text()) == stored


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "another"}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a result of 'vil bench'"):
        load_result(path)


def test_new_paths_are_numbered(tmp_path: Path) -> None:
    names = [new_path(tmp_path, "rules", overwrite=overwrite).name for overwrite in (False, False, False, True)]
    assert names == ["rules.json", "rules-2.json", "rules-3.json", "rules.json"]


def test_overwriting_keeps_the_file_until_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text("earlier")
    assert new_path(tmp_path, "rules", overwrite=True) == path
    assert path.read_text() == "earlier"


def _compared(earlier: list[Row], now: list[Row]) -> list[tuple[str, dict[str, float], float | None]]:
    changes, _ = compare(result(*earlier), result(*now))
    return [(change.row.case.variant, change.speed, change.memory) for change in changes]


def test_compare_with_an_earlier_result() -> None:
    """Above 1 is faster or leaner than then; rows that only one of them has are left out."""
    now = [row(), row("tiled", 0.5), row("tiled", 1.0, mode=FORWARD_BACKWARD)]
    changes = _compared([row(), row("tiled", 2.0), row("flex")], now)
    assert changes == [
        ("sliding_chunk", {"default": 1.0, "kept": 1.0}, 1.0),
        ("tiled", {"default": pytest.approx(4), "kept": pytest.approx(4)}, 4.0),
    ]


def test_compare_leaves_out_what_was_measured_only_once() -> None:
    """Not measured now, not measured then, and memory alone."""
    unmeasured, memory_only = Row(attention_case("tiled")), Row(attention_case("flex"))
    memory_only.memory = {"inputs": 100, "outputs": 50, "extra": 400}
    assert _compared([row(), row("tiled"), row("flex")], [row(), unmeasured, memory_only]) == [
        ("sliding_chunk", {"default": 1.0, "kept": 1.0}, 1.0),
        ("flex", {}, 0.5),
    ]
    assert _compared([unmeasured], [row("tiled")]) == []


def test_compare_names_differences_of_the_machines() -> None:
    earlier, now = result(row()), result(row())
    now.machine["threads"] = 4
    assert compare(earlier, now)[1] == ["threads was 2, now 4"]


def test_rows_of_all_groups() -> None:
    made = Result("all", "", {}, {}, [*result(row()).groups, *result(row("tiled"), row("flex")).groups])
    assert [own.case.variant for _, own in made.rows()] == ["sliding_chunk", "tiled", "flex"]


# The machine


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
