"""A Hugging Face Hub of one machine: as much of its protocol as creating, uploading and downloading a model takes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Hub:
    """Repositories by name, each a dict of files; requests of users without ``token`` to write are refused.

    ``commits`` has the files of every commit by its hash.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, dict[str, bytes]] = {}

    def revision(self, name: str) -> str:
        return hashlib.sha1(repr(sorted(self.repositories[name].items())).encode()).hexdigest()

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or a commit; None if there is none."""
        current = revision in ("main", self.revision(name))
        return self.repositories[name] if current else self.commits.get(revision)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        if not self.path.startswith("/api/models/"):
            self._file(body=True)
            return
        owner, repo, *asked = self.path.split("?")[0].split("/")[3:]
        name, revision = f"{owner}/{repo}", asked[1] if asked else "main"
        if name not in self.hub.repositories:
            self._answer(404, {"error": "no such repository"}, {"X-Error-Code": "RepoNotFound"})
            return
        files = self.hub.files(name, revision)
        if files is None:
            self._answer(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
            return
        sha = self.hub.revision(name) if revision == "main" else revision
        self._answer(200, {"id": name, "sha": sha, "siblings": [{"rfilename": file} for file in files]})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}"
            self.hub.repositories.setdefault(name, {})
            self._answer(200, {"url": f"http://{self.headers['Host']}/{name}"})
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(content)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]
            self._answer(200, {"files": modes})
        elif "/commit/" in self.path:
            self._commit("/".join(self.path.split("/")[3:5]), [json.loads(line) for line in content.splitlines()])
        else:
            self._answer(200, {"errors": [], "warnings": []})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["key"] == "file":
                self.hub.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        revision = self.hub.revision(name)
        self.hub.commits[revision] = dict(self.hub.repositories[name])
        url = f"http://{self.headers['Host']}/{name}/commit/{revision}"
        self._answer(200, {"commitUrl": url, "commitOid": revision})

    def _file(self, *, body: bool) -> None:
        """A file by ``/owner/name/resolve/revision/file``."""
        parts = self.path.split("/")
        name, revision, file = "/".join(parts[1:3]), parts[4], "/".join(parts[5:])
        files = self.hub.files(name, revision) if name in self.hub.repositories else None
        content = (files or {}).get(file)
        if content is None:
            code = "EntryNotFound" if name in self.hub.repositories else "RepoNotFound"
            self._answer(404, {"error": "not found"}, {"X-Error-Code": code}, body=body)
            return
        commit = self.hub.revision(name) if revision == "main" else revision
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        self._answer(200, content, headers, body=body)

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None, *, body: bool = True) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *values: Any) -> None:
        pass


@contextmanager
def hub_server(token: str) -> Iterator[tuple[Hub, str]]:
    """A running hub and its address."""
    hub = Hub(token)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
