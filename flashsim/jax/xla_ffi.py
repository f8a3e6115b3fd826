"""Register Python functions as XLA foreign functions, and read XLA's call frames.

XLA calls a function pointer with a *call frame*: arguments, result buffers to fill, attributes, and
a table of XLA's functions. The C structures follow version 0.x of jaxlib's ``xla/ffi/api/c_api.h``
(in `jax.ffi.include_dir`); later minor versions append fields. XLA calls the pointer from its own
thread, in which ctypes acquires the GIL.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from flashsim.errors import BackendUnavailable
from flashsim.problem.problem import numpy_dtype

_MAJOR = 0
_METADATA = 1  # the kind of extension that asks for which version a function was written
_INVALID_ARGUMENT = 3
_DTYPES = {
    **{1: "bool", 2: "int8", 3: "int16", 6: "uint8"},
    4: "int32",
    5: "int64",
    10: "float16",
    11: "float32",
    12: "float64",
    16: "bfloat16",
}


class _Struct(ctypes.Structure):
    _fields_: ClassVar[Any] = (("struct_size", c_size_t), ("extension", c_void_p))


class _Version(_Struct):
    _fields_ = (("major", c_int), ("minor", c_int))


class _Api(_Struct):
    _fields_ = (
        ("version", _Version),
        ("internal", c_void_p),
        ("error_create", c_void_p),
        ("error_message", c_void_p),
        ("error_destroy", c_void_p),
        ("register", c_void_p),
        ("stream_get", c_void_p),
    )


#: Structures as 64-bit words: a call frame, a buffer and a text span, up to the last word read.
_FRAME, _BUFFER, _SPAN = (c_uint64 * 21), (c_uint64 * 6), (c_uint64 * 2)
_FRAME_WORDS, _BUFFER_WORDS = struct.Struct("21Q"), struct.Struct("=16xI4xQQQ")
# Word offsets of a frame's fields. Arguments and results have two: their number, and the address
# of an array of buffer addresses. Attributes have four: their number, and the addresses of their
# kinds, of an array of name addresses, and of an array of text addresses.
_EXTENSION, _API_AT, _CONTEXT = 1, 2, 3
_ARGUMENTS, _RESULTS, _ATTRIBUTES = (7, 9), (12, 14), (17, 18, 19, 20)


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("kind", c_int),
        ("next", c_void_p),
        ("metadata", POINTER(_Metadata)),
    )


class _ErrorCreate(_Struct):
    _fields_ = (("message", c_char_p), ("code", c_int))


class _StreamGet(_Struct):
    _fields_ = (("context", c_void_p), ("stream", c_void_p))


_CALLED = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_CREATE = ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorCreate))
# This function returns at once, so it need not release the GIL.
_STREAM = ctypes.PYFUNCTYPE(c_void_p, POINTER(_StreamGet))


class XlaArray(NamedTuple):
    """One argument or result of XLA in memory."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Return the size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class ForeignCall:
    """One call of a foreign function; `frame` is the address of XLA's call frame.

    The frame is read as 64-bit words, because reading a ctypes field takes ten times as long.
    """

    def __init__(self, frame: int) -> None:
        view = _VIEWS.get(frame)
        if view is None:
            if len(_VIEWS) >= _MOST:
                _VIEWS.clear()
            view = _VIEWS[frame] = _view(frame, _FRAME)
        self._frame = _FRAME_WORDS.unpack(view)
        self.extension, self.api = self._frame[_EXTENSION], self._frame[_API_AT]

    def layout(self) -> tuple[Layout, list[int]]:
        """Return the call's layout, and the addresses of its arguments and results."""
        key = self._frame[_ARGUMENTS[0] :]
        layout = _LAYOUTS.get(key)
        addresses = None if layout is None else layout.addresses()
        if layout is None or addresses is None:
            if len(_LAYOUTS) >= _MOST:
                _LAYOUTS.clear()
            layout = _LAYOUTS[key] = Layout(self._frame)
            addresses = layout.addresses()
            assert addresses is not None
        return layout, addresses

    @cached_property
    def arrays(self) -> list[XlaArray]:
        """Return the memory of the call's arguments, and of the results that the function fills."""
        layout, addresses = self.layout()
        pairs = zip(addresses, layout.looks, strict=True)
        return [XlaArray(address, *look) for address, look in pairs]

    def stream(self) -> int:
        """Return the address of the CUDA stream that XLA launches on (GPUs only)."""
        asked = _StreamGet(ctypes.sizeof(_StreamGet), None, self._frame[_CONTEXT])
        if _asking(_Api.from_address(self.api).stream_get)(ctypes.byref(asked)):
            raise RuntimeError(
                "XLA returned no CUDA stream for this call, so flashsim cannot launch its "
                "kernel; run the call on an NVIDIA GPU"
            )
        return asked.stream or 0


