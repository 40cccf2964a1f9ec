"""Builds the fused CPU kernel where a C++ compiler is at hand; without one the package installs and runs all the same.

The kernel is a plain shared library: it needs neither torch nor Python's headers to build, and one wheel serves all
versions of Python. Its one source is compiled once per level of instructions that the compiler knows; the choice among
them is made when it runs. It is written in the vector extensions of GCC and Clang, which Microsoft's compiler lacks: on
Windows it is not built, and `vil doctor` says so.
"""

import platform
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/vision_longformer/ops/cpu/csrc")
FLAGS = ["-std=gnu++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
LEVELS: dict[str, list[str]] = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma"]
    LEVELS["avx512"] = ["-mavx512f", "-mavx512vl", "-mavx512dq", *LEVELS["avx2"]]


class BuildKernel(build_ext):
    """Compiles ``kernel.cpp`` per level, at the same time, then ``dispatch.cpp`` for the levels that worked."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the version of Python in it: ``ops/cpu/library.py`` knows this name."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        with ThreadPoolExecutor() as threads:
            jobs = {
                level: threads.submit(self._compile, "kernel.cpp", level, flags, [("VL_LEVEL", level)])
                for level, flags in LEVELS.items()
            }
        objects = jobs.pop("portable").result()
        macros: list[tuple[str, str | None]] = [("VL_LEVEL", "dispatch")]
        for level, job in jobs.items():
            if self._succeeded(level, job):
                objects += job.result()
                macros.append((f"VL_HAS_{level.upper()}", None))
        objects += self._compile("dispatch.cpp", "dispatch", [], macros)
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, target, target_lang="c++")

    def _compile(self, source: str, name: str, flags: list[str], macros: list[tuple[str, str | None]]) -> list[str]:
        """The object files; in a folder of their own, because one source makes several."""
        folder = str(Path(self.build_temp) / name)
        return self.compiler.compile([str(FOLDER / source)], folder, macros, extra_postargs=[*FLAGS, *flags])

    def _succeeded(self, level: str, job: "Future[list[str]]") -> bool:
        error = job.exception()
        if error is not None:
            self.warn(f"building without the level {level}, which the compiler does not support: {error}")
        return error is None


class WheelForAnyPython(bdist_wheel):
    """Tags the wheel by its platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


sources = [str(FOLDER / name) for name in ("kernel.cpp", "dispatch.cpp")]
headers = [str(path) for path in sorted(FOLDER.glob("*.h"))]
kernel = Extension("vision_longformer.ops.cpu._fused_cpu", sources, depends=headers, language="c++", optional=True)
setup(
    ext_modules=[] if platform.system() == "Windows" else [kernel],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": WheelForAnyPython},
)
