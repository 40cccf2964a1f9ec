"""A process that runs cases of local attention by Triton's interpreter; started by ``conftest.py``.

The interpreter is chosen when triton is first imported, hence a process of its own. It reads one case per line, as a
Python literal, and answers each with a line: ``ok``, or what was wrong.
"""

from __future__ import annotations

import ast
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from builders import Case, RowsCase, assert_close, oracle, rows_oracle, run, run_bands
from triton.runtime import interpreter

from vision_longformer import ModelConfig, StageConfig, VisionLongformer
from vision_longformer.geometry import Grid
from vision_longformer.models import config as cfg
from vision_longformer.models.attention import LongformerAttention
from vision_longformer.ops import IMPLEMENTATIONS
from vision_longformer.ops.spec import Inputs, LocalSpec
from vision_longformer.ops.triton import TRITON_GPU, launch
from vision_longformer.ops.triton import rows as triton_rows

TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def values(dtype: str, **options: object) -> None:
    """Output and all gradients of a case, against the float64 oracle on the same numbers."""
    precision, case = getattr(torch, dtype), Case(**options)
    got = run("triton_gpu", case, case.tensors(precision))
    for name, expected in oracle(case, precision).items():
        assert got[name].dtype == precision
        assert_close(got[name], expected, TOLERANCES[precision], name)


def dilation_per_head(**options: object) -> None:
    """Heads of different dilation go through one operator, with one launch of the forward kernel."""
    forwards = []
    original = launch.forward
    launch.forward = lambda inputs, spec: forwards.append(spec.dilation) or original(inputs, spec)
    try:
        values("float32", rule="exact", heads=2, **options)
    finally:
        launch.forward = original
    assert forwards == [(1, 3)]


def shares(programs: int) -> None:
    """Gradients with the partial sums of so many programs per head."""
    case = Case((4, 7), 2, batch=1, heads=2, dim=16, rule="exact")
    original = launch.MOST_PARTIAL_SUMS
    q = case.tensors(torch.float32)["q"]
    spec = LocalSpec(Grid(*case.grid), case.window, case.rule, "all", 1, 0.25)
    tiling = launch.tiling_of(q, spec, backward=True)
    launch.MOST_PARTIAL_SUMS = programs * case.heads * tiling.parts * tiling.elements
    try:
        values("float32", grid=case.grid, window=2, batch=1, heads=2, dim=16, rule="exact")
    finally:
        launch.MOST_PARTIAL_SUMS = original


def bands() -> None:
    """Bands of one and of two chunk rows make up the map, outputs and gradients."""
    for rule, neighbours, rows in (("chunk", "all", 1), ("exact", "all", 2), ("cyclic", 2, 1)):
        case = Case((5, 4), 2, rule, neighbours, batch=1, heads=1, dim=16)
        got = run_bands("triton_gpu", case, case.tensors(torch.float32), rows)
        for name, expected in oracle(case, torch.float32).items():
            assert_close(got[name], expected, TOLERANCES[torch.float32], f"{name}, {rule}")


def far_heads() -> None:
    """Three heads 2³⁰ numbers apart: 32 bits cannot count as far as the last. Most of the memory is never touched."""
    case = Case((2, 3), 2, batch=1, heads=3, dim=16, global_tokens=0, bias=False, global_bias=False)
    tensors = case.tensors(torch.float32)
    q = tensors["q"].detach()
    memory = torch.empty((2 << 30) + q.numel(), dtype=torch.float16)
    far = memory.as_strided(q.shape, (0, case.dim, 1 << 30, 1)).copy_(q)
    k, v = (tensors[name].detach().half() for name in ("k", "v"))
    spec = LocalSpec(Grid(*case.grid), case.window, case.rule, "all", 1, case.dim**-0.5)
    out, _ = launch.forward(Inputs(far, k, v), spec)
    expected, _ = launch.forward(Inputs(far.clone(memory_format=torch.contiguous_format), k, v), spec)
    assert_close(expected, oracle(case, torch.float16, grad=False)["output"], TOLERANCES[torch.float16])
    assert torch.equal(out, expected)


