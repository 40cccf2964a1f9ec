"""A process that runs cases of local attention by Triton's interpreter; started by ``test_triton.py``.

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
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from builders import Case, assert_close, oracle, run
from triton.runtime import interpreter

from vision_longformer.geometry import Grid
from vision_longformer.ops import IMPLEMENTATIONS
from vision_longformer.ops.spec import Inputs, LocalSpec
from vision_longformer.ops.triton import TRITON_GPU, launch

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


def registered() -> None:
    """The operators keep torch's contract, and a compiled graph holds them whole."""
    case = Case((3, 4), 2, dim=16, batch=1, heads=2)
    spec = LocalSpec(Grid(3, 4), 2, "chunk", "all", 1, 0.25)
    inputs = case.tensors(torch.float32)
    weight = inputs.pop("weight")
    arguments = (*inputs.values(), None, 3, 4, 2, "chunk", "all", [1], 0.25)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operators = torch.ops.vision_longformer
    torch.library.opcheck(operators.triton_gpu.default, arguments, test_utils=tests)
    given = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    out, lse = operators.triton_gpu(*given)
    for needs in ((True, True), (False, False)):
        backward = (weight, *given, out, lse, *needs)
        torch.library.opcheck(operators.triton_gpu_backward.default, backward, test_utils=tests)
        grads = operators.triton_gpu_backward(*backward)
        assert all(grad.is_contiguous() for grad in grads)
        assert [grad.numel() > 0 for grad in grads[3:]] == list(needs)

    def weighted(*tensors: torch.Tensor) -> torch.Tensor:
        return (TRITON_GPU.attend(Inputs(*tensors), spec) * weight).sum()

    compiled = torch.compile(weighted, fullgraph=True, backend="aot_eager")
    eager_grads, compiled_grads = (
        torch.autograd.grad(f(*inputs.values()), list(inputs.values())) for f in (weighted, compiled)
    )
    for expected, got in zip(eager_grads, compiled_grads, strict=True):
        assert_close(got, expected, 1e-5)


def refusals() -> None:
    """What the interpreter takes, and what nobody does."""
    spec = LocalSpec(Grid(2, 2), 2, "chunk", "all", 1, 1.0)
    answers = {dtype: TRITON_GPU.refusal(spec, torch.zeros(1, 4, 1, 16, dtype=dtype)) for dtype in TOLERANCES}
    assert answers[torch.float32] is None
    assert answers[torch.float16] is None
    assert "interpreter" in answers[torch.bfloat16]
    assert "float64" in TRITON_GPU.refusal(spec, torch.zeros(1, 4, 1, 16, dtype=torch.float64))
    assert "136" in TRITON_GPU.refusal(spec, torch.zeros(1, 4, 1, 136))


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
