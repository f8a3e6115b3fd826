"""What the GPU backends say when the GPU, its driver or a compiler fails; no GPU is needed.

CuPy's functions are replaced where they would fail. `Host` stands in for the GPU that holds arrays.
"""

import builtins
import contextlib
import math
import os
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from gpus import H200

import flashsim
from flashsim import Problem
from flashsim.backends import failures
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch_policy.portable import PORTABLE
from flashsim.engines.protocol import Job
from flashsim.errors import BackendUnavailable
from flashsim.schedule.split import WHOLE
from flashsim.schedule.tiling import Tiling

cupy = pytest.importorskip("cupy")

from flashsim.backends.cupy_gpu import arrays, calls  # noqa: E402
from flashsim.backends.cupy_gpu import engine as cupy_engine  # noqa: E402

pytestmark = pytest.mark.promise("failures end in words")

P = Problem(16, 16, 16, dtype="float16")


def error(name, base, text):
    """An error of a library that need not be installed."""
    return type(name, (base,), {})(text)


OUT_OF_MEMORY = [
    cupy.cuda.memory.OutOfMemoryError(1, 2),
    error("OutOfMemoryError", RuntimeError, "CUDA out of memory. Tried to allocate 2 GiB"),  # torch
]
REFUSED = [
    cupy.cuda.runtime.CUDARuntimeError(719),
    error("CUDADriverError", RuntimeError, "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
    error("CudaAPIError", Exception, "[719] Call to cuLaunchKernelEx results in LAUNCH_FAILED"),
    error("CUDAError", Exception, "CUDA_ERROR_LAUNCH_FAILED"),  # of cuda.core
    error("AcceleratorError", RuntimeError, "CUDA error: unspecified launch failure"),  # of torch
]
LOG = (
    "warning: eh\ncommon.cuh(3): catastrophic error: cannot open source file 'cuda_fp16.h'\nmore\n"
)


@pytest.mark.parametrize("missing", ["_dynamo", "guards", "_empty_strided_cuda"])
def test_a_torch_without_the_private_allocation_allocates_as_usual(missing):
    space = object.__new__(arrays.TorchSpace)
    inner = types.SimpleNamespace()
    for name in ("_empty_strided_cuda", "guards", "_dynamo"):
        inner = types.SimpleNamespace(**{} if name == missing else {name: inner})
    usual = {"float32": 4, "empty": lambda *shape, **options: (*shape, options)}
    space.torch, space.device = types.SimpleNamespace(_C=inner, **usual), 0
    assert space.maker((2, 3))() == ((2, 3), {"dtype": 4, "device": 0})


class Host(arrays.Space):
    """Arrays in the CPU's memory, where a GPU's should be; `full` makes every new one fail."""

    device, full = 0, None

    def view(self, array):
        return arrays.View((0, 0, 0, 0), array)

    def empty(self, shape, like=None):
        if self.full is not None:
            raise self.full
        return np.empty(shape, np.float32 if like is None else like.dtype)

    def pointer(self, array):
        return 0

    def stream(self):
        return 0

    def on_device(self):
        return contextlib.nullcontext()


class Planned:
    """A plan whose launches fail, if they are given something to fail with."""

    name, tiling, split, gpu, failure = "portable", Tiling(16, 16), WHOLE, H200, None
    sizes = calls.NewArrays.of(Problem(16, 16, 16, dtype="float16"))
    gradients, new_arrays, head = calls.Plan.gradients, calls.Plan.new_arrays, calls.Plan.head
    summed, ordered, flags = 0, False, 0

    def of(self, job):
        """Itself, with what the job's algorithm adds up."""
        self.summed = calls.summed_up(self.sizes, "float16", job.algorithm)
        return self

    def run(self, call, trace):
        if self.failure is not None:
            raise self.failure
        return None, None


@pytest.fixture
def host(monkeypatch):
    """`cupy_engine` on a GPU that is none: the space and the plan of every call."""
    space, plan = Host(), Planned()
    monkeypatch.setattr(cupy_engine, "require_gpu", lambda: None)
    monkeypatch.setattr(arrays, "space_of", lambda *_: space)
    monkeypatch.setattr(arrays, "check_space", lambda *_: None)
    monkeypatch.setattr(cupy_engine, "_plan", lambda family, job, *_: plan.of(job))
    return space, plan


def run():
    x = np.ones((1, 1, 16, 16), np.float16)
    return flashsim.run(x, x, x, backend="cupy"), x


# -- the GPU itself -------------------------------------------------------------------------------


def test_too_old_a_gpu_is_named_with_what_the_kernels_need(monkeypatch):
    turing = {"major": 7, "minor": 5, "name": b"Tesla T4"}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda device: turing)
    with pytest.raises(
        BackendUnavailable, match=r"Tesla T4 has compute capability 7\.5, .*8\.0 \(Ampere\) or lat"
    ):
        cupy_engine.gpu_of.__wrapped__(0)


def test_no_visible_gpu_is_said(monkeypatch):
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(BackendUnavailable, match=r"no NVIDIA GPU is visible.*CUDA_VISIBLE_DEVICES"):
        cupy_engine.require_gpu.__wrapped__()