def guarded(dtype: str, **options: Any) -> None:
    """Inputs with NaNs before and after each row of tokens, and of numbers: whoever reads them shows."""
    case, precision = Case(batch=1, **options), getattr(torch, dtype)
    tensors = case.tensors(precision)
    got = run("triton_gpu", case, tensors | {name: _amid_nans(tensors[name]) for name in ("q", "k", "v")})
    for name, expected in oracle(case, precision).items():
        assert_close(got[name], expected, TOLERANCES[precision], name)


def guarded_rows(**options: Any) -> None:
    """The same of a projection and of dense float32 biases, with the rows of global tokens."""
    case = RowsCase(batch=1, **options)
    tensors = case.tensors(torch.float16)
    tensors |= {name: _amid_nans(x.float(), 0) for name, x in tensors.items() if name.endswith("bias")}
    got = case.run("triton_gpu", tensors | {"qkv": _amid_nans(tensors["qkv"])})
    for name, expected in rows_oracle(case, torch.float16).items():
        assert_close(got[name], expected, TOLERANCES[torch.float16], name)


def _amid_nans(x: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """The same numbers in a larger tensor of NaNs, along an axis or all."""
    inside = tuple(slice(1, -1) if axis in (None, n) else slice(None) for n in range(x.dim()))
    outer = x.new_full([size + 2 * (axis in (None, n)) for n, size in enumerate(x.shape)], float("nan"))
    outer[inside] = x.detach()
    return outer[inside].requires_grad_()


def projection() -> None:
    """Slices of one projection are read in place; the gradient may come in any layout; twice the same bits."""
    qkv = torch.randn(1, 13, 3, 1, 16, requires_grad=True)
    bias = torch.randn(1, 11, 11, requires_grad=True)
    spec = LocalSpec(Grid(4, 3), 3, "chunk", "all", 1, 0.25)
    weight = torch.randn(1, 1, 16, 12).permute(0, 3, 1, 2)
    results = []
    for implementation in ("masked_dense", "triton_gpu", "triton_gpu"):
        q, k, v = qkv.unbind(2)
        out = IMPLEMENTATIONS[implementation].attend(Inputs(q[:, 1:], k, v, bias), spec)
        grads = torch.autograd.grad((out * weight).sum(), [qkv, bias])
        assert out.is_contiguous() or implementation == "masked_dense"
        results.append((out, *grads))
    for expected, got, again in zip(*results, strict=True):
        assert_close(got, expected, 1e-4)
        assert torch.equal(got, again)


def refusals() -> None:
    """What the interpreter takes, and what nobody does."""
    spec = LocalSpec(Grid(2, 2), 2, "chunk", "all", 1, 1.0)
    answers = {dtype: TRITON_GPU.refusal(spec, torch.zeros(1, 4, 1, 16, dtype=dtype)) for dtype in TOLERANCES}
    assert answers[torch.float32] is None
    assert answers[torch.float16] is None
    assert "interpreter" in answers[torch.bfloat16]
    assert "float64" in TRITON_GPU.refusal(spec, torch.zeros(1, 4, 1, 16, dtype=torch.float64))
    assert "136" in TRITON_GPU.refusal(spec, torch.zeros(1, 4, 1, 136))


def rows(dtype: str, shares: int, share: int | None = None, **options: object) -> None:
    """Rows of global and of local tokens and all gradients, against the float64 oracle on the same numbers.

    The keys are in so many ``shares``, of ``share`` keys if that is given.
    """
    precision, case = getattr(torch, dtype), RowsCase(**options)
    original = launch.share_of
    launch.share_of = original if share is None else lambda tokens: share
    launches = _launches()
    try:
        got = case.run("triton_gpu", case.tensors(precision))
    finally:
        launch.share_of = original
    tiles = -(-case.global_tokens // 16)
    assert launches() == [shares * tiles * case.batch * case.heads]
    for name, expected in rows_oracle(case, precision).items():
        assert got[name].dtype == precision
        assert_close(got[name], expected, TOLERANCES[precision], name)


def _launches() -> Callable[[], list[int]]:
    """Watches the launches of the kernel of global rows; returns a function that ends it and tells the programs."""
    original, programs = launch.launch, []

    def watch(kernel: Any, count: int, *arguments: Any, **options: Any) -> None:
        if kernel.fn.__name__ == "global_rows_kernel":
            programs.append(count)
        original(kernel, count, *arguments, **options)

    def end() -> list[int]:
        launch.launch = original
        return programs

    launch.launch = watch
    return end


def registered_rows() -> None:
    """The packed operators keep torch's contract; what nobody needs is empty."""
    tensors = RowsCase((3, 2), global_tokens=2, batch=1).tensors(torch.float32)
    weight = tensors.pop("weight")
    arguments = (*tensors.values(), None, 3, 2, 2, "chunk", "all", [1], 0.25, [])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operators = torch.ops.vision_longformer
    torch.library.opcheck(operators.triton_rows.default, arguments, test_utils=tests)
    given = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    out, lse = operators.triton_rows(*given)
    for needs in ((True, True, True), (False, False, False)):
        backward = (weight, *given, out, lse, *needs)
        torch.library.opcheck(operators.triton_rows_backward.default, backward, test_utils=tests)
        grads = operators.triton_rows_backward(*backward)
        assert all(grad.is_contiguous() for grad in grads)
        assert [grad.numel() > 0 for grad in grads[1:]] == list(needs)


def rows_of_a_model() -> None:
    """A model whose layers go through the packed operator is the model of the oracle, and so are its gradients."""
    options = cfg.Longformer(window=2)
    stages = (StageConfig(16, 1, 1, 2, options, global_tokens=2),)
    model = VisionLongformer(ModelConfig(stages, img_size=(6, 10), num_classes=3))
    images, calls, results = torch.randn(1, 3, 6, 10), [], []
    original = triton_rows.forward
    triton_rows.forward = lambda inputs, spec: calls.append(inputs.qkv.shape) or original(inputs, spec)
    try:
        for implementation in ("masked_dense", "triton_gpu"):
            for module in model.modules():
                if isinstance(module, LongformerAttention):
                    module.set_implementation(implementation)
            loss = model(images).square().sum()
            results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    finally:
        triton_rows.forward = original
    assert calls == [(1, 2 + 15, 3, 1, 16)]
    for expected, got in zip(*results, strict=True):
        assert_close(got, expected, 1e-4)


def _prepare_interpreter() -> None:
    """Patch the language once instead of at every call, and do bfloat16 as the hardware does.

    The interpreter keeps bfloat16 as bit patterns, which its dot product multiplies as integers (triton issue 11584),
    and it rounds to them by cutting off.
    """
    original_patch, patched = interpreter._patch_lang, set()

    def patch_once(function: types.FunctionType) -> types.SimpleNamespace:
        module = function.__globals__["__name__"]
        if module not in patched:
            patched.add(module)
            original_patch(function)
        return types.SimpleNamespace(restore=lambda: None)

    builder = interpreter.InterpreterBuilder
    original_dot, original_cast = builder.create_dot, builder.cast_impl

    def dot(self: object, a: Any, b: Any, *rest: object) -> object:
        return original_dot(self, _as_float32(a), _as_float32(b), *rest)

    def cast(self: object, source: Any, target: Any) -> object:
        if (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16):
            return _as_bfloat16(source)
        return original_cast(self, source, target)

    interpreter._patch_lang, builder.create_dot, builder.cast_impl = patch_once, dot, cast


def _as_bfloat16(x: Any) -> Any:
    bits = np.ascontiguousarray(x.data).view(np.uint32)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return interpreter.TensorHandle(nearest_even.astype(np.uint16), tl.bfloat16)


def _as_float32(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def main() -> None:
    _prepare_interpreter()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name, options = ast.literal_eval(line)
        willing = options.get("dtype") == "bfloat16"  # which the interpreter computes as prepared above
        IMPLEMENTATIONS["triton_gpu"] = replace(TRITON_GPU, refusal=lambda spec, q: None) if willing else TRITON_GPU
        try:
            globals()[name](**options)
            print("ok", file=answers, flush=True)
        except Exception:
            print(repr(traceback.format_exc()), file=answers, flush=True)


if __name__ == "__main__":
    main()
