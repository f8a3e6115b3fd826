"""Launch kernels through the CUDA driver, and manage the memory of kernel arguments.

Thread-block clusters and programmatic dependent launch (a kernel may begin before the previous one
ends) need launch attributes, which CuPy cannot set. The launch attributes are set through the CUDA
driver's library.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import cupy
import numpy as np

from flashsim.backends.cupy_gpu.tensor_maps import driver
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Kernel

#: CUlaunchAttributeID of cuda.h.
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
#: CUstreamCaptureMode of cuda.h: a capture must not reject this thread's calls.
_RELAXED = 2
#: CU_STREAM_CAPTURE_STATUS_ACTIVE.
_CAPTURING = 1


PER_THREAD = cupy.cuda.runtime.streamPerThread


def shares_nothing(stream: int) -> bool:
    """Return whether launches on this stream may not share scratch memory with later launches.

    The handle of CUDA's per-thread stream denotes a different stream in each thread. A captured
    CUDA graph may later run in any stream, at the same time as other launches.
    """
    return stream == PER_THREAD or cupy.cuda.runtime.streamIsCapturing(stream)


class _Attribute(ctypes.Structure):
    """The driver's ``CUlaunchAttribute``: an id, and a value of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """The driver's ``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Argument:
    """A buffer for a kernel's ``struct`` argument, at an address that never changes."""

    def __init__(self, dtype: np.dtype) -> None:
        whole = np.zeros(dtype.itemsize, np.uint8)
        self.buffer, self.values = whole.data, whole.view(dtype)
        self.address = whole.ctypes.data


class Parameters:
    """The array of argument addresses that a launch passes to the driver."""

    def __init__(self, *addresses: int, keeps: Any = None) -> None:
        self._keeps = keeps  # keeps the argument alive
        self._values = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self._values)


class Launcher:
    """A launcher of one kernel.

    `grid` is the number of thread blocks along x and y. `cluster` is the number of blocks per
    cluster along x; it is ignored if the kernel declares a cluster size. With `overlap`, the kernel
    may begin before the previous kernel in the stream ends. A kernel with `overlap` must wait
    (griddepcontrol.wait) before it accesses memory that the previous kernel may access.
    """

    def __init__(
        self,
        function: Any,
        kernel: Kernel,
        grid: tuple[int, int],
        *,
        cluster: int = 1,
        overlap: bool = False,
    ) -> None:
        self._function = function  # owns the code at the address
        threads, shared = kernel.threads, kernel.shared_bytes
        self._plain = (function.ptr, *grid, 1, threads, 1, 1, shared)
        wanted: list[tuple[int, tuple[int, ...]]] = []
        if cluster > 1:
            wanted.append((_CLUSTER_DIMENSION, (cluster, 1, 1)))
        if overlap:
            wanted.append((_PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))
        self._config: _Config | None = None
        if not wanted:
            return
        self._attributes = (_Attribute * len(wanted))()
        for attribute, (number, value) in zip(self._attributes, wanted, strict=True):
            attribute.id = number
            attribute.value[: len(value)] = value
        self._config = _Config(
            *((*grid, 1), (threads, 1, 1), shared, 0),
            *(ctypes.cast(self._attributes, ctypes.POINTER(_Attribute)), len(wanted)),
        )
        self._at, self._stream = ctypes.addressof(self._config), 0
        self._run = _launch()

    def fixed(self, stream: int, parameters: Parameters) -> tuple[Any, tuple[Any, ...]]:
        """Return the driver's launch function and its arguments, for repeated calls."""
        if self._config is None:
            plain = *self._plain, stream, parameters.address, 0
            return cupy.cuda.driver.launchKernel, plain
        config = _Config.from_buffer_copy(self._config)
        config.stream = stream
        return self._run, (ctypes.byref(config), self._plain[0], parameters.address, None)

    def __call__(self, stream: int, parameters: Parameters) -> None:
        """Launch the kernel on a stream, or raise `CUDADriverError` if the driver refuses.

        Two threads must not call the same launcher at the same time.
        """
        if self._config is None:
            cupy.cuda.driver.launchKernel(*self._plain, stream, parameters.address, 0)
            return
        if stream != self._stream:
            self._config.stream = self._stream = stream
        error = self._run(self._at, self._plain[0], parameters.address, None)
        if error:
            raise cupy.cuda.driver.CUDADriverError(error)


class FixedLaunch:
    """A launch whose kernel, stream and parameters are fixed, so that it can be repeated."""

    def __init__(self, launcher: Launcher, stream: int, parameters: Parameters) -> None:
        self._keeps = launcher, parameters
        self._run, self._args = launcher.fixed(stream, parameters)

    def __call__(self) -> None:
        """Launch the kernel, or raise `CUDADriverError` if the driver refuses.

        Several threads may make the same launch at the same time.
        """
        error = self._run(*self._args)
        if error:
            raise cupy.cuda.driver.CUDADriverError(error)


@cache
def _own_stream(device: int) -> Any:
    """Return the stream of CuPy's current device in which tables are copied to the GPU."""
    return cupy.cuda.Stream(non_blocking=True)


@contextmanager
def aside() -> Iterator[None]:
    """Run the body of a `with` statement in another CUDA stream, and wait for its end.

    Preparing a plan in another stream does not wait for the caller's GPU work, and works during a
    CUDA graph capture.
    """
    mode = ctypes.c_int(_RELAXED)
    exchange = driver().cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        stream = _own_stream(cupy.cuda.runtime.getDevice())
        with stream:
            yield
        stream.synchronize()
    finally:
        exchange(ctypes.byref(mode))


def capture_of(stream: int) -> int:
    """Return the driver's id of a stream's CUDA graph capture, or 0 without a capture."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error:
        raise cupy.cuda.driver.CUDADriverError(error)
    return number.value if status.value == _CAPTURING else 0


def clusters_at_once(shared: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return, for each cluster size, how many clusters the GPU runs at once with one block per SM.

    `shared` is the shared memory per block in bytes, too much for two blocks per SM.
    """
    code = 'extern "C" __global__ void nothing() {}'
    function = cupy.RawModule(code=code, backend="nvrtc").get_function("nothing")
    function.max_dynamic_shared_size_bytes = shared
    ask, found = driver().cuOccupancyMaxActiveClusters, []
    for size in sizes:
        attribute = (_Attribute * 1)()
        attribute[0].id, attribute[0].value[:3] = _CLUSTER_DIMENSION, (size, 1, 1)
        pointer = ctypes.cast(attribute, ctypes.POINTER(_Attribute))
        config = _Config((size, 1, 1), (128, 1, 1), shared, 0, pointer, 1)
        number = ctypes.c_int()
        address = ctypes.c_void_p(function.kernel.ptr)
        error = ask(ctypes.byref(number), address, ctypes.byref(config))
        if error:
            raise cupy.cuda.driver.CUDADriverError(error)
        found.append((size, number.value))
    return tuple(found)


def launch_once(kernel: Kernel, grid: tuple[int, int], record: np.ndarray, space: Any) -> None:
    """Load and launch a kernel once; `record` is the kernel's struct argument."""
    with space.active():
        function = nvrtc.load(kernel, space.device)
    Launcher(function, kernel, grid)(space.stream(), Parameters(record.ctypes.data))


@cache
def _launch() -> Any:
    """Return the driver's ``cuLaunchKernelEx`` with declared argument types."""
    function = driver().cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    return function
