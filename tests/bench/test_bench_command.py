"""``vil bench``: a run of the command at tiny shapes, its tables, and how it answers mistakes."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from bench_builders import attention_case, result, row

from vision_longformer.bench.cases import FORWARD, FORWARD_BACKWARD, FULL_ATTENTION, LARGE_MATMUL, REFERENCES
from vision_longformer.bench.results import Result, Row, load_result
from vision_longformer.bench.timing import OUT_OF_TIME, Samples
from vision_longformer.cli.bench import print_changes, print_result
from vision_longformer.cli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one run of the command."""
    made = tmp_path_factory.mktemp("bench")
    options = ["--implementations", "sliding_chunk,whole_map,tiled", "--sizes", "24x17", "--quick", "--threads", "1"]
    main(["bench", "attention", *options, "--budget", "6", "--output", str(made)])
    return made


@pytest.fixture
def measured(folder: Path) -> Result:
    return load_result(folder / "attention.json")


def test_command_measures_every_variant(measured: Result) -> None:
    assert measured.complete
    assert measured.machine["threads"] == 1
    assert measured.settings["implementations"] == ["sliding_chunk", "whole_map", "tiled"]
    assert measured.settings["allocators"] == ["default", "kept"]
    variants = {"sliding_chunk", "whole_map", "tiled", *REFERENCES}
    for group in measured.groups:
        keys = {(own.case.variant, own.case.mode) for own in group.rows}
        assert keys == {(variant, mode) for variant in variants for mode in (FORWARD, FORWARD_BACKWARD)}
    for _, own in measured.rows():
        assert all(times["median"] > 0 and times["rounds"] >= 1 for times in own.time.values())
        if own.case.variant == "whole_map":
            assert own.time == {}
            assert any("chunk" in reason for reason in own.reasons)
        elif not own.reasons:
            assert set(own.time) == {"default", "kept"}
            assert (own.memory is None) == ("matmul" in own.case.variant)
        else:  # a busy machine
            assert all(OUT_OF_TIME in reason for reason in own.reasons)
    extra = [own.memory["extra"] for _, own in measured.rows() if own.memory]
    assert all(0 < bytes_ < 1e8 for bytes_ in extra)


def test_command_ratios_are_those_of_its_samples(measured: Result) -> None:
    group = measured.groups[0]
    for own in (own for own in group.rows if own.time):
        base = group.find(*own.case.baseline, own.case.mode)
        assert base is not None
        for allocator, times in own.time.items():
            if allocator in base.time:
                pairs = zip(base.time[allocator]["samples"], times["samples"], strict=False)
                assert times["speedup"] == pytest.approx(statistics.median(b / own for b, own in pairs))


def test_command_writes_plots(folder: Path, measured: Result) -> None:
    names = ("window-17-exact", "model-shapes")
    pairs = zip(names, measured.groups, strict=True)
    expected = {f"attention-{name}.png" for name, group in pairs if any(own.time for own in group.rows)}
    assert expected
    assert {path.name for path in folder.glob("*.png")} == expected
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in expected)


def _printed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Cells of the lines with anything on them; two spaces or more separate cells."""
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


@pytest.mark.parametrize("width", [60, 80])
def test_no_name_is_cut(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the table of a result nor in that of changes, whose first columns are names."""
    monkeypatch.setenv("COLUMNS", str(width))
    made = result(row("sliding_chunk"), row("sliding_chunk_autograd", 0.5), row(LARGE_MATMUL, 10.0))
    print_result(made)
    print_changes(made, made, "earlier.json")
    output = capsys.readouterr().out
    assert "…" not in output
    assert [line for line in output.splitlines() if line.startswith(" ") and len(line.rstrip()) > width] == []
    assert output.count("sliding_chunk_autograd") == 2


def test_table_of_calls(capsys: pytest.CaptureFixture[str]) -> None:
    """Medians of 300 and 150 ms, quartiles 250 to 350; 1000 operations; the matrix product takes ten times as long."""
    print_result(result(row(), row("tiled", 0.5), row(LARGE_MATMUL, 10.0), Row(attention_case("flex"))))
    head, about, title, columns, *rows = _printed(capsys)
    assert head[0].startswith("a cpu, 2 of 2 cores, torch 2.8; float32; median")
    assert about == ["attention: about it"]
    assert title == ["6×9", "(1× is sliding_chunk)"]
    assert columns == [
        *("variant", "time, default allocator", "×", "time, memory kept", "×"),
        *("GFLOP/s", "of matmul", "extra MB", "in + out"),
    ]
    assert rows == [
        ["sliding_chunk", "forward", "300 ms ±17%", "1.00×", "150 ms ±17%", "1.00×", "0.0", "1000%", "0.0", "0.0"],
        ["tiled", "forward", "150 ms ±17%", "2.00×", "75 ms ±17%", "2.00×", "0.0", "2000%", "0.0", "0.0"],
        ["large_matmul", "forward", "3000 ms ±17%", "0.10×", "1500 ms ±17%", "0.10×", "0.0", "100%", "0.0", "0.0"],
    ]


