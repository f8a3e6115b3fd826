"""Kernels in Triton with arrays of torch and of JAX: `make test-torch` has all three."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
import triton
import triton_cases as cases
from commands import checked, refused
from triton_cases import example

from flashsim.errors import DTypeError
from flashsim.triton import trace, watch

pytestmark = pytest.mark.promise("bridges equal their library")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_on_torch_tensors(dtype):
    """Results are written into the reader's own tensors, and are right."""
    fa = example("flash_attention")
    q, k, v, do = (torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(n)).to(dtype)
                   for n in range(4))  # fmt: skip

    with watch(check=True) as seen:
        o, lse = fa.forward(q, k, v, True, 32, 16)
    forward = seen.result()
    with watch(check=True) as seen:
        dq, dk, dv = fa.backward(q, k, v, o, lse, do, True, 32, 16)

    assert forward.verdict.right, str(forward.verdict)
    assert seen.result().verdict.right
    assert forward.outputs["O"] is o
    assert forward.problem.dtype == str(dtype).removeprefix("torch.")
    assert all(torch.isfinite(x.float()).all() for x in (o, lse, dq, dk, dv))


def test_views_of_torch_tensors():
    both = torch.randn(2, 64)
    z = torch.zeros(64)

    traced = trace(cases.add, (2,), both[0], both[1], z, 64, BLOCK=32)

    assert torch.equal(z, both.sum(dim=0))
    assert traced.findings == []


def test_a_tensor_elsewhere_is_refused():
    with pytest.raises(DTypeError, match=r"x_ptr is on meta, but .*pass x_ptr\.cpu\(\)"):
        trace(cases.add, (2,), torch.zeros(64, device="meta"), 0, 0, 64, BLOCK=32)


def test_jax_arrays_are_copied():
    jax = pytest.importorskip("jax")
    x, y = (jax.random.normal(jax.random.key(n), (64,)) for n in range(2))
    z = jax.numpy.zeros(64)

    traced = trace(cases.add, (2,), x, y, z, 64, BLOCK=32)

    np.testing.assert_array_equal(traced.outputs["z_ptr"], np.asarray(x + y))
    assert not np.asarray(z).any()


CLASS = '''

import torch


class FlashAttentionTriton(torch.autograd.Function):
    """As homework asks for it."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal, sm_scale):
        assert sm_scale == q.shape[-1] ** -0.5
        o, lse = forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, do):
        return (*backward(*ctx.saved_tensors, do, ctx.is_causal), None)
'''


def test_an_autograd_function_of_a_homework_file(tmp_path):
    path = tmp_path / "flash_attention.py"
    text = (ROOT / "examples/triton/flash_attention.py").read_text(encoding="utf-8")
    path.write_text(text + CLASS)

    words = [f"{path}:FlashAttentionTriton.apply", "--causal", "-n", "64", "--ndim", "3"]
    done = checked(*words)

    assert "O right" in done
    assert triton.__version__ in done


WANTS_A_GPU = """
import torch
import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, n, B: tl.constexpr, PROGRAMS: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(n, B), PROGRAMS):
        at = tile * B + tl.arange(0, B)
        old = tl.load(y_ptr + at, mask=at < n)
        tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) FOUND, mask=at < n)


def launch(x):
    assert x.is_cuda
    y = torch.empty_like(x)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    utils = triton.runtime.driver.active.utils
    assert utils.get_device_properties(x.device.index)["multiprocessor_count"] == programs
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.set_default_device("cuda")
    draws = torch.Generator(device="cuda").manual_seed(0)
    assert torch.randn(2, generator=draws, device=0).pin_memory().to(0).device == x.device
    with torch.cuda.device(x.device), torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        assert start.elapsed_time(end) != 1
    assert programs == 108 and torch.cuda.get_device_capability() == (8, 0)
    add[(programs,)](x, y, x.numel(), B=16, PROGRAMS=programs)


def same(loaded):
    return {"y_ptr": loaded["x_ptr"]}
"""


def test_a_file_that_asks_torch_for_a_gpu(tmp_path):
    """It is told of an A100. Memory of torch.empty is NaN, so that reading it shows."""
    path = tmp_path / "wants.py"

    def run(found):
        path.write_text(WANTS_A_GPU.replace("FOUND", found))
        words = [f"{path}:launch", "--set", "x=10x10", "--reference", "same"]
        return checked(*words)

    assert "y_ptr right" in run("")
    assert "y_ptr WRONG (error nan" in run("+ old")
    path.write_text(f"{WANTS_A_GPU.replace('FOUND', '')}\ndef fp8(q):\n    launch(q)\n")
    done = checked(f"{path}:fp8", "-n", "16", "--dtype", "float8_e5m2")
    assert "load x_ptr 2,048" in " ".join(done.split())
    assert not torch.zeros(1).is_cuda
    text = path.read_text().replace(
        "    add[(programs,)](", "    add[(1,)](x, y, 4, 16, 1).n_regs("
    )
    path.write_text(text)
    said = refused("kernel", f"{path}:launch", "--set", "x=10x10")
    assert "add is interpreted, not compiled for a GPU, so its n_regs is unknown" in said
