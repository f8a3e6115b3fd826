"""`backend="numba_cuda"`: FlashAttention-2 on a GPU in Python, compiled by numba-cuda.

The "tensor" kernels support float16 and bfloat16, and use tensor cores from sm_80 on. The "hopper"
kernels support the same types, and use instructions that only Hopper has. The "teaching" kernels
are plain Python loops for float16 and float32, which also run in Numba's CUDA simulator. All
families support score functions, mask functions and sinks.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from flashsim.backends import failures
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy.family import Family
from flashsim.engines.protocol import Job, Outcome
from flashsim.errors import BackendUnavailable, UnsupportedError

OPTIONS: frozenset[str] = frozenset({"kernel"})
KERNELS = ("tensor", "hopper", "teaching")
ALGORITHMS = ("flash2", "flash2-fused")


def _require_numba_cuda() -> None:
    """Import numba-cuda, or raise an error that says what to install."""
    try:
        import numba_cuda
    except ImportError as error:
        raise BackendUnavailable(
            f"backend='numba_cuda' needs NVIDIA's numba-cuda, which cannot be imported ({error}); "
            f"{failures.INSTALL}"
        ) from None
    try:
        from numba import config, cuda  # noqa: F401

        # With an unsupported NumPy, numba-cuda itself imports, but the module that every
        # compilation needs does not. The simulator compiles nothing.
        if not config.ENABLE_CUDASIM:
            import_module("numba.cuda.cudaimpl")
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            f"numba-cuda {numba_cuda.__version__} does not work with NumPy {np.__version__} "
            f"({error}); {_remedy()}"
        ) from error


def _remedy() -> str:
    if np.lib.NumpyVersion(np.__version__) >= "2.5.0":
        return "this numba-cuda uses names that NumPy 2.5 removed; run pip install 'numpy<2.5'"
    return "upgrade it with pip install --upgrade numba-cuda numba"


_require_numba_cuda()

from flashsim.backends.numba_gpu.teaching import run as teaching_run  # noqa: E402


def forward(job: Job) -> Outcome:
    """Run the forward pass on the arrays' GPU (the current GPU for NumPy arrays)."""
    if _kernel(job) == "teaching":
        return teaching_run.forward(job)
    return _launcher().forward_with(_family, _with_bias(job))


def recall(job: Job, out: Any, lse: Any) -> Mapping[str, Any]:
    """Return the state for the backward pass, from the forward pass's `out` and `lse`."""
    if _kernel(job) == "teaching":
        return teaching_run.recall(job, out, lse)
    return _launcher().recall_of(_with_bias(job), out, lse)


def backward(job: Job, saved: Mapping[str, Any], dout: Any, dlse: Any = None) -> Outcome:
    """Run the backward pass as three deterministic passes, or fused, which sums dQ in HBM."""
    if _kernel(job) == "teaching":
        return teaching_run.backward(job, saved, dout, dlse)
    return _launcher().backward_with(_family, _with_bias(job, gradient=True), saved, dout, dlse)


def constant(job: Job, shape: tuple[int, ...], dtype: str, value: float) -> Any:
    """Return an array filled with `value`, in the library and on the device of the job's arrays."""
    _kernel(job)  # or say what is not taken
    if teaching_run.simulated():
        return teaching_run.constant(job, shape, dtype, value)
    return _launcher().constant_of(job, shape, dtype, value)


def fastest_backward(
    job: Job, saved: Mapping[str, Any], algorithm: str, deterministic: bool
) -> tuple[str, bool]:
    """Return the fastest backward algorithm, and whether it adds to dQ in a fixed order."""
    if _kernel(job) == "teaching":
        return job.algorithm, False
    return _launcher().fastest_of(_family, job, saved, algorithm, deterministic)


def adopt(name: str, array: Any) -> Any:
    """Return a CuPy array that shares the memory of an array which supports only DLPack."""
    return array if teaching_run.simulated() else _launcher().adopt(name, array)


def _with_bias(job: Job, *, gradient: bool = False) -> Job:
    """Return a job whose score function adds the bias, if the job has a bias."""
    return _launcher().bias.as_function(job, gradient=gradient)


def _launcher() -> Any:
    """Return the CuPy engine, which manages arrays, launches and traces of tensor-core kernels."""
    failures.require_cupy("numba_cuda")
    from flashsim.backends.cupy_gpu import engine as cupy_engine

    return cupy_engine


def _family(job: Job, gpu: Gpu, direction: str) -> Family:
    """Return the family of tensor-core kernels for a forward or backward pass.

    The default is `HOPPER` if its kernels can run the pass, and otherwise `TENSOR`.
    """
    from flashsim.backends.numba_gpu.launch_policy import HOPPER, TENSOR

    asked = job.options.get("kernel", "auto")
    if asked != "auto":
        return HOPPER if asked == "hopper" else TENSOR
    p = job.problem
    refusal = HOPPER.refusal(p, job.tiling, gpu, direction, job.algorithm)
    return TENSOR if refusal else HOPPER


def _kernel(job: Job) -> str:
    """Return the kernel family's name ("teaching", "tensor" or "hopper"), or raise an error."""
    p = job.problem
    name = launch.check_asked("numba_cuda", job, ALGORITHMS, KERNELS)
    simulated = teaching_run.simulated()
    narrow = p.dtype in ("float16", "bfloat16")
    if name == "auto":
        name = "tensor" if narrow and not simulated else "teaching"
    takes = ("float16", "float32") if name == "teaching" else ("float16", "bfloat16")
    if p.dtype not in takes:
        raise UnsupportedError(
            f"backend='numba_cuda', kernel={name!r} supports {' and '.join(takes)}, not {p.dtype}; "
            "convert the arrays, or use backend='simulator'"
        )
    if name != "teaching" and simulated:
        raise UnsupportedError(
            "Numba's CUDA simulator (NUMBA_ENABLE_CUDASIM) has no tensor cores; use "
            "kernel='teaching', or unset NUMBA_ENABLE_CUDASIM on a machine with a GPU"
        )
    if name == "teaching" and job.trace == "timeline":
        raise UnsupportedError(
            "the teaching kernels, the only ones of backend='numba_cuda' for float32, record no "
            "time stamps; use kernel='tensor' with float16 or bfloat16, or backend='cupy'"
        )
    if name != "teaching":
        launch.check_head_dims(p, "backend='numba_cuda'")
    return name
