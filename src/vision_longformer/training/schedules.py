"""Learning rates as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from .settings import TrainSettings

DROP = 0.1
"""What multistep multiplies the rate by at each milestone."""


def learning_rate(settings: TrainSettings, step: int, total: int, warmup: int) -> float:
    """The rate of step ``step``, counted from 0, of ``total``, of which the first ``warmup`` warm up linearly.

    Decay starts where warm-up ends and would reach ``min_lr`` at step ``total``. With "release_cosine" it starts at
    step 0, hidden by warm-up, so that the rate falls a little when warm-up ends; the release's linear decay is as here.
    """
    peak = settings.scaled_lr
    if step < warmup:
        return peak * (settings.warmup_factor + (1 - settings.warmup_factor) * step / warmup)
    if settings.schedule == "constant":
        return peak
    if settings.schedule == "multistep":
        return peak * DROP ** sum(step >= round(milestone * total) for milestone in settings.milestones)
    start = 0 if settings.schedule == "release_cosine" else warmup
    progress = min(1.0, (step - start) / max(1, total - start))
    left = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.min_lr + (peak - settings.min_lr) * left
