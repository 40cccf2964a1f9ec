"""README and docs: every command is understood, and every command and code block runs."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_pages import PAGES, ROOT, blocks, shell_commands, vil_arguments
from docs_runs import FILES, NEEDS, NOT_RUN, SHORTER, SHORTER_CODE, code_as_run, command_as_run, make_files

from vision_longformer.classification.recipe import ClassificationRecipe
from vision_longformer.cli.main import COMMANDS
from vision_longformer.cli.parser import Group, run_command
from vision_longformer.detection.recipe import DetectionRecipe
from vision_longformer.models.zoo import model_config
from vision_longformer.training.recipe import parse_values, resolve

LANGUAGES = {"bash", "python", "yaml", "text"}

AFTER_COMMANDS = {"api.md", "training.md", "export.md", "own_images.md"}
"""Pages whose Python blocks train, or read what the commands before them write: run with these, as slow tests."""


# Commands


def _all_commands() -> Iterator[tuple[str, str]]:
    """Every command of every page, and where it stands."""
    for page in PAGES:
        for block in blocks(page):
            if block.language == "bash":
                yield from ((block.location, command) for command in shell_commands(block.code))


def _check_train(recipe: str | None = None, resume: str | None = None, **options: Any) -> None:
    settings = {name: value for name, value in options.items() if name not in ("output", "dry_run")}
    if resume is None:
        resolve(ClassificationRecipe, recipe or ClassificationRecipe.default_name(settings), **parse_values(settings))


def _check_detect_train(recipe: str | None = None, resume: str | None = None, **options: Any) -> None:
    settings = {name: value for name, value in options.items() if name not in ("output", "dry_run")}
    if resume is None:
        resolve(DetectionRecipe, recipe or DetectionRecipe.default_name(settings), **parse_values(settings))


NAMES: dict[str, Callable[..., Any]] = {
    "train": _check_train,
    "detect train": _check_detect_train,
    "recipes": lambda name, **_: name and resolve(ClassificationRecipe, name),
    "detect recipes": lambda name, **_: name and resolve(DetectionRecipe, name),
    "cost": lambda model, **_: model_config(model),
}
"""What a command does with the names it is given, as far as it can be known without running it."""


def _only_parsed(group: Group, path: tuple[str, ...] = ()) -> Group:
    """The same commands with the same parameters, which do no more than look names up."""

    def only_parsed(command: Any, path: tuple[str, ...]) -> Any:
        if command is None or isinstance(command, Group):
            return command and _only_parsed(command, path)
        return functools.wraps(command)(functools.partial(_call, NAMES.get(" ".join(path), lambda *_, **__: None)))

    commands = {name: only_parsed(command, (*path, name)) for name, command in group.commands.items()}
    return Group(group.about, commands, otherwise=only_parsed(group.otherwise, path))


def _call(check: Callable[..., Any], *values: Any, **options: Any) -> None:
    check(*values, **options)


def _is_script(command: str) -> bool:
    program, script, *_ = command.split()
    return program == "python" and (ROOT / script).is_file()


def _problem(command: str, parsed: Group) -> str | None:
    """What is wrong with a command, as far as can be seen without running it."""
    arguments = vil_arguments(command)
    if arguments is None:
        known = command.startswith(tuple(NOT_RUN)) or _is_script(command)
        return None if known else "a test should know how to run it"
    try:
        run_command("vil", parsed, arguments, "0")
    except Exception as error:
        return str(error)
    return None


def test_commands_are_known() -> None:
    """Every ``vil`` command of every page is understood by the real parser; other programs are those we know."""
    parsed, commands = _only_parsed(COMMANDS), list(_all_commands())
    problems = [(where, command, _problem(command, parsed)) for where, command in commands]
    wrong = [f"{where}: {command}: {problem}" for where, command, problem in problems if problem]
    assert not wrong, "\n".join(wrong)
    assert len(commands) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_escapes(page: Path) -> None:
    """Every block says what it is, so that commands and code are run."""
    assert [block.location for block in blocks(page) if block.language not in LANGUAGES] == []


@pytest.mark.parametrize(
    "wrong", ["vil trian", "vil train --dry-rum x", "vil train imagenet1k_smal", "vil models --jsn"]
)
def test_wrong_commands_are_noticed(wrong: str) -> None:
    assert re.search("trian|dry-rum|smal|jsn", _problem(wrong, _only_parsed(COMMANDS)) or "")


def test_nothing_is_shortened_that_is_not_printed() -> None:
    commands = {command for _, command in _all_commands()}
    text = "\n".join(page.read_text() for page in PAGES)
    assert set(SHORTER) <= commands
    assert all(any(command.startswith(start) for command in commands) for start in NOT_RUN)
    assert all(part in text for part in [*SHORTER_CODE, *FILES])


# Running


def _run_page(page: Path, folder: Path, *, with_commands: bool) -> None:
    """Python blocks and, if wanted, commands of a page, in order, in one namespace and one directory."""
    names: dict[str, Any] = {}
    for block in blocks(page):
        if block.language == "python":
            make_files(block.code, folder)
            exec(compile(code_as_run(block.code), block.location, "exec"), names)
        elif block.language == "bash" and with_commands:
            for command in shell_commands(block.code):
                _run_shell(command, block.location, folder)


def _run_shell(command: str, location: str, folder: Path) -> None:
    text = command_as_run(command)
    if text is None:
        return
    make_files(text, folder)
    text = re.sub(r"^python (scripts|examples)/", rf"python {ROOT}/\1/", text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        text, shell=True, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{location}: {text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


PYTHON_PAGES = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


@pytest.mark.parametrize(
    "page", [page for page in PYTHON_PAGES if page.name not in AFTER_COMMANDS], ids=lambda page: page.name
)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run_page(page, tmp_path, with_commands=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    _run_page(page, tmp_path, with_commands=True)
