"""What is measured of the attention alone: implementations, masking rules, window sizes, cost per token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from ..ops import IMPLEMENTATIONS
from .plans import BASELINE, Choices, Size, fast_methods, pick_baseline
from .tasks import BOTH, FORWARD, REFERENCES, AttentionWork, Group, Task

SHAPES = (
    AttentionWork("", 56, 56, batch=4),
    AttentionWork("", 112, 112),
    AttentionWork("", 50, 84, heads=6, dim=64),
    AttentionWork("", 200, 334),
)
"""First stages at 224×224, 448×448 and 800×1333, and a middle stage at 800×1333."""

RULES = ("chunk", "exact", "cyclic")
PAPER_WINDOW = 8
"""Chunk side of the paper's figures, which state the window 2w + 1 = 17."""


def squares(*sides: int) -> tuple[Size, ...]:
    return tuple((side, side) for side in sides)


def plan_attention(choices: Choices) -> list[Group]:
    """The paper's first efficiency figure, exact windows of 17; and the shapes of our models."""
    quick_sizes, sizes = squares(28, 56), squares(14, 28, 42, 56, 84, 112, 168)
    sizes = choices.sizes or (quick_sizes if choices.quick else sizes)
    paper = [_resized(size, choices, AttentionWork("", 0, 0, window=PAPER_WINDOW, rule="exact")) for size in sizes]
    shapes = _model_shapes(choices, SHAPES[:1] if choices.quick else SHAPES)
    methods = (*choices.methods(tuple(IMPLEMENTATIONS)), *REFERENCES)
    exact = "implementations of the exact window of 17×17 over the size of the map, as in the paper's figure"
    ours = "implementations at shapes of our models: chunks of 7×7, rule 'chunk', one global token, relative bias"
    return [
        Group("attention", "window 17, exact", exact, "lines", "call", _by_method(paper, methods, choices)),
        Group("attention", "model shapes", ours, "bars", "call", _by_method(shapes, methods, choices)),
    ]


def _resized(size: Size, choices: Choices, work: AttentionWork) -> AttentionWork:
    return replace(work, height=size[0], width=size[1], batch=choices.batch or work.batch)


def _model_shapes(choices: Choices, default: Sequence[AttentionWork]) -> list[AttentionWork]:
    if choices.sizes:
        return [_resized(size, choices, AttentionWork("", 0, 0)) for size in choices.sizes]
    return [_resized(shape.grid, choices, shape) for shape in default]


def _by_method(shapes: Iterable[AttentionWork], methods: Sequence[str], choices: Choices) -> tuple[Task, ...]:
    baseline = pick_baseline(choices.baseline, BASELINE, methods)
    side = 1536 if choices.quick else 2048
    works = [(method, replace(shape, method=method, side=side)) for shape in shapes for method in methods]
    return tuple(_task(work, method, mode, baseline) for mode in (FORWARD, BOTH) for method, work in works)


def plan_rules(choices: Choices) -> list[Group]:
    """The three masking rules, for each implementation."""
    groups = []
    for method in _figure_methods(choices):
        works = [
            (f"rule {rule}", _resized(size, choices, AttentionWork(method, 0, 0, window=PAPER_WINDOW, rule=rule)))
            for size, rule in product(choices.sizes or _map_sizes(choices), RULES)
        ]
        about = f"the three masking rules with chunks of {PAPER_WINDOW}×{PAPER_WINDOW}, by {method}"
        groups.append(Group("rules", method, about, "lines", "call", _tasks(works, "rule chunk", choices)))
    return groups


def plan_windows(choices: Choices) -> list[Group]:
    """Window sizes, for each implementation."""
    windows = choices.windows or ((4, 7, 12) if choices.quick else (2, 4, 7, 8, 12, 16))
    groups = []
    for method in _figure_methods(choices):
        works = [
            (_window_text(window), _resized(size, choices, AttentionWork(method, 0, 0, window=window)))
            for size, window in product(choices.sizes or _map_sizes(choices), windows)
        ]
        baseline = pick_baseline(None, _window_text(7), [variant for variant, _ in works])
        about = f"window sizes, rule 'chunk', by {method}"
        groups.append(Group("windows", method, about, "lines", "call", _tasks(works, baseline, choices)))
    return groups


def _figure_methods(choices: Choices) -> tuple[str, ...]:
    """What models use and the baseline; quickly, the former only."""
    fast = fast_methods(choices.device)
    return choices.methods(fast[:1] if choices.quick else fast)


def _map_sizes(choices: Choices) -> tuple[Size, ...]:
    return squares(28, 56) if choices.quick else squares(28, 56, 84, 112)


def _window_text(window: int) -> str:
    return f"window {2 * window + 1} (chunk {window})"


def plan_scaling(choices: Choices) -> list[Group]:
    """Cost per token over the size of the map; all sizes take turns, so that they can be compared."""
    sizes = choices.sizes or (squares(28, 56, 112) if choices.quick else squares(28, 56, 112, 200, 400))
    point = point_text(_resized((56, 56) if (56, 56) in sizes else sizes[0], choices, AttentionWork("", 0, 0)))
    tasks = []
    for mode, method, size in product((FORWARD, BOTH), _figure_methods(choices), sizes):
        work = _resized(size, choices, AttentionWork(method, 0, 0))
        tasks.append(replace(_task(work, method, mode, method), together="all sizes", baseline=(point, method)))
    about = f"cost per token over the size of the map; ratios against {point}"
    return [Group("scaling", "per token", about, "per_token", "token", tuple(tasks))]


def plan_shift_attention(choices: Choices) -> Group:
    """Random shift against all neighbours in the attention alone."""
    shapes = _model_shapes(choices, SHAPES[:1] if choices.quick else SHAPES[:2])
    texts = {"all": "all neighbours", "random": "random shift", "self": "own chunk only"}
    tasks = []
    for mode, shape, method in product((FORWARD, BOTH), shapes, _figure_methods(choices)):
        for neighbours, text in texts.items():
            work = replace(shape, method=method, neighbours=neighbours)
            tasks.append(_task(work, f"{method}, {text}", mode, f"{method}, {texts['all']}"))
    about = "all neighbours, one random neighbour, none: attention with chunks of 7×7, rule 'chunk'"
    return Group("shift", "attention", about, "bars", "call", tuple(tasks))


def _tasks(works: Sequence[tuple[str, AttentionWork]], baseline: str, choices: Choices) -> tuple[Task, ...]:
    """In both modes; quickly, forward+backward only, which is what the paper's figures show."""
    modes = (BOTH,) if choices.quick else (FORWARD, BOTH)
    return tuple(_task(work, variant, mode, baseline) for mode in modes for variant, work in works)


def _task(work: AttentionWork, variant: str, mode: str, baseline: str) -> Task:
    point = point_text(work)
    return Task(point, variant, mode, point, (point, baseline), work.batch * work.grid.tokens, work)


def point_text(work: AttentionWork) -> str:
    return f"{work.height}×{work.width}, batch {work.batch}, {work.heads}×{work.dim}"
