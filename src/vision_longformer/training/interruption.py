"""Ending a run when asked: the first signal lets it save and leave, a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While entered, SIGINT and SIGTERM set ``requested`` to the signal's number instead of ending the process."""

    def __init__(self) -> None:
        self.requested = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = number
        self._restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}
