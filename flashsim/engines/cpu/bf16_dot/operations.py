"""Operations on one panel of bfloat16 pairs, defined in plain Numba.

A *pair* is two neighbouring bfloat16 numbers in 32 bits, the first in the lower half. Each term of
a matrix product's sum is a dot product of two pairs. A row of the left operand holds pairs side by
side, as a tensor's row does. A row of the right operand holds one pair per lane, merged from two
rows of numbers. Lanes are queries (forward, dQ) or keys (dK, dV). So two rounded rows of P, merged,
form a row of the next right operand without shuffles.

A product's rows and pairs are multiples of `amx_tiles.SIDE`, and lanes are a multiple of 2 `SIDE`.
`copy_pairs` and `transpose_*` copy multiples of `SIDE` rows, pairs and columns. On a CPU with
instructions for pairs (`Blocking.pairs`), vector or AMX code replaces each function. The Numba
functions define what the vector and AMX code must compute; tests compare both.
"""

import numpy as np

from flashsim.engines.cpu.bf16_dot.codegen import (
    build_add_scaled,
    build_configure,
    build_copy_pairs,
    build_pair_softmax,
    build_pairs_of_lanes,
    build_pairs_of_rows,
    build_release,
    build_scale,
    build_transpose_columns,
    build_transpose_panel,
    build_transpose_rows,
)
from flashsim.engines.cpu.micro_kernels.exponential import SLACK
from flashsim.engines.cpu.micro_kernels.plain import LOG2E, bits_of
from flashsim.engines.cpu.micro_kernels.vector import operation
from flashsim.problem.masks import masked_score

#: The largest score that counts as masked.
MASKED = np.float32(masked_score(np.float32))


@operation("a o0 i a a a o1,2,3 a a o5", build_pair_softmax)
def online_softmax_pairs(cpu, S, s0, rows, m, l, alpha, at, factor, P, p0):
    """Run one online-softmax step on ``factor[0] S``, and store rows of P, two at a time, as pairs.

    If a lane has a score above m, m becomes the lane's largest score plus `SLACK`; otherwise m
    stays, and alpha is 1. So P = e^(factor S - m) is at most 1. The factor of S must be at least 0.
    If P has an odd number of rows, the last row is paired with zeros. The sum `l` adds unrounded
    elements of P.
    """
    w, log2e = cpu.width, np.float32(LOG2E)
    for c in range(w):
        top = np.float32(-np.inf)
        for r in range(rows):
            top = max(top, S[s0 + r * w + c])
        old, needed = m[at + c], top * factor[0]
        if needed > old:
            m[at + c] = needed + np.float32(SLACK)
        base = m[at + c] if m[at + c] > MASKED else np.float32(0)
        alpha[at + c] = np.exp2((old - base) * log2e)
        total = np.float32(0)
        for r in range(rows):
            p = np.exp2((S[s0 + r * w + c] * factor[0] - base) * log2e)
            here = p0 + r // 2 * w + c
            if r % 2 == 0:
                P[here] = bits_of(p)
            else:
                P[here] |= bits_of(p) << np.uint32(16)
            total += p
        l[at + c] = alpha[at + c] * l[at + c] + total


@operation("a o0 i i a o1", build_pairs_of_rows)
def pairs_of_rows(cpu, X, x0, ld, rows, P, p0):
    """Round a panel to bfloat16, and merge every two rows into a right operand's row."""
    for r in range(0, rows, 2):
        for c in range(cpu.width):
            pair = bits_of(X[x0 + r * ld + c])
            if r + 1 < rows:
                pair |= bits_of(X[x0 + (r + 1) * ld + c]) << np.uint32(16)
            P[p0 + r // 2 * cpu.width + c] = pair


@operation("a o0 i i a o1 i", build_pairs_of_lanes)
def pairs_of_lanes(cpu, X, x0, ld, rows, P, p0, row):
    """Round a panel to bfloat16, and merge neighbouring lanes into a left operand's pairs."""
    for r in range(rows):
        for c in range(0, cpu.width, 2):
            pair = bits_of(X[x0 + r * ld + c + 1]) << np.uint32(16)
            P[p0 + r * row + c // 2] = bits_of(X[x0 + r * ld + c]) | pair


@operation("a o0 i i a", build_scale, by_lane=False)
def scale_panel(cpu, X, x0, ld, rows, factor):
    """Multiply all elements of the panel X by ``factor[0]``, in place."""
    for r in range(rows):
        for at in range(x0 + r * ld, x0 + r * ld + cpu.width):
            X[at] *= factor[0]


@operation("a o0 i i a o1", build_scale, by_lane=True)
def scale_lanes(cpu, X, x0, ld, rows, factors, f0):
    """Multiply each lane of the panel X by the factor of this lane, in place."""
    for r in range(rows):
        for c in range(cpu.width):
            X[x0 + r * ld + c] *= factors[f0 + c]


@operation("a o0 a o1 i i a", build_add_scaled)
def add_scaled(cpu, Y, y0, X, x0, ld, rows, factor):
    """Add ``factor[0]`` times panel X to panel Y."""
    for r in range(rows):
        for c in range(cpu.width):
            Y[y0 + r * ld + c] += factor[0] * X[x0 + r * ld + c]


@operation("a o0 i a o1 i i", build_copy_pairs)
def copy_pairs(cpu, out, o0, row, X, x0, rows, pairs):
    """Copy rows of X, in which every two neighbouring numbers form a bfloat16 pair."""
    for r in range(rows):
        for x in range(pairs):
            at = x0 + 2 * (r * pairs + x)
            out[o0 + r * row + x] = np.uint32(X[at]) | np.uint32(X[at + 1]) << np.uint32(16)


@operation("a o0 i a o1 i i i", build_transpose_columns)
def transpose_columns(cpu, out, o0, row, X, x0, d, pairs, columns):
    """Copy columns of X to rows of `out`; two neighbours in a column form a bfloat16 pair."""
    for x in range(columns):
        for r in range(pairs):
            low, high = X[x0 + 2 * r * d + x], X[x0 + (2 * r + 1) * d + x]
            out[o0 + x * row + r] = np.uint32(low) | np.uint32(high) << np.uint32(16)


@operation("a o0 a o1 i i i", build_transpose_rows)
def transpose_rows(cpu, out, o0, X, x0, d, rows, pairs):
    """Copy rows of X to lanes of `out`; two neighbours in a row of X form a bfloat16 pair."""
    for r in range(rows):
        for x in range(pairs):
            low, high = X[x0 + r * d + 2 * x], X[x0 + r * d + 2 * x + 1]
            out[o0 + x * cpu.width + r] = np.uint32(low) | np.uint32(high) << np.uint32(16)


@operation("a o0 a o1 i a o2 i i", build_transpose_panel)
def transpose_panel(cpu, panel, p0, X, x0, d, factors, f0, rows, columns):
    """Write lanes of a panel to rows of X, each times a factor and rounded to bfloat16."""
    for r in range(rows):
        for x in range(columns):
            value = panel[p0 + x * cpu.width + r] * factors[f0 + r]
            X[x0 + r * d + x] = np.uint16(bits_of(value))


@operation("a", build_configure)
def begin_tiles(cpu, any_array):
    """Configure a thread's AMX tiles before the first matrix product; without AMX, do nothing."""


@operation("a", build_release)
def end_tiles(cpu, any_array):
    """Release a thread's AMX tiles after the last matrix product; without AMX, do nothing."""
