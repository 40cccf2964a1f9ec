"""Which cases each benchmark of ``vil bench`` times, and what the user may choose about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import timm
import torch

from ..errors import check_at_least, check_choice, unknown_name
from ..models.zoo import MODELS
from ..ops import IMPLEMENTATIONS
from ..ops.local_attention import AUTOMATIC
from .cases import (
    CHECKPOINTING,
    FORWARD,
    FORWARD_BACKWARD,
    INFERENCE,
    PLAIN,
    REFERENCES,
    STREAMED,
    STRIPS,
    TRAINING_STEP,
    AttentionWorkload,
    Case,
    Group,
    ModelWorkload,
    refusal,
    size_note,
)

Size = tuple[int, int]

BASELINE = "sliding_chunk"
"""What implementations are compared with unless another baseline is chosen: the paper's fastest."""

SHAPES = (
    AttentionWorkload("", 56, 56, batch=4),
    AttentionWorkload("", 112, 112),
    AttentionWorkload("", 50, 84, heads=6, dim=64),
    AttentionWorkload("", 200, 334),
)
"""First stages at 224×224, 448×448 and 800×1333, and a middle stage at 800×1333."""

RULES = ("chunk", "exact", "cyclic")
PAPER_WINDOW = 8
"""Chunk side of the paper's figures, which state the window 2w + 1 = 17."""

BASELINE_MODEL = "swin_tiny_patch4_window7_224"
OUR_MODELS = ("vision_longformer_tiny", "vision_longformer_small")
LARGE_METHODS = {INFERENCE: (PLAIN, STREAMED), TRAINING_STEP: (PLAIN, CHECKPOINTING, STRIPS)}
"""How models of ours run on large images; others run plain only."""

OTHER_MODELS = (BASELINE_MODEL, "deit_small_patch16_224", "pvt_v2_b2", "resnet50")


@dataclass(frozen=True)
class Options:
    """What the user chose; None is the benchmark's own default. ``sizes`` are maps of tokens, or images of models."""

    quick: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    implementations: tuple[str, ...] | None = None
    sizes: tuple[Size, ...] | None = None
    models: tuple[str, ...] | None = None
    windows: tuple[int, ...] | None = None
    baseline: str | None = None
    batch: int | None = None
    shift: bool = False

    def __post_init__(self) -> None:
        for name in self.implementations or ():
            check_choice("implementation", name, IMPLEMENTATIONS)
        for window in self.windows or ():
            check_at_least("window", window, 1)
        if self.batch is not None:
            check_at_least("batch", self.batch, 1)

    def methods(self, default: Sequence[str]) -> tuple[str, ...]:
        """Implementations to time; a chosen baseline is always among them."""
        chosen = tuple(self.implementations or default)
        if self.baseline is None or self.baseline in chosen:
            return chosen
        check_choice("baseline", self.baseline, IMPLEMENTATIONS)
        return (*chosen, self.baseline)

    def main_methods(self) -> tuple[str, ...]:
        """By default the implementation that models use on this device and the baseline; if quick, the former only."""
        automatic = next(name for name in AUTOMATIC if self._can_run(name))
        default = tuple(dict.fromkeys((automatic, BASELINE)))
        return self.methods(default[:1] if self.quick else default)

    def _can_run(self, implementation: str) -> bool:
        """On a first stage at 224×224, in training."""
        return refusal(AttentionWorkload(implementation, 56, 56), FORWARD_BACKWARD, self.device) is None


class Benchmark(NamedTuple):
    """Its groups for some options, the options that apply to it, and the seconds it takes, quick or not.

    ``large``: its cases may take most of the memory. It is no part of 'all', and is timed with the default allocator
    only, since the other would keep what the largest case took.
    """

    groups: Callable[[Options], list[Group]]
    applicable: tuple[str, ...]
    quick_seconds: float
    seconds: float
    large: bool = False


