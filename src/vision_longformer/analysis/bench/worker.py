"""A process that measures: one JSON request per line on stdin, JSON answers on stdout.

``time``: measures the tasks of a request in turns. ``memory``: forks a child for each task, which inherits loaded
libraries, but no threads, caches or freed memory: a fresh process without the seconds that imports take.
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

from .attention_jobs import Job, Refused, Shared, attention_job
from .memory import peak_growth, warm_up
from .model_jobs import model_job
from .tasks import AttentionWork, Task
from .timing import Effort, Samples, first_line, measure


def main(kind: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
    _answer(answers, {"ready": kind})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = _time(request, answers) if kind == "time" else _memory(request)
        except Exception as error:
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        _answer(answers, {"result": result})


def _answer(stream: TextIO, data: Any) -> None:
    stream.write(json.dumps(data) + "\n")


def _build(task: Task, device: torch.device, shared: Shared) -> Job:
    if isinstance(task.work, AttentionWork):
        return attention_job(task.work, task.mode, device, shared)
    return model_job(task.work, task.mode, device)


def _time(request: dict[str, Any], answers: TextIO) -> list[dict[str, Any]]:
    """Samples of each task, or the reason why there are none."""
    device = _device(request)
    samples, jobs, shared = {}, {}, Shared()
    for index, data in enumerate(request["tasks"]):
        try:
            jobs[index] = _build(Task.from_dict(data), device, shared)
        except Refused as refusal:
            samples[index] = Samples(reason=str(refusal))
    samples |= measure(jobs, Effort(**request["effort"]), device, lambda *done: _answer(answers, {"round": done}))
    return [samples[index].to_dict() for index in range(len(request["tasks"]))]


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
    except Refused as refusal:
        return {"reason": str(refusal)}
    except Exception as error:
        return {"reason": f"memory: failed: {first_line(error)}"}


def _device(request: dict[str, Any]) -> torch.device:
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    return torch.device(request["device"])


if __name__ == "__main__":
    main(sys.argv[1])
