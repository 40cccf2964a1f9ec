"""The scripts in ``examples/`` that no page runs to its end."""

from __future__ import annotations

import json
import runpy
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import HTTPServer
from pathlib import Path

import pytest
from builders import build, grey_png
from docs_pages import ROOT

from vision_longformer import save
from vision_longformer.classification import predict

CLASSES = ["ant", "bee", "cow", "dog", "eel"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = build("two_stages")
    preprocessing = {
        "size": model.config.img_size, "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0,
        "interpolation": "bicubic", "classes": CLASSES[: model.num_classes],
    }  # fmt: skip
    return save(model, tmp_path / "model.safetensors", info={"preprocessing": preprocessing})


@pytest.fixture
def port(checkpoint: Path) -> Iterator[int]:
    make_handler = runpy.run_path(str(ROOT / "examples/serve_classifier.py"))["make_handler"]
    server = HTTPServer(("localhost", 0), make_handler(str(checkpoint)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def _post(port: int, content: bytes) -> tuple[int, dict[str, object]]:
    connection = HTTPConnection("localhost", port, timeout=60)
    connection.request("POST", "/", content)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_a_served_classifier(port: int, checkpoint: Path, tmp_path: Path) -> None:
    """It says what 'vil predict' says."""
    path = tmp_path / "grey.png"
    path.write_bytes(grey_png(200))
    (expected,) = predict(checkpoint, [path])
    status, answer = _post(port, path.read_bytes())
    assert status == 200
    assert list(answer) == list(expected.labels)
    assert list(answer.values()) == pytest.approx(expected.probabilities, abs=1e-4)
    status, answer = _post(port, b"not an image")
    assert status == 400
    assert "the image that was posted cannot be read as an image" in str(answer["error"])


def test_a_server_says_how_to_use_it(port: int) -> None:
    connection = HTTPConnection("localhost", port, timeout=60)
    connection.request("GET", "/")
    response = connection.getresponse()
    use = f"POST an image, as by: curl --data-binary @photo.jpg http://localhost:{port}"
    assert (response.status, json.loads(response.read())) == (200, {"use": use})


def test_a_busy_port_is_said(port: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["serve_classifier.py", str(checkpoint), "--port", str(port)])
    with pytest.raises(SystemExit, match=rf"port {port} cannot be used \(Address already in use\); give another"):
        runpy.run_path(str(ROOT / "examples/serve_classifier.py"), run_name="__main__")