def plan(what: str, options: Options, only: str | None = None) -> dict[str, list[Group]]:
    """The groups of a benchmark, or of all of them; an option that does not apply to it is an error.

    ``only`` selects the groups with this in their name.
    """
    check_choice("benchmark", what, (ALL, *BENCHMARKS))
    names = tuple(name for name, each in BENCHMARKS.items() if not each.large) if what == ALL else (what,)
    for option in ("implementations", "sizes", "models", "windows", "baseline", "batch", "shift"):
        if getattr(options, option) and not all(option in BENCHMARKS[name].applicable for name in names):
            takers = ", ".join(name for name, benchmark in BENCHMARKS.items() if option in benchmark.applicable)
            raise ValueError(f"--{option} does not apply to 'vil bench {what}', only to {takers}")
    plans = {name: BENCHMARKS[name].groups(options) for name in names}
    if only is None:
        return plans
    selected = {name: [group for group in groups if only in group.name] for name, groups in plans.items()}
    if not any(selected.values()):
        raise unknown_name("figure", only, (group.name for groups in plans.values() for group in groups))
    return {name: groups for name, groups in selected.items() if groups}


def default_budget(name: str, quick: bool) -> float:
    """Seconds that a benchmark is meant to take."""
    return BENCHMARKS[name].quick_seconds if quick else BENCHMARKS[name].seconds


def pick_baseline(chosen: str | None, default: str, variants: Sequence[str]) -> str:
    """The variant that the others are compared with: the chosen one, else the default if present, else the first."""
    if chosen is not None:
        check_choice("baseline", chosen, variants)
        return chosen
    return default if default in variants else variants[0]


# Attention alone


def _attention_groups(options: Options) -> list[Group]:
    """The paper's first efficiency figure, exact windows of 17; and the shapes of our models."""
    sizes = options.sizes or (_squares(28, 56) if options.quick else _squares(14, 28, 42, 56, 84, 112, 168))
    paper_shape = AttentionWorkload("", 0, 0, window=PAPER_WINDOW, rule="exact")
    paper_shapes = [_resized(paper_shape, size, options) for size in sizes]
    model_shapes = _model_shapes(options, SHAPES[:1] if options.quick else SHAPES)
    methods = (*options.methods(tuple(IMPLEMENTATIONS)), *REFERENCES)
    paper = "implementations of the exact window of 17×17 over the size of the map, as in the paper's figure"
    ours = "implementations at shapes of our models: chunks of 7×7, rule 'chunk', one global token, relative bias"
    return [
        Group("attention", "window 17, exact", paper, "lines", "call", _method_cases(paper_shapes, methods, options)),
        Group("attention", "model shapes", ours, "bars", "call", _method_cases(model_shapes, methods, options)),
    ]


def _rule_groups(options: Options) -> list[Group]:
    """The three masking rules, for each implementation."""
    groups = []
    for method in options.main_methods():
        variants = []
        for size, rule in product(options.sizes or _map_sizes(options), RULES):
            shape = AttentionWorkload(method, 0, 0, window=PAPER_WINDOW, rule=rule)
            variants.append((f"rule {rule}", _resized(shape, size, options)))
        about = f"the three masking rules with chunks of {PAPER_WINDOW}×{PAPER_WINDOW}, by {method}"
        groups.append(Group("rules", method, about, "lines", "call", _variant_cases(variants, "rule chunk", options)))
    return groups


def _window_groups(options: Options) -> list[Group]:
    """Window sizes, for each implementation."""
    windows = options.windows or ((4, 7, 12) if options.quick else (2, 4, 7, 8, 12, 16))
    groups = []
    for method in options.main_methods():
        variants = []
        for size, window in product(options.sizes or _map_sizes(options), windows):
            variants.append(
                (_window_text(window), _resized(AttentionWorkload(method, 0, 0, window=window), size, options))
            )
        baseline = pick_baseline(None, _window_text(7), [name for name, _ in variants])
        about = f"window sizes, rule 'chunk', by {method}"
        groups.append(Group("windows", method, about, "lines", "call", _variant_cases(variants, baseline, options)))
    return groups


def _scaling_groups(options: Options) -> list[Group]:
    """Cost per token over the size of the map; all sizes share their rounds, so that they can be compared."""
    sizes = options.sizes or (_squares(28, 56, 112) if options.quick else _squares(28, 56, 112, 200, 400))
    baseline_size = (56, 56) if (56, 56) in sizes else sizes[0]
    baseline_point = _point_text(_resized(AttentionWorkload("", 0, 0), baseline_size, options))
    cases = []
    for mode, method, size in product((FORWARD, FORWARD_BACKWARD), options.main_methods(), sizes):
        case = _attention_case(_resized(AttentionWorkload(method, 0, 0), size, options), method, mode, method)
        cases.append(replace(case, round_key="all sizes", baseline=(baseline_point, method)))
    about = f"cost per token over the size of the map; ratios against {baseline_point}"
    return [Group("scaling", "per token", about, "per_token", "token", tuple(cases))]


