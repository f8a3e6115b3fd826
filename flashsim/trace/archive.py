"""Reading an ``.npz`` archive that nobody vouches for: sizes first, then bytes, then the checksum.

NumPy allocates what an array's header declares, and does not look at a member's checksum unless it
happens to read up to its end. Here nothing is allocated before what the zip directory and the
array's own header say agrees with what the caller expects, and every checksum is checked.
"""

from __future__ import annotations

import ast
import math
import zipfile
from typing import Any

import numpy as np

_MAGIC = b"\x93NUMPY\x01\x00"
#: An array's header: what NumPy writes for our types is below 1 KiB.
_HEADER_BYTES = 1 << 14
_CHUNK = 1 << 24


class Archive:
    """The members of an open ``.npz`` file.

    Raises
    ------
    ValueError, and whatever zipfile and zlib raise for damage
    """

    def __init__(self, file: Any) -> None:
        self._zip = zipfile.ZipFile(file)
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            name = info.filename.removesuffix(".npy")
            if name in self._infos or name == info.filename:
                raise ValueError(f"member {info.filename!r} is there twice, or is no array")
            self._infos[name] = info

    @property
    def names(self) -> list[str]:
        """What the arrays are called, in the order of the directory."""
        return list(self._infos)

    def shape(self, name: str, dtype: np.dtype, ndim: int = 1) -> tuple[int, ...]:
        """The shape of an array that must be of this type and have `ndim` axes; reads only that."""
        with self._zip.open(self._infos[name]) as member:
            return self._shape(member, name, np.dtype(dtype), ndim)

    def read(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The array, which must be of this type and shape."""
        dtype = np.dtype(dtype)
        with self._zip.open(self._infos[name]) as member:
            found = self._shape(member, name, dtype, len(shape))
            if found != tuple(shape):
                raise ValueError(f"{name} has shape {found}, not {tuple(shape)}")
            data = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
            at = 0
            while at < data.size:
                piece = member.read(min(_CHUNK, data.size - at))
                if not piece:
                    raise EOFError(f"{name} ends after {at} of {data.size} B")
                data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
            if member.read(1):  # its end is where zipfile compares the checksum
                raise ValueError(f"{name} is longer than it says")
        return data.view(dtype).reshape(shape)

    def _shape(self, member: Any, name: str, dtype: np.dtype, ndim: int) -> tuple[int, ...]:
        start = member.read(len(_MAGIC) + 2)
        length = int.from_bytes(start[-2:], "little")
        if start[:-2] != _MAGIC or length > _HEADER_BYTES:
            raise ValueError(f"{name} is not an array as NumPy writes them")
        header = ast.literal_eval(member.read(length).decode("latin1").strip())
        descr, shape = header["descr"], header["shape"]
        if descr != np.lib.format.dtype_to_descr(dtype) or header["fortran_order"] is not False:
            raise ValueError(f"{name} has dtype {descr}, not {dtype}")
        if not isinstance(shape, tuple) or len(shape) != ndim:
            raise ValueError(f"{name} has shape {shape}, not {ndim} axes")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{name} has shape {shape}")
        size = len(start) + length + math.prod(shape) * dtype.itemsize
        if self._infos[name].file_size != size:
            raise ValueError(f"{name} has {self._infos[name].file_size} B, its header says {size}")
        return shape
