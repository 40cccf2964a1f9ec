"""New processes without the seconds that imports take.

A process that has computed holds threads, caches and freed memory. So a server is forked off before anything is
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

from ..errors import first_line

Function = Callable[[dict[str, Any]], Any]


class ChildFailed(Exception):
    """A child has no result; the message is the reason as a sentence."""


class ForkServer:
    """Calls ``function`` on requests, each in a process of its own; make it before the process computes anything.

    Requests and results are JSON data.
    """

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

    def call(self, request: dict[str, Any], seconds: float) -> Any:
        """What the function returns; :class:`ChildFailed` if it fails, dies or takes longer than ``seconds``."""
        self._stream.write(json.dumps({"request": request, "seconds": seconds}) + "\n")
        answer = json.loads(self._stream.readline())
        if "reason" in answer:
            raise ChildFailed(answer["reason"])
        return answer["result"]


def _serve(stream: TextIO, function: Function) -> None:
    for line in stream:
        message = json.loads(line)
        stream.write(json.dumps(_in_child(function, message["request"], message["seconds"])) + "\n")


def _in_child(function: Function, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writer, "w") as pipe:
                pipe.write(json.dumps(_answer(function, request)))
        finally:
            os._exit(0)
    os.close(writer)
    in_time = bool(select.select([reader], [], [], seconds)[0])
    if not in_time:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not in_time:
        return {"reason": f"not done after {seconds:.0f} s"}
    return json.loads(text) if text else {"reason": f"the process ended with {status}, perhaps out of memory"}


def _answer(function: Function, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": function(request)}
    except Exception as error:
        return {"reason": f"failed: {first_line(error)}"}
