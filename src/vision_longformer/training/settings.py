"""What classification and detection recipes have in common: optimisation, schedule, and how a run behaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..config import NEIGHBOURS
from ..errors import check_at_least, check_choice, check_fraction

OPTIMIZERS = ("adamw", "sgd", "release_adamw", "release_qhm")
SCHEDULES = ("cosine", "linear", "multistep", "constant", "release_cosine")
PRECISIONS = ("fp32", "bf16", "fp16")
DECAYS = ("matrices", "release", "all")
STRATEGIES = ("ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a training run.

    Args:
        about: what the recipe is for, in a line.
        seed: of everything random; the same seed gives the same run.
        epochs: passes over the training set.
        steps: stop after this many optimiser steps instead of whole epochs.
        batch_size: images per optimiser step, over all processes.
        accumulate: parts into which a process splits its share of the batch, to save memory.
        precision: fp32, bf16 or fp16.
        compile: compile the model with torch.compile.
        grad_checkpointing: recompute blocks in backward, to save memory.
        strategy: over several processes, ddp, or fsdp (FSDP2) to shard parameters.
        optimizer: adamw, sgd; release_adamw and release_qhm step as the authors' release does.
        lr: peak learning rate.
        lr_batch: the batch size that lr is stated for; it is scaled to batch_size. None: not scaled.
        beta2: of adamw and release_adamw, the decay of squared gradients.
        momentum: of sgd and release_qhm.
        weight_decay: decoupled for adamw.
        decay: what decays: matrices (no biases, norms, tokens, position tables), release (its grouping) or all.
        clip_norm: largest norm of the whole gradient; None for no limit.
        schedule: cosine, linear, multistep, constant; release_cosine counts the steps of warm-up too.
        warmup: epochs of linear warm-up.
        warmup_steps: the same in optimiser steps, instead of epochs.
        warmup_factor: of the first step's learning rate.
        min_lr: where the schedule ends.
        milestones: of multistep, fractions of the run at which the rate falls to a tenth.
        ema: decay of an exponential moving average of the weights, which is then evaluated and saved; None for none.
        workers: data-loading processes.
        checkpoint_minutes: time between checkpoints; there is one after each epoch as well.
        log_every: steps between lines of metrics.
        eval_every: epochs between evaluations.
    """

    about: str = ""
    seed: int = 0
    epochs: int = 300
    steps: int | None = None
    batch_size: int = 1024
    accumulate: int = 1
    precision: str = "fp32"
    compile: bool = False
    grad_checkpointing: bool = False
    strategy: str = "ddp"
    optimizer: str = "adamw"
    lr: float = 1e-3
    lr_batch: int | None = None
    beta2: float = 0.999
    momentum: float = 0.9
    weight_decay: float = 0.1
    decay: str = "matrices"
    clip_norm: float | None = None
    schedule: str = "cosine"
    warmup: float = 5.0
    warmup_steps: int | None = None
    warmup_factor: float = 0.002
    min_lr: float = 1e-6
    milestones: tuple[float, ...] = ()
    ema: float | None = None
    workers: int = 2
    checkpoint_minutes: float = 10.0
    log_every: int = 50
    eval_every: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "log_every", "eval_every"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("seed", "workers"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("steps", "lr_batch", "warmup_steps"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        for name, choices in (
            ("precision", PRECISIONS),
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("decay", DECAYS),
            ("strategy", STRATEGIES),
        ):
            check_choice(name, getattr(self, name), choices)
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; it must be positive")
        for name in ("weight_decay", "warmup", "min_lr", "checkpoint_minutes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema is {self.ema}; it must be at least 0 and below 1, such as 0.9999")
        if list(self.milestones) != sorted(self.milestones) or not all(0 < at < 1 for at in self.milestones):
            raise ValueError(f"milestones are {self.milestones}; give rising fractions of the run, as [0.66, 0.88]")

    def count_warmup(self, steps_per_epoch: int) -> int:
        """Steps of warm-up."""
        return round(self.warmup * steps_per_epoch) if self.warmup_steps is None else self.warmup_steps

    @property
    def scaled_lr(self) -> float:
        """The peak learning rate for this batch size."""
        return self.lr * self.batch_size / self.lr_batch if self.lr_batch else self.lr


@dataclass(frozen=True, kw_only=True)
class BackboneSettings(TrainSettings):
    """Settings of a run that trains a Vision Longformer.

    Args:
        model: a name from 'vil models'.
        model_options: fields of its configuration to change, such as {"global_pool": "token"}; stages as data.
        drop_path: rate of dropped residual branches in the last block; it grows linearly with depth.
        neighbours: what local attention sees in training: all, self, or random (random shift).
        shift_until: with random, the fraction of the run after which all neighbours are seen.
    """

    model: str = "vision_longformer_tiny"
    model_options: dict[str, Any] = field(default_factory=dict)
    drop_path: float = 0.1
    neighbours: str = "all"
    shift_until: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("neighbours", self.neighbours, NEIGHBOURS)
        for name in ("drop_path", "shift_until"):
            check_fraction(name, getattr(self, name))
