"""GPU memory with unmapped addresses before and after it: reads beyond a tensor fail there.

With an ordinary allocator, neighbouring allocations mostly hide such reads.
"""

import ctypes

import cupy

_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3  # of cuda.h


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Island:
    """The smallest mappable piece of memory, in its own address range; it is never freed."""

    def __init__(self) -> None:
        cupy.cuda.runtime.free(0)  # creates a context
        where = _Location(_DEVICE, cupy.cuda.Device().id)
        properties = _Properties(_PINNED, 0, where)
        size, start = ctypes.c_size_t(), ctypes.c_uint64()
        _call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), 0)
        self.size = size.value
        sizes = [ctypes.c_size_t(n * self.size) for n in (1, 3)]
        zero, handle = ctypes.c_uint64(0), ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(start), sizes[1], zero, zero, zero)
        _call("cuMemCreate", ctypes.byref(handle), sizes[0], ctypes.byref(properties), zero)
        self.start = start.value + self.size
        middle, access = ctypes.c_uint64(self.start), _Access(where, _READ_WRITE)
        _call("cuMemMap", middle, sizes[0], zero, handle, zero)
        _call("cuMemSetAccess", middle, sizes[0], ctypes.byref(access), ctypes.c_size_t(1))

    def put(self, array: cupy.ndarray, *, at_end: bool) -> cupy.ndarray:
        """Return a copy that starts where the island starts, or ends where it ends."""
        at = self.start + (self.size - array.nbytes if at_end else 0)
        memory = cupy.cuda.UnownedMemory(at, array.nbytes, self)
        made = cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0))
        made[...] = array
        return made


def _call(name: str, *arguments: object) -> None:
    error = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    assert error == 0, (name, error)
