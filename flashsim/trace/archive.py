"""Safe reading of an untrusted ``.npz`` archive, with NumPy's own reader of arrays.

NumPy allocates as much as an array's header declares, and checks a member's checksum only if it
happens to read to the member's end. So before NumPy reads a member, the zip directory and the
array's own header must agree with the caller's expectation. Afterwards the member is read to its
end, which checks the checksum.
"""

from __future__ import annotations

import math
import zipfile
from typing import Any

import numpy as np


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
                raise ValueError(f"member {info.filename!r} is there twice, or is no array")
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
                raise ValueError(f"{name} has version {version} of NumPy's format")
            shape, fortran, found = np.lib.format.read_array_header_1_0(member)
            if found != dtype or fortran:
                raise ValueError(f"{name} has dtype {found}, not {dtype}, or Fortran's order")
            if len(shape) != ndim or min(shape) < 0:
                raise ValueError(f"{name} has shape {shape}, not {ndim} axes")
            size = member.tell() + math.prod(shape) * found.itemsize
        if self._infos[name].file_size != size:
            raise ValueError(f"{name} has {self._infos[name].file_size} B, its header says {size}")
        return shape

    def read(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The array, which must have this type and shape."""
        found = self.shape(name, dtype, len(shape))
        if found != tuple(shape):
            raise ValueError(f"{name} has shape {found}, not {tuple(shape)}")
        with self._zip.open(self._infos[name]) as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
            if member.read(1):  # its end is where zipfile compares the checksum
                raise ValueError(f"{name} is longer than it says")
        return array
