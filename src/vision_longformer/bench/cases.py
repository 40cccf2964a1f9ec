"""What is timed: calls of local attention and passes of whole models, as data and as something to run.

A :class:`Case` is one row of a result. It is plain data that travels as JSON to the worker processes and into result
files; :func:`make_runnable` turns its workload into a callable with inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..geometry import Grid, ceil_div
from ..large import stream
from ..large.memory import MOST_CHUNK_ROWS
from ..models import VisionLongformer
from ..models.timm_registry import create_model
from ..models.zoo import MODELS
from ..ops import IMPLEMENTATIONS, local_attention
from ..ops.spec import LocalSpec

FORWARD, FORWARD_BACKWARD = "forward", "forward+backward"
INFERENCE, TRAINING_STEP = "inference", "training step"

FULL_ATTENTION = "full_sdpa"
BATCHED_MATMUL = "batched_matmul"
LARGE_MATMUL = "large_matmul"
REFERENCES = (FULL_ATTENTION, BATCHED_MATMUL, LARGE_MATMUL)
"""What implementations of local attention are compared with: full attention by torch's kernel without bias, the matrix
products of interior chunks alone with preallocated operands, and a large square matrix product."""

PLAIN, CHECKPOINTING, STRIPS, STREAMED = "plain", "checkpointing", "strips", "streamed"
"""How a model runs: as it is; with gradient checkpointing, of whole blocks or strip by strip; or streamed, without
gradients."""

MAX_BATCHED_FLOATS = 1 << 27
"""Operands and results of the batched matrix products; where there are more, the same operands serve several times."""

PAD = 32
"""Models of a fixed image size are made for the requested size padded to multiples of this, as detectors pad."""


@dataclass(frozen=True)
class AttentionWorkload:
    """One call of local attention; ``method`` is an implementation or one of :data:`REFERENCES`.

    ``neighbours`` is ``"all"``, ``"self"`` or ``"random"``: neighbours 1..8 in turn, call by call. ``side`` is that of
    the large matrix product.
    """

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
    def keys_per_chunk(self) -> int:
        """Keys of an interior chunk: nine chunks and the global tokens."""
        return 9 * self.window**2 + self.global_tokens

    @property
    def chunks(self) -> int:
        """Chunks of all maps and heads."""
        return self.batch * self.heads * self.grid.chunks(self.window).tokens

    def inputs_key(self) -> AttentionWorkload:
        """Equal for workloads whose inputs have the same shapes, so that they can share them."""
        return replace(self, method="", neighbours="all", rule="", side=0)

    def small(self) -> AttentionWorkload:
        """The same on a map of 3×3 chunks, to load libraries and start threads with."""
        return replace(self, height=3 * self.window, width=3 * self.window, batch=1)


@dataclass(frozen=True)
class ModelWorkload:
    """A batch of images through a model of ours or of timm, for inference or a training step.

    ``method``: ``plain``; for models of ours also ``checkpointing`` or ``strips``, or ``streamed`` for one image.
    """

    model: str
    height: int
    width: int
    batch: int = 1
    neighbours: str = "all"
    implementation: str = "auto"
    method: str = PLAIN


Workload = AttentionWorkload | ModelWorkload
_WORKLOAD_TYPES: dict[str, type[AttentionWorkload] | type[ModelWorkload]] = {
    "attention": AttentionWorkload,
    "model": ModelWorkload,
}
"""By the key ``kind`` of JSON files."""


@dataclass(frozen=True)
class Case:
    """One row of a result.

    - ``point`` and ``variant``: where it stands in a figure, the position along the axis and the line;
    - ``mode``: forward, forward+backward, inference or training step;
    - ``round_key``: cases of a group that share this and the mode are timed in the same rounds;
    - ``baseline``: (point, variant) of the case, of the same mode, that this one is compared with;
    - ``units``: tokens, images or pixels of one run.
    """

    point: str
    variant: str
    mode: str
    round_key: str
    baseline: tuple[str, str]
    units: int
    workload: Workload

    def to_dict(self) -> dict[str, Any]:
        """As it is stored; ``round_key`` is called ``together`` and ``workload`` is called ``work`` there."""
        kind = next(name for name, cls in _WORKLOAD_TYPES.items() if isinstance(self.workload, cls))
        return {
            "point": self.point,
            "variant": self.variant,
            "mode": self.mode,
            "together": self.round_key,
            "baseline": self.baseline,
            "units": self.units,
            "work": {"kind": kind, **asdict(self.workload)},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Case:
        fields = dict(data)
        workload = dict(fields.pop("work"))
        workload_type = _WORKLOAD_TYPES[workload.pop("kind")]
        baseline_point, baseline_variant = fields.pop("baseline")
        return cls(
            round_key=fields.pop("together"),
            baseline=(baseline_point, baseline_variant),
            workload=workload_type(**workload),
            **fields,
        )


@dataclass(frozen=True)
class Group:
    """Cases of one figure. ``style`` says how it is drawn, ``unit`` what a cost is stated for: call, token, image or
    pixel."""

    bench: str
    name: str
    about: str
    style: str
    unit: str
    cases: tuple[Case, ...]


class Runnable(NamedTuple):
    """A callable, and the bytes of the tensors that exist before it runs and of those that it returns."""

    run: Callable[[], object]
    input_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class AttentionInputs:
    """Of local attention; ``k`` and ``v`` begin with the global tokens, ``grad`` is the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    global_bias: Tensor | None
    grad: Tensor


