"""What Triton's kernels promise to compilers, in a process where they are interpreted; for ``test_triton_compile.py``.

It answers like ``triton_worker.py``, whose interpreter it uses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton_worker
from builders import (
    BiasedPair,
    Case,
    assert_as_promised,
    assert_close,
    assert_trains_like_the_oracle,
    operator_arguments,
    oracle,
    run,
    without_compiler_caches,
)

from vision_longformer import local_attention
from vision_longformer.ops.triton import launch

OPERATORS = torch.ops.vision_longformer


def promises(dtype: str, *, opcheck: bool = False, **options: Any) -> None:
    """Results of both operators have the shapes and strides of their fakes; ``opcheck`` adds torch's own checks, and
    those of a backward pass that needs no gradients of biases.
    """
    case = Case(**options)
    forward, backward = OPERATORS.triton_gpu, OPERATORS.triton_gpu_backward
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if opcheck:
        torch.library.opcheck(
            forward.default, operator_arguments(case, getattr(torch, dtype), grad=True), test_utils=checks
        )
    given = operator_arguments(case, getattr(torch, dtype), grad=False)
    out, lse = forward(*given)
    assert_as_promised("triton_gpu", given, (out, lse))
    for needs in ((case.bias, case.global_bias), *([(False, False)] if opcheck else [])):
        asked = (torch.ones_like(out), *given, out, lse, *needs)
        if opcheck:
            torch.library.opcheck(backward.default, asked, test_utils=checks)
        grads = backward(*asked)
        assert_as_promised("triton_gpu_backward", asked, grads)
        assert [grad.numel() > 0 for grad in grads[3:]] == list(needs)


def inductor(**options: Any) -> None:
    """Output and gradients, the biases' too, of a function compiled by torch's default backend."""
    case = Case(**options)
    tensors = case.tensors(torch.float32)
    names = [name for name in tensors if name != "weight"]

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        named = dict(zip(names, inputs, strict=True))
        return local_attention(**named, grid=case.grid, **case.options(), implementation="triton_gpu").sin()

    with without_compiler_caches():
        out = torch.compile(attend, fullgraph=True)(*(tensors[name] for name in names))
        grads = torch.autograd.grad((out * tensors["weight"]).sum(), [tensors[name] for name in names])
    exact = case.tensors(precision=torch.float32)
    expected = local_attention(
        **{name: exact[name] for name in names}, grid=case.grid, **case.options(), implementation="masked_dense"
    ).sin()
    wanted = torch.autograd.grad((expected * exact["weight"]).sum(), [exact[name] for name in names])
    for name, got, right in zip(["output", *names], [out, *grads], [expected, *wanted], strict=True):
        assert_close(got, right, 1e-4, name)


def training() -> None:
    """Twenty steps of a small model, compiled by torch's default backend."""
    assert_trains_like_the_oracle("triton_gpu")


def log_sum_exp() -> None:
    """It has no gradient, the output has."""
    out, lse = OPERATORS.triton_gpu(*operator_arguments(Case((2, 3), batch=1), torch.float32, grad=True))
    assert out.requires_grad
    assert not lse.requires_grad


def biases_in_float32(global_key: bool) -> None:
    """2049 is no float16: as a bias it would become 2048, and so would a gradient of 3 · 683."""
    pair = BiasedPair(global_key)
    out = pair.attend("triton_gpu", pair.tensors(torch.float16, 2049, 2048))
    assert out.dtype == torch.float16
    assert_close(out[0, 0, 0], torch.full((4,), 0.7310586), 1e-3, "σ(1)")
    assert pair.bias_gradients("triton_gpu", torch.float16, 3, 4 * 683.0) == pair.expected_gradients(2049)


def one_launch(implementation: str) -> None:
    """Heads of different dilation take no more launches than heads of one, and are computed rightly."""
    launched: list[str] = []
    original = launch.launch
    launch.launch = lambda kernel, *given, **options: (
        launched.append(kernel.__name__) or original(kernel, *given, **options)
    )
    case = Case((3, 4), rule="exact", dilation=(1, 2), dim=16, batch=1)
    try:
        got = run(implementation, case, case.tensors(torch.float32))
        apart = launched.copy()
        launched.clear()
        run(implementation, replace(case, dilation=2), case.tensors(torch.float32))
    finally:
        launch.launch = original
    assert apart.count("forward_kernel") == 1
    assert apart == launched
    for name, expected in oracle(case, torch.float32).items():
        assert_close(got[name], expected, 1e-4, name)


if __name__ == "__main__":
    for function in (promises, inductor, training, log_sum_exp, biases_in_float32, one_launch):
        setattr(triton_worker, function.__name__, function)
    triton_worker.main()
