"""Registration of implementations with ``torch.library``, so that compilers and exporters see each as one operator.

An implementation gives two functions. Its forward keeps the log-sum-exp of each query's scores, from which its backward
recomputes the scores. Schemas, fake results and autograd are the same for all and live here. Compiled graphs rely on
the strides of fake results: what an implementation returns is made dense here if it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry import Grid
from .spec import Inputs, LocalSpec, PackedInputs

LOG2E = math.log2(math.e)
"""Natural logarithms times this are logarithms to base 2: exponentials are computed as powers of two."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
PackedGradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
InputsType = type[Inputs] | type[PackedInputs]
Forward = Callable[[Any, LocalSpec], tuple[Tensor, Tensor]]
Backward = Callable[..., Gradients | PackedGradients]

OPERATORS: dict[str, Any] = {}
"""Forward operators by name, as ``torch.ops`` has them. :func:`spec_of` reads their arguments."""

_SETTINGS = (
    "SymInt height, SymInt width, SymInt window, str rule, str neighbour_mode, SymInt[] dilation, float scale, "
    "SymInt[] halo"
)
_SETTING_COUNT = len(_SETTINGS.split(","))


def register(
    name: str,
    forward: Forward,
    backward: Backward,
    device_types: str | None = None,
    inputs_type: InputsType = Inputs,
) -> Callable[[Any, LocalSpec], Tensor]:
    """Register ``vision_longformer::name`` and ``vision_longformer::name_backward``; returns a function to attend by.

    - ``forward(inputs, spec)`` returns the output and the log-sum-exp, shaped as :func:`empty_results` makes them, the
      latter in the unit that ``backward`` reads.
    - ``backward(grad, inputs, out, lse, spec, *needs)`` returns the gradients of q, k, v or of qkv, and of each bias,
      None where it is not needed: ``needs_bias``, ``needs_global_bias`` and so on, in the order of the inputs.

    Whatever their layout and dtype, results become dense: the output and each gradient in the dtype of its input, so
    that a float32 bias beside 16-bit q, k and v has a float32 gradient.

    Both run on ``device_types`` only, or on any device if None.
    """
    operators = _Operators(inputs_type, forward, backward)
    qualified, schema = f"vision_longformer::{name}", f"{_schema(inputs_type)}, {_SETTINGS}"
    options: dict[str, Any] = {"mutates_args": (), "device_types": device_types}
    definition = torch.library.custom_op(
        qualified, operators.run, **options, schema=f"({schema}) -> (Tensor, Tensor)"
    )  # fmt: skip
    definition.register_fake(operators.fake)
    definition.register_autograd(operators.differentiate, setup_context=operators.save_for_backward)
    saved = ", ".join(["Tensor out, Tensor lse", *(f"bool needs_{bias}" for bias in operators.biases)])
    results = ", ".join(["Tensor"] * (operators.tensors - 1))
    backward_definition = torch.library.custom_op(
        f"{qualified}_backward", operators.run_backward, **options,
        schema=f"(Tensor grad, {schema}, {saved}) -> ({results})",
    )  # fmt: skip
    backward_definition.register_fake(operators.fake_backward)
    backward_definition.register_autograd(_refuse_second_derivatives)
    for each in (definition, backward_definition):
        each.register_vmap(_one_by_one(each))
    operator = OPERATORS[name] = getattr(torch.ops.vision_longformer, name)
    forward_call = _with_transforms(operator.default, operators.save_for_backward, operators.differentiate)
    operators.backward_call = _with_transforms(
        backward_definition, lambda ctx, inputs, output: None, _refuse_second_derivatives
    )

    def attend(inputs: Any, spec: LocalSpec) -> Tensor:
        dilation = [spec.dilation] if isinstance(spec.dilation, int) else spec.dilation
        settings = spec.window, spec.rule, spec.neighbour_mode, dilation, spec.scale, spec.halo or ()
        out, _ = forward_call(*inputs, *spec.grid, *settings)
        return out

    return attend


