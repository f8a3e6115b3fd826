"""The arrays of a GPU call, behind one interface for NumPy, CuPy and torch.

NumPy, CuPy and torch arrays yield results of the same library. Arrays of any other library yield
CuPy arrays, which that library can take through DLPack without a copy.

Kernels read GPU arrays in place. An array is copied only if the kernels' 16-byte accesses cannot
read it: its last axis is not contiguous, its rows or base are not 16-byte aligned, or its head_dim
is no multiple of 8. NumPy arrays go to the GPU and back through CuPy.

Work runs on the current stream of the array's own library; for other libraries, on CuPy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from flashsim.backends.launch.kernel import row_elements
from flashsim.errors import DTypeError
from flashsim.problem.problem import numpy_dtype

#: Types that carry the bits of types that CuPy may lack, by size in bytes.
_RAW = {1: np.uint8, 2: np.uint16}


Place = tuple[int, int, int, int]


class View(NamedTuple):
    """A (batch, heads, n, d) array in HBM as kernels see it."""

    place: Place  # address; strides of the first three axes, in elements
    array: Any  # keeps the memory alive
    copied: int = 0  # bytes of a copy that had to be made on the GPU


class Space:
    """The library, device and stream of a call's arrays.

    Besides the methods below, a space has these:

    - `view`: an array for a kernel; a copy only if the kernel cannot read it as it is.
    - `vector`: the same for an array of one float32 per row.
    - `empty`: a new array of `like`'s type, or of float32 without `like`.
    - `duplicate`: a contiguous copy.
    - `full`: an array for the caller, filled with one value, of a type given by name.
    - `prototype`: an empty array of a type given by name.
    - `pointer`: the address of one of its arrays.
    - `stream`: the address of the current stream.
    - `active`: a context manager that makes its device and stream CuPy's current ones.
    """

    device: int
    view: Callable[..., Any]
    vector: Callable[[Any], Any]
    empty: Callable[..., Any]
    duplicate: Callable[[Any], Any]
    full: Callable[[tuple[int, ...], str, float], Any]
    prototype: Callable[[str], Any]
    pointer: Callable[[Any], int]
    stream: Callable[[], int]
    active: Callable[[], AbstractContextManager[Any]]

    def on_device(self) -> AbstractContextManager[Any]:
        """A context manager that makes the space's device the thread's current one."""
        if cupy.cuda.runtime.getDevice() == self.device:
            return _AS_IT_IS
        return cupy.cuda.Device(self.device)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> cupy.ndarray:
        """A new CuPy array of zeros, for a kernel's reports."""
        return cupy.zeros(shape, dtype)

    def counters(self, shape: tuple[int, ...]) -> Any:
        """A new array of 32-bit zeros in the space's own memory."""
        with self.active():
            return cupy.zeros(shape, "uint32")

    def result(self, array: Any, keep: int = 0, width: int = 0) -> Any:
        """Convert an array of this space for the caller: the first `keep` of `width` columns."""
        return array if keep == width else _copy(array[..., :keep])


