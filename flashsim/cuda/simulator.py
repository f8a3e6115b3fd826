"""Records the memory accesses of a Numba-CUDA kernel that runs in Numba's CUDA simulator.

The simulator runs each thread of a block as a Python thread, and passes arguments of unknown types
to the kernel unchanged. So each array is replaced by a `WatchedArray`, which records every element
that a thread reads or writes, with the source line.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from flashsim.backends.numba_gpu.teaching.simulator import atomic_shared_arrays
from flashsim.errors import BackendUnavailable, DTypeError, OptionError, UnsupportedError, shown

WARP, SECTOR = 32, 32
#: Python's thread switch interval in seconds, while a kernel runs.
SWITCH = 5e-5


#: What a thread's accesses are merged by: the barriers that the thread had passed, the kind, the
#: tensor's number, and the source line (file, number).
Key = tuple[int, str, int, tuple[str, int]]


class BlockAccess(NamedTuple):
    """The accesses of a thread block's threads from one source line, between two barriers.

    `offsets` has one accessed element per thread and execution of the source line, in no particular
    order. `requests` is the number of memory requests of all warps, and `sectors` the number of
    32-byte sectors that the requests touch, summed over the requests. `outside` is the number of
    accesses past the tensor's end.
    """

    kind: str
    tensor: int
    line: tuple[str, int]
    offsets: np.ndarray
    outside: int
    requests: int
    sectors: int


class WatchedArray:
    """An array that records every element access of a kernel, including accesses through slices.

    `start` is the offset of the array's first element in the tensor, in bytes.
    """

    def __init__(self, watch: BlockWatch, tensor: int, array: np.ndarray, start: int = 0) -> None:
        self._watch, self._tensor, self._array, self._start = watch, tensor, array, start
        self.shape, self.ndim, self.size = array.shape, array.ndim, array.size
        self.dtype, self.strides = array.dtype, array.strides

    def __len__(self) -> int:
        return len(self._array)

    @property
    def T(self) -> WatchedArray:
        """Return the array with its dimensions reversed."""
        return WatchedArray(self._watch, self._tensor, self._array.T, self._start)

    def _element(self, index: Any) -> tuple[tuple[int, ...], int] | None:
        """Return an element's index as a tuple, and its offset in memory, or None for a slice."""
        one = index if isinstance(index, tuple) else (index,)
        if len(one) != self.ndim or not all(isinstance(i, (int, np.integer)) for i in one):
            return None
        place = self._start
        for i, size, stride in zip(one, self.shape, self.strides, strict=True):
            at = int(i) + size if i < 0 else int(i)
            if not 0 <= at < size:
                return one, -1
            place += at * stride
        return one, place // self._array.itemsize

    def __getitem__(self, index: Any) -> Any:
        element = self._element(index)
        if element is None:
            return self._slice(index)
        one, place = element
        self._watch.note("load", self._tensor, place)
        return self._array[one] if place >= 0 else self._array.dtype.type(0)

    def __setitem__(self, index: Any, value: Any) -> None:
        element = self._element(index)
        if element is None:
            raise UnsupportedError(
                f"index {shown(index)} does not select a single element of an array with "
                f"{self.ndim} dimensions; write one element at a time, as a CUDA thread does"
            )
        one, place = element
        self._watch.note("store", self._tensor, place)
        if place >= 0:
            self._array[one] = value

    def _slice(self, index: Any) -> WatchedArray:
        one = index if isinstance(index, tuple) else (index,)
        try:
            view = self._array[one]
            plain = all(isinstance(i, (int, np.integer, slice)) for i in one)
        except IndexError:
            plain = False
        if not plain:
            raise UnsupportedError(
                f"index {shown(index)} is not valid for an array of shape {self.shape}: use "
                "integers and slices that lie within the array"
            )
        moved = address(view) - address(self._array)
        return WatchedArray(self._watch, self._tensor, view, self._start + moved)


def address(array: np.ndarray) -> int:
    """Return the memory address of an array's first element."""
    return array.__array_interface__["data"][0]