class _Operators:
    """What the forward and the backward operator of an implementation do, for real, as fakes and in autograd.

    Arguments of both are ``tensors`` tensors in the order of the inputs, then settings.
    """

    backward_call: Callable[..., Any]

    def __init__(self, inputs_type: InputsType, forward: Forward, backward: Backward) -> None:
        self.inputs_type, self.forward, self.backward = inputs_type, forward, backward
        self.tensors = len(inputs_type._fields)
        self.biases = [field for field in inputs_type._fields if field.endswith("bias")]
        self.always = (True,) * (self.tensors - len(self.biases) - 1)  # all but biases and neighbour

    def run(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs = self.inputs_type(*arguments[: self.tensors])
        out, lse = self.forward(inputs, spec_of(arguments, self.inputs_type))
        return _dense(out, inputs.q.dtype), _dense(lse, arithmetic_dtype(inputs.q))

    def fake(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        return empty_results(self.inputs_type(*arguments[: self.tensors]).q)

    def run_backward(self, grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        inputs, (out, lse, *needs) = (
            self.inputs_type(*arguments[: self.tensors]), arguments[self.tensors + _SETTING_COUNT :]
        )  # fmt: skip
        grads = self.backward(grad, inputs, out, lse, spec_of(arguments, self.inputs_type), *needs)
        return tuple(
            _dense(x, like.dtype) if needed and x is not None and like is not None else inputs.q.new_empty(0)
            for x, like, needed in zip(grads, inputs[:-1], (*self.always, *needs), strict=True)
        )

    def fake_backward(self, grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        needs = (*self.always, *arguments[-len(self.biases) :])
        empty = arguments[0].new_empty
        return tuple(x.new_empty(x.shape) if needed else empty(0) for x, needed in zip(arguments, needs, strict=False))

    def save_for_backward(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        out, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(*inputs[: self.tensors], out, lse)
        ctx.settings = inputs[self.tensors :]

    def differentiate(self, ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *given, out, lse = ctx.saved_tensors  # read once: gradient checkpointing allows no more
        needs = ctx.needs_input_grad[: self.tensors - 1]
        grads = self.backward_call(grad, *given, *ctx.settings, out, lse, *needs[len(self.always) :])
        wanted = [x if needed else None for x, needed in zip(grads, needs, strict=True)]
        return *wanted, None, *(None for _ in ctx.settings)


def _with_transforms(
    operator: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The operator; inside ``torch.func``, whose transforms know nothing of ``torch.library``'s autograd, as a function
    with these rules."""
    rules = {"forward": operator, "setup_context": setup_context, "backward": backward}
    members = {name: staticmethod(rule) for name, rule in rules.items()}
    function: Any = type("Transformable", (torch.autograd.Function,), {**members, "generate_vmap_rule": True})

    def call(*arguments: Any) -> Any:
        transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        return function.apply(*arguments) if transformed else operator(*arguments)

    return call


def _one_by_one(operator: Any) -> Callable[..., Any]:
    """The rule of ``torch.vmap``: a call for each sample. Gradients of biases that samples share are thus their own."""

    def run(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        pairs = list(zip(arguments, in_dims, strict=True))
        results = [
            operator(*(x.select(dim, index) if isinstance(dim, int) else x for x, dim in pairs))
            for index in range(info.batch_size)
        ]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return run


def _refuse_second_derivatives(*_: Any) -> Any:
    raise RuntimeError(
        "this implementation of local attention has first derivatives only; for more, use "
        "set_attention_implementation('sliding_chunk_autograd'), or implementation='sliding_chunk_autograd'"
    )


def _schema(inputs_type: InputsType) -> str:
    """The tensors of an operator: those of the inputs, optional where they are None by default."""
    optional = inputs_type._field_defaults
    return ", ".join(f"Tensor{'?' if field in optional else ''} {field}" for field in inputs_type._fields)


def spec_of(arguments: Sequence[Any], inputs_type: InputsType = Inputs) -> LocalSpec:
    """What the arguments of a forward operator, or those of a backward operator after ``grad``, say beside tensors."""
    tensors = len(inputs_type._fields)
    height, width, window, rule, neighbour_mode, steps, scale, halo = arguments[tensors : tensors + _SETTING_COUNT]
    dilation = steps[0] if len(steps) == 1 else tuple(steps)
    return LocalSpec(Grid(height, width), window, rule, neighbour_mode, dilation, scale, tuple(halo) or None)


def arithmetic_dtype(q: Tensor) -> torch.dtype:
    """What scores and sums are computed in: float32 at least."""
    return torch.promote_types(q.dtype, torch.float32)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the output (B, N, heads, dim) and the log-sum-exp (B, heads, N)."""
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, tokens, dtype=arithmetic_dtype(q))


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``contiguous`` alone would leave any stride to a dimension of size 1."""
    return x.to(dtype).reshape(-1).view(x.shape)
