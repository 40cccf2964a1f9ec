"""The wheel: one for all versions of Python, with the compiled kernel inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vision_longformer.ops.cpu import library

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the kernel is not for Windows")
def test_one_wheel_for_all_pythons(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "wheel"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*pip, target, source], check=True)
    (wheel,) = target.iterdir()
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    compiled = [path.name for path in (tmp_path / "unpacked").rglob("*") if path.suffix in (".so", ".cpp", ".h")]
    assert compiled == [library.FILE_NAME]
    show = "from vision_longformer.ops.cpu import library; print(library.__file__, *library.load().levels)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "unpacked")}
    run = subprocess.run(
        [sys.executable, "-c", show], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    file, *levels = run.stdout.split()
    assert Path(file).is_relative_to(tmp_path)
    assert levels[0] == "portable"
