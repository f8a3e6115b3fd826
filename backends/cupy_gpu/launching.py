"""Launches with attributes that CuPy's launcher does not take: clusters of blocks, and launches
that may begin before what runs before them has ended. The driver's library is called directly.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import cupy

from flashsim.backends.cupy_gpu.tensor_maps import driver

#: CUlaunchAttributeID of cuda.h.
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: which one, and 64 bytes that are its value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Launcher:
    """How one kernel is launched, again and again.

    Parameters
    ----------
    function : cupy.cuda.function.Function
    grid : tuple of int
        Thread blocks, along x and y.
    threads, shared : int
        Of a block; shared memory in bytes.
    parameters : int
        Address of the addresses of the kernel's arguments.
    cluster : int
        Blocks of a cluster, along x.
    overlap : bool
        Whether the kernel may begin before the stream's last one has ended; it must wait itself
        (griddepcontrol.wait) before it reads or writes what that one may touch.
    """

    def __init__(
        self,
        function: Any,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        parameters: int,
        *,
        cluster: int = 1,
        overlap: bool = False,
    ) -> None:
        self._function = function  # owns the code that the address is of
        self._plain = (function.ptr, *grid, 1, threads, 1, 1, shared)
        self._parameters = parameters
        wanted: list[tuple[int, tuple[int, ...]]] = []
        if cluster > 1:
            wanted.append((_CLUSTER_DIMENSION, (cluster, 1, 1)))
        if overlap:
            wanted.append((_PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))
        self._attributes = (_Attribute * len(wanted))()
        for attribute, (number, value) in zip(self._attributes, wanted, strict=True):
            attribute.id = number
            attribute.value[: len(value)] = value
        self._config = _Config(
            *((*grid, 1), (threads, 1, 1), shared, 0),
            *(ctypes.cast(self._attributes, ctypes.POINTER(_Attribute)), len(wanted)),
        )
        self._at = ctypes.addressof(self._config)

    def __call__(self, stream: int, parameters: int = 0) -> None:
        """Launch on a stream, maybe with parameters at another address; no other thread may, at the
        same time.

        Raises
        ------
        cupy.cuda.driver.CUDADriverError
            If the driver refuses.
        """
        if not self._attributes:
            cupy.cuda.driver.launchKernel(*self._plain, stream, parameters or self._parameters, 0)
            return
        self._config.stream = stream
        error = _launch()(self._at, self._plain[0], parameters or self._parameters, None)
        if error:
            raise cupy.cuda.driver.CUDADriverError(error)


@cache
def _launch() -> Any:
    """``cuLaunchKernelEx``; with its types said, a call converts nothing."""
    function = driver().cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    return function
