"""Converts rows of bfloat16 numbers to operands of matrix products over pairs, or back.

``X`` holds rows of d bfloat16 numbers as 16-bit integers. Operands are padded with zeros beyond n
rows and d columns.
"""

from typing import NamedTuple

import numpy as np

from flashsim.engines.cpu.bf16_dot import operations
from flashsim.engines.cpu.bf16_dot.amx_tiles import SIDE
from flashsim.engines.cpu.micro_kernels.plain import bits_of
from flashsim.engines.cpu.primitives.arrays import rest
from flashsim.engines.cpu.primitives.inline_jit import hot_part, part
from flashsim.engines.cpu.tables import ODD


class Left(NamedTuple):
    """A left operand: the array element of row r and term x is ``start + r * row + x * step``."""

    array: np.ndarray
    start: int
    row: int
    step: int


@part
def tiles_of(n):
    """Return n rows or pairs, rounded up to a multiple of an AMX tile's side."""
    return (n + SIDE - 1) // SIDE * SIDE


@part
def pair_tiles_of(n):
    """Return the number of pairs in n numbers, rounded up to a multiple of an AMX tile's side."""
    return tiles_of((n + 1) // 2)


@part
def pair_at(X, at, step, count):
    """Return X[at] and X[at + step] as a bfloat16 pair; numbers after the first `count` are 0."""
    pair = np.uint32(0)
    if count > 0:
        pair = np.uint32(X[at])
        if count > 1:
            pair |= np.uint32(X[at + step]) << np.uint32(16)
    return pair


@part
def left_of_rows(cpu, room, first, X, x0, n, d, rounding):
    """Copy rows of X to the rows of a left operand; two neighbours in a row of X form a pair."""
    row, begin = pair_tiles_of(d), 0
    out = rest(room, first * row)
    if d == 2 * row:  # whole tiles
        operations.copy_pairs(cpu, out, 0, row, X, x0, n, row)
        begin = n
    for r in range(begin, tiles_of(n)):
        for x in range(row):
            out[r * row + x] = pair_at(X, x0 + r * d + 2 * x, 1, d - 2 * x if r < n else 0)
    return Left(room, 0, row, 1)


@hot_part
def left_of_columns(cpu, room, first, row, block, X, x0, n, d, rounding):
    """Copy columns of X to the rows of a left operand; two neighbours in a column form a pair."""
    out, full, begin = rest(room, first // 2), n // 2, 0
    if n == 2 * block and d % SIDE == 0:  # whole tiles
        operations.transpose_columns(cpu, out, 0, row, X, x0, d, block, d)
        begin = d
    for x in range(begin, d):
        to = x * row
        for r in range(full):
            at = x0 + 2 * r * d + x
            out[to + r] = X[at] | np.uint32(X[at + d]) << np.uint32(16)
        for r in range(full, block):
            out[to + r] = X[x0 + (n - 1) * d + x] if 2 * r < n else 0
    for x in range(d, tiles_of(d)):
        for r in range(block):
            out[x * row + r] = 0
    return Left(room, 0, row, 1)


@part
def turned(cpu, left, room, row, X, x0, n, d):
    """Pack the columns of X as a left operand; two neighbours in a column form a pair."""
    return left_of_columns(cpu, room, 0, row, row, X, x0, n, d, None)


@part
def right_of_rows(cpu, panels, X, x0, n, d, factors, room, rounding):
    """Copy rows of X to lanes of panels, as a right operand for a sum over d.

    Row p * pairs + x of `panels` holds pair x of every lane of panel p; `pairs` is the number of
    pairs per row of X.
    """
    w, pairs = cpu.width, pair_tiles_of(d)
    for p in range((n + w - 1) // w):
        begin = 0
        if 2 * pairs == d:  # whole tiles
            begin = min(w, n - p * w) // SIDE * SIDE
            operations.transpose_rows(
                cpu, panels, p * pairs * w, X, x0 + p * w * d, d, begin, pairs
            )
        for c in range(begin, w):
            r, to = p * w + c, p * pairs * w + c
            for x in range(pairs):
                count = d - 2 * x if r < n else 0
                panels[to + x * w] = pair_at(X, x0 + r * d + 2 * x, 1, count)


@part
def right_of_columns(cpu, out, stride, X, x0, n, d, factor, room, rounding):
    """Copy columns of X to `stride` lanes of a right operand, for a sum over the rows of X."""
    for r in range(pair_tiles_of(n)):
        for x in range(stride):
            count = n - 2 * r if x < d else 0
            out[r * stride + x] = pair_at(X, x0 + 2 * r * d + x, d, count)


@part
def write_rows(cpu, panels, X, x0, n, d, factors, room, rounding, counter):
    """Write lanes of panels to rows of X, each times a factor and rounded to bfloat16."""
    for r in range(0, n, cpu.width):
        panel, lanes = rest(panels, r * tiles_of(d)), min(cpu.width, n - r)
        unpack_bits(cpu, panel, X, x0 + r * d, lanes, d, rest(factors, r))
    seen = np.uint64(0)
    for i in range(n * d):  # 0x80 more in an exponent of ones reaches the sign
        seen |= (np.uint64(X[np.uint64(x0 + i)]) & np.uint64(0x7FFF)) + np.uint64(0x80)
    if seen & np.uint64(0x8000):
        counter[ODD] = 1


@hot_part
def unpack_bits(cpu, panel, X, x0, n, d, factors):
    """Write lanes of one panel to rows of X, times a factor and rounded to bfloat16."""
    begin = 0
    if d % SIDE == 0:  # whole tiles
        begin = n // SIDE * SIDE
        operations.transpose_panel(cpu, panel, 0, X, x0, d, factors, 0, begin, d)
    for row in range(begin, n):
        for x in range(d):
            X[x0 + row * d + x] = np.uint16(bits_of(panel[x * cpu.width + row] * factors[row]))