InputCache = dict[AttentionWorkload, AttentionInputs]
"""Inputs by :meth:`AttentionWorkload.inputs_key`."""


def make_runnable(workload: Workload, mode: str, device: torch.device, cache: InputCache) -> Runnable:
    """``workload`` ready to run; inputs of attention are taken from ``cache`` or drawn and added to it."""
    if isinstance(workload, ModelWorkload):
        return _model_pass(workload, mode, device)
    if workload.method == LARGE_MATMUL:
        return _large_matmul(workload, device)
    if workload.method == BATCHED_MATMUL:
        return _batched_matmul(workload, mode, device)
    key = workload.inputs_key()
    if key not in cache:
        cache[key] = _draw_inputs(workload, device)
    inputs = cache[key]
    leaves = [x for x in (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.global_bias) if x is not None]
    if workload.method == FULL_ATTENTION:
        return _attention_call(lambda: _full_attention(inputs), leaves[:3], inputs.grad, mode)
    neighbours = _neighbour_sequence(workload.neighbours, device)
    return _attention_call(lambda: _local_attention(workload, inputs, next(neighbours)), leaves, inputs.grad, mode)


def refusal(workload: Workload, mode: str, device: torch.device) -> str | None:
    """Why the implementation cannot run this, as a sentence; None if it can."""
    if isinstance(workload, ModelWorkload) or workload.method in REFERENCES:
        return None
    neighbours = "one" if workload.neighbours == "random" else workload.neighbours
    spec = LocalSpec(workload.grid, workload.window, workload.rule, neighbours, 1, workload.dim**-0.5)
    shape = (workload.batch, workload.grid.tokens, workload.heads, workload.dim)
    q = torch.empty(shape, device=device, requires_grad=mode == FORWARD_BACKWARD)
    return IMPLEMENTATIONS[workload.method].refusal(spec, q)


