"""The page docs/reference/features.md: which feature runs on which kernels.

    python tests/tools/features.py

asks the code itself: it runs each case on the simulator and on the CPU engine, and asks the checks
of each family of GPU kernels, which need no GPU. It writes the table into the page.
`tests/backends/test_features_page.py` compares the page with the code.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from gpus import A100, H200

import flashsim
from flashsim.backends.cupy_gpu import bias, decode_options, engine
from flashsim.backends.launch import device_tables
from flashsim.backends.launch_policy import decode_plan
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.backends.launch_policy.hopper_fp8 import HOPPER_FP8
from flashsim.backends.launch_policy.portable import PORTABLE
from flashsim.backends.numba_gpu import engine as numba_cuda
from flashsim.backends.numba_gpu import launch_policy as python_kernels
from flashsim.backends.numba_gpu.teaching import run as teaching
from flashsim.engines.protocol import Job
from flashsim.errors import FlashSimError, UnsupportedError
from flashsim.problem.masks import BlockMask
from flashsim.problem.problem import numpy_dtype

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/features.md"
N, HEADS = 128, 2
PACKED = {"cu_seqlens_q": [0, 24, N], "cu_seqlens_k": [0, 40, N]}
BIAS = np.zeros((1, 1, N, N))


class Case(NamedTuple):
    """A feature's name on the page, the call's options, and the sizes and type of its arrays."""

    name: str
    options: Mapping[str, Any] = MappingProxyType({})
    head_dim: int = 64
    head_dim_v: int = 0
    kv_heads: int = HEADS
    dtype: str = ""
    backward: bool = False


def distance(score, b, h, q, k):
    return score - abs(q - k)


def even(b, h, q, k):
    return (q + k) % 2 == 0


CASES = (
    Case("`causal=`, `window=`", {"causal": True, "window": (20, 0)}),
    Case("`softcap=`", {"softcap": 5.0}),
    Case("`block_mask=` (whole cells)", {"block_mask": BlockMask(np.eye(1, dtype=bool), N, N)}),
    Case("`mask=` (NumPy function)", {"mask": lambda q, k: (q + k) % 2 == 0}),
    Case("`mask_mod=` (FlexAttention's)", {"mask_mod": even}),
    Case("`score_mod=` (FlexAttention's)", {"score_mod": distance}),
    Case("`bias=`", {"bias": BIAS}),
    Case("`sinks=`", {"sinks": np.zeros(HEADS)}),
    Case("packed sequences (`cu_seqlens_q=`)", PACKED),
    Case("`bias=` with packed sequences", {"bias": BIAS, **PACKED}),
    Case("`sinks=` with packed sequences", {"sinks": np.zeros(HEADS), **PACKED}),
    Case("grouped-query heads", kv_heads=1),
    Case("grouped-query heads in one row tile (`pack_gqa=True`)", {"pack_gqa": True}, kv_heads=1),
    Case("head_dim_v ≠ head_dim", head_dim_v=32),
    Case("head_dim 96", head_dim=96),
    Case("head_dim 256", head_dim=256),
    Case("head_dim 257 to 576", head_dim=320),
    Case("float16", dtype="float16"),
    Case("bfloat16", dtype="bfloat16"),
    Case("float32", dtype="float32"),
    Case("float64", dtype="float64"),
    Case("FP8", dtype="float8_e4m3fn"),
    Case("`tiling=`, `key_order=`", {"key_order": "descending"}),
    Case("`trace=True`", {"trace": True}),
    Case("`trace=True` with `mask_mod=`", {"trace": True, "mask_mod": even}),
    Case("`trace=True` with `sinks=`", {"trace": True, "sinks": np.zeros(HEADS)}),
    Case('`trace="timeline"`', {"trace": "timeline"}),
    Case("backward pass", backward=True),
    Case("backward, head_dim 192", backward=True, head_dim=192),
    Case("backward of `score_mod=`", {"score_mod": distance}, backward=True),
)


class Column(NamedTuple):
    """A column of the table: its head, the type of its arrays, and the check of a case."""

    head: str
    dtype: str
    check: Callable[[Case, Job], object]


def call(case: Case, dtype: str, **more: Any) -> flashsim.Result:
    """Run a case on the CPU, with the arrays' type that the case or else the column names."""
    rng = np.random.default_rng(0)
    sizes = ((HEADS, case.head_dim), (case.kv_heads, case.head_dim))
    sizes += ((case.kv_heads, case.head_dim_v or case.head_dim),)
    fp8 = case.dtype.startswith("float8")
    kind = numpy_dtype("float32" if fp8 else case.dtype or dtype)
    q, k, v = (rng.standard_normal((1, h, N, d)).astype(kind) for h, d in sizes)
    options = {**case.options, **more}
    if fp8:
        scaled = flashsim.quantize(q, k, v, dtype=case.dtype)
        q, k, v, options = scaled.q, scaled.k, scaled.v, {**options, **scaled.options}
    if "bias" in options:
        options["bias"] = options["bias"].astype(kind)
    return flashsim.run(q, k, v, **options)


