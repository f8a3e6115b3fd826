"""Safe reading of an untrusted ``.npz`` archive, with NumPy's own reader of arrays.

NumPy allocates as much as an array's header declares, and checks a member's checksum only if it
happens to read to the member's end. So before NumPy reads a member, the zip directory and the
array's own header must agree with the caller's expectation. Afterwards the member is read to its
end, which checks the checksum.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

#: Bytes that are read and checked at once.
_PART_BYTES = 1 << 25


class Archive:
    """The members of an open ``.npz`` file.

    Raises
    ------
    ValueError, and whatever zipfile, zlib and NumPy raise for damage
    """

    def __init__(self, file: Any) -> None:
        self._zip = zipfile.ZipFile(file)
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            name = info.filename.removesuffix(".npy")
            if name in self._infos or name == info.filename:
                raise ValueError(f"member {info.filename!r} appears twice, or is not an array")
            self._infos[name] = info

    @property
    def names(self) -> list[str]:
        """The names of the arrays, in the order of the directory."""
        return list(self._infos)

    def shape(self, name: str, dtype: np.dtype, ndim: int = 1) -> tuple[int, ...]:
        """The shape of an array, which must have this type and `ndim` axes; reads no data."""
        with self._zip.open(self._infos[name]) as member:
            version = np.lib.format.read_magic(member)
            if version != (1, 0):  # what NumPy writes for our types
                raise ValueError(f"{name} uses version {version} of NumPy's file format")
            shape, fortran, stored_type = np.lib.format.read_array_header_1_0(member)
            if stored_type != dtype or fortran:
                raise ValueError(
                    f"{name} has dtype {stored_type}, not {dtype}, or is in Fortran order"
                )
            if len(shape) != ndim or min(shape) < 0:
                raise ValueError(f"{name} has shape {shape}, not {ndim} axes")
            size = member.tell() + math.prod(shape) * stored_type.itemsize
        if self._infos[name].file_size != size:
            raise ValueError(f"{name} has {self._infos[name].file_size} B, its header says {size}")
        return shape

    def read(
        self,
        name: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
        check: Callable[[np.ndarray], None] | None = None,
    ) -> np.ndarray:
        """The array, which must have this type and shape.

        `check` gets the array part by part as it is read, and may raise or change the part. So a
        large array that is wrong from its beginning costs no more than its first part.
        """
        stored_shape = self.shape(name, dtype, len(shape))
        if stored_shape != tuple(shape):
            raise ValueError(f"{name} has shape {stored_shape}, not {tuple(shape)}")
        array = np.empty(shape, dtype)  # takes memory only where it is written
        raw = memoryview(array.reshape(-1).view(np.uint8).data)
        rows = max(1, _PART_BYTES // (array[:1].nbytes or 1))
        with self._zip.open(self._infos[name]) as opened:
            member: Any = opened  # a zipfile.ZipExtFile, which has `readinto`
            np.lib.format.read_magic(member)
            np.lib.format.read_array_header_1_0(member)
            for first in range(0, len(array), rows):
                part = array[first : first + rows]
                at, stop = first * array[:1].nbytes, first * array[:1].nbytes + part.nbytes
                while at < stop:
                    got = member.readinto(raw[at:stop])
                    if not got:
                        raise ValueError(f"{name} is shorter than it says")
                    at += got
                if check is not None:
                    check(part)
            if member.read(1):  # its end is where zipfile compares the checksum
                raise ValueError(f"{name} is longer than it says")
        return array
