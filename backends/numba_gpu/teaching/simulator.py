"""Mends a race in Numba's CUDA simulator."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def atomic_shared_arrays() -> Iterator[None]:
    """In the ``with`` block, all threads of a simulated block get the same shared array.

    `cuda.shared.array` of the simulator looks for the array of its source line and creates a
    missing one without a lock. Where Python switches threads in between, two threads get separate
    arrays, and the kernel's results are wrong.
    """
    from numba.cuda.simulator import kernelapi

    shared: Any = kernelapi.FakeCUDAShared
    plain = shared.array
    lock = threading.Lock()

    def array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
        if alignment is not None or shape == 0:  # refused, or dynamic memory, which exists already
            return plain(self, shape, dtype, alignment)
        caller = sys._getframe(1)
        line = (caller.f_code.co_filename, caller.f_lineno)
        with lock:
            if line not in self._allocations:
                numpy_dtype = kernelapi.numpy_support.as_dtype
                kind = numpy_dtype(dtype) if isinstance(dtype, kernelapi.types.Type) else dtype
                self._allocations[line] = np.empty(shape, kind)
            return self._allocations[line]

    shared.array = array
    try:
        yield
    finally:
        shared.array = plain
