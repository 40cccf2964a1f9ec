"""Devices and processes, by accelerate and FSDP2: precision, how a model is distributed, and how processes agree."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..data.order import Process
from ..data.randomness import derive_seed
from ..models.vision_longformer import Block
from .optimizer import build_optimizer, parameter_groups
from .recipe import TrainSettings

T = TypeVar("T")

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Meanwhile, matrix products run in ``precision``; fp32 leaves them in the model's own dtype."""
    dtype = AUTOCAST_DTYPES[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


START = timedelta(minutes=30)
"""How long processes that start wait for one another: some may have to read the packages from a slow disk."""


def start_processes() -> PartialState:
    """Connect this process with the others that torchrun started, if any."""
    options: dict[str, Any] = {}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not torch.distributed.is_initialized():
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, is_master=False, timeout=START)
        options = {"store": agree_on_store(store, rank, count), "rank": rank, "world_size": count}
    return PartialState(cpu=not torch.cuda.is_available(), timeout=START, **options)


def agree_on_store(store: Store, rank: int, count: int) -> Store:
    """A part of torchrun's ``store`` for those ``count`` processes that it has started just now.

    torchrun keeps one store over all restarts, in which processes would find the addresses of those that are dead
    (pytorch/pytorch#135712), and its number of restarts is not the same on all nodes. So each process writes a word of
    its own, and process 0 all words that it reads, over and over; they have agreed when all have found theirs in it.
    """
    own, deadline = uuid4().hex, time.monotonic() + START.total_seconds()

    def read(key: str) -> str:
        return store.get(f"vil/{key}").decode() if store.check([f"vil/{key}"]) else ""

    store.set(f"vil/word/{rank}", own)
    while time.monotonic() < deadline:
        if rank == 0:
            store.set("vil/words", ",".join(read(f"word/{other}") for other in range(count)))
        words = read("words")
        if words.split(",")[rank : rank + 1] == [own]:
            store.set(f"vil/found/{rank}", words)
            if rank == 0 and all(read(f"found/{other}") == words for other in range(count)):
                store.set("vil/agreed", words)
            if read("agreed") == words:
                return PrefixStore(f"vil/{derive_seed(words)}", store)
        time.sleep(0.1)
    raise TimeoutError(f"not all of {count} processes have started within {START}")


def set_timeout(minutes: float, mesh: DeviceMesh | None = None) -> None:
    """From now on, a process waits so long for the others, of all or of the groups of a mesh."""
    if torch.distributed.is_initialized():
        name = "set_timeout" if hasattr(torch.distributed, "set_timeout") else "_set_pg_timeout"
        for group in [None] if mesh is None else mesh.get_all_groups():
            getattr(torch.distributed.distributed_c10d, name)(timedelta(minutes=minutes), group)


def together(build: Callable[[], T]) -> T:
    """``build()`` in every process; if it fails in some, the first of those raises its error and the others exit."""
    state = PartialState()
    if state.num_processes == 1:
        return build()
    error: Exception | None = None
    try:
        value = build()
    except (ValueError, OSError) as caught:
        error = caught
    failed = gather_object([error is not None])
    if not any(failed):
        return value
    if error is not None and state.process_index == failed.index(True):
        raise error
    time.sleep(1)  # torchrun ends all when one exits, and the sentence should be out before that
    raise SystemExit(2)


def check_alike(described: Mapping[str, Any]) -> None:
    """End all processes, with a sentence of the main one, unless ``described`` is the same in all."""
    state = PartialState()
    if state.num_processes == 1:
        return
    hosts_and_values = gather_object([(platform.node(), dict(described))])

    def compare() -> None:
        (first_host, first), *others = hosts_and_values
        for rank, (host, values) in enumerate(others, 1):
            for name in [*first, *values]:
                if state.is_main_process and values.get(name) != first.get(name):
                    raise ValueError(
                        f"{name} is {first.get(name)!r} in process 0 on {first_host} but {values.get(name)!r} in "
                        f"process {rank} on {host}; start all with the same versions, command and recipe"
                    )

    together(compare)


def make_accelerator(settings: TrainSettings) -> Accelerator:
    """For this process, alone or one of those that torchrun started; refuses what the machine cannot do."""
    cuda = torch.cuda.is_available()
    start_processes()
    if settings.precision == "fp16" and not cuda:
        raise ValueError("precision fp16 needs a GPU; use bf16 or fp32 here")
    AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
    precision = {"fp32": "no"}.get(settings.precision, settings.precision)
    accelerator = Accelerator(cpu=not cuda, mixed_precision=precision)
    count, spatial = accelerator.num_processes, settings.spatial
    if count % spatial:
        raise ValueError(
            f"spatial is {spatial}, but the number of processes, {count}, is not a multiple of it; start "
            f"{max(1, count // spatial) * spatial} of them with torchrun, or change spatial"
        )
    return accelerator


def replica(accelerator: Accelerator, settings: TrainSettings) -> Process:
    """Which part of a batch this process works on, and of how many: those that share images have the same."""
    return Process(accelerator.process_index // settings.spatial, accelerator.num_processes // settings.spatial)


def image_mesh(accelerator: Accelerator, settings: TrainSettings) -> DeviceMesh:
    """All processes by ``data``, what they work on, and ``spatial``, which share each image."""
    shape = accelerator.num_processes // settings.spatial, settings.spatial
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("data", "spatial"))
    set_timeout(settings.timeout_minutes, mesh)
    return mesh


def distribute(accelerator: Accelerator, model: nn.Module, settings: TrainSettings) -> tuple[nn.Module, Any]:
    """The model to train with, replicated (DDP) or sharded in place by blocks (FSDP2), and its optimiser."""
    sharded = settings.strategy == "fsdp" and accelerator.num_processes > 1
    if sharded:
        model.to(accelerator.device)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        set_timeout(settings.timeout_minutes, mesh)
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


def broadcast_from_main(accelerator: Accelerator | PartialState, value: T) -> T:
    """The main process's value, in every process."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def mean_over_processes(accelerator: Accelerator, values: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars averaged over processes."""
    stacked = torch.stack([torch.as_tensor(value, device=accelerator.device) for value in values.values()])
    return dict(zip(values, accelerator.reduce(stacked, "mean").tolist(), strict=True))
