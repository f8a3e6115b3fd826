"""From bfloat16 as it lies in memory to operands of pairs: see `operations`.

``X`` holds the bits of rows of d numbers. What an operand has beyond n rows and d columns is zero.
"""

from __future__ import annotations

import numpy as np

from flashsim.engines.cpu.micro_kernels.plain import bits_of
from flashsim.engines.cpu.pairs.operations import (
    copy_pairs,
    transpose_columns,
    transpose_panel,
    transpose_rows,
)
from flashsim.engines.cpu.pairs.tiles import SIDE
from flashsim.engines.cpu.primitives.parts import hot_part, part
from flashsim.engines.cpu.tables import ODD


@part
def tiles_of(n):
    """`n` rounded up to whole tiles: rows of C, or pairs along a sum."""
    return (n + SIDE - 1) // SIDE * SIDE


@part
def pair_tiles_of(n):
    """Pairs that n numbers along a sum take, in whole tiles."""
    return tiles_of((n + 1) // 2)


@hot_part
def left_of_rows(cpu, out, row, X, x0, n, d):
    """Rows of X as a left operand, for a sum over d: as they lie in memory."""
    begin = 0
    if d == 2 * row:  # whole tiles
        copy_pairs(cpu, out, 0, row, X, x0, n, row)
        begin = n
    for r in range(begin, tiles_of(n)):
        at, to = x0 + r * d, r * row
        for x in range(row):
            value = np.uint32(0)
            if r < n and 2 * x < d:
                value = np.uint32(X[at + 2 * x])
                if 2 * x + 1 < d:
                    value |= np.uint32(X[at + 2 * x + 1]) << np.uint32(16)
            out[to + x] = value


@hot_part
def left_of_columns(cpu, out, row, pairs, X, x0, n, d):
    """Columns of X as a left operand, for a sum over rows: `out`'s row x pairs X's rows.

    `pairs` of them, whole tiles; rows of `out` are `row` pairs apart.
    """
    full, begin = n // 2, 0
    if n == 2 * pairs and d % SIDE == 0:  # whole tiles
        transpose_columns(cpu, out, 0, row, X, x0, d, pairs, d)
        begin = d
    for x in range(begin, tiles_of(d)):
        to = x * row
        if x >= d:
            for r in range(pairs):
                out[to + r] = 0
            continue
        for r in range(full):
            at = x0 + 2 * r * d + x
            out[to + r] = X[at] | np.uint32(X[at + d]) << np.uint32(16)
        for r in range(full, pairs):
            out[to + r] = X[x0 + (n - 1) * d + x] if 2 * r < n else 0


@hot_part
def right_of_rows(cpu, out, X, x0, n, d):
    """Rows of X in the lanes of panels, for a sum over d: pair x of panel p at (p pairs + x)."""
    w, pairs = cpu.width, pair_tiles_of(d)
    for p in range((n + w - 1) // w):
        begin = 0
        if 2 * pairs == d:  # whole tiles
            begin = min(w, n - p * w) // SIDE * SIDE
            transpose_rows(cpu, out, p * pairs * w, X, x0 + p * w * d, d, begin, pairs)
        for c in range(begin, w):
            r, to = p * w + c, p * pairs * w + c
            for x in range(pairs):
                value = np.uint32(0)
                if r < n and 2 * x < d:
                    value = np.uint32(X[x0 + r * d + 2 * x])
                    if 2 * x + 1 < d:
                        value |= np.uint32(X[x0 + r * d + 2 * x + 1]) << np.uint32(16)
                out[to + x * w] = value


@hot_part
def right_of_columns(out, stride, X, x0, n, d):
    """Columns of X in the lanes, for a sum over rows: rows of `stride` lanes."""
    for r in range(pair_tiles_of(n)):
        at, to = x0 + 2 * r * d, r * stride
        for x in range(stride):
            value = np.uint32(0)
            if x < d and 2 * r < n:
                value = np.uint32(X[at + x])
                if 2 * r + 1 < n:
                    value |= np.uint32(X[at + d + x]) << np.uint32(16)
            out[to + x] = value


@hot_part
def unpack_bits(cpu, panel, X, x0, n, d, factors):
    """`primitives.packing.unpack` of one panel, rounded to bfloat16."""
    begin = 0
    if d % SIDE == 0:  # whole tiles
        begin = n // SIDE * SIDE
        transpose_panel(cpu, panel, 0, X, x0, d, factors, 0, begin, d)
    for row in range(begin, n):
        for x in range(d):
            X[x0 + row * d + x] = np.uint16(bits_of(panel[x * cpu.width + row] * factors[row]))


@part
def look_at_bits(counter, X, x0, n):
    """`primitives.packing.look` at bits: 0x80 more in an exponent of ones reaches the sign."""
    seen = np.uint64(0)
    for i in range(n):
        seen |= (np.uint64(X[np.uint64(x0 + i)]) & np.uint64(0x7FFF)) + np.uint64(0x80)
    if seen & np.uint64(0x8000):
        counter[ODD] = 1


@part
def clear_pairs(cpu, P, p0, ld, first, last):
    """Zero rows first .. last - 1 of pairs, `width` wide."""
    for r in range(first, last):
        for at in range(p0 + r * ld, p0 + r * ld + cpu.width):
            P[at] = 0