class BlockWatch:
    """Collects the accesses of one kernel launch, block by block."""

    def __init__(self, simulator: Any) -> None:
        self._simulator = simulator
        self.accesses: dict[tuple[int, int, int], list[BlockAccess]] = {}
        self.itemsizes: list[int] = []
        #: Shared arrays by the file and the line that create them.
        self.shared: dict[tuple[str, int], np.ndarray] = {}
        self._block: tuple[int, int, int] | None = None
        #: By thread number: the accesses' keys, and their offsets in elements, -1 if outside.
        self._threads: dict[int, list[tuple[Key, int]]] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._first: dict[Any, int] = {}

    def array(self, array: np.ndarray) -> WatchedArray:
        """Return a `WatchedArray` that records accesses to a kernel's argument."""
        self.itemsizes.append(array.itemsize)
        return WatchedArray(self, len(self.itemsizes) - 1, array)

    def note(self, kind: str, tensor: int, offset: int) -> None:
        """Record one access by the thread that calls this function."""
        frame = sys._getframe(2)
        if frame.f_code.co_filename.endswith("kernelapi.py"):  # an atomic operation
            # The simulator reads, reads again and writes; only the first read's line is recorded.
            first = self._first.setdefault(frame.f_code, frame.f_lineno)
            if kind != "load" or frame.f_lineno != first:
                return
            kind = "reduce"
            while frame.f_code.co_filename.endswith("kernelapi.py") and frame.f_back:
                frame = frame.f_back
        notes = getattr(self._local, "notes", None)
        if notes is None:
            notes = self._local.notes = self._begin()
        phase = getattr(threading.current_thread(), "barriers", 0)
        notes.append(((phase, kind, tensor, (frame.f_code.co_filename, frame.f_lineno)), offset))

    def _begin(self) -> list[tuple[Key, int]]:
        thread: Any = threading.current_thread()
        block = (int(thread.blockIdx.x), int(thread.blockIdx.y), int(thread.blockIdx.z))
        with self._lock:
            if block != self._block:
                self.end_block()
                self._block = block
                self.shared = self._simulator._get_kernel_context().shared._allocations
            return self._threads.setdefault(int(thread.thread_id), [])

    def end_block(self) -> None:
        """Combine the records of a block's threads, after the block has ended."""
        if self._block is not None:
            self.accesses[self._block] = merged(self._threads, self.itemsizes)
        self._threads = {}


