"""Give NumPy, CuPy and torch arrays a single interface for GPU calls.

A GPU call returns arrays of the inputs' library, or CuPy arrays if that library is not NumPy, CuPy
or torch. The inputs' library can import a CuPy array through DLPack without a copy.

A GPU array is copied only if the kernels' 16-byte accesses cannot read it. An array is copied if
its last axis is not contiguous, a row is not 16-byte aligned, or head_dim is not a multiple of 8.
CuPy copies NumPy inputs to the GPU, and the results back to the CPU. For torch arrays, kernels run
on torch's current CUDA stream. For all other arrays, kernels run on CuPy's current stream.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
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
    """The address and strides of a (batch, heads, n, d) array in HBM, as kernels read it."""

    place: Place  # address; strides of the first three axes, in elements
    array: Any  # keeps the memory alive
    copied: int = 0  # bytes of a copy that had to be made on the GPU


class Space:
    """The "space" of a call's arrays, which is their library, device and CUDA stream."""

    device: int
    view: Callable[..., Any]
    vector: Callable[[Any], Any]
    empty: Callable[..., Any]
    duplicate: Callable[[Any], Any]
    full: Callable[[tuple[int, ...], str, float], Any]
    maker: Callable[..., Callable[[], Any]]
    prototype: Callable[[str], Any]
    pointer: Callable[[Any], int]
    stream: Callable[[], int]
    active: Callable[[], AbstractContextManager[Any]]

    def on_device(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes the space's device the thread's current device."""
        if cupy.cuda.runtime.getDevice() == self.device:
            return _AS_IT_IS
        return cupy.cuda.Device(self.device)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> cupy.ndarray:
        """Return a new CuPy array of zeros, to which a kernel writes counts or time stamps."""
        return cupy.zeros(shape, dtype)

    def counters(self, shape: tuple[int, ...]) -> Any:
        """Return a new array of 32-bit zeros, allocated by the space's library."""
        with self.active():
            return cupy.zeros(shape, "uint32")

    def result(self, array: Any, keep: int = 0, width: int = 0) -> Any:
        """Return the first `keep` of an array's `width` columns, in the inputs' library."""
        return array if keep == width else _copy(array[..., :keep])


class CupySpace(Space):
    """The `Space` (library, device, stream) of CuPy arrays on CuPy's current stream."""

    def __init__(self, device: int) -> None:
        self.device = device

    def view(self, array: Any) -> View:
        """Return the `View` of an array of any CUDA library, copied only if necessary."""
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
        """Return a contiguous array with one float32 per row, copied only if necessary."""
        return cupy.ascontiguousarray(cupy.asarray(array))

    def empty(self, shape: tuple[int, ...], like: Any = None) -> Any:
        """Return an uninitialised array of the type of `like`, or of float32 if `like` is None."""
        return _empty(shape, np.dtype(np.float32) if like is None else like.dtype)

    def maker(self, shape: tuple[int, ...], dtype: str = "float32") -> Callable[[], Any]:
        """Return a function without arguments that allocates an array of this shape and type."""
        return partial(self.empty, shape, self.prototype(dtype))

    def duplicate(self, array: Any) -> Any:
        """Return a contiguous copy of an array."""
        return array.copy(order="C")

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """Return an array in the caller's library that is filled with `value`."""
        return upload(np.full(shape, value, numpy_dtype(dtype)))

    def prototype(self, dtype: str) -> Any:
        """Return an empty array of the type that `dtype` names."""
        return _empty((0,), numpy_dtype(dtype))

    def pointer(self, array: Any) -> int:
        """Return the GPU address of an array."""
        return array.data.ptr

    def stream(self) -> int:
        """Return the handle of the library's current CUDA stream."""
        return cupy.cuda.get_current_stream().ptr

    def active(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this space's device and stream current in CuPy."""
        return cupy.cuda.Device(self.device)


class NumpySpace(CupySpace):
    """The `Space` of NumPy arrays: inputs are copied to the GPU, and results back to the CPU."""

    def __init__(self, device: int, dtype: str) -> None:
        super().__init__(device)
        self.dtype = numpy_dtype(dtype)

    def view(self, array: Any) -> View:
        """Copy a NumPy array to the GPU, and return the copy's `View`."""
        if isinstance(array, np.ndarray):
            raw = _RAW.get(array.itemsize)
            bits = array if raw is None else array.view(raw)
            array = cupy.asarray(np.ascontiguousarray(bits))
        return super().view(array)

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """Return an array in the caller's library that is filled with `value`."""
        return np.full(shape, value, numpy_dtype(dtype))

    def prototype(self, dtype: str) -> Any:
        """Return an empty array of the type that `dtype` names."""
        size = numpy_dtype(dtype).itemsize
        return cupy.empty(0, _RAW.get(size, np.float32))

    def result(self, array: Any, keep: int = 0, width: int = 0) -> Any:
        """Return the first `keep` of an array's `width` columns, as a NumPy array."""
        host = cupy.asnumpy(super().result(array, keep, width))
        return host.view(self.dtype) if host.dtype == np.uint16 else host


class TorchSpace(Space):
    """The `Space` (library, device, stream) of CUDA tensors on torch's current stream."""

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
        """Return a tensor's `View`, copying it only if kernels cannot read it in place."""
        batch, head, row, last = array.stride()
        pointer, size = array.data_ptr(), array.element_size()
        if _readable((batch | head | row) * size | pointer, last, array.shape[-1]):
            return View((pointer, batch, head, row), array)
        return self.view(_padded(array, self.torch))._replace(copied=_padded_bytes(array, size))

    def vector(self, array: Any) -> Any:
        """Return a contiguous array with one float32 per row, copied only if necessary."""
        return array.contiguous()

    def empty(self, shape: tuple[int, ...], like: Any = None) -> Any:
        """Return an uninitialised array of the type of `like`, or of float32 if `like` is None."""
        # torch parses separate integers in half the time of a tuple.
        made = (self._float32 if like is None else like).new_empty
        return made(*shape) if shape else made(())

    def maker(self, shape: tuple[int, ...], dtype: str = "float32") -> Callable[[], Any]:
        """Return a function without arguments that allocates a tensor of this shape and type."""
        kind = getattr(self.torch, dtype)
        try:
            # torch's allocation for compiled code takes half the time, but it is private.
            make = self.torch._C._dynamo.guards._empty_strided_cuda
        except AttributeError:
            make = None
        if make is None or not shape:
            return partial(self.torch.empty, shape, dtype=kind, device=self.device)
        strides = tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
        return partial(make, shape, strides, kind)

    def duplicate(self, array: Any) -> Any:
        """Return a contiguous copy of an array."""
        return array.clone(memory_format=self.torch.contiguous_format)

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        """Return an array in the caller's library that is filled with `value`."""
        return self._float32.new_full(shape, value, dtype=getattr(self.torch, dtype))

    def prototype(self, dtype: str) -> Any:
        """Return an empty array of the type that `dtype` names."""
        return self._float32.new_empty(0, dtype=getattr(self.torch, dtype))

    def counters(self, shape: tuple[int, ...]) -> Any:
        """Return 32-bit zeros, allocated by torch because torch can allocate in a graph capture."""
        return self._float32.new_zeros(shape)

    def pointer(self, array: Any) -> int:
        """Return the GPU address of an array."""
        return array.data.ptr if isinstance(array, cupy.ndarray) else array.data_ptr()

    def stream(self) -> int:
        """Return the handle of the library's current CUDA stream."""
        return self._stream(self.device)

    def active(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this space's device and stream current in CuPy."""
        return ForeignStream(self.device, self.stream())


def place(space: Space, x: Any) -> tuple[Place, Any]:
    """Return the address and strides of a tensor or of its copy, and the owner of this memory."""
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
    """Return a new uninitialised CuPy array; the type may be FP8, which `cupy.empty` lacks."""
    if dtype.itemsize == 1:
        return cupy.empty(shape, np.uint8).view(dtype)
    return cupy.empty(shape, dtype)


class ForeignStream:
    """A context manager that makes a stream and device of another library current in CuPy."""

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
    """Return a CuPy array over the memory of a DLPack array, or raise `DTypeError`.

    The array's library makes CuPy's current stream wait for the pending work on the array. The
    array must be on an NVIDIA GPU, and CuPy must have its type (bfloat16 since CuPy 14).
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
    """Return a NumPy copy of a CuPy array of any type, including FP8."""
    raw = _RAW.get(array.itemsize)
    return cupy.asnumpy(array if raw is None else array.view(raw)).view(array.dtype)


def upload(array: np.ndarray) -> cupy.ndarray:
    """Return a copy of a NumPy array of any type, including FP8, on CuPy's current device."""
    raw = _RAW.get(array.itemsize)
    return cupy.asarray(array if raw is None else array.view(raw)).view(array.dtype)


def check_space(name: str, array: Any, dtype: str, space: Space) -> None:
    """Raise `DTypeError` unless `array` has the library and the device of the forward pass."""
    if _space(name, array, dtype) is not space:
        raise DTypeError(
            f"{name} must be on the same device as q, k and v, which are "
            f"{type(space).__name__.removesuffix('Space').lower()} arrays on GPU {space.device}, "
            f"got {_place(array)}"
        )


def space_of(arrays: dict[str, Any], dtype: str) -> Space:
    """Return the space (library, device, stream) of all of `arrays`, or raise `DTypeError`."""
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
    """Return a `Space`; equal arguments give the same object, so that `is` can compare spaces."""
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
    """Return whether an array is a torch tensor, without importing torch."""
    return _library(array) == "torch"


def dtype_name(array: Any) -> str:
    """Return the name of the element type of any library's array, such as "bfloat16"."""
    return str(array.dtype).removeprefix("torch.")


def as_cupy(array: Any) -> cupy.ndarray:
    """Return a CuPy array that shares an array's memory, or a copy of a NumPy array on the GPU."""
    return cupy.from_dlpack(array.detach()) if is_torch(array) else cupy.asarray(array)


def as_library_of(like: Any, array: cupy.ndarray) -> Any:
    """Convert a CuPy array to an array of the same library as `like`."""
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
    """Return whether a kernel can read an array in place, with 16-byte accesses.

    The rows of a readable array are contiguous, 16-byte aligned, and a multiple of 16 bytes long.
    `steps` is the bitwise OR of the address and all strides in bytes. `last` and `width` are the
    stride and length of the last axis, in elements.
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
