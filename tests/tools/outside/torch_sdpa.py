"""PyTorch's installed samples of `scaled_dot_product_attention`, run on flashsim.

`torch.testing` has samples of every operator of torch, from which torch's own tests are built. Here
the samples of attention run with flashsim activated (`activate_flash_attention_impl`). The error
beside torch's math kernel in float64 is at most twice that of torch's own flash attention or math
in the same type. A sample that torch's flash attention does not support is not applicable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

import flashsim.torch
from flashsim.api import execution
from outside.cases import NotApplicable, Test, product

TITLE = "PyTorch, samples of scaled_dot_product_attention"

FLASH = "torch.ops.aten._flash_attention_forward"
NAMES = ("nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward")
HALF = (torch.bfloat16, torch.float16)


def tests(device: str, whole: bool) -> list[Test]:
    """Return the tests: values and gradients, gradcheck, and non-contiguous arguments."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = []
    for op in (op for op in op_db if op.name in NAMES):
        points = product(number=range(len(samples(op, device, torch.float32))), device=[device])
        typed = [point | {"dtype": dtype} for dtype in dtypes_of(device) for point in points]
        apart = [point | {"contiguous": False} for point in typed[: len(points)]]
        name, compare = op.name.removeprefix("nn.functional."), partial(compared, op)
        found.append(Test(f"{name}: values and gradients", compare, typed))
        found.append(Test(f"{name}: not contiguous", compare, apart))
        if device == "cpu":
            found.append(Test(f"{name}: gradcheck", partial(gradcheck, op), points))
    for op in (op for op in op_db if op.name == FLASH and device == "cuda"):
        points = product(number=range(len(samples(op, device, HALF[0]))), dtype=HALF)
        found.append(Test("_flash_attention_forward", partial(operator, op), points))
    return found


def dtypes_of(device: str) -> tuple[torch.dtype, ...]:
    """Return the types that torch passes to flash attention."""
    return HALF if device == "cuda" else (*HALF, torch.float32, torch.float64)


def samples(op: Any, device: str, dtype: torch.dtype) -> list[Any]:
    """Return the samples, equal at each call."""
    torch.manual_seed(0)
    return [*op.sample_inputs(device, dtype, requires_grad=True)]


@contextmanager
def activated() -> Iterator[list[str]]:
    """Replace torch's flash attention by flashsim; yield a list of the calls that it gets."""
    seen: list[str] = []
    run = execution.run

    def counted(*args: Any, **options: Any) -> Any:
        seen.append("run")
        return run(*args, **options)

    flashsim.torch.install()
    activate_flash_attention_impl("flashsim")
    try:
        with mock.patch.object(execution, "run", counted):
            yield seen
    finally:
        restore_flash_attention_impl(_raise_warn=False)


def call(op: Any, sample: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """Return an operator's (first) result for a sample whose leading tensors are `inputs`."""
    first, *others = inputs
    args = (*others, *sample.args[len(others) :])
    result = op(first, *args, **sample.kwargs)
    return result[0] if isinstance(result, tuple) else result


def tensors(sample: Any) -> list[torch.Tensor]:
    """Return the first three arguments: query, key and value."""
    return [sample.input, *sample.args[:2]]


def asked(op: Any, sample: Any) -> list[torch.Tensor]:
    """Return output and gradients by flashsim.

    Raises
    ------
    NotApplicable
        If torch's flash attention does not support the sample.
    """
    if sample.kwargs.get("dropout_p"):
        raise NotApplicable("flashsim has no dropout")
    inputs = [x.detach().clone().requires_grad_() for x in tensors(sample)]
    with activated() as seen, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        try:
            out = call(op, sample, *inputs)
        except RuntimeError as error:
            if seen or "No available kernel" not in str(error):
                raise
        if not seen:
            raise NotApplicable("torch's flash attention does not accept this sample")
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def compared(
    op: Any, number: int, device: str, dtype: torch.dtype, contiguous: bool = True
) -> None:
    """Check by the rule above, or within `torch.testing`'s tolerance if that is larger."""
    sample = samples(op, device, dtype)[number]
    got = asked(op, sample if contiguous else sample.noncontiguous())
    exact = by_torch(op, sample, SDPBackend.MATH, torch.float64)
    flash = by_torch(op, sample, SDPBackend.FLASH_ATTENTION, dtype)
    math = by_torch(op, sample, SDPBackend.MATH, dtype)
    for x, y, z, true in zip(got, flash, math, exact, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        close(x, true, y, z)


def close(x: torch.Tensor, true: torch.Tensor, *others: torch.Tensor) -> None:
    """Check for at most twice the largest error of the others, or `torch.testing`'s tolerance."""
    allowed = 2 * max((other.double() - true).abs().max().item() for other in others)
    rtol, atol = torch.testing._comparison.default_tolerances(x.dtype)
    torch.testing.assert_close(x.double(), true, rtol=rtol, atol=max(allowed, atol))


def operator(op: Any, number: int, dtype: torch.dtype) -> None:
    """Check the operator itself: (batch, n, heads, d), with causal ends at the bottom right.

    The rule above holds, because torch's flash attention also computes delta from a rounded O. On
    these samples, of up to 9 rows, this costs the gradients several times math's error.
    """
    sample = samples(op, "cuda", dtype)[number]
    got = asked(op, sample)

    def written_out(wide: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.detach().to(wide).requires_grad_() for x in tensors(sample)]
        n_q, n_kv = (x.shape[1] for x in inputs[:2])
        kept = torch.ones(n_q, n_kv, dtype=torch.bool, device="cuda")
        kept = kept.tril(n_kv - n_q) if sample.kwargs["is_causal"] else kept
        heads, scale = (x.transpose(1, 2) for x in inputs), sample.kwargs["scale"]
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=kept, scale=scale
            ).transpose(1, 2)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    flash = by_torch(op, sample, SDPBackend.FLASH_ATTENTION, dtype)
    math, exact = written_out(dtype), written_out(torch.float64)
    for x, y, z, true in zip(got, flash, math, exact, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        close(x, true, y, z)


def by_torch(op: Any, sample: Any, kernel: SDPBackend, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return output and gradients by one of torch's kernels, in a type."""
    sample = sample.transform(
        lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
    )
    inputs = [x.detach().clone().requires_grad_() for x in tensors(sample)]
    with sdpa_kernel(kernel):
        out = call(op, sample, *inputs)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def gradcheck(op: Any, number: int, device: str) -> None:
    """Check numeric gradients, in float64."""
    sample = samples(op, device, torch.float64)[number]
    asked(op, sample)
    inputs = [x.detach().clone().requires_grad_() for x in tensors(sample)]
    with activated():
        assert torch.autograd.gradcheck(lambda *x: call(op, sample, *x), inputs)
