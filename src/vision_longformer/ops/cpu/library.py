"""The compiled kernel as a shared library: finding it, its levels of instructions, and calling it."""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

LEVELS = ("portable", "avx2", "avx512")
"""Levels of instructions, in the order of the library's numbers; the last one available is used."""

DATA_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
NOT_BUILT = (
    "the compiled kernel was not built: no C++ compiler at install time; install one (g++ or clang++) and then "
    "vision-longformer again"
)

_Index = ctypes.c_int64
_Strides = _Index * 3
_SIZES = ("batch", "heads", "dim", "height", "width", "window", "global_tokens")
_CHOICES = ("rule", "neighbour_mode", "neighbour_row", "neighbour_column", "data_type", "threads")
_INPUTS = ("q", "k", "v", "bias", "global_bias", "out", "lse", "grad_out")
GRADIENTS = ("grad_q", "grad_k", "grad_v", "grad_bias", "grad_global_bias")


class Problem(ctypes.Structure):
    """Mirrors the structure in ``csrc/problem.h``."""

    _fields_ = [
        *((name, _Index) for name in _SIZES + _CHOICES),
        ("scale", ctypes.c_double),
        *((f"{name}_strides", _Strides) for name in ("q", "k", "v", "grad_out")),
        *((name, ctypes.c_void_p) for name in _INPUTS + GRADIENTS),
    ]

    def __init__(self, *values: float) -> None:
        super().__init__(*values)
        self._tensors: list[Tensor | None] = []

    def set_tensors(self, **tensors: Tensor | None) -> None:
        """Stores pointers, and strides where there are fields for them. The tensors live as long as the structure."""
        self._tensors += tensors.values()
        for name, tensor in tensors.items():
            setattr(self, name, None if tensor is None else tensor.data_ptr())
            if tensor is not None and name in ("q", "k", "v", "grad_out"):
                setattr(self, f"{name}_strides", _Strides(*tensor.stride()[:3]))


class Library:
    """The loaded library. ``level`` is the level of instructions in use; tests lower it by :func:`use_level`."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.vl_problem_size.restype = _Index
        if self._library.vl_problem_size() != ctypes.sizeof(Problem):
            raise OSError(f"{path} belongs to another version of vision-longformer")
        self._library.vl_available.argtypes = [_Index]
        self._library.vl_set_thread_runtime.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._library.vl_run.argtypes = [ctypes.POINTER(Problem), _Index, ctypes.c_int]
        self.levels = tuple(name for index, name in enumerate(LEVELS) if self._library.vl_available(index))
        self.level = self.levels[-1]
        self.threaded = self._share_threads()

    def run(self, problem: Problem, *, backward: bool) -> None:
        problem.threads = torch.get_num_threads()
        status = self._library.vl_run(ctypes.byref(problem), LEVELS.index(self.level), backward)
        if status:
            raise MemoryError("no memory for the working space of local attention")

    def _share_threads(self) -> bool:
        """Hands torch's OpenMP runtime to the library, so that there is one pool of threads; False if not found."""
        for path in _openmp_runtimes():
            try:
                runtime = ctypes.CDLL(path)
                entries = runtime.GOMP_parallel, runtime.GOMP_barrier
            except (OSError, AttributeError):
                continue
            self._library.vl_set_thread_runtime(*(ctypes.cast(entry, ctypes.c_void_p) for entry in entries))
            return True
        return False


def _openmp_runtimes() -> Iterator[str]:
    """OpenMP runtimes that come with torch; LLVM's and Intel's have GNU's entry points too."""
    root = os.path.dirname(torch.__file__)
    for folder in (os.path.join(root, "lib"), os.path.join(root, "..", "torch.libs")):
        for name in ("libgomp", "libiomp5", "libomp"):
            yield from sorted(glob.glob(os.path.join(glob.escape(folder), f"{name}[.-]*")))


@cache
def load() -> Library | str:
    """The library, or a sentence that says why there is none."""
    candidates = [Path(__file__).parent / f"_fused_cpu{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        return NOT_BUILT
    try:
        return Library(str(path))
    except OSError as error:
        return f"the compiled kernel cannot be loaded: {error}"


@contextmanager
def use_level(name: str) -> Iterator[None]:
    """Within this context the kernel runs with the named level of instructions: for tests and comparisons."""
    library = load()
    if isinstance(library, str) or name not in library.levels:
        raise ValueError(f"level {name!r} is not available here")
    previous, library.level = library.level, name
    try:
        yield
    finally:
        library.level = previous
