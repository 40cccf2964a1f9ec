"""Imports that wait: lazily exported names, and the registration with timm in whatever order things are imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType

import pytest

from vision_longformer.lazy import after_import

LAZY_PACKAGES = ["", ".models", ".costs", ".classification", ".detection"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that exports ``measure`` of its submodule ``measure`` and ``LENGTH`` of ``units``."""
    folder = tmp_path / "lazily"
    folder.mkdir()
    exports = '{".measure": ["measure"], ".units": ["LENGTH"]}'
    (folder / "__init__.py").write_text(
        f"from vision_longformer.lazy import lazy_exports\nlazy_exports(__name__, {exports})\n"
    )
    (folder / "measure.py").write_text("from .units import LENGTH\ndef measure():\n    return LENGTH\n")
    (folder / "units.py").write_text("LENGTH = 7\n")
    (folder / "broken.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("lazily")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazily"]:
        del sys.modules[name]


def test_nothing_is_imported_before_its_use(package: ModuleType) -> None:
    assert "lazily.units" not in sys.modules
    assert package.LENGTH == 7
    assert "lazily.units" in sys.modules
    assert "lazily.measure" not in sys.modules


def test_a_name_wins_over_the_submodule_of_the_same_name(package: ModuleType) -> None:
    """Also if the submodule was imported first, when Python itself binds the name to the submodule."""
    assert import_module("lazily.measure").__name__ == "lazily.measure"
    assert package.measure() == 7


def test_other_attributes(package: ModuleType) -> None:
    """Submodules are found, exports listed, others refused; an error inside a submodule is its own."""
    assert package.units.LENGTH == 7
    assert {"LENGTH", "measure", "__name__"} <= set(dir(package))
    with pytest.raises(AttributeError, match="module 'lazily' has no attribute 'width'"):
        _ = package.width
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        _ = package.broken


def _imports_for_type_checkers(package: ModuleType) -> dict[str, str]:
    """Names that a package imports under TYPE_CHECKING, each with its module."""
    names = {}
    for node in ast.parse(Path(str(package.__file__)).read_text()).body:
        if isinstance(node, ast.If):
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                module = resolve_name("." * line.level + (line.module or ""), package.__name__)
                names |= {alias.name: module for alias in line.names}
    return names


@pytest.mark.parametrize("name", LAZY_PACKAGES)
def test_exports_are_what_type_checkers_see(name: str) -> None:
    package = import_module(f"vision_longformer{name}")
    expected = _imports_for_type_checkers(package)
    assert sorted(expected) == sorted(package.__all__)
    assert sorted(expected) == sorted(n for n in dir(package) if n in expected)
    for export, module in expected.items():
        assert getattr(package, export) is getattr(import_module(module), export)


@pytest.fixture
def plain_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "awaited.py").write_text("import os\nif os.environ.get('AWAITED_FAILS'):\n    raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "awaited"
    sys.modules.pop("awaited", None)
    sys.meta_path[:] = finders


def test_after_import(plain_package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when somebody looks whether it is there, not when its import fails, and then once."""
    calls: list[bool] = []
    finders = list(sys.meta_path)
    after_import(plain_package, lambda: calls.append(plain_package in sys.modules))
    assert find_spec(plain_package) is not None
    monkeypatch.setenv("AWAITED_FAILS", "1")
    with pytest.raises(ImportError):
        import_module(plain_package)
    assert calls == []
    monkeypatch.delenv("AWAITED_FAILS")
    module = import_module(plain_package)
    assert calls == [True]
    assert sys.meta_path == finders
    assert "exec_module" not in vars(module.__loader__)
    after_import(plain_package, lambda: calls.append(False))
    assert calls == [True, False]


ORDERS = [
    "import timm, vision_longformer; timm.create_model(NAME)",
    "import vision_longformer, timm; timm.create_model(NAME)",
    "import vision_longformer; from timm.models import create_model; create_model(NAME)",
    "import vision_longformer.models.vision_longformer, timm; timm.create_model(NAME)",
    "from vision_longformer import create_model; create_model(NAME)",
    "import vision_longformer, timm; assert len(timm.list_models('vision_longformer_*')) == 28",
]

RUN_ORDERS = """
import os, sys
import torch, torchvision
failed = []
for code in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            exec(code, {"NAME": "vision_longformer_micro"})
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(code)
print(*failed, sep="\\n", end="")
"""


@pytest.mark.slow
def test_timm_knows_the_models_in_any_order_of_imports() -> None:
    """Each order in a process that has imported torch and neither timm nor this package."""
    result = subprocess.run([sys.executable, "-c", RUN_ORDERS, *ORDERS], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