def merged(
    threads: dict[int, list[tuple[Key, int]]], itemsizes: Sequence[int]
) -> list[BlockAccess]:
    """Return a thread block's accesses in program order, merged to `BlockAccess` objects."""
    offsets: dict[Key, list[int]] = {}
    places: dict[Key, int] = {}
    requests: dict[Key, dict[tuple[int, int], set[int]]] = {}  # sectors by warp and execution
    for number in sorted(threads):
        times: Counter[Key] = Counter()
        for place, (key, offset) in enumerate(threads[number]):
            offsets.setdefault(key, []).append(offset)
            places[key] = min(place, places.get(key, place))
            times[key] += 1
            if offset >= 0:
                request = requests.setdefault(key, {}).setdefault(
                    (number // WARP, times[key]), set()
                )
                request.add(offset * itemsizes[key[2]] // SECTOR)
    result = []
    for key in sorted(offsets, key=lambda key: (key[0], places[key], key[3], key[1])):
        _, kind, tensor, line = key
        reached, sectors = np.asarray(offsets[key], np.int64), requests.get(key, {}).values()
        inside = reached[reached >= 0]
        outside, total = len(reached) - len(inside), sum(map(len, sectors))
        result.append(BlockAccess(kind, tensor, line, inside, outside, len(sectors), total))
    return result


@contextmanager
def counted_barriers(thread_class: Any):
    """In the ``with`` block, each simulated thread counts the barriers that it passes.

    Python's thread switch interval is shortened, because a thread that waits at a barrier keeps the
    CPU busy.
    """
    plain: Callable[[Any], None] = thread_class.syncthreads
    interval = sys.getswitchinterval()

    def syncthreads(self: Any) -> None:
        plain(self)
        self.barriers = getattr(self, "barriers", 0) + 1

    thread_class.syncthreads = syncthreads
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        thread_class.syncthreads = plain
        sys.setswitchinterval(interval)


def require_simulator(kernel: Any) -> Any:
    """Return the simulator's module that defines a kernel; raise if a GPU would run the kernel."""
    module = sys.modules.get(type(kernel).__module__)
    if type(kernel).__name__ == "FakeCUDAKernel" and module is not None:
        return module
    if type(kernel).__module__.partition(".")[0] in ("numba", "numba_cuda"):
        raise BackendUnavailable(
            "flashsim.cuda.trace works only in Numba's CUDA simulator, but this kernel is "
            "compiled for a GPU: set NUMBA_ENABLE_CUDASIM=1 in the environment before Python "
            "starts (NUMBA_ENABLE_CUDASIM=1 python yours.py)"
        )
    raise DTypeError(
        "flashsim.cuda.trace needs a kernel (a function decorated with @numba.cuda.jit) with "
        f"its grid and block, as in trace(kernel[grid, block], ...); got {shown(kernel)}"
    )


def run_watched(kernel: Any, args: tuple[Any, ...]) -> tuple[BlockWatch, list[np.ndarray | None]]:
    """Run a kernel on the caller's arguments; return its accesses, and the arguments' arrays."""
    simulator = require_simulator(kernel)
    refuse_merged_arrays(kernel)
    if kernel.grid_dim is None or kernel.block_dim is None:
        raise OptionError(
            f"kernel {kernel.fn.__name__} was passed without its grid and block; write "
            "trace(kernel[grid, block], ...)"
        )
    watch = BlockWatch(simulator)
    arrays = [held(arg, number) for number, arg in enumerate(args)]
    given = [
        arg if array is None else watch.array(array)
        for arg, array in zip(args, arrays, strict=True)
    ]
    try:
        with counted_barriers(simulator.BlockThread), atomic_shared_arrays():
            kernel(*given)
    except AttributeError as error:
        raise UnsupportedError(
            f"{kernel_line(error, kernel)}: the kernel uses a feature that Numba's CUDA "
            f"simulator lacks ({error}); leave out that feature while you trace"
        ) from error
    except Exception as error:
        error.add_note(f"{kernel_line(error, kernel)}, traced by flashsim.cuda.trace")
        raise
    watch.end_block()
    return watch, arrays


def refuse_merged_arrays(kernel: Any) -> None:
    """Raise if one source line creates two shared arrays: the simulator would merge them."""
    try:
        lines, first = inspect.getsourcelines(kernel.fn)
    except OSError:  # the source of a function typed into a prompt cannot be read
        return
    for number, line in enumerate(lines):
        if line.partition("#")[0].count("shared.array(") > 1:
            raise UnsupportedError(
                f"line {first + number} of {kernel.fn.__code__.co_filename} creates two shared "
                "arrays, which Numba's simulator would treat as one array; create each shared "
                "array on a separate line"
            )


def held(arg: Any, number: int) -> np.ndarray | None:
    """Return the NumPy array that a kernel's argument holds, or None if it is a number."""
    arg = getattr(arg, "value", arg) if type(arg).__name__ in ("In", "Out", "InOut") else arg
    if type(arg).__name__ in ("FakeCUDAArray", "FakeWithinKernelCUDAArray"):
        arg = getattr(arg, "_item", arg)._ary
    if isinstance(arg, (bool, int, float, complex, np.generic)):
        return None
    if not isinstance(arg, np.ndarray) or arg.ndim == 0 or arg.dtype.kind not in "biufc":
        raise DTypeError(
            f"argument {number} must be an array or a number, got {shown(arg)} "
            f"({type(arg).__name__}); pass a NumPy array or numba.cuda.to_device(array)"
        )
    return arg


def kernel_line(error: BaseException, kernel: Any) -> str:
    """Return the kernel's source line in which an error was raised, as text."""
    file = kernel.fn.__code__.co_filename
    found = kernel.fn.__code__.co_firstlineno
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == file:
            found = step.tb_lineno
        step = step.tb_next
    return f"line {found} of {file}"
