"""Transposes a tensor's rows in memory to panels, and panels back to rows."""

import numpy as np

from flashsim.engines.cpu.micro_kernels.plain import narrow, transpose_in, transpose_out, widen
from flashsim.engines.cpu.primitives.arrays import panel_array
from flashsim.engines.cpu.primitives.inline_jit import hot_part, part
from flashsim.engines.cpu.tables import ODD

#: Rows and columns that are transposed a register at a time: multiples of every register's lanes.
SIDE = 16


@part
def panels_of(cpu, n):
    """Return how many panels n lanes fill, with a partly filled last panel counted."""
    return (n + cpu.width - 1) // cpu.width


@part
def filled(n, value, dtype):
    """Return an array of n equal numbers; this compiles three times as fast as `np.full`."""
    array = panel_array(n, dtype)
    fill(array, array.dtype.type(value))
    return array


@part
def fill(X, value):
    """Set all elements of X to `value`, which must have the type of X's elements."""
    for i in range(X.size):
        X[np.uint64(i)] = value


@part
def room_for(n, dtype, rounding):
    """Allocate n floats for converted 16-bit numbers; if the inputs are floats, none."""
    return panel_array(0 if rounding is None else n, dtype)


@part
def widened(cpu, room, X, x0, n, rounding):
    """Return an array of floats (X or `room`) and the index of the first of n numbers in it."""
    if rounding is None:
        return X, x0
    widen(cpu, room, 0, X, x0, n, rounding)
    return room, 0


@part
def pack_rows(cpu, panels, X, x0, n, d, factors, room, rounding):
    """Transpose n rows of X into panels; 16-bit numbers are converted to floats first."""
    from_x, start = widened(cpu, room, X, x0, n * d, rounding)
    pack(cpu, panels, from_x, start, n, d, factors)


@part
def unpack_rows(cpu, panels, X, x0, n, d, factors, room, rounding, counter):
    """Transpose panels into rows of X, times a factor per row; check for NaN and infinity."""
    if rounding is None:
        unpack(cpu, panels, X, x0, n, d, factors)
        look(counter, X, x0, n * d)
    else:
        unpack(cpu, panels, room, 0, n, d, factors)
        narrow(cpu, room, 0, X, x0, n * d, rounding)


@part(fastmath={"reassoc"})
def look(counter, X, x0, n):
    """Set `counter[ODD]` if any of n results is NaN or infinite; such a result times 0 is NaN."""
    total = X.dtype.type(0)
    for i in range(n):
        total += X[np.uint64(x0 + i)] * X.dtype.type(0)  # as in `copy_rows`
    if total != 0:
        counter[ODD] = 1


@hot_part
def pack(cpu, panels, X, x0, n, d, factors):
    """Transpose n rows of X (.., d), each times its factor, into panels; lanes past n are zero.

    In `panels`, row x of panel p begins at element (p d + x) times the panel's width.
    """
    w, rows, cols = cpu.width, n // SIDE * SIDE, d // SIDE * SIDE
    transpose_in(cpu, panels, X, x0, rows, cols, d, factors)
    for row in range(panels_of(cpu, n) * w):
        for x in range(cols if row < rows else 0, d):
            value = X[x0 + row * d + x] * factors[row] if row < n else X.dtype.type(0)
            panels[(row // w * d + x) * w + row % w] = value


@hot_part
def unpack(cpu, panels, X, x0, n, d, factors):
    """Transpose panels back into n rows of X, each times its factor: the reverse of `pack`."""
    w, rows, cols = cpu.width, n // SIDE * SIDE, d // SIDE * SIDE
    transpose_out(cpu, panels, X, x0, rows, cols, d, factors)
    for row in range(n):
        for x in range(cols if row < rows else 0, d):
            X[x0 + row * d + x] = panels[(row // w * d + x) * w + row % w] * factors[row]


@part
def copy_rows(out, stride, X, x0, n, d, factor):
    """Copy n rows of X (.., d) times `factor`, padded with zeros to the length `stride`.

    Indices are unsigned, because with signed ones the compiler uses gathers and scatters.
    """
    for row in range(n):
        for x in range(d):
            out[np.uint64(row * stride + x)] = X[np.uint64(x0 + row * d + x)] * factor
        for x in range(d, stride):
            out[np.uint64(row * stride + x)] = 0


@part
def clear_rows(cpu, X, x0, ld, first, last):
    """Set rows first .. last - 1 of a panel to 0."""
    for r in range(first, last):
        for at in range(x0 + r * ld, x0 + r * ld + cpu.width):
            X[np.uint64(at)] = 0