def _draw_inputs(workload: AttentionWorkload, device: torch.device) -> AttentionInputs:
    """Random numbers in the layout that the projection to q, k and v leaves them in: views of one tensor."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    batch, heads, dim = workload.batch, workload.heads, workload.dim
    tokens, extra, side = workload.grid.tokens, workload.global_tokens, 4 * workload.window - 1
    qkv = draw(batch, extra + tokens, 3, heads, dim)
    q, k, v = (x.detach().requires_grad_() for x in (qkv[:, extra:, 0], qkv[:, :, 1], qkv[:, :, 2]))
    bias = draw(heads, side, side).requires_grad_() if workload.bias else None
    global_bias = draw(heads, extra).requires_grad_() if workload.bias and extra else None
    return AttentionInputs(q, k, v, bias, global_bias, draw(batch, tokens, heads, dim))


def _neighbour_sequence(neighbours: str, device: torch.device) -> Iterator[Any]:
    """What to pass from call to call; random shift passes tensors, as the model does."""
    return cycle(torch.arange(1, 9, device=device).unbind() if neighbours == "random" else (neighbours,))


def _local_attention(workload: AttentionWorkload, inputs: AttentionInputs, neighbours: str | Tensor) -> Tensor:
    return local_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        workload.grid,
        window=workload.window,
        rule=workload.rule,
        neighbours=neighbours,
        bias=inputs.bias,
        global_bias=inputs.global_bias,
        implementation=workload.method,
    )


def _full_attention(inputs: AttentionInputs) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _attention_call(attend: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor, mode: str) -> Runnable:
    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(), leaves, grad)

    leaf_bytes, output_bytes = sum(x.nbytes for x in leaves), grad.nbytes
    if mode == FORWARD_BACKWARD:
        return Runnable(forward_backward, leaf_bytes + output_bytes, output_bytes + leaf_bytes)
    return Runnable(forward, leaf_bytes, output_bytes)


def _large_matmul(workload: AttentionWorkload, device: torch.device) -> Runnable:
    a, b, c = (torch.ones(workload.side, workload.side, device=device) for _ in range(3))
    return Runnable(lambda: torch.mm(a, b, out=c), 3 * a.nbytes, 0)


def _batched_matmul(workload: AttentionWorkload, mode: str, device: torch.device) -> Runnable:
    """The products of all chunks as if each had all neighbours, into preallocated results: no copies, no softmax."""
    count, queries, keys, dim = workload.chunks, workload.window**2, workload.keys_per_chunk, workload.dim
    floats_per_chunk = keys * (4 * dim + 2 * queries) + 4 * queries * dim
    size = max(1, min(count, MAX_BATCHED_FLOATS // floats_per_chunk))
    q, out, grad, grad_q = (torch.ones(size, queries, dim, device=device) for _ in range(4))
    k, v, grad_k, grad_v = (torch.ones(size, keys, dim, device=device) for _ in range(4))
    scores, grad_scores = (torch.ones(size, queries, keys, device=device) for _ in range(2))
    products = [(q, k.transpose(1, 2), scores), (scores, v, out)]
    if mode == FORWARD_BACKWARD:
        products += [(scores.transpose(1, 2), grad, grad_v), (grad, v.transpose(1, 2), grad_scores)]
        products += [(grad_scores, k, grad_q), (grad_scores.transpose(1, 2), q, grad_k)]

    def run() -> None:
        for start in range(0, count, size):
            part = slice(min(size, count - start))
            for a, b, c in products:
                torch.bmm(a[part], b[part], out=c[part])

    return Runnable(run, sum(x.nbytes for x in (q, out, k, v, scores)), 0)


def _model_pass(workload: ModelWorkload, mode: str, device: torch.device) -> Runnable:
    """Inference: logits of a batch. Training step: forward, cross entropy, backward, one step of plain SGD."""
    model, size = build_model(workload)
    model = model.to(device)
    images = torch.randn(workload.batch, 3, *size, generator=torch.Generator().manual_seed(0)).to(device)
    input_bytes = images.nbytes + sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    logit_bytes = 4 * 1000 * workload.batch
    if mode != TRAINING_STEP:
        model.eval()

        def infer() -> Tensor:
            if workload.method == STREAMED:
                assert isinstance(model, VisionLongformer)
                return stream(model, images[0], rows=MOST_CHUNK_ROWS).logits
            with torch.inference_mode():
                return model(images)

        return Runnable(infer, input_bytes, logit_bytes)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    labels = torch.arange(workload.batch, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return Runnable(step, input_bytes, logit_bytes)


def build_model(workload: ModelWorkload) -> tuple[nn.Module, tuple[int, int]]:
    """The model with random weights, and the image size it is given; see :func:`size_note`."""
    size = (workload.height, workload.width)
    if workload.model in MODELS:
        ours = create_model(workload.model, neighbours=workload.neighbours)
        ours.set_attention_implementation(workload.implementation)
        ours.set_grad_checkpointing({CHECKPOINTING: True, STRIPS: STRIPS}.get(workload.method, False))
        return ours, size
    padded = (_padded(workload.height), _padded(workload.width))
    try:
        return timm.create_model(workload.model, img_size=padded), padded
    except TypeError:  # no such argument: a model of no fixed size
        return timm.create_model(workload.model), size


def size_note(height: int, width: int) -> str:
    """What is done about sizes that a model cannot take, to be printed beside the results."""
    padded = (_padded(height), _padded(width))
    if padded == (height, width):
        return f"{height}×{width}: all models get images of this size"
    return (
        f"{height}×{width}: models of a fixed image size (Swin, DeiT) are made for and given {padded[0]}×{padded[1]}, "
        "as detectors pad; all others get the size itself"
    )


def _padded(length: int) -> int:
    return ceil_div(length, PAD) * PAD
