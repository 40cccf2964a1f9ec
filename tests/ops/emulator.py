"""The fused CPU kernel of another architecture, run by an emulator in place of the library that is loaded."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

from torch import Tensor

from vision_longformer.ops import cpu
from vision_longformer.ops.cpu.library import Problem

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=gnu++17", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-static"]


def missing_tools() -> list[str]:
    return [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]


class EmulatedLibrary:
    """The kernel compiled for ARM. ``run`` is that of :class:`~vision_longformer.ops.cpu.library.Library`."""

    def __init__(self, folder: Path) -> None:
        sources = Path(cpu.__file__).parent / "csrc"
        driver, program = Path(__file__).with_name("kernel_driver.cpp"), folder / "kernel_driver"
        files = [driver, sources / "kernel.cpp", sources / "dispatch.cpp"]
        subprocess.run([COMPILER, *FLAGS, "-DVL_LEVEL=portable", f"-I{sources}", *files, "-o", program], check=True)
        self._process = subprocess.Popen([EMULATOR, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        self._process.communicate()

    def run(self, problem: Problem, *, backward: bool) -> None:
        """Sends the memory of all tensors, and stores what comes back in the same places."""
        problem.threads = 1
        sent, memory, places = Problem.from_buffer_copy(problem), bytearray(64), {}
        for name, tensor in problem.tensors.items():
            place = None
            if tensor is not None:
                places[name] = len(memory)
                place = len(memory) + tensor.storage_offset() * tensor.itemsize
                memory += bytes(_storage(tensor))
            setattr(sent, name, place)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(struct.pack("qq", backward, len(memory)) + bytes(sent) + memory)
        stdin.flush()
        (status,) = struct.unpack("q", stdout.read(8))
        returned = stdout.read(len(memory))
        assert status == 0
        for name, place in places.items():
            tensor = problem.tensors[name]
            storage = _storage(tensor)
            storage[:] = returned[place : place + len(storage)]


def _storage(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """All the memory that a tensor is part of."""
    storage = tensor.untyped_storage()
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
