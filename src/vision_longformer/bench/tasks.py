"""What is measured, as data that travels to the worker processes and into the result files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from ..geometry import Grid

FORWARD, BOTH = "forward", "forward+backward"
INFERENCE, TRAINING = "inference", "training step"

FULL_ATTENTION = "full_sdpa"
BATCHED_MATMUL = "batched_matmul"
LARGE_MATMUL = "large_matmul"
REFERENCES = (FULL_ATTENTION, BATCHED_MATMUL, LARGE_MATMUL)
"""What implementations of local attention are measured beside: full attention by torch's kernel without bias, the
matrix products of interior chunks alone with their operands in place, and a large square matrix product."""


@dataclass(frozen=True)
class AttentionWork:
    """One call of local attention; ``method`` is an implementation or one of :data:`REFERENCES`.

    ``neighbours`` is ``"all"``, ``"self"`` or ``"random"``: neighbours 1..8 in turn, call by call. ``side`` is that of
    the large matrix product.
    """

    kind: ClassVar[str] = "attention"
    method: str
    height: int
    width: int
    batch: int = 1
    heads: int = 3
    dim: int = 32
    window: int = 7
    rule: str = "chunk"
    neighbours: str = "all"
    global_tokens: int = 1
    bias: bool = True
    side: int = 2048

    @property
    def grid(self) -> Grid:
        return Grid(self.height, self.width)

    @property
    def shape(self) -> AttentionWork:
        """What methods of the same inputs have in common."""
        return replace(self, method="", neighbours="all", rule="", side=0)

    def small(self) -> AttentionWork:
        """The same on a map of 3×3 chunks, to load libraries and start threads with."""
        return replace(self, height=3 * self.window, width=3 * self.window, batch=1)


@dataclass(frozen=True)
class ModelWork:
    """A batch of images through a model of ours or of timm, for inference or a training step."""

    kind: ClassVar[str] = "model"
    model: str
    height: int
    width: int
    batch: int = 1
    neighbours: str = "all"
    implementation: str = "auto"


Work = AttentionWork | ModelWork
_WORKS: dict[str, type[AttentionWork] | type[ModelWork]] = {cls.kind: cls for cls in (AttentionWork, ModelWork)}


@dataclass(frozen=True)
class Task:
    """One line of a result.

    - ``point`` and ``variant``: where it stands in a figure, the position along the axis and the line;
    - ``mode``: forward, forward+backward, inference or training step;
    - ``together``: tasks of a group that share this and the mode are measured interleaved;
    - ``baseline``: (point, variant) of the task, of the same mode, that this one is compared with;
    - ``units``: tokens or images of one run.
    """

    point: str
    variant: str
    mode: str
    together: str
    baseline: tuple[str, str]
    units: int
    work: Work

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "work": {"kind": self.work.kind, **asdict(self.work)}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Task:
        options = dict(data["work"])
        work = _WORKS[options.pop("kind")](**options)
        return cls(**{**data, "baseline": tuple(data["baseline"]), "work": work})


@dataclass(frozen=True)
class Group:
    """Tasks of one figure. ``style`` says how it is drawn, ``unit`` what a cost is stated for: call, token, image."""

    bench: str
    name: str
    about: str
    style: str
    unit: str
    tasks: tuple[Task, ...]