def test_table_of_large_images(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(result(row(), row("tiled", 0.25), unit="pixel"))
    *_, cells, shares = _printed(capsys)
    assert cells[:3] == ["tiled", "forward", "0.075 s ±17%"]
    assert shares == ["6×9, forward: tiled takes 0.25 of the time and 0.25 of the extra memory of sliding_chunk"]


def test_table_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    """54 images in 0.3 s, or in 0.15 s; the peak is that of the weights and images and what comes on top."""
    made = row()
    made.flops, made.memory = None, {"inputs": 40_000_000, "outputs": 1, "extra": 2_000_000}
    print_result(result(made, unit="image"))
    columns, cells = _printed(capsys)[3:]
    assert columns[-2:] == ["peak MB", "weights + images"]
    assert cells == ["sliding_chunk", "forward", "180.00 ±17%", "1.00×", "360.00 ±17%", "1.00×", "42", "40"]


def test_table_per_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Several maps in one table: 0.27 s for 54 tokens are 5 ms a token, 0.3 s for 60 as well; in the first round 0.2
    for 60 against 0.27 for 54."""
    small, large = Row(attention_case()), row("sliding_chunk", point="6×10", units=60)
    small.add_samples("default", Samples([0.27], [0]))
    for own in (small, large):
        own.case = replace(own.case, round_key="all sizes", baseline=("6×9", "sliding_chunk"))
    print_result(result(small, large, unit="token"))
    title, columns, *rows = _printed(capsys)[2:]
    assert title == ["all sizes", "(1× is 6×9)"]
    assert columns[:4] == ["map", "variant", "per token, default allocator", "×"]
    assert [cells[:6] for cells in rows] == [
        ["6×9", "sliding_chunk", "forward", "5e+06 ns", "once", "1.00×"],
        ["6×10", "sliding_chunk", "forward", "5e+06 ns ±17%", "1.50×", "2.5e+06 ns ±17%"],
    ]


def test_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    """Once per variant and reason, with the points unless it is all of them; want of time is counted."""
    refused = [Row(attention_case("flex", mode), reasons=["it cannot"]) for mode in (FORWARD, FORWARD_BACKWARD)]
    partly = [row("tiled"), Row(attention_case("tiled", FORWARD_BACKWARD), reasons=["not this"])]
    late = Row(attention_case(FULL_ATTENTION), reasons=[OUT_OF_TIME])
    print_result(result(row(), *refused, *partly, late))
    assert [" ".join(cells) for cells in _printed(capsys)[-3:]] == [
        "flex: it cannot",
        "tiled: not this (6×9 forward+backward)",
        "1 of 6 rows are not complete: the time budget was used up; give a larger --budget",
    ]


def test_changes(capsys: pytest.CaptureFixture[str]) -> None:
    earlier, now = result(row(), row("tiled", 2.0)), result(row(), row("tiled", 0.5))
    now.machine["torch"] = "2.9"
    print_changes(earlier, now, "old.json")
    title, columns, *rows, note = _printed(capsys)
    assert title == ["now against old.json of 2026-01-01T00:00:00 (above 1×: faster, leaner)"]
    assert columns == ["group", "point", "variant", "speed, default allocator", "speed, memory kept", "memory"]
    assert rows == [
        ["attention: a group", "6×9", "sliding_chunk", "forward", "1.00×", "1.00×", "1.00×"],
        ["attention: a group", "6×9", "tiled", "forward", "4.00×", "4.00×", "4.00×"],
    ]
    assert note == ["note: torch was '2.8', now '2.9'"]
    print_changes(result(row("flex")), now, "old.json")
    assert _printed(capsys) == [["old.json has no case in common with this run"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["atention"], ["benchmark 'atention'", "'attention'"]),
        (["attention", "--implementations", "sliding_chunks"], ["sliding_chunks", "did you mean 'sliding_chunk"]),
        (["attention", "--sizes", "56by56"], ["56by56", "56x56"]),
        (["attention", "--sizes", "0x4"], ["0x4"]),
        (["attention", "--sizes", ","], ["','"]),
        (["attention", "--baseline", "fussed"], ["baseline 'fussed'"]),
        (["windows", "--windows", "7,x"], ["'x'", "integers"]),
        (["windows", "--windows", "0"], ["window is 0"]),
        (["models", "--models", "swin_tinny"], ["swin_tinny", "did you mean"]),
        (["shift", "--models", "resnet50"], ["resnet50", "random shift"]),
        (["attention", "--models", "resnet50"], ["--models does not apply", "models"]),
        (["--sizes", "28x28", "--shift"], ["does not apply to 'vil bench all'"]),
        (["attention", "--batch", "0"], ["batch is 0"]),
        (["attention", "--budget", "-1"], ["budget"]),
        (["attention", "--threads", "0"], ["threads"]),
        (["attention", "--device", "cdua"], ["device 'cdua'", "did you mean 'cuda'"]),
        (["attention", "--compare", "nowhere.json"], ["nowhere.json"]),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message.startswith("vil: ")
    assert message.count("\n") == 1
    assert all(word in message for word in words)
    assert not Path("bench-results").exists()
