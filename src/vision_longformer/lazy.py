"""Lazy exports of a package, and a hook that runs after another package has been imported.

With them, ``import vision_longformer`` and the commands that need no model start without torch and timm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def lazy_exports(package: str, names_by_module: Mapping[str, Sequence[str]]) -> None:
    """Let ``package`` export names of its modules, each imported when the name is first used.

    ``names_by_module`` has modules relative to the package: ``{".models.config": ["ModelConfig"]}``. Where a submodule
    has the same name, the export wins, as it does after ``from .evaluate import evaluate``. Submodules that have not
    been imported yet are attributes, too.
    """
    modules = {name: module for module, names in names_by_module.items() for name in names}

    class LazyPackage(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name in modules:
                value = getattr(import_module(modules[name], package), name)
                setattr(self, name, value)
                return value
            if not name.startswith("_"):
                try:
                    return import_module(f"{package}.{name}")
                except ModuleNotFoundError as error:
                    if error.name != f"{package}.{name}":
                        raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            if name in modules and isinstance(value, ModuleType):
                return  # Python binds every submodule that it has imported
            super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *modules})

    sys.modules[package].__class__ = LazyPackage


def after_import(package: str, callback: Callable[[], object]) -> None:
    """Call ``callback`` as soon as ``package`` has been imported: at once, if it is already."""
    if package in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _ImportHook(package, callback))


class _ImportHook:
    """Finds ``package`` as the other finders on ``sys.meta_path`` do; its loader calls ``callback`` afterwards, once.

    The hook stays until the package has run: many programs look for a package's spec without importing it.
    """

    def __init__(self, package: str, callback: Callable[[], object]) -> None:
        self._package, self._callback = package, callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != self._package:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: Any) -> None:
        run = loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._callback()

        loader.exec_module = run_and_call
