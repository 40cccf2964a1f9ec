"""What is measured of whole models."""

from __future__ import annotations

from dataclasses import replace

import timm

from ..errors import unknown_name
from ..models.zoo import MODELS
from .model_jobs import size_note
from .plan_attention import plan_shift_attention
from .plans import Choices, pick_baseline
from .tasks import INFERENCE, TRAINING, Group, ModelWork, Task

RIVAL = "swin_tiny_patch4_window7_224"
OURS = ("vision_longformer_tiny", "vision_longformer_small")
OTHERS = (RIVAL, "deit_small_patch16_224", "pvt_v2_b2", "resnet50")


def plan_models(choices: Choices) -> list[Group]:
    """Our models beside others: images per second and memory, in inference and in a training step."""
    names = choices.models or ((OURS[1], RIVAL) if choices.quick else (*OURS, *OTHERS))
    sizes = choices.sizes or (((224, 224),) if choices.quick else ((224, 224), (800, 1333)))
    _check_models(names)
    baseline = pick_baseline(choices.baseline, RIVAL, names)
    tasks = []
    for size in sizes:
        works = _works(names, size, choices)
        for mode in (INFERENCE, TRAINING):
            tasks += [_task(work, variant, mode, baseline) for variant, work in works.items()]
        shifted = {name: replace(work, neighbours="random") for name, work in works.items() if work.model in MODELS}
        if choices.shift:
            tasks += [_task(work, f"{name}, random shift", TRAINING, baseline) for name, work in shifted.items()]
    notes = "; ".join(size_note(*size) for size in sizes)
    about = f"whole models; a training step is forward, backward and plain SGD; {notes}"
    return [Group("models", "models", about, "bars", "image", tuple(tasks))]


def _works(names: tuple[str, ...], size: tuple[int, int], choices: Choices) -> dict[str, ModelWork]:
    """Models by the name of their line; ours once for each implementation that was asked for."""
    batch, asked = choices.batch or _batch(size, choices.quick), choices.implementations or ("auto",)
    works = {}
    for name in names:
        for implementation in asked if name in MODELS else asked[:1]:
            variant = name if implementation == asked[0] else f"{name}, {implementation}"
            works[variant] = ModelWork(name, *size, batch, implementation=implementation)
    return works


def plan_shift(choices: Choices) -> list[Group]:
    """Random shift against all neighbours: the attention alone, and a training step of a model."""
    names = choices.models or (OURS[:1] if choices.quick else OURS[1:])
    _check_models(names)
    batch = choices.batch or _batch((224, 224), choices.quick)
    tasks = []
    for name in names:
        if name not in MODELS:
            raise ValueError(f"random shift is for models of this package, and {name!r} is none; see 'vil models'")
        texts = {"all": f"{name}, all neighbours", "random": f"{name}, random shift"}
        works = {text: ModelWork(name, 224, 224, batch, neighbours) for neighbours, text in texts.items()}
        tasks += [_task(work, text, TRAINING, texts["all"]) for text, work in works.items()]
    about = "a training step at 224×224, a first stage of 56×56 tokens: forward, backward, plain SGD"
    return [plan_shift_attention(choices), Group("shift", "training step", about, "bars", "image", tuple(tasks))]


def _check_models(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in MODELS and not timm.is_model(name):
            raise unknown_name("model", name, (*MODELS, *OTHERS, *timm.list_models()))


def _batch(size: tuple[int, int], quick: bool) -> int:
    if size[0] * size[1] > 512 * 512:
        return 1
    return 2 if quick else 8


def _task(work: ModelWork, variant: str, mode: str, baseline: str) -> Task:
    point = f"{work.height}×{work.width}, batch {work.batch}"
    return Task(point, variant, mode, point, (point, baseline), work.batch, work)
