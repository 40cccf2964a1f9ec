"""Peak memory of a training step with one image over several processes: ``python scripts/spatial_memory.py [SIDE]``.

For 1, 2 and 4 processes of one thread each, by how much the largest of them grows from the start of a step (forward and
backward of the model in float32; weights, the image and the buffers of DDP are there before) to its highest point, and
how that compares with one process.
"""

from __future__ import annotations

import os
import socket
import sys
from queue import Queue

import torch
import torch.multiprocessing as mp
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from vision_longformer import VisionLongformer
from vision_longformer.bench.memory import peak_growth
from vision_longformer.large import spatial_parallel
from vision_longformer.models.zoo import model_config

MODEL = "vision_longformer_tiny"
PROCESSES = (1, 2, 4)


def measure(rank: int, count: int, port: int, side: int, grown: Queue[int]) -> None:
    """In one of ``count`` processes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = spatial_parallel(VisionLongformer(model_config(MODEL)).train(), init_device_mesh("cpu", (count,)))
    network = DistributedDataParallel(model)
    network(torch.randn(1, 3, 64, 64)).sum().backward()  # what is allocated only once
    image = torch.randn(1, 3, side, side)
    grown.put(peak_growth(lambda: network(image).logsumexp(1).sum().backward(), torch.device("cpu")))
    distributed.destroy_process_group()


def largest_growth(count: int, side: int) -> int:
    """Bytes, of the process that grows most."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    grown = mp.get_context("fork").SimpleQueue()
    mp.start_processes(measure, (count, port, side, grown), nprocs=count, start_method="fork")
    return max(grown.get() for _ in range(count))


def main(side: int = 2048) -> None:
    print(f"{MODEL}, a training step with one image of {side}×{side}, largest process")
    print("| processes | MB | of one process |", "|---|---|---|", sep="\n")
    alone = None
    for count in PROCESSES:
        grown = largest_growth(count, side)
        alone = alone or grown
        print(f"| {count} | {grown / 1e6:,.0f} | {grown / alone:.2f} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
