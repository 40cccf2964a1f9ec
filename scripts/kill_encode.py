"""Kills ``vil encode`` at random moments, resumes it, compares bytes: ``python scripts/kill_encode.py IMAGE [KILLS]``.

Encodes the image with ViL-Tiny once undisturbed, and once killed by SIGKILL five times, or as often as asked for, at
moments drawn from the whole run. Exits with 1 if a byte of the outputs differs.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import safe_open

MODEL = "vision_longformer_tiny"


def start(image: str, folder: Path, name: str) -> subprocess.Popen[bytes]:
    words = ["encode", MODEL, image, "--output", f"{folder / name}.zarr", "--storage", str(folder / f"{name}-tokens")]
    return subprocess.Popen([sys.executable, "-m", "vision_longformer", *words], stdout=subprocess.DEVNULL)


def wait_for_work(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Until a process has written tokens, which it begins when its libraries are loaded."""
    began = time.time()
    while process.poll() is None:
        if any(path.stat().st_mtime > began for path in folder.glob("*.tokens")):
            return
        time.sleep(0.02)


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        sys.exit(f"vil encode ended with {process.returncode}")


def last_step(folder: Path) -> str:
    """The last finished step that a killed run has noted."""
    state = folder / "state.safetensors"
    if not state.exists():
        return "nothing"
    with safe_open(state, "pt") as file:
        step = json.loads(file.metadata()["state"])
    return f"stage {step['stage'] + 1}, " + (f"block {step['block']}" if step["block"] else "patches")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main(image: str, kills: int = 5) -> None:
    with TemporaryDirectory(dir=".") as made:
        folder = Path(made)
        process = start(image, folder, "undisturbed")
        wait_for_work(process, folder / "undisturbed-tokens")
        began = time.monotonic()
        finish(process)
        seconds = time.monotonic() - began
        print(f"undisturbed: {seconds:.0f} s", flush=True)
        moments = [0.0, *sorted(random.uniform(0, seconds) for _ in range(kills))]
        for number in range(1, kills + 1):
            process, delay = start(image, folder, "killed"), moments[number] - moments[number - 1]
            wait_for_work(process, folder / "killed-tokens")
            time.sleep(delay)
            if process.poll() is not None:
                sys.exit(f"the run had ended before kill {number}")
            process.kill()
            process.wait()
            print(f"kill {number} after {delay:.1f} s; finished: {last_step(folder / 'killed-tokens')}", flush=True)
        finish(start(image, folder, "killed"))
        whole, resumed = contents(folder / "undisturbed.zarr"), contents(folder / "killed.zarr")
        pictures = [(folder / f"{name}.png").read_bytes() for name in ("undisturbed", "killed")]
        same = whole == resumed and pictures[0] == pictures[1]
        size = sum(map(len, whole.values()))
        print(f"{len(whole)} files of {size} bytes in all, and the picture: {'equal' if same else 'DIFFERENT'}")
        sys.exit(not same)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