# -- while a pass runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("failure", OUT_OF_MEMORY, ids=["cupy", "torch"])
def test_out_of_memory_says_what_needs_less(failure, direction, host):
    space, _ = host
    if direction == "backward":
        result, dout = run()
    space.full = failure
    advice = (
        r"out of GPU memory: .*algorithm=\"flash2\" with `deterministic` left out needs less memory"
    )
    with pytest.raises(BackendUnavailable, match=advice) as caught:
        result.backward(dout) if direction == "backward" else run()
    assert caught.value.__cause__ is failure


@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
def test_the_advice_on_memory_is_true(algorithm, host, monkeypatch):
    """Of the forms of the backward, that of "flash2" alone makes no float32 dQ."""
    space, made = host[0], []
    result, dout = run()
    empty = space.empty

    def seen(shape, like=None):
        made.append((shape, like is None))
        return empty(shape, like)

    monkeypatch.setattr(space, "empty", seen)
    job = cupy_engine.replace(result._job, algorithm=algorithm)
    cupy_engine.backward(job, result._saved, dout)
    wide = sum(math.prod(shape) for shape, is_float32 in made if is_float32)
    assert (wide >= dout.size) == (algorithm == "flash2-fused")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("failure", REFUSED, ids=lambda failure: type(failure).__name__)
def test_a_refused_launch_is_explained(failure, direction, host):
    _, plan = host
    if direction == "backward":
        result, dout = run()
    plan.failure = failure
    with pytest.raises(
        BackendUnavailable, match=r"refused the launch: .*failed, start a new process"
    ):
        result.backward(dout) if direction == "backward" else run()


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (
            cupy.cuda.compiler.CompileException(LOG, "source", "name", ()),
            r"a kernel does not compile: common\.cuh\(3\): .*cuda_fp16\.h'; .*pip install --up",
        ),
        (
            error(
                "nvJitLinkError", error("CUDAError", Exception, "").__class__, "ERROR 4: no sm_103"
            ),
            r"a kernel does not compile: ERROR 4: no sm_103; .*pip install --upgrade",
        ),
        (
            RuntimeError(
                "CuPy failed to load libnvrtc.so.12: OSError: libnvrtc.so.12: no such file"
            ),
            r"a CUDA library is missing: .*libnvrtc\.so\.12.*'flashsim-attention\[cuda13\]'",
        ),
        (
            error("NvvmSupportError", ImportError, "libNVVM cannot be found"),
            r"a CUDA library is missing: libNVVM .*; .*flashsim-attention\[cuda13\]",
        ),
    ],
    ids=["CompileException", "nvJitLinkError", "libnvrtc", "libNVVM"],
)
def test_what_does_not_compile_says_what_to_install(failure, text, host):
    host[1].failure = failure
    with pytest.raises(BackendUnavailable, match=text):
        run()


@pytest.mark.parametrize("failure", [RuntimeError("a bug"), MemoryError("the host's"), KeyError(1)])
def test_other_errors_pass_as_they_are(failure, host):
    host[1].failure = failure
    with pytest.raises(type(failure)) as caught:
        run()
    assert caught.value is failure


def test_backward_passes_share_a_plan_whether_heads_were_packed_or_not(monkeypatch):
    monkeypatch.setattr(cupy_engine, "_planned", lambda *how: how)

    def planned(direction, **options):
        job = Job(P, None, None, None, options={"kernel": "hopper", **options})
        return cupy_engine._plan(None, job, direction, Host())[:-1]

    assert planned("backward", pack_gqa=True) == planned("backward")
    assert planned("forward", pack_gqa=True) != planned("forward")
    assert ("kernel", "hopper") in planned("backward")[-1]


# -- backends by name -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cupy", "numba_cuda"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_without_cupy_the_error_names_the_backend_asked_for(backend, dtype, monkeypatch):
    if backend == "numba_cuda":
        pytest.importorskip("numba_cuda")
    monkeypatch.setitem(sys.modules, "cupy", None)
    if backend == "cupy":
        monkeypatch.delitem(sys.modules, "flashsim.backends.cupy_gpu.engine")
    x = np.zeros((8, 16), dtype)
    with pytest.raises(BackendUnavailable, match=rf"backend='{backend}' needs CuPy, .*\[cuda13\]"):
        flashsim.run(x, x, x, backend=backend)


def test_a_cache_that_cupy_cannot_make_as_it_is_imported_is_named(monkeypatch):
    def cannot(name, *rest, **more):
        if name == "cupy":
            raise NotADirectoryError(20, "Not a directory", "/somewhere")
        return genuine(name, *rest, **more)

    genuine = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", cannot)
    with pytest.raises(
        BackendUnavailable, match=r"'/somewhere'\); set CUPY_CACHE_DIR to a writable folder"
    ):
        failures.require_cupy("cupy")


