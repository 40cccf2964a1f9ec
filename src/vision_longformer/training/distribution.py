"""Several processes, through accelerate: how a model is wrapped, and how processes agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from .settings import TrainSettings


def make_accelerator(settings: TrainSettings) -> Accelerator:
    """For this process, alone or as torchrun started it; refuses what the machine cannot do."""
    cuda = torch.cuda.is_available()
    if settings.precision == "fp16" and not cuda:
        raise ValueError("precision fp16 needs a GPU; use bf16 or fp32 here")
    AcceleratorState._reset_state()
    plugin = None
    if settings.strategy == "fsdp":
        from accelerate import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        plugin.transformer_cls_names_to_wrap = ["Block"]
    precision = {"fp32": "no"}.get(settings.precision, settings.precision)
    accelerator = Accelerator(cpu=not cuda, mixed_precision=precision, fsdp_plugin=plugin)
    parts = accelerator.num_processes * settings.accumulate
    if settings.batch_size % parts:
        raise ValueError(
            f"batch_size {settings.batch_size} is not divisible by {accelerator.num_processes} processes × accumulate "
            f"{settings.accumulate}; use {max(1, settings.batch_size // parts) * parts}"
        )
    return accelerator


def wrap(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    """The model and the optimiser to train with."""
    return accelerator.prepare(model, optimizer)


def agree(accelerator: Accelerator, signal_number: int, save: bool) -> tuple[int, bool]:
    """What all processes do after a step: end if any was asked to, save if the first one's clock says so."""
    if accelerator.num_processes == 1:
        return signal_number, save
    flags = torch.tensor([signal_number, int(save and accelerator.is_main_process)], device=accelerator.device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return int(flags[0]), bool(flags[1])


def mean_over_processes(accelerator: Accelerator, values: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars averaged over processes."""
    stacked = torch.stack([torch.as_tensor(value, device=accelerator.device) for value in values.values()])
    return dict(zip(values, accelerator.reduce(stacked, "mean").tolist(), strict=True))
