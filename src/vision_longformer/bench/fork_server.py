"""Fresh processes without the seconds that imports take.

A process that has computed holds threads, caches and freed memory. So a nursery is forked off before anything is
computed; it never computes itself, and forks a child for each request.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any, TextIO

from .timing import first_line

Function = Callable[[dict[str, Any]], Any]


class Nursery:
    """Runs ``function`` on requests, each in a process of its own; make it before the process computes anything."""

    def __init__(self, function: Function) -> None:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            try:
                _serve(theirs.makefile("rw", buffering=1), function)
            finally:
                os._exit(0)
        theirs.close()
        self._stream = ours.makefile("rw", buffering=1)

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """What the function returns, or a sentence if there is nothing after ``seconds`` or the process died."""
        self._stream.write(json.dumps({"request": request, "seconds": seconds}) + "\n")
        return json.loads(self._stream.readline())


def _serve(stream: TextIO, function: Function) -> None:
    for line in stream:
        asked = json.loads(line)
        stream.write(json.dumps(_in_child(function, asked["request"], asked["seconds"])) + "\n")


def _in_child(function: Function, request: dict[str, Any], seconds: float) -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(_result(function, request)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    in_time = bool(select.select([reader], [], [], seconds)[0])
    if not in_time:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as stream:
        text = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not in_time:
        return f"not done after {seconds:.0f} s"
    return json.loads(text) if text else f"the process ended with {status}, perhaps out of memory"


def _result(function: Function, request: dict[str, Any]) -> Any:
    try:
        return function(request)
    except Exception as error:
        return f"failed: {first_line(error)}"
