"""Devices and processes, by accelerate and FSDP2: precision, how a model is distributed, and how processes agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..models.vision_longformer import Block
from .optimizer import build_optimizer, parameter_groups
from .recipe import TrainSettings

T = TypeVar("T")

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Meanwhile, matrix products run in ``precision``; fp32 leaves them in the model's own dtype."""
    dtype = AUTOCAST_DTYPES[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def make_accelerator(settings: TrainSettings) -> Accelerator:
    """For this process, alone or one of those that torchrun started; refuses what the machine cannot do."""
    cuda = torch.cuda.is_available()
    if settings.precision == "fp16" and not cuda:
        raise ValueError("precision fp16 needs a GPU; use bf16 or fp32 here")
    AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
    precision = {"fp32": "no"}.get(settings.precision, settings.precision)
    return Accelerator(cpu=not cuda, mixed_precision=precision)


def distribute(accelerator: Accelerator, model: nn.Module, settings: TrainSettings) -> tuple[nn.Module, Any]:
    """The model to train with, replicated (DDP) or sharded in place by blocks (FSDP2), and its optimiser."""
    sharded = settings.strategy == "fsdp" and accelerator.num_processes > 1
    if sharded:
        model.to(accelerator.device)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for module in [part for part in model.modules() if isinstance(part, Block)]:
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(parameter_groups(model, settings.weight_decay, settings.decay), settings)
    if sharded:
        return model, accelerator.prepare_optimizer(optimizer)
    return accelerator.prepare(model, optimizer)


@contextmanager
def without_sync(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Meanwhile, gradients are added up in each process by itself: for all micro-batches of a step but the last."""
    if not isinstance(model, FSDPModule):
        with accelerator.no_sync(model):
            yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def agree(accelerator: Accelerator, signal_number: int, save: bool) -> tuple[int, bool]:
    """What all processes do after a step: stop if any got a signal, save if the main one's clock says so."""
    if accelerator.num_processes == 1:
        return signal_number, save
    flags = torch.tensor([signal_number, int(save and accelerator.is_main_process)], device=accelerator.device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return int(flags[0]), bool(flags[1])


def broadcast_from_main(accelerator: Accelerator, value: T) -> T:
    """The main process's value, in every process."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def mean_over_processes(accelerator: Accelerator, values: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars averaged over processes."""
    stacked = torch.stack([torch.as_tensor(value, device=accelerator.device) for value in values.values()])
    return dict(zip(values, accelerator.reduce(stacked, "mean").tolist(), strict=True))
