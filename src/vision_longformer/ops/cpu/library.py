"""The compiled kernel as a shared library: finding it, its levels of instructions, and calling it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LEVELS = ("portable", "avx2", "avx512")
"""Levels of instructions, in the order of the library's numbers; the last one available is used."""

DATA_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
FILE_NAME = "_fused_cpu.so"
"""As ``setup.py`` names it: one file for all versions of Python, because it uses none of Python's interface."""

NOT_BUILT = (
    "the compiled kernel was not built: no C++ compiler at install time; install one (g++ or clang++) and then "
    "vision-longformer again"
)
NOT_FOR_WINDOWS = (
    "the compiled kernel is built on Linux and macOS only: Microsoft's compiler lacks extensions that it uses"
)
NO_OPENMP = (
    "the compiled kernel shares torch's OpenMP threads, but no OpenMP runtime was found in this process; "
    "with torch.set_num_threads(1) it runs"
)

_NO_SUCH_LEVEL = 2  # among the statuses of vl_run

_Index = ctypes.c_int64
_Strides = _Index * 3
_SIZES = ("batch", "heads", "dim", "height", "width", "window", "global_tokens", "banded", "above", "below")
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
        self.tensors: dict[str, Tensor | None] = {}

    def set_tensors(self, **tensors: Tensor | None) -> None:
        """Stores pointers, and strides where there are fields for them. The tensors live as long as the structure."""
        self.tensors |= tensors
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
        if status == _NO_SUCH_LEVEL:
            raise RuntimeError(f"the kernel's level {self.level!r} is not available here, only {self.levels}")
        if status:
            raise MemoryError("no memory for the working space of local attention")

    def _share_threads(self) -> bool:
        """Hands torch's OpenMP runtime to the library, so that there is one pool of threads; False if not found."""
        for path in _openmp_scopes():
            with suppress(OSError, AttributeError):
                scope = ctypes.CDLL(path)
                entries = scope.GOMP_parallel, scope.GOMP_barrier  # which LLVM's and Intel's runtimes have, too
                self._library.vl_set_thread_runtime(*(ctypes.cast(entry, ctypes.c_void_p) for entry in entries))
                return True
        return False


def _openmp_scopes() -> Iterator[str | None]:
    """Where to look for torch's OpenMP runtime, best first: libraries by path, None for all that is global.

    Wherever torch came from, its own library leads to the runtime that it was linked with.
    """
    loaded = _loaded_libraries()
    yield from (path for path in loaded if Path(path).name.startswith("libtorch_cpu."))
    if torch.backends.openmp.is_available():
        yield None
        yield from (path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")))


def _loaded_libraries() -> list[str]:
    """The files of all libraries in this process."""
    if sys.platform == "darwin":
        dyld = ctypes.CDLL(None)
        dyld._dyld_get_image_name.restype = ctypes.c_char_p
        return [dyld._dyld_get_image_name(index).decode() for index in range(dyld._dyld_image_count())]
    with open("/proc/self/maps") as file:
        columns = [line.rstrip("\n").split(maxsplit=5) for line in file]
    return list(dict.fromkeys(line[5] for line in columns if len(line) == 6 and line[5].startswith("/")))


@cache
def load() -> Library | str:
    """The library, or a sentence that says why there is none."""
    if sys.platform == "win32":
        return NOT_FOR_WINDOWS
    path = Path(__file__).with_name(FILE_NAME)
    if not path.exists():
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
