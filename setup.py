"""Builds the fused CPU kernel where a C++ compiler is at hand; without one the package installs and runs all the same.

The kernel is a plain shared library: it needs neither torch nor Python's headers to build. Its one source is compiled
once per level of instructions that the compiler knows; the choice among them is made when it runs.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/vision_longformer/ops/csrc")
FLAGS = ["-std=gnu++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
LEVELS = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["avx2"] = ["-mavx2", "-mfma"]
    LEVELS["avx512"] = ["-mavx512f", "-mavx512vl", "-mavx512dq", *LEVELS["avx2"]]


class BuildKernel(build_ext):
    """Compiles ``kernel.cpp`` per level, then ``dispatch.cpp`` with the levels that worked, and links them."""

    def build_extension(self, ext: Extension) -> None:
        objects, macros = self._compile("kernel.cpp", "portable", LEVELS["portable"], [("VL_LEVEL", "portable")]), []
        for level, flags in LEVELS.items():
            if level == "portable":
                continue
            try:
                objects += self._compile("kernel.cpp", level, flags, [("VL_LEVEL", level)])
                macros.append((f"VL_HAS_{level.upper()}", None))
            except Exception as error:
                self.warn(f"the compiler does not know {level}, going on without: {error}")
        objects += self._compile("dispatch.cpp", "dispatch", [], [*macros, ("VL_LEVEL", "dispatch")])
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, target, target_lang="c++")

    def _compile(self, source: str, name: str, flags: list, macros: list) -> list:
        """Objects go to a folder of their own, because one source makes several."""
        folder = Path(self.build_temp) / name
        return self.compiler.compile([str(FOLDER / source)], str(folder), macros, extra_postargs=[*FLAGS, *flags])


sources = [str(FOLDER / name) for name in ("kernel.cpp", "dispatch.cpp")]
headers = [str(path) for path in sorted(FOLDER.glob("*.h"))]
kernel = Extension("vision_longformer.ops._fused_cpu", sources, depends=headers, language="c++", optional=True)
setup(ext_modules=[kernel], cmdclass={"build_ext": BuildKernel})
