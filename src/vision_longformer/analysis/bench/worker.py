"""A process that measures: one JSON request per line on stdin, JSON answers on stdout.

``tasks``: measures them in turns. ``questions``: whether tasks can run. ``task``: measures its memory in a forked
child, which inherits loaded libraries, but no threads, caches or freed memory: a fresh process without the seconds that
imports take. For that, the process that is asked about memory must not be asked for anything else.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from typing import Any, TextIO

import torch

from .attention_jobs import Job, Shared, attention_job, refusal
from .memory import peak_growth, warm_up
from .model_jobs import model_job
from .tasks import AttentionWork, Task
from .timing import Effort, first_line, measure


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = _serve(request, answers)
        except Exception as error:
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        _answer(answers, {"result": result})


def _serve(request: dict[str, Any], answers: TextIO) -> Any:
    if "tasks" in request:
        return _time(request, answers)
    if "questions" in request:
        return _refusals(request)
    return _memory(request)


def _answer(stream: TextIO, data: Any) -> None:
    stream.write(json.dumps(data) + "\n")


def _build(task: Task, device: torch.device, shared: Shared) -> Job:
    if isinstance(task.work, AttentionWork):
        return attention_job(task.work, task.mode, device, shared)
    return model_job(task.work, task.mode, device)


def _refusals(request: dict[str, Any]) -> list[str | None]:
    """Why each task cannot run at all, or None."""
    tasks = [Task.from_dict(data) for data in request["questions"]]
    device = _device(request)
    return [refusal(t.work, t.mode, device) if isinstance(t.work, AttentionWork) else None for t in tasks]


def _time(request: dict[str, Any], answers: TextIO) -> list[dict[str, Any]]:
    """Samples of each task, or the reason why there are none."""
    device, shared = _device(request), Shared()
    tasks = [Task.from_dict(data) for data in request["tasks"]]
    jobs = {index: _build(task, device, shared) for index, task in enumerate(tasks)}
    samples = measure(jobs, Effort(**request["effort"]), device, lambda *done: _answer(answers, {"round": done}))
    return [samples[index].to_dict() for index in range(len(tasks))]


def _memory(request: dict[str, Any]) -> dict[str, Any]:
    """Peak memory of a task, measured by a child that is killed after ``limit`` seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as stream:
                stream.write(json.dumps(_memory_of(request)))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        in_time = bool(select.select([stream], [], [], request["limit"])[0])
        if not in_time:
            os.kill(child, signal.SIGKILL)
        text = stream.read()
    status = os.waitpid(child, 0)[1]
    if not in_time:
        return {"reason": f"memory: not done after {request['limit']:.0f} s"}
    if not text:
        return {"reason": f"memory: the process ended with {os.waitstatus_to_exitcode(status)}, perhaps out of memory"}
    return json.loads(text)


def _memory_of(request: dict[str, Any]) -> dict[str, Any]:
    device, task, shared = _device(request), Task.from_dict(request["task"]), Shared()
    try:
        work = task.work
        warm_up(attention_job(work.small(), task.mode, device, {}) if isinstance(work, AttentionWork) else None)
        job = _build(task, device, shared)
        return {"extra": peak_growth(job, device), "inputs": job.inputs, "outputs": job.outputs}
    except Exception as error:
        return {"reason": f"memory: failed: {first_line(error)}"}


def _device(request: dict[str, Any]) -> torch.device:
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    return torch.device(request["device"])


if __name__ == "__main__":
    main()
