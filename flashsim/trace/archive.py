"""Reads an ``.npz`` file safely, although the file may come from an untrusted source.

NumPy's own reader allocates as much memory as an array's header declares, and does not always
verify the checksum of an archive's member. So this module reads an array only if the zip directory
and the array's header both state the expected size. The module reads each member to the end, where
`zipfile` compares the checksum.
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
    """The members of an open ``.npz`` file; a damaged file raises any error of zipfile or NumPy."""

    def __init__(self, file: Any) -> None:
        self._zip = zipfile.ZipFile(file)
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            name = info.filename.removesuffix(".npy")
            if name in self._infos or name == info.filename:
                raise ValueError(
                    f"each array in the file must have a unique name that ends in .npy, got "
                    f"{info.filename!r}"
                )
            self._infos[name] = info
        #: The shape of each array that `declare` has checked, and its type.
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, np.dtype] = {}

    @property
    def names(self) -> list[str]:
        """The names of the arrays in the file, in the order of the zip directory."""
        return list(self._infos)

    def declare(self, name: str, dtype: np.dtype, ndim: int = 1) -> None:
        """Check an array's header for its type and number of axes, and keep the shape."""
        with self._zip.open(self._infos[name]) as member:
            version = np.lib.format.read_magic(member)
            if version != (1, 0):  # the version that NumPy writes for our types
                raise ValueError(
                    f"the array {name} in the file must use version (1, 0) of NumPy's file "
                    f"format, got {version}"
                )
            shape, fortran, stored_type = np.lib.format.read_array_header_1_0(member)
            if stored_type != dtype or fortran:
                raise ValueError(
                    f"the array {name} in the file must have dtype {dtype} in C order, got "
                    f"{stored_type} in {('Fortran' if fortran else 'C')} order"
                )
            if len(shape) != ndim or min(shape) < 0:
                raise ValueError(
                    f"the array {name} in the file must have {ndim} axes, got the shape {shape}"
                )
            size = member.tell() + math.prod(shape) * stored_type.itemsize
        if self._infos[name].file_size != size:
            raise ValueError(
                f"the array {name} in the file must have {size} B, as its shape implies, got "
                f"{self._infos[name].file_size} B"
            )
        self.shapes[name], self._types[name] = shape, dtype

    def read(self, name: str, check: Callable[[np.ndarray], None] | None = None) -> np.ndarray:
        """Return an array that was declared.

        The function `check` gets each chunk as it is read, and may change the chunk or raise an
        error early.
        """
        dtype = self._types[name]
        array = np.empty(self.shapes[name], dtype)  # a page uses memory only once it is written
        rows = max(1, _PART_BYTES // (array[:1].nbytes or 1))
        with self._zip.open(self._infos[name]) as member:
            np.lib.format.read_magic(member)
            np.lib.format.read_array_header_1_0(member)
            for first in range(0, len(array), rows):
                part = array[first : first + rows]
                data = member.read(part.nbytes)
                if len(data) < part.nbytes:
                    raise ValueError(
                        f"the array {name} in the file has fewer bytes than its shape implies"
                    )
                part[...] = np.frombuffer(data, dtype).reshape(part.shape)
                if check is not None:
                    check(part)
            if member.read(1):  # zipfile compares the checksum when it reaches the end
                raise ValueError(
                    f"the array {name} in the file has more bytes than its shape implies"
                )
        return array
