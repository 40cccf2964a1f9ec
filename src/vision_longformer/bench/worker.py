"""A process that measures: one JSON request per line on stdin, JSON answers on stdout.

``tasks``: measures them in turns. ``questions``: whether tasks can run. ``task``: measures its memory in a process of
its own, see ``fresh.py``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, TextIO

import torch

from .attention_jobs import Job, Shared, attention_job, refusal
from .fork_server import Nursery
from .memory import peak_growth, warm_up
from .model_jobs import model_job
from .tasks import AttentionWork, Task
from .timing import Effort, Samples, first_line, measure


def main() -> None:
    nursery = Nursery(_memory)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = _serve(request, answers, nursery)
        except Exception as error:
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        _answer(answers, {"result": result})


def _answer(stream: TextIO, data: Any) -> None:
    stream.write(json.dumps(data) + "\n")


def _serve(request: dict[str, Any], answers: TextIO, nursery: Nursery) -> Any:
    if "tasks" in request:
        return _time(request, answers)
    if "questions" in request:
        return _refusals(request)
    answer = nursery.ask(request, request["limit"])
    return {"reason": f"memory: {answer}"} if isinstance(answer, str) else answer


def _refusals(request: dict[str, Any]) -> list[str | None]:
    """Why each task cannot run at all, or None."""
    tasks = [Task.from_dict(data) for data in request["questions"]]
    device = _device(request)
    return [refusal(t.work, t.mode, device) if isinstance(t.work, AttentionWork) else None for t in tasks]


def _time(request: dict[str, Any], answers: TextIO) -> list[dict[str, Any]]:
    """Samples of each task, or the reason why there are none."""
    device, shared = _device(request), Shared()
    tasks = [Task.from_dict(data) for data in request["tasks"]]
    samples, jobs = {}, {}
    for index, task in enumerate(tasks):
        try:
            jobs[index] = _build(task, device, shared)
        except Exception as error:
            samples[index] = Samples(reason=f"failed: {first_line(error)}")
    keys = {(task.point, task.variant): index for index, task in enumerate(tasks)}
    baselines = {keys.get(task.baseline, index) for index, task in enumerate(tasks)}
    effort = Effort(**request["effort"])
    samples |= measure(jobs, effort, device, lambda *done: _answer(answers, {"round": done}), baselines)
    return [samples[index].to_dict() for index in range(len(tasks))]


def _memory(request: dict[str, Any]) -> dict[str, int]:
    """Bytes of a task; to be called in a fresh process."""
    device, task = _device(request), Task.from_dict(request["task"])
    work = task.work
    warm_up(attention_job(work.small(), task.mode, device, {}) if isinstance(work, AttentionWork) else None)
    job = _build(task, device, {})
    return {"extra": peak_growth(job, device), "inputs": job.inputs, "outputs": job.outputs}


def _build(task: Task, device: torch.device, shared: Shared) -> Job:
    if isinstance(task.work, AttentionWork):
        return attention_job(task.work, task.mode, device, shared)
    return model_job(task.work, task.mode, device)


def _device(request: dict[str, Any]) -> torch.device:
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    return torch.device(request["device"])


if __name__ == "__main__":
    main()
