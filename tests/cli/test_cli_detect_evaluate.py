"""``vil detect evaluate`` under torchrun: it leaves no process group open, of which torch would warn at the end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from builders import write_detector, write_garments

EVALUATE = """
import sys
import torch
from accelerate import PartialState
from vision_longformer.cli.main import main
PartialState()
assert torch.distributed.is_initialized()
main(sys.argv[1:])
print(torch.distributed.is_initialized())
"""


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _run_as_the_only_process(*argv: object) -> str:
    """Standard output of a command that was started as torchrun starts one."""
    launched = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **launched, "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", EVALUATE, *map(str, argv)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_detect_evaluate_closes_its_process_group(tmp_path: Path) -> None:
    detector = write_detector(tmp_path / "detector.safetensors", None)
    data = write_garments(tmp_path, ("val", 1))
    arguments = ["--data", data, "--split", "val", "--workers", "0"]
    assert _run_as_the_only_process("detect", "evaluate", detector, *arguments).splitlines()[-1] == "False"