def on_cpu(backend: str) -> Callable[[Case, Job], object]:
    """Return the check that runs a case on the CPU, with its backward pass if it has one."""

    def check(case: Case, job: Job) -> object:
        result = call(case, "float32", backend=backend)
        return result.backward(np.ones(result.out.shape, result.out.dtype)) if case.backward else 0

    return check


def with_cupy(kernel: str, family: Any, gpu: Any) -> Callable[[Case, Job], object]:
    """Return the checks that a cupy call with `kernel=` passes before a kernel runs."""

    def check(case: Case, job: Job) -> object:
        job = bias.as_function(job, gradient=case.backward)
        engine._check(job)
        if case.backward:
            engine._no_fp8_gradients(job)
        job = replace(job, options={"kernel": kernel})
        if engine._family(job, gpu, "backward" if case.backward else "forward") is not family:
            raise UnsupportedError("other kernels run this type")
        return passes(family, case, job, gpu)

    return check


def passes(family: Any, case: Case, job: Job, gpu: Any) -> object:
    """Return the launches that a family makes of a case."""
    given = job.problem, job.tiling, gpu
    if case.backward:
        return family.backward_passes(*given, job.key_order, "", "flash2")
    return family.forward_passes(*given, job.key_order, "", case.options.get("pack_gqa"))


def decoded(case: Case, job: Job) -> object:
    """Return the plan of a decode launch on a GPU."""
    if case.backward:
        raise UnsupportedError("decoding has no backward pass")
    decode_options.check(replace(job, options={}))
    p = job.problem
    return decode_plan.plan(p, (p.n_kv,) * p.batch, H200)


def in_python(kernel: str, family: Any, gpu: Any) -> Callable[[Case, Job], object]:
    """Return the checks of a numba_cuda call with a family of tensor-core kernels."""

    def check(case: Case, job: Job) -> object:
        numba_cuda._kernel(replace(job, options={"kernel": kernel}))
        job = bias.as_function(job, gradient=case.backward)
        device_tables.refuse(job.problem)
        return passes(family, case, job, gpu)

    return check


def taught(case: Case, job: Job) -> None:
    """Raise an error if the teaching kernels do not run a case."""
    numba_cuda._kernel(replace(job, options={"kernel": "teaching"}))
    if "pack_gqa" in case.options:
        raise UnsupportedError("backend='numba_cuda' has no option pack_gqa")
    direction = "backward" if case.backward else "forward"
    device_tables.check(job.problem, teaching.choose(job.problem, job.tiling, direction))
    teaching._check_functions(job)


COLUMNS = (
    Column("simulator", "float32", on_cpu("simulator")),
    Column("numba", "float32", on_cpu("numba")),
    Column("cupy, Hopper", "bfloat16", with_cupy("hopper", HOPPER, H200)),
    Column("cupy, portable", "bfloat16", with_cupy("portable", PORTABLE, A100)),
    Column("cupy, FP8 (Hopper)", "float8_e4m3fn", with_cupy("hopper", HOPPER_FP8, H200)),
    Column("cupy, decode", "bfloat16", decoded),
    Column("numba_cuda, hopper", "bfloat16", in_python("hopper", python_kernels.HOPPER, H200)),
    Column("numba_cuda, tensor", "bfloat16", in_python("tensor", python_kernels.TENSOR, A100)),
    Column("numba_cuda, teaching", "float16", taught),
)


def job_of(case: Case, column: Column) -> Job:
    """Return the job that a call of this case passes to an engine, with the column's type."""
    job = call(case, "float32", trace=False)._job
    problem = replace(job.problem, dtype=case.dtype or column.dtype)
    return replace(job, problem=problem, trace=case.options.get("trace", False))


def runs(case: Case, column: Column) -> bool:
    """Return whether the code of a column runs a case."""
    try:
        column.check(case, job_of(case, column))
    except FlashSimError:
        return False
    return True


def table() -> list[str]:
    """Return the lines of the table."""
    lines = ["| feature | " + " | ".join(c.head for c in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for case in CASES:
        cells = ("yes" if runs(case, column) else "–" for column in COLUMNS)
        lines.append(f"| {case.name} | " + " | ".join(cells) + " |")
    return lines


def page() -> str:
    """Return the page with a fresh table."""
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(r"\| feature \|.*?\n\n", "\n".join(table()) + "\n\n", text, count=1, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
