"""The program ``vil``: how it ends, and what it does not import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

import pytest

from vision_longformer.cli.main import COMMANDS, main
from vision_longformer.cli.parser import Group
from vision_longformer.training import run
from vision_longformer.training.loop import Interrupted

VIL = [sys.executable, "-m", "vision_longformer"]


def _paths(group: Group = COMMANDS, path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """The words of every group and command."""
    yield list(path)
    for name, command in group.commands.items():
        if isinstance(command, Group):
            yield from _paths(command, (*path, name))
        else:
            yield [*path, name]


LIGHT = [
    *([*path, "--help"] for path in _paths()),
    ["--version"],
    ["trian"],
    ["detect", "trian"],
    ["train", "--epochs"],
    ["recipes"],
    ["recipes", "quickstart", "--all"],
    ["detect", "recipes"],
    ["models"],
    ["models", "vision_longformer_tin", "--json"],
    ["table", "cost"],
]
"""Commands that need neither torch nor timm."""

RUN_LIGHT = """
import contextlib, io, json, sys
from vision_longformer.cli.main import main
heavy = {}
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(argv)
        except SystemExit as stop:
            assert stop.code in (0, 2), argv
    assert out.getvalue() or err.getvalue(), argv
    heavy[" ".join(argv)] = [name for name in ("torch", "timm", "torchvision", "accelerate") if name in sys.modules]
print(json.dumps(heavy))
"""


def test_light_commands_import_neither_torch_nor_timm() -> None:
    """In one process, one after another: the first that imports one of them is the first with a name."""
    result = subprocess.run(
        [sys.executable, "-c", RUN_LIGHT, json.dumps(LIGHT)], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == {" ".join(argv): [] for argv in LIGHT}


def test_version_as_a_module() -> None:
    """As torchrun starts it."""
    result = subprocess.run([*VIL, "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "vil 0.1.0\n", "")


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="vil")
    assert command.load() is main


# How it ends


def test_a_mistake_ends_with_2_and_one_sentence() -> None:
    result = subprocess.run([*VIL, "models", "vision_longformer_tin"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("vil: unknown model 'vision_longformer_tin'; did you mean 'vision_longformer_tiny'")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("lr is 0; it must be positive"), "vil: lr is 0; it must be positive\n"),
        (FileNotFoundError(2, "No such file or directory", "a.png"), "vil: No such file or directory: a.png\n"),
        (FileExistsError("a.png exists"), "vil: a.png exists\n"),
    ],
)
def test_errors_of_users(
    error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> NoReturn:
        raise error

    monkeypatch.setitem(COMMANDS.commands, "doctor", fail)  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    assert (stop.value.code, capsys.readouterr().err) == (2, sentence)


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_a_traceback_on_request(
    value: str, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VIL_TRACEBACK", value)
    with pytest.raises(SystemExit) as stop:
        main(["models", "nothing_like_it"])
    errors = capsys.readouterr().err
    assert stop.value.code == 2
    assert errors.startswith("Traceback (most recent call last):") == ("in models\n" in errors) == shown
    assert errors.splitlines()[-1].startswith("vil: unknown model 'nothing_like_it'; ")


def test_an_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise TypeError("a bug")

    monkeypatch.setitem(COMMANDS.commands, "doctor", fail)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a bug"):
        main(["doctor"])


@pytest.mark.parametrize("argv", [["models"], ["models", "--json"], ["recipes", "quickstart"]], ids=" ".join)
def test_a_closed_pipe_ends_with_1(argv: list[str]) -> None:
    """As in ``vil models | head -1``, without a traceback: a table, much JSON, and text still in the buffer."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        result = subprocess.run([*VIL, *argv], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (1, "")


WAIT = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores
from vision_longformer.cli.main import COMMANDS, main
def wait():
    print("waiting", flush=True)
    time.sleep(600)
COMMANDS.commands["doctor"] = wait
main(["doctor"])
"""


def test_ctrl_c_ends_with_130() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
        assert process.wait() == 130


def test_a_signal_in_training_ends_with_128_and_its_number(tmp_path: Path) -> None:
    """A checkpoint is saved, and the last line is the command that resumes the run.

    The signal goes to all processes, as from ``timeout``: the one that loads data leaves it to the other.
    """
    settings = ["--steps", "100000", "--log-every", "1", "--in-memory", "false", "--workers", "1", "--batch-size", "2"]
    command = [*VIL, "train", "quickstart", "--output", "run", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stderr is not None
        last = process.stderr.read().splitlines()[-1]
        assert process.wait() == 143
    assert last.startswith("stopped by SIGTERM after step ")
    assert last.endswith("; resume with: vil train --resume run")
    assert list((tmp_path / "run").glob("checkpoint*"))


@pytest.mark.parametrize(
    ("argv", "rank", "code", "told"),
    [
        (["train"], "0", 130, "stopped by SIGINT after step 7; resume with: vil train --resume run\n"),
        (["detect", "train"], "0", 130, "stopped by SIGINT after step 7; resume with: vil detect train --resume run\n"),
        (["train"], "1", 130, ""),
    ],
)
def test_ctrl_c_in_training(
    argv: list[str],
    rank: str,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of several processes, the first says so."""

    def stop(*arguments: object, **options: object) -> NoReturn:
        raise Interrupted(signal.SIGINT, 7, Path("run"))

    monkeypatch.setattr(run, "train", stop)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert (end.value.code, capsys.readouterr().err) == (code, told)