def _shift_attention_group(options: Options) -> Group:
    """Random shift against all neighbours in the attention alone."""
    shapes = _model_shapes(options, SHAPES[:1] if options.quick else SHAPES[:2])
    texts = {"all": "all neighbours", "random": "random shift", "self": "own chunk only"}
    cases = []
    for mode, shape, method in product((FORWARD, FORWARD_BACKWARD), shapes, options.main_methods()):
        for neighbours, text in texts.items():
            workload = replace(shape, method=method, neighbours=neighbours)
            cases.append(_attention_case(workload, f"{method}, {text}", mode, f"{method}, {texts['all']}"))
    about = "all neighbours, one random neighbour, none: attention with chunks of 7×7, rule 'chunk'"
    return Group("shift", "attention", about, "bars", "call", tuple(cases))


def _squares(*sides: int) -> tuple[Size, ...]:
    return tuple((side, side) for side in sides)


def _map_sizes(options: Options) -> tuple[Size, ...]:
    return _squares(28, 56) if options.quick else _squares(28, 56, 84, 112)


def _resized(shape: AttentionWorkload, size: Size, options: Options) -> AttentionWorkload:
    return replace(shape, height=size[0], width=size[1], batch=options.batch or shape.batch)


def _model_shapes(options: Options, default: Sequence[AttentionWorkload]) -> list[AttentionWorkload]:
    if options.sizes:
        return [_resized(AttentionWorkload("", 0, 0), size, options) for size in options.sizes]
    return [_resized(shape, shape.grid, options) for shape in default]


def _window_text(window: int) -> str:
    return f"window {2 * window + 1} (chunk {window})"


def _point_text(workload: AttentionWorkload) -> str:
    return f"{workload.height}×{workload.width}, batch {workload.batch}, {workload.heads}×{workload.dim}"


def _method_cases(shapes: Iterable[AttentionWorkload], methods: Sequence[str], options: Options) -> tuple[Case, ...]:
    """Every method at every shape, in both modes."""
    baseline = pick_baseline(options.baseline, BASELINE, methods)
    side = 1536 if options.quick else 2048
    workloads = [replace(shape, method=method, side=side) for shape in shapes for method in methods]
    modes = (FORWARD, FORWARD_BACKWARD)
    return tuple(_attention_case(own, own.method, mode, baseline) for mode in modes for own in workloads)


def _variant_cases(
    variants: Sequence[tuple[str, AttentionWorkload]], baseline: str, options: Options
) -> tuple[Case, ...]:
    """In both modes; if quick, forward+backward only, which is what the paper's figures show."""
    modes = (FORWARD_BACKWARD,) if options.quick else (FORWARD, FORWARD_BACKWARD)
    return tuple(_attention_case(workload, name, mode, baseline) for mode in modes for name, workload in variants)


def _attention_case(workload: AttentionWorkload, variant: str, mode: str, baseline: str) -> Case:
    point = _point_text(workload)
    return Case(point, variant, mode, point, (point, baseline), workload.batch * workload.grid.tokens, workload)


# Whole models


def _model_groups(options: Options) -> list[Group]:
    """Our models beside others: images per second and memory, in inference and in a training step."""
    names = options.models or ((OUR_MODELS[1], BASELINE_MODEL) if options.quick else (*OUR_MODELS, *OTHER_MODELS))
    sizes = options.sizes or (((224, 224),) if options.quick else ((224, 224), (800, 1333)))
    _check_models(names)
    baseline = pick_baseline(options.baseline, BASELINE_MODEL, names)
    cases = []
    for size in sizes:
        workloads = _model_workloads(names, size, options)
        for mode in (INFERENCE, TRAINING_STEP):
            cases += [_model_case(workload, name, mode, baseline) for name, workload in workloads.items()]
        if options.shift:
            ours = {name: workload for name, workload in workloads.items() if workload.model in MODELS}
            for name, workload in ours.items():
                shifted = replace(workload, neighbours="random")
                cases.append(_model_case(shifted, f"{name}, random shift", TRAINING_STEP, baseline))
    notes = "; ".join(size_note(*size) for size in sizes)
    about = f"whole models; a training step is forward, backward and plain SGD; {notes}"
    return [Group("models", "models", about, "bars", "image", tuple(cases))]


