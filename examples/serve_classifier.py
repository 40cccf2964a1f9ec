"""A classifier behind HTTP, with nothing but the standard library: POST an image, get its classes as JSON.

    python examples/serve_classifier.py CHECKPOINT [--port 8000]
    curl --data-binary @photo.jpg http://localhost:8000

CHECKPOINT is a run directory, a .safetensors file, or a file from 'vil export'.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch

from vision_longformer.classification.export import open_classifier
from vision_longformer.data.images import ImageError, decode_image

MAX_BYTES = 50_000_000


def make_handler(checkpoint: str) -> type[BaseHTTPRequestHandler]:
    """A handler of requests that classifies what is posted."""
    model, preprocessing, _ = open_classifier(checkpoint)
    transform = preprocessing.transform()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            if length > MAX_BYTES:
                self._answer(413, {"error": f"an image may have {MAX_BYTES:,} bytes"})
                return
            try:
                image = decode_image(self.rfile.read(length), "the image that was posted")
            except ImageError as error:
                self._answer(400, {"error": str(error)})
                return
            with torch.no_grad():
                probabilities = model(transform(image)[None])[0].softmax(0).tolist()
            ranked = sorted(zip(probabilities, preprocessing.classes, strict=True), reverse=True)
            self._answer(200, {name: round(probability, 4) for probability, name in ranked})

        def do_GET(self) -> None:
            host = self.headers.get("Host", "localhost")
            self._answer(200, {"use": f"POST an image, as by: curl --data-binary @photo.jpg http://{host}"})

        def _answer(self, status: int, data: dict[str, object]) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(data).encode() + b"\n")

    return Handler


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    handler = make_handler(arguments.checkpoint)
    try:
        server = HTTPServer(("localhost", arguments.port), handler)
    except OSError as error:
        raise SystemExit(f"port {arguments.port} cannot be used ({error.strerror}); give another as --port") from None
    print(f"serving on http://localhost:{server.server_port}; Ctrl-C stops it", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