# -- compiling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compiles", "patience"), [(True, 0), (False, 0), (True, 60)])
def test_a_compile_that_lasts_says_so_and_a_load_from_disk_does_not(
    compiles, patience, tmp_path, monkeypatch, capsys
):
    """CuPy puts what it compiles into its cache; from there it only loads."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_PATIENCE_S", patience)
    os.utime(tmp_path, ns=(0, 0))

    class Function:
        kernel = "the function"

        def compile(self):
            if compiles:
                (tmp_path / "made.cubin").touch()

    module = types.SimpleNamespace(get_function=lambda name: Function())
    monkeypatch.setattr(cupy, "RawModule", lambda **_: module)
    (one,) = PORTABLE.forward_passes(P, None, H200, "ascending", "")
    assert nvrtc.load.__wrapped__(one.kernel, 0) == "the function"
    said = capsys.readouterr().err
    expected = (
        f"flashsim: compiled {one.kernel.name} ({one.kernel.file}) in 0.0 s; cached on disk\n"
    )
    assert said == (expected if compiles and not patience else "")


@pytest.mark.parametrize(
    "change",
    ["nothing", "numba", "numba_gpu/traversal.py", "launch/kernel.py", "reports/counts.py"],
)
def test_a_compiled_kernel_is_kept_for_all_that_decides_what_it_is(change, tmp_path, monkeypatch):
    pytest.importorskip("numba_cuda")
    from flashsim.backends.numba_gpu import compiler as python_compiler

    folder = tmp_path / "backends"
    shutil.copytree(Path(launch.__file__).parents[1], folder)
    places = {f"flashsim.backends.{room}": folder / room for room in ("numba_gpu", "launch")}
    monkeypatch.setattr(python_compiler.resources, "files", lambda name: places[name])
    before = python_compiler._sources.__wrapped__()
    if change == "numba":
        monkeypatch.setattr(python_compiler.numba, "__version__", "0.0.0")
    elif change != "nothing":
        with (folder / change).open("a") as file:
            file.write("# changed\n")
    same = python_compiler._sources.__wrapped__() == before
    assert same == (change in ("nothing", "reports/counts.py"))


# -- the teaching kernels -------------------------------------------------------------------------


class Numba:
    """What launching takes from `numba.cuda`; `log` is what happened, in order."""

    def __init__(self, log):
        self.log, self.gpus = log, self

    def __getitem__(self, device):
        return self.scope("numba", device)

    @contextlib.contextmanager
    def scope(self, *what):
        self.log.append(("enter", *what))
        yield
        self.log.append(("leave", *what))

    def external_stream(self, address):
        return ("stream", address)


class Kernel:
    """A kernel of Numba's that is compiled at its first launch."""

    __name__ = "flash_forward"

    def __init__(self, log):
        self.log, self.overloads = log, {}

    def __getitem__(self, where):
        def launched(*given):
            self.overloads["signature"] = None
            self.log.append((where, given))

        return launched


@pytest.fixture
def teaching(monkeypatch):
    """`teaching_run._Gpu` on GPU 1 and stream 77, and the log of what was done there."""
    pytest.importorskip("numba_cuda")
    from flashsim.backends.numba_gpu.teaching import run as teaching_run

    log = []
    numba = Numba(log)
    monkeypatch.setattr(teaching_run, "cuda", numba)
    space = Host()
    space.device, space.stream = 1, lambda: 77
    space.active = lambda: numba.scope("cupy", 1)
    return teaching_run._Gpu(space), log


def test_teaching_kernels_run_on_the_arrays_gpu_and_stream(teaching, capsys):
    place, log = teaching
    kernel = Kernel(log)
    with place.active():
        place.launch(kernel, (3, 2), 32, ("q", "k"))
        place.launch(kernel, (3, 2), 32, ("q", "k"))
    launched = (((3, 2), 32, ("stream", 77)), ("q", "k"))
    inside = [("enter", "cupy", 1), ("enter", "numba", 1)]
    assert log == [*inside, launched, launched, ("leave", "numba", 1), ("leave", "cupy", 1)]
    (said,) = capsys.readouterr().err.splitlines()  # of the first compile alone
    assert said.startswith("flashsim: compiled flash_forward (Python, to learn from) in ")


@pytest.mark.parametrize("failure", [*OUT_OF_MEMORY, *REFUSED])
def test_failures_of_teaching_kernels_are_explained(failure, teaching):
    place, _ = teaching
    with pytest.raises(BackendUnavailable, match=r"out of GPU memory|refused the launch"):  # noqa: SIM117
        with place.active():
            raise failure


def test_teaching_kernels_run_where_the_forward_ran(teaching, monkeypatch):
    """A gradient from elsewhere is refused before anything is launched."""
    from flashsim.backends.numba_gpu.teaching import run as teaching_run

    place, log = teaching
    x = np.ones((1, 1, 16, 16), np.float32)
    job = Job(Problem(16, 16, 16, dtype="float32"), x, x, x)
    monkeypatch.setattr(arrays, "_space", lambda *_: Host())
    with pytest.raises(flashsim.DTypeError, match="dout must be on the same device as q, k and v"):
        teaching_run.backward(job, {"place": place}, x)
    assert log == []


def test_a_failure_without_a_word_is_still_explained():
    assert "a kernel does not compile" in failures._meaning(error("NvvmError", Exception, ""))
