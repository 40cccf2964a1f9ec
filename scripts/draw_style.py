"""What all figures share: colours, sizes, and how a file is written."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

QUERY, OWN, SEEN, GLOBAL, MUTED = "#c81e3a", "#2f6db3", "#a9c8ea", "#e3a018", "0.45"
"""A query; its own chunk; other keys it sees; global tokens; lines and remarks."""

DPI = 110


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A white figure of ``width``×``height`` inches with a list of panels, row by row."""
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10})
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), facecolor="white", squeeze=False)
    return figure, list(axes.flat)


def clear(axes: Axes) -> None:
    """Leave out ticks and frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)


def write(figure: Figure, path: Path) -> None:
    """Save without the version of matplotlib, so that drawing twice gives the same file."""
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    plt.close(figure)
