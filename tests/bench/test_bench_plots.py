"""What figures show of a result: lines, bars and their lengths, as matplotlib holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bench_builders import attention_case, result, row
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vision_longformer.bench.cases import FORWARD_BACKWARD, FULL_ATTENTION, LARGE_MATMUL
from vision_longformer.bench.plots import draw, missing_word
from vision_longformer.bench.results import Result, Row
from vision_longformer.bench.timing import Samples

Drawn = Callable[[Result], Figure]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Drawn:
    """Draws a result of one group and returns the figure."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: figures.append(self))

    def draw_one(made: Result) -> Figure:
        draw(made, tmp_path / "attention")
        return figures.pop()

    return draw_one


def _lines(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    lines = [line for line in axes.get_lines() if line.get_marker() == "o" or line.get_label() == "inputs + outputs"]
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def _bars(axes: Axes) -> list[float]:
    return [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]


@pytest.mark.parametrize(("style", "unit"), [("lines", "call"), ("bars", "image"), ("per_token", "token")])
def test_files(style: str, unit: str, tmp_path: Path) -> None:
    unmeasured = Row(attention_case("unfold_nn"), reasons=["it cannot"])
    rows = [row(), row("tiled", 0.5), row("tiled", 0.5, mode=FORWARD_BACKWARD), row(FULL_ATTENTION, 3.0), unmeasured]
    (path,) = draw(result(*rows, style=style, unit=unit), tmp_path / "attention")
    assert path.name == "attention-a-group.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw(result(unmeasured, style=style), tmp_path / "attention") == []


def test_lines_over_megapixels(drawn: Drawn) -> None:
    """Seconds, and sizes of images as megapixels."""
    figure = drawn(result(row(), row("tiled", 2.0, units=2_500_000, point="b"), unit="pixel"))
    time = figure.axes[0]
    assert time.get_title() == "forward: s, default allocator"
    assert _lines(time)["tiled"][1] == [pytest.approx(0.6)]
    assert time.get_xlabel() == "megapixels"
    assert "2.5" in [label.get_text() for label in time.get_xticklabels()]


def test_file_names_state_the_benchmark_once(tmp_path: Path) -> None:
    made = result(row())
    made.what = "all"
    made.groups[0].name = "attention, exact"
    assert [path.name for path in draw(made, tmp_path / "all")] == ["all-attention-exact.png"]


def test_lines(drawn: Drawn) -> None:
    """Milliseconds with each allocator and megabytes, over the side of a square map of as many tokens."""
    large = {"point": "12×12", "units": 144, "height": 12, "width": 12}
    rows = [row("tiled", 8.0, **large), row(), row("tiled", 0.5), row(LARGE_MATMUL), Row(attention_case("flex"))]
    figure = drawn(result(*rows))
    default, tuned, memory = (_lines(axes) for axes in figure.axes)
    sides = [pytest.approx(54**0.5), 12.0]
    assert default == {
        "sliding_chunk": (sides[:1], [pytest.approx(300)]),
        "tiled": (sides, [pytest.approx(150), pytest.approx(2400)]),
    }
    assert tuned["tiled"] == (sides, [pytest.approx(75), pytest.approx(1200)])
    assert memory["tiled"] == (sides, [1e-4, 1.6e-3])
    assert memory["inputs + outputs"] == (sides, [1.5e-4, 1.5e-4])
    assert [axes.get_title() for axes in figure.axes] == [
        "forward: ms, default allocator",
        "forward: ms, memory kept",
        "forward: extra memory in MB",
    ]


def test_shade_of_the_quartiles(drawn: Drawn) -> None:
    default, *_ = drawn(result(row(), row("sliding_chunk", 2.0, point="12×12", height=12, width=12))).axes
    (shade,) = default.collections
    (path,) = shade.get_paths()
    assert (path.vertices[:, 1].min(), path.vertices[:, 1].max()) == (pytest.approx(250), pytest.approx(700))


def test_per_token(drawn: Drawn) -> None:
    """0.3 s for 54 tokens; twice the time for four times as many tokens is half the time per token."""
    base, other = row(), row("sliding_chunk", 2.0, point="12×18", units=216, height=12, width=18)
    other.case = replace(other.case, baseline=("6×9", "sliding_chunk"))
    figure = drawn(result(base, other, style="per_token", unit="token"))
    absolute, relative, memory = (_lines(axes)["sliding_chunk"][1] for axes in figure.axes)
    assert absolute == [pytest.approx(3e8 / 54), pytest.approx(6e8 / 216)]
    assert relative == [1.0, pytest.approx(0.5)]
    assert memory == [pytest.approx(200 / 54), pytest.approx(400 / 216)]


def test_bars_of_calls(drawn: Drawn) -> None:
    """Milliseconds by allocator, variant by variant; extra memory, then inputs and outputs."""
    speed, memory = drawn(result(row(), row("tiled", 0.5), row(LARGE_MATMUL), style="bars")).axes
    assert _bars(speed) == [pytest.approx(x) for x in (300, 150, 150, 75)]
    assert _bars(memory) == [pytest.approx(x) for x in (2e-4, 1e-4, 1.5e-4, 1.5e-4)]
    assert [label.get_text() for label in speed.get_yticklabels()] == ["sliding_chunk", "tiled"]
    assert speed.get_title() == "6×9\nforward: ms"


def test_bars_of_models(drawn: Drawn) -> None:
    """Images per second (54 in 0.3 s); peak memory with the weights and images, then these alone."""
    speed, memory = drawn(result(row(), style="bars", unit="image")).axes
    assert _bars(speed) == [pytest.approx(180), pytest.approx(360)]
    assert _bars(memory) == [pytest.approx(3e-4), pytest.approx(1e-4)]
    assert memory.get_title() == "6×9\nforward: peak memory in MB"


LARGE = {"point": "12×12", "units": 144, "height": 12, "width": 12}


def _with_gaps() -> list[Row]:
    """Two variants on two maps; on the larger one, the first was refused and the second timed once."""
    once = Row(attention_case("tiled", **LARGE), flops=1000)
    for allocator in ("default", "kept"):
        once.add_samples(allocator, Samples([0.5], [1]))
    once.memory = {"inputs": 100, "outputs": 50, "extra": 400}
    refused = Row(attention_case(**LARGE), reasons=["would need about 9.0 GB; the limit is 4.0 GB"])
    nowhere = Row(attention_case("unfold_nn"), reasons=["the rule must be 'exact'"])
    return [row(), row("tiled", 0.5), refused, once, nowhere]


@pytest.mark.parametrize(("style", "unit"), [("lines", "call"), ("per_token", "token")])
def test_lines_mark_what_is_missing_and_what_was_timed_once(style: str, unit: str, drawn: Drawn) -> None:
    figure = drawn(result(*_with_gaps(), style=style, unit=unit))
    for axes in figure.axes:
        squares = [line for line in axes.get_lines() if line.get_marker() == "s"]
        (missing,) = [
            line for line in squares if line.get_markeredgecolor() == "tab:red" and list(line.get_xdata()) == [12.0]
        ]
        assert missing.get_markerfacecolor() == "none"
        assert "out of memory" in [text.get_text().strip() for text in axes.texts]
        assert axes.get_ylabel()
    (ring,) = [line for line in figure.axes[0].get_lines() if line.get_marker() == "D"]
    assert list(ring.get_xdata()) == [12.0]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim() or style == "per_token"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-2:] == ["timed once", "not measured"]
    assert figure.get_suptitle().endswith("not measured: unfold_nn (refused)")


