"""``vil bench gpu``: what the Triton kernels would do on NVIDIA GPUs, from their machine code."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from .bench import save_all, split_names, split_numbers
from .output import print_line, print_table, track

if TYPE_CHECKING:
    from ..bench.gpu.report import KernelReport, LayerReport

SHOWN = ("tensor", "special", "load", "shared", "integer", "float", "conversion")
"""Classes of instructions with a column of their own; 'all' has the others, too."""


def bench_gpu(
    *,
    chips: str = "sm_80,sm_90,sm_100",
    dims: str = "32,64",
    windows: str = "7",
    dtype: str = "float16",
    output: str = "bench-results",
    overwrite: bool = False,
) -> None:
    """Predict the speed of the Triton kernels on GPUs that need not be present: tables and a JSON file.

    Every kernel that the attention of a layer launches, for global and local tokens, forward and backward, is compiled
    for each chip and disassembled. The instructions of its inner loop are counted per score, and the slowest part of a
    multiprocessor for them gives the predicted share of the chip's peak in 16-bit products. All of this is predicted
    and not measured; on a machine with one of the chips the passes are also timed. A chip and head dimension take about
    half a minute.

    Args:
        chips: architectures, of sm_75, sm_80, sm_86, sm_89, sm_90, sm_100 and sm_120.
        dims: head dimensions.
        windows: sides of the chunks; the window is twice as wide, plus one.
        dtype: float16, bfloat16 or float32.
        output: folder for the results; an existing file is not replaced; the new one gets a number.
        overwrite: replace earlier results of the same name.
    """
    from ..bench.gpu.chips import chip_of
    from ..errors import check_at_least, check_choice
    from ..ops.triton import INSTALLED, MAX_HEAD_DIM

    if not INSTALLED:
        raise ValueError("'vil bench gpu' needs the package triton, which is not installed: pip install triton")
    check_choice("dtype", dtype, ("float16", "bfloat16", "float32"))
    chosen = [chip_of(name) for name in split_names(chips) or ()]
    sizes = list(product(split_numbers("dims", dims), split_numbers("windows", windows)))
    for dim, window in sizes:
        check_at_least("window", window, 1)
        if not 0 < dim <= MAX_HEAD_DIM:
            raise ValueError(f"a head dimension is {dim}; the Triton kernels take 1 to {MAX_HEAD_DIM}")

    from ..bench.gpu.layer import Layer
    from ..bench.gpu.report import report_layers
    from ..bench.results import new_path

    path = new_path(Path(output), "gpu", overwrite=overwrite)
    layers = [(Layer(dim, window, dtype), chip) for (dim, window), chip in product(sizes, chosen)]
    result = save_all(report_layers(track(layers, "compiling and counting")), path)
    for report in result.reports:
        print_kernels(report)
    print_shares(result.reports)
    print_line(f"wrote {path}")


def print_kernels(report: LayerReport) -> None:
    """A line for each kernel, then what is worth a warning."""
    chip, layer = report.chip, report.layer
    counts = ", ".join(
        f"{phase} {len(report.of_phase(phase))} and {report.torch_operations.get(phase, 0)} of torch"
        for phase in ("forward", "backward")
    )
    print_line(
        f"{chip.name} ({chip.product}), head dimension {layer.dim}, window {layer.window}, {layer.dtype}; predicted, "
        f"not measured; launches per layer: {counts}"
    )
    columns = ["kernel", "pass", "bound by", "of pass", "regs", "stack", "shared KB", "blocks", *SHOWN, "all"]
    print_table("", columns, [_cells(kernel, report) for kernel in report.kernels], left=3)
    for warning in (text for kernel in report.kernels for text in kernel.warnings()):
        print_line(f"  note: {warning}")


def _cells(kernel: KernelReport, report: LayerReport) -> list[str]:
    share = kernel.time / sum(other.time for other in report.of_phase(kernel.phase))
    counts = [kernel.per_score.get(name) for name in SHOWN]
    total = sum(kernel.per_score.values()) if kernel.per_score else None
    return [
        kernel.name,
        kernel.phase,
        kernel.bound,
        f"{100 * share:.0f}%",
        *map(str, (kernel.registers, kernel.stack)),
        f"{kernel.shared / 1024:.0f}",
        str(kernel.blocks),
        *("" if count is None else f"{count:.2f}" for count in counts),
        "" if total is None else f"{total:.1f}",
    ]


def print_shares(reports: list[LayerReport]) -> None:
    """Predicted shares of the peak, beside measured ones where the machine has the chip."""
    measured = any(report.measured for report in reports)
    columns = ["chip", "head dimension", "window", "forward", "backward"]
    columns += ["forward, measured", "backward, measured"] if measured else []
    rows = []
    for report in reports:
        row = [report.chip.name, str(report.layer.dim), str(report.layer.window)]
        row += [f"{100 * report.predicted(phase):.1f}%" for phase in ("forward", "backward")]
        if measured:
            shares = [report.measured_share(phase) for phase in ("forward", "backward")]
            row += ["–" if share is None else f"{100 * share:.1f}%" for share in shares]
        rows.append(row)
    print_table("share of the 16-bit peak, predicted unless it says measured", columns, rows)
