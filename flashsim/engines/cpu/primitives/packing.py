"""Between rows as they lie in memory and panels."""

from __future__ import annotations

import numpy as np

from flashsim.engines.cpu.primitives.parts import hot_part, part

#: Bytes of a cache line: a vector register that lies across two takes two reads.
LINE = 64


@part
def panel_array(n, dtype):
    """Room for n elements, from the beginning of a cache line on."""
    array = np.empty(n + LINE, dtype)
    skip = -array.ctypes.data % LINE // array.itemsize
    return array[skip : skip + n]


@part
def panels_of(cpu, n):
    """How many panels n lanes take."""
    return (n + cpu.width - 1) // cpu.width


@hot_part
def pack(cpu, panels, X, x0, n, d, factor):
    """Transpose n rows of X (.., d), times `factor`, into panels: row x of panel p at (p d + x)."""
    w = cpu.width
    for p in range(panels_of(cpu, n)):
        for c in range(w):
            row = p * w + c
            for x in range(d):
                value = X[x0 + row * d + x] * factor if row < n else X.dtype.type(0)
                panels[(p * d + x) * w + c] = value


@hot_part
def unpack(cpu, panels, X, x0, n, d, factors):
    """The reverse of `pack`, with a factor for each row."""
    w = cpu.width
    for row in range(n):
        p, c = row // w, row % w
        for x in range(d):
            X[x0 + row * d + x] = panels[(p * d + x) * w + c] * factors[row]


@part
def copy_rows(out, stride, X, x0, n, d, factor):
    """n rows of X (.., d), times `factor`, with zeros after them up to the row length `stride`."""
    for row in range(n):
        for x in range(stride):
            value = X[x0 + row * d + x] * factor if x < d else X.dtype.type(0)
            out[row * stride + x] = value


@part
def clear_rows(cpu, X, x0, ld, first, last):
    """Zero rows first .. last - 1 of a panel."""
    for r in range(first, last):
        for at in range(x0 + r * ld, x0 + r * ld + cpu.width):
            X[at] = 0