def test_a_panel_without_values_is_drawn(tmp_path: Path) -> None:
    """Memory may be missing everywhere, as in a run that has no time for it."""
    unmeasured = row()
    unmeasured.memory = None
    for style, unit in (("lines", "call"), ("per_token", "token"), ("bars", "call")):
        assert draw(result(unmeasured, style=style, unit=unit), tmp_path / style)


def test_bars_mark_what_is_missing_and_what_was_timed_once(drawn: Drawn) -> None:
    """Each variant has its place at each point; panels of the same quantity have the same axis, with its unit."""
    rows = [*_with_gaps(), row(mode=FORWARD_BACKWARD), row("tiled", 20.0, mode=FORWARD_BACKWARD)]
    figure = drawn(result(*rows, style="bars"))
    small, large = figure.axes[:4], figure.axes[4:]
    assert [label.get_text() for label in large[0].get_yticklabels()] == ["sliding_chunk", "tiled"]
    assert [text.get_text() for text in large[0].texts].count("out of memory") == 2
    assert [text.get_text() for text in large[0].texts].count("500 (once)") == 2
    assert "out of memory" in [text.get_text() for text in large[1].texts]
    assert small[0].get_xlim() == small[2].get_xlim()
    assert small[1].get_xlim() == small[3].get_xlim()
    assert [axes.get_xlabel() for axes in small] == ["ms", "MB", "ms", "MB"]


@pytest.mark.parametrize(
    ("reasons", "word"),
    [
        (["the time budget was used up"], "no time"),
        (["memory: the time budget was used up"], "no time"),
        (["would need about 9.0 GB; the limit is 4.0 GB"], "out of memory"),
        (["CUDA out of memory. Tried to allocate"], "out of memory"),
        (["the rule must be 'exact'"], "refused"),
        ([], "—"),
    ],
)
def test_reasons_in_a_word(reasons: list[str], word: str) -> None:
    assert missing_word(Row(attention_case(), reasons=reasons)) == word


def test_bars_of_very_different_length_have_a_logarithmic_axis(drawn: Drawn) -> None:
    close, far = (drawn(result(row(), row("tiled", factor), style="bars")).axes[0] for factor in (0.1, 0.01))
    assert (close.get_xscale(), far.get_xscale()) == ("linear", "log")