def _large_groups(options: Options) -> list[Group]:
    """Time and memory over the size of one image: our models plain and in parts, others plain."""
    names = options.models or (OUR_MODELS[0], BASELINE_MODEL)
    sizes = sorted(options.sizes or (_squares(256, 512) if options.quick else _squares(512, 1024, 2048, 4096)))
    _check_models(names)
    cases = []
    for (height, width), (mode, methods) in product(sizes, LARGE_METHODS.items()):
        point = f"{height}×{width}, {height * width / 1e6:.3g} MP"
        baseline = point, f"{names[0]}, {PLAIN}"
        for name, method in product(names, methods):
            if name in MODELS or method == PLAIN:
                workload = ModelWorkload(name, height, width, method=method)
                cases.append(Case(point, f"{name}, {method}", mode, point, baseline, height * width, workload))
    about = (
        "one large image; a training step is forward, backward and plain SGD; extra memory is beside weights and image"
    )
    return [Group("large", "images", about, "lines", "pixel", tuple(cases))]


def _shift_groups(options: Options) -> list[Group]:
    """Random shift against all neighbours: the attention alone, and a training step of a model."""
    names = options.models or (OUR_MODELS[:1] if options.quick else OUR_MODELS[1:])
    _check_models(names)
    batch = options.batch or _default_batch((224, 224), options.quick)
    cases = []
    for name in names:
        if name not in MODELS:
            raise ValueError(f"random shift is for models of this package, and {name!r} is none; see 'vil models'")
        texts = {"all": f"{name}, all neighbours", "random": f"{name}, random shift"}
        for neighbours, text in texts.items():
            workload = ModelWorkload(name, 224, 224, batch, neighbours)
            cases.append(_model_case(workload, text, TRAINING_STEP, texts["all"]))
    about = "a training step at 224×224, a first stage of 56×56 tokens: forward, backward, plain SGD"
    return [_shift_attention_group(options), Group("shift", "training step", about, "bars", "image", tuple(cases))]


def _model_workloads(names: tuple[str, ...], size: Size, options: Options) -> dict[str, ModelWorkload]:
    """Models by the name of their row; ours once for each chosen implementation."""
    batch = options.batch or _default_batch(size, options.quick)
    implementations = options.implementations or ("auto",)
    workloads = {}
    for name in names:
        for implementation in implementations if name in MODELS else implementations[:1]:
            variant = name if implementation == implementations[0] else f"{name}, {implementation}"
            workloads[variant] = ModelWorkload(name, *size, batch, implementation=implementation)
    return workloads


def _check_models(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in MODELS and not timm.is_model(name):
            raise unknown_name("model", name, (*MODELS, *OTHER_MODELS, *timm.list_models()))


def _default_batch(size: Size, quick: bool) -> int:
    if size[0] * size[1] > 512 * 512:
        return 1
    return 2 if quick else 8


def _model_case(workload: ModelWorkload, variant: str, mode: str, baseline: str) -> Case:
    point = f"{workload.height}×{workload.width}, batch {workload.batch}"
    return Case(point, variant, mode, point, (point, baseline), workload.batch, workload)


BENCHMARKS = {
    "attention": Benchmark(_attention_groups, ("implementations", "sizes", "baseline", "batch"), 34, 900),
    "rules": Benchmark(_rule_groups, ("implementations", "sizes", "batch"), 5, 300),
    "windows": Benchmark(_window_groups, ("implementations", "sizes", "windows", "batch"), 5, 300),
    "shift": Benchmark(_shift_groups, ("implementations", "sizes", "models", "batch"), 10, 300),
    "models": Benchmark(_model_groups, ("implementations", "sizes", "models", "baseline", "batch", "shift"), 18, 1800),
    "scaling": Benchmark(_scaling_groups, ("implementations", "sizes", "batch"), 7, 600),
    "large": Benchmark(_large_groups, ("sizes", "models"), 60, 5400, large=True),
}
ALL = "all"