class Layout:
    """The parts of a foreign call that stay the same from run to run, unlike the arrays' addresses.

    XLA keeps a call's structures in memory, and writes the arrays' addresses into the structures
    before each run. XLA may also free the structures and reuse their memory. So `addresses` first
    checks that the structures are unchanged, and follows no changed pointer. Callers may store
    prepared launches in the dict `runs`.

    `looks` has the shape and type of each array, of which the first `inputs` are arguments; `texts`
    has the call's attributes by name, all of which must be texts.
    """

    def __init__(self, frame: tuple[int, ...]) -> None:
        self.runs: dict[Any, Any] = {}
        self._same: list[tuple[memoryview, bytes]] = []
        self._arrays: list[tuple[memoryview, tuple[int, int, int]]] = []
        self._dims: list[tuple[memoryview, bytes]] = []
        self.looks: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        self.inputs = frame[_ARGUMENTS[0]]
        for n, at in (_ARGUMENTS, _RESULTS):
            for address in self._pointers(frame[at], frame[n]):
                view = _view(address, _BUFFER)
                dtype, _, rank, dims = _BUFFER_WORDS.unpack(view)
                self._arrays.append((view, (dtype, rank, dims)))
                if rank:
                    self._dims.append(_content(dims, 8 * rank))
                shape = tuple((c_int64 * rank).from_address(dims)[:]) if rank else ()
                self.looks.append((shape, numpy_dtype(_DTYPES[dtype])))
        n, kinds, names, texts = (frame[at] for at in _ATTRIBUTES)
        if n:
            self._same.append(_content(kinds, 4 * n))
        pairs = zip(self._texts(names, n), self._texts(texts, n), strict=True)
        self.texts = {name.decode(): text.decode() for name, text in pairs}

    def _texts(self, at: int, n: int) -> list[bytes]:
        found = []
        for span in self._pointers(at, n):
            self._same.append(_content(span, ctypes.sizeof(_SPAN)))
            address, length = _SPAN.from_address(span)[:]
            text = b""
            if length:
                self._same.append(_content(address, length))
                text = self._same[-1][1]
            found.append(text)
        return found

    def _pointers(self, address: int, n: int) -> list[int]:
        if not n:
            return []
        self._same.append(_content(address, 8 * n))
        return (c_uint64 * n).from_address(address)[:]

    def addresses(self) -> list[int] | None:
        """Return the addresses of arguments and results, or None if the call has changed."""
        for view, content in self._same:
            if view.tobytes() != content:
                return None
        found = []
        for view, (dtype, rank, dims) in self._arrays:
            of_dtype, address, of_rank, of_dims = _BUFFER_WORDS.unpack(view)
            if of_dtype != dtype or of_rank != rank or of_dims != dims:
                return None
            found.append(address)
        for view, content in self._dims:
            if view.tobytes() != content:
                return None
        return found


def _view(address: int, kind: Any) -> memoryview:
    """Return a view of a structure's memory as bytes."""
    return memoryview(kind.from_address(address)).cast("B")


def _content(address: int, n: int) -> tuple[memoryview, bytes]:
    """Return a view of `n` bytes of memory, and a copy of their current content."""
    view = _view(address, ctypes.c_char * n)
    return view, view.tobytes()


#: Views of call frames, by address; layouts, by a frame's words from its arguments on.
_VIEWS: dict[int, memoryview] = {}
_LAYOUTS: dict[tuple[int, ...], Layout] = {}
_MOST = 1024


@cache
def _asking(address: int) -> Any:
    """Return a Python function that calls XLA's function at an address to get a CUDA stream."""
    return _STREAM(address)


#: Registered function pointers, kept alive here because XLA holds no reference to them.
_REGISTERED: list[Any] = []


def register(name: str, platform: str, function: Callable[[ForeignCall], None]) -> None:
    """Register `function` as XLA's target `name` on a platform, "cpu" or "CUDA".

    An exception in `function` becomes an error of XLA's computation, with the same text.

    Raises
    ------
    BackendUnavailable
        If jaxlib's interface has another major version than this module supports.
    """
    spoken: list[int] = []

    def called(frame: int) -> int | None:
        call = ForeignCall(frame)
        if call.extension:  # XLA asks this once, while it registers
            extension = _MetadataExtension.from_address(call.extension)
            if extension.kind == _METADATA:
                told = extension.metadata.contents
                theirs = _Api.from_address(call.api).version
                told.version.major, told.version.minor = theirs.major, theirs.minor
                spoken.append(told.version.major)
                told.traits = 0
                return None
        try:
            function(call)
        except BaseException as error:  # an exception must not reach C++
            text = f"{type(error).__name__}: {error}".encode()
            asked = _ErrorCreate(ctypes.sizeof(_ErrorCreate), None, text, _INVALID_ARGUMENT)
            create = _CREATE(_Api.from_address(call.api).error_create)
            return create(ctypes.byref(asked))
        return None

    pointer = _CALLED(called)
    _REGISTERED.append(pointer)
    address = ctypes.cast(pointer, c_void_p).value
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform=platform)
    if any(major != _MAJOR for major in spoken):
        raise BackendUnavailable(
            f"flashsim.jax uses version {_MAJOR}.x of XLA's foreign function interface, but "
            f"jaxlib {jax.lib.__version__} uses {spoken[0]}.x; install another version of JAX"
        )