class CupySpace(Space):
    """A space of CuPy arrays on the current stream."""

    def __init__(self, device: int) -> None:
        self.device = device

    def view(self, array: Any) -> View:
        """See `Space`; takes any array with ``__cuda_array_interface__``."""
        if type(array) is not cupy.ndarray:
            array = cupy.asarray(array)
        size = array.itemsize
        if size == 1:
            array = array.view(np.uint8)  # FP8: CuPy can hold such arrays but not copy them
        batch, head, row, last = array.strides
        if _readable(array.data.ptr | batch | head | row, last // size, array.shape[-1]):
            return View((array.data.ptr, batch // size, head // size, row // size), array)
        return self.view(_padded(array, cupy))._replace(copied=_padded_bytes(array, size))

    def vector(self, array: Any) -> Any:
        """See `Space`."""
        return cupy.ascontiguousarray(cupy.asarray(array))

    def empty(self, shape: tuple[int, ...], like: Any = None) -> Any:
        """See `Space`."""
        return _empty(shape, np.dtype(np.float32) if like is None else like.dtype)

    def duplicate(self, array: Any) -> Any:
        """See `Space`."""
        return array.copy(order="C")

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """See `Space`."""
        return upload(np.full(shape, value, numpy_dtype(dtype)))

    def prototype(self, dtype: str) -> Any:
        """See `Space`."""
        return _empty((0,), numpy_dtype(dtype))

    def pointer(self, array: Any) -> int:
        """See `Space`."""
        return array.data.ptr

    def stream(self) -> int:
        """See `Space`."""
        return cupy.cuda.get_current_stream().ptr

    def active(self) -> AbstractContextManager[Any]:
        """See `Space`."""
        return cupy.cuda.Device(self.device)


class NumpySpace(CupySpace):
    """A space of NumPy arrays: inputs are uploaded, and results downloaded.

    Types narrower than float32 travel as raw bits.
    """

    def __init__(self, device: int, dtype: str) -> None:
        super().__init__(device)
        self.dtype = numpy_dtype(dtype)

    def view(self, array: Any) -> View:
        """See `Space`; NumPy arrays are uploaded."""
        if isinstance(array, np.ndarray):
            raw = _RAW.get(array.itemsize)
            bits = array if raw is None else array.view(raw)
            array = cupy.asarray(np.ascontiguousarray(bits))
        return super().view(array)

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """See `Space`."""
        return np.full(shape, value, numpy_dtype(dtype))

    def prototype(self, dtype: str) -> Any:
        """See `Space`."""
        size = numpy_dtype(dtype).itemsize
        return cupy.empty(0, _RAW.get(size, np.float32))

    def result(self, array: Any, keep: int = 0, width: int = 0) -> Any:
        """See `Space`."""
        host = cupy.asnumpy(super().result(array, keep, width))
        return host.view(self.dtype) if host.dtype == np.uint16 else host


class TorchSpace(Space):
    """A space of torch CUDA tensors on torch's current stream."""

    def __init__(self, device: int) -> None:
        import torch

        self.torch, self.device = torch, device
        self._float32 = torch.empty(0, dtype=torch.float32, device=device)
        # If available, torch's shortcut avoids a Stream object per call.
        self._stream = getattr(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda device: torch.cuda.current_stream(device).cuda_stream,
        )

    def view(self, array: Any) -> View:
        """See `Space`."""
        batch, head, row, last = array.stride()
        pointer, size = array.data_ptr(), array.element_size()
        if _readable((batch | head | row) * size | pointer, last, array.shape[-1]):
            return View((pointer, batch, head, row), array)
        return self.view(_padded(array, self.torch))._replace(copied=_padded_bytes(array, size))

    def vector(self, array: Any) -> Any:
        """See `Space`."""
        return array.contiguous()

    def empty(self, shape: tuple[int, ...], like: Any = None) -> Any:
        """See `Space`."""
        # torch parses separate integers in half the time of a tuple.
        made = (self._float32 if like is None else like).new_empty
        return made(*shape) if shape else made(())

    def duplicate(self, array: Any) -> Any:
        """See `Space`."""
        return array.clone(memory_format=self.torch.contiguous_format)

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """See `Space`."""
        return self._float32.new_full(shape, value, dtype=getattr(self.torch, dtype))

    def prototype(self, dtype: str) -> Any:
        """See `Space`."""
        return self._float32.new_empty(0, dtype=getattr(self.torch, dtype))

    def counters(self, shape: tuple[int, ...]) -> Any:
        """See `Space`; torch's memory may be allocated while a CUDA graph is captured."""
        return self._float32.new_zeros(shape)

    def pointer(self, array: Any) -> int:
        """See `Space`."""
        return array.data.ptr if isinstance(array, cupy.ndarray) else array.data_ptr()

    def stream(self) -> int:
        """See `Space`."""
        return self._stream(self.device)

    def active(self) -> AbstractContextManager[Any]:
        """See `Space`."""
        return ForeignStream(self.device, self.stream())


def place(space: Space, x: Any) -> tuple[Place, Any]:
    """Return address and strides of a tensor that kernels can read, and the owner of its memory.

    The tensor is copied only if it is broadcast or the kernels cannot read it as it is.
    """
    batch, head, row, last = x.stride()
    at = x.data_ptr()
    if (
        not ((batch | head | row) * x.element_size() | at) & 15
        and last == 1
        and batch
        and head
        and row
        and not x.shape[-1] & 7
    ):
        return (at, batch, head, row), x
    view = space.view(x.contiguous() if 0 in x.stride() else x)
    return view.place, view.array


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> cupy.ndarray:
    """A new CuPy array, also of an FP8 type.

    CuPy does not allocate FP8 arrays, but a view of a uint8 array can have the type.
    """
    if dtype.itemsize == 1:
        return cupy.empty(shape, np.uint8).view(dtype)
    return cupy.empty(shape, dtype)


class ForeignStream:
    """A context manager that makes a device and a foreign stream on it CuPy's current ones."""

    def __init__(self, device: int, stream: int) -> None:
        self._device, self._pointer = cupy.cuda.Device(device), stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer  # the protocol of Stream.from_external

    def __enter__(self) -> None:
        self._device.__enter__()
        if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
            self._stream = cupy.cuda.Stream.from_external(self)
        else:
            self._stream = cupy.cuda.ExternalStream(self._pointer)
        self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)
        self._device.__exit__(*error)


def adopt(name: str, array: Any) -> cupy.ndarray:
    """Return a CuPy array over the memory of an array that only supports DLPack.

    The array's library makes CuPy's current stream wait for its pending work on the array.

    Raises
    ------
    DTypeError
        If the array is not on an NVIDIA GPU, or has a type that CuPy lacks (bfloat16, before CuPy
        14).
    """
    kind, number = array.__dlpack_device__()
    what = f"{name}, {_type_name(array)},"
    if kind not in _DLPACK_CUDA:
        raise DTypeError(
            f"{what} is not on an NVIDIA GPU (its DLPack device is ({int(kind)}, {number})); move "
            f"it to a GPU or, if it is in the CPU's memory, pass numpy.from_dlpack({name})"
        )
    try:
        return cupy.from_dlpack(array)
    except (BufferError, NotImplementedError, TypeError, ValueError) as error:
        raise DTypeError(
            f"{what} cannot be read through DLPack by CuPy {cupy.__version__}: {error}; pass a "
            "torch CUDA tensor or a NumPy array, which need no DLPack"
        ) from error


def download(array: Any) -> np.ndarray:
    """Return a copy of a CuPy array, of any type, in the CPU's memory."""
    raw = _RAW.get(array.itemsize)
    return cupy.asnumpy(array if raw is None else array.view(raw)).view(array.dtype)


def upload(array: np.ndarray) -> cupy.ndarray:
    """Return a copy of a NumPy array, of any type, on CuPy's current device."""
    raw = _RAW.get(array.itemsize)
    return cupy.asarray(array if raw is None else array.view(raw)).view(array.dtype)


def check_space(name: str, array: Any, dtype: str, space: Space) -> None:
    """Raise `DTypeError` unless `array` is in `space`, where the forward pass ran."""
    if _space(name, array, dtype) is not space:
        raise DTypeError(
            f"{name} must be on the same device as q, k and v, got {_place(array)}, but the "
            "forward pass ran on arrays of "
            f"{type(space).__name__.removesuffix('Space').lower()}, GPU {space.device}"
        )


def space_of(arrays: dict[str, Any], dtype: str) -> Space:
    """Return the space that contains all of `arrays`.

    Raises
    ------
    DTypeError
        If the arrays are not all in one space, or not in one that a GPU kernel can reach.
    """
    first = None
    for name, array in arrays.items():
        space = _space(name, array, dtype)
        if first is None:
            first = space
        elif space is not first:
            raise DTypeError(
                "all arrays must be on one device and from one library, got "
                + ", ".join(f"{n} {_place(a)}" for n, a in arrays.items())
            )
    assert first is not None
    return first


_AS_IT_IS = nullcontext()
#: Spaces of torch tensors, by GPU; and the classes of torch's arrays.
_OF_TORCH: dict[int, Space] = {}
_TENSORS: set[type] = set()
#: DLPack's device types for GPU memory and managed memory.
_DLPACK_CUDA = (2, 13)


@cache
def _made(space: Any, *where: Any) -> Space:
    """Return the only object for a space, so that equal spaces are identical objects."""
    return space(*where)


def _space(name: str, array: Any, dtype: str) -> Any:
    if type(array) in _TENSORS and (known := _OF_TORCH.get(array.get_device())):
        return known
    if type(array) is cupy.ndarray:
        return _made(CupySpace, array.data.device_id)
    if isinstance(array, np.ndarray):
        return _made(NumpySpace, cupy.cuda.runtime.getDevice(), dtype)
    if is_torch(array):
        if not array.is_cuda:
            raise DTypeError(
                f"{name} is a torch tensor on {array.device}; pass {name}.cuda(), or "
                f"{name}.numpy() if it is on the CPU"
            )
        _TENSORS.add(type(array))
        number = array.get_device()
        return _OF_TORCH.setdefault(number, _made(TorchSpace, number))
    if hasattr(array, "__cuda_array_interface__"):
        return _made(CupySpace, cupy.asarray(array).device.id)
    raise DTypeError(
        f"{name} must be a NumPy array, or a CuPy array, torch CUDA tensor or other array with "
        f"__cuda_array_interface__ or __dlpack__, got {_type_name(array)}"
    )


def is_torch(array: Any) -> bool:
    """Whether an array is a torch tensor; does not import torch."""
    return _library(array) == "torch"


def dtype_name(array: Any) -> str:
    """Return the name of an array's type in any library, such as "bfloat16"."""
    return str(array.dtype).removeprefix("torch.")


def as_cupy(array: Any) -> cupy.ndarray:
    """Return a CuPy array over the same memory; for a NumPy array, a copy on the GPU."""
    return cupy.from_dlpack(array.detach()) if is_torch(array) else cupy.asarray(array)


def as_library_of(like: Any, array: cupy.ndarray) -> Any:
    """Return a CuPy array, converted to the library of `like`."""
    if isinstance(like, np.ndarray):
        return array.get()
    if is_torch(like):
        import torch

        return torch.from_dlpack(array)
    return array


def _library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def _type_name(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__name__}"


def _place(array: Any) -> str:
    return f"{_library(array)} on {getattr(array, 'device', 'the CPU')}"


def _readable(steps: int, last: int, width: int) -> bool:
    """Whether 16-byte accesses can read an array: rows are contiguous, aligned and of whole pieces.

    `steps` is the bitwise OR of the address and all strides in bytes: a multiple of 16 iff each of
    them is. `last` is the last axis' stride and `width` its length, in elements.
    """
    return last == 1 and width % 8 == 0 and steps % 16 == 0


def _padded_bytes(array: Any, itemsize: int) -> int:
    *shape, width = array.shape
    return math.prod(shape) * row_elements(width) * itemsize


def _padded(array: Any, library: Any) -> Any:
    """Return a contiguous copy whose rows are padded with zeros to a multiple of 8 elements."""
    shape = (*array.shape[:-1], row_elements(array.shape[-1]))
    where = {} if library is cupy else {"device": array.device}
    copy = library.zeros(shape, dtype=array.dtype, **where)
    copy[..., : array.shape[-1]] = array
    return copy


def _copy(array: Any) -> Any:
    return array.copy() if hasattr(array, "copy") else array.contiguous()
