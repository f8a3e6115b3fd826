"""Operands of matrix products: floats, or bfloat16 pairs if the CPU multiplies such pairs.

Each function has a variant for floats and a variant for pairs (in the package `bf16_dot`). The type
of the argument `cpu` selects the variant, so a kernel's source exists only once. Float inputs are
used in place; 16-bit inputs are first converted to floats, or packed as pairs into entire tiles,
padded with zeros. `micro_kernels.plain` and `bf16_dot.operations` explain lanes and pairs. In a
product, each element of the result is a sum of terms. A left operand holds one scalar or pair for
each row of the result and each term. A right operand holds one row for each term, with one scalar
or pair per lane.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flashsim.engines.cpu.bf16_dot import packing, steps
from flashsim.engines.cpu.bf16_dot.amx_tiles import SIDE
from flashsim.engines.cpu.bf16_dot.operations import scale_panel
from flashsim.engines.cpu.bf16_dot.packing import Left, pair_tiles_of
from flashsim.engines.cpu.micro_kernels.plain import (
    online_softmax,
    product_add,
    product_rescale,
    product_set,
    round_panel,
)
from flashsim.engines.cpu.micro_kernels.registers import BLOCKING
from flashsim.engines.cpu.primitives.arrays import panel_array, rest
from flashsim.engines.cpu.primitives.inline_jit import HotPart, Part, part, using
from flashsim.engines.cpu.primitives.packing import (
    copy_rows,
    look,
    pack_rows,
    room_for,
    unpack_rows,
    widened,
)

#: Keys whose scores are computed at once: a panel of these scores, P and Q fit in the L1 cache.
CHUNK = 64
#: Keys whose P is kept before it is multiplied. A row tile computes P for so many keys, of several
#: column tiles, and multiplies all of it by V at once, unless a maximum changes in between. O is
#: larger than the operands. So it is loaded and stored once per eight AMX tiles along the sum,
#: instead of once per two.
KEPT = 256


class RowSums(NamedTuple):
    """A row tile's running sums: O, the softmax's m and l, and the last rescaling factor."""

    O: np.ndarray
    m: np.ndarray
    l: np.ndarray
    alpha: np.ndarray


def or_pairs(of_pairs: Callable, pipeline: type[Part] = Part) -> Callable:
    """Decorate a function; compiled code calls `of_pairs` instead if the CPU multiplies pairs."""

    def decorate(of_floats: Callable) -> Callable:
        def choose(cpu, *_):
            return of_pairs if BLOCKING[cpu.instance_class].pairs else of_floats

        using(pipeline, of_floats, choose)
        return of_floats

    return decorate


# -- sizes and memory -----------------------------------------------------------------------------


@or_pairs(lambda cpu: 2)
def per_term(cpu):
    """Return how many numbers make one term of a sum: 1 for floats, 2 for pairs."""
    return 1


@or_pairs(lambda cpu: SIDE)
def side(cpu):
    """Return the multiple to which an operand's rows and terms are padded (1 for floats)."""
    return 1


@part
def rows_of(cpu, n):
    """Return n rows of a matrix product, rounded up to a multiple of `side`."""
    return (n + side(cpu) - 1) // side(cpu) * side(cpu)


@part
def terms(cpu, n):
    """Return the number of terms in a sum over n numbers, with padding."""
    return rows_of(cpu, (n + per_term(cpu) - 1) // per_term(cpu))


@part
def whole(cpu, n):
    """Return n rounded up, so that n numbers fill entire terms and entire AMX tiles."""
    return terms(cpu, n) * per_term(cpu)


@part
def aligned(cpu, first):
    """Round `first` down to a row at which an operand of a matrix product can begin."""
    return first - first % (side(cpu) * per_term(cpu))


@or_pairs(lambda cpu, keys: max(1, KEPT // (2 * pair_tiles_of(keys))))
def slots_of(cpu, keys):
    """Return how many key tiles (with `keys` keys each) share one matrix product P V."""
    return 1


@or_pairs(lambda cpu, keys: min(2 * pair_tiles_of(keys), CHUNK))
def chunk_of(cpu, keys):
    """Return for how many of a key tile's `keys` keys scores are computed at the same time."""
    return keys


@or_pairs(lambda cpu, n, dtype: panel_array(n, np.uint32))
def operand_room(cpu, n, dtype):
    """Allocate memory for right operands with n terms in total."""
    return panel_array(n, dtype)


@or_pairs(lambda cpu, rows, n, dtype, rounding: panel_array(rows * pair_tiles_of(n), np.uint32))
def left_room(cpu, rows, n, dtype, rounding):
    """Allocate a left operand with n numbers per row; for float inputs, it is empty."""
    return room_for(rows * n, dtype, rounding)


@or_pairs(lambda cpu, n, dtype, rounding: panel_array(0, dtype))
def wide_room(cpu, n, dtype, rounding):
    """Allocate n floats for converted 16-bit numbers; for kernels with pairs, none."""
    return room_for(n, dtype, rounding)


@or_pairs(lambda cpu, n, dtype: panel_array(n, dtype))
def pairs_room(cpu, n, dtype):
    """Allocate n elements for kernels that multiply bfloat16 pairs; for other kernels, none."""
    return panel_array(0, dtype)


# -- from memory ----------------------------------------------------------------------------------


@or_pairs(packing.left_of_rows, HotPart)
def left_of_rows(cpu, room, first, X, x0, n, d, rounding):
    """Return n rows of X (.., d) as a left operand, for sums over d.

    Pairs are written to `room` from row `first` on, and the operand is all of `room`.
    """
    array, start = widened(cpu, room, X, x0, n * d, rounding)
    return Left(array, start, d, 1)


@or_pairs(packing.left_of_columns, HotPart)
def left_of_columns(cpu, room, first, row, block, X, x0, n, d, rounding):
    """Return the columns of X as a left operand, for sums over X's n rows.

    Pairs are written to `room`, whose rows have `row` terms. Each row gets `block` terms, from term
    number `first` on.
    """
    array, start = widened(cpu, room, X, x0, n * d, rounding)
    return Left(array, start, 1, d)


@or_pairs(packing.turned)
def turned(cpu, left, room, row, X, x0, n, d):
    """Return the columns of X as a left operand; `left` already holds the rows of X."""
    return Left(left.array, left.start, left.step, left.row)


@or_pairs(packing.right_of_rows, HotPart)
def right_of_rows(cpu, panels, X, x0, n, d, factors, room, rounding):
    """Copy n rows of X to lanes of panels, for sums over d; multiply floats by a factor per row."""
    pack_rows(cpu, panels, X, x0, n, d, factors, room, rounding)


@or_pairs(packing.right_of_columns, HotPart)
def right_of_columns(cpu, out, stride, X, x0, n, d, factor, room, rounding):
    """Copy columns of X to `stride` lanes, for sums over n rows; multiply floats by a factor."""
    array, start = widened(cpu, room, X, x0, n * d, rounding)
    copy_rows(out, stride, array, start, n, d, factor)


@or_pairs(packing.write_rows)
def write_rows(cpu, panels, X, x0, n, d, factors, room, rounding, counter):
    """Write lanes of panels to rows of X, each times a factor; check for NaN and infinity."""
    unpack_rows(cpu, panels, X, x0, n, d, factors, room, rounding, counter)


# -- products -------------------------------------------------------------------------------------


@part
def set_product(cpu, C, c0, ldc, left, r0, x0, B, b0, ldb, rows, n):
    """Compute C = A B with sums over n numbers; (r0, x0) is where A starts in the left operand."""
    a0 = left.start + r0 * left.row + x0 // per_term(cpu) * left.step
    product_set(
        *(cpu, C, c0, ldc, left.array, a0, left.row, left.step),
        *(B, b0, ldb, rows_of(cpu, rows), terms(cpu, n)),
    )


@part
def add_product(cpu, C, c0, ldc, left, r0, x0, B, b0, ldb, rows, n):
    """Compute C += A B; the arguments are those of `set_product`."""
    a0 = left.start + r0 * left.row + x0 // per_term(cpu) * left.step
    product_add(
        *(cpu, C, c0, ldc, left.array, a0, left.row, left.step),
        *(B, b0, ldb, rows_of(cpu, rows), terms(cpu, n)),
    )


@or_pairs(lambda cpu, S, s0, ld, rows, scale: scale_panel(cpu, S, s0, ld, rows, scale))
def scale_scores(cpu, S, s0, ld, rows, scale):
    """Multiply scores by ``scale[0]`` if operands are pairs; floats were scaled before."""


@or_pairs(steps.right_of_panel)
def right_of_panel(cpu, X, x0, ld, rows, P, rounding):
    """Round a panel of P or dS to the inputs' type, as a right operand for sums over its rows.

    The function returns the operand's array, offset and stride. Pairs are stored in the array `P`.
    """
    round_panel(cpu, X, x0, ld, rows, rounding)
    return X, x0, ld


# -- the softmax, and O ---------------------------------------------------------------------------


@or_pairs(steps.scaled)
def scaled(cpu, S, rows, plain, scales):
    """Return an array with the factor (the scale, or 1) that the softmax applies to scores."""
    return rest(scales, 1)


@or_pairs(steps.take_scores)
def take_scores(cpu, sums, S, rows, scale, P, V, key, panel, dv, rounding, waiting):
    """Turn a panel of scores into P, and compute O = alpha O + V^T P.

    The rows of V for the panel's keys start at row `key`. For pairs, P stays in memory until
    `weigh` multiplies it by V. `waiting` is the range (first, last + 1) of key pairs whose P is
    kept; the function returns a new range. If a lane's maximum has changed, or keys were skipped,
    the function first multiplies the kept P by V.
    """
    O, m, l, alpha = sums
    w = cpu.width
    online_softmax(cpu, S, 0, rows, m, l, alpha, panel * w)
    round_panel(cpu, S, 0, w, rows, rounding)
    product_rescale(
        *(cpu, O, panel * dv * w, w, V.array, V.start + key * V.step, V.row, V.step),
        *(S, 0, w, dv, rows, alpha, panel * w),
    )
    return waiting


@or_pairs(steps.weigh)
def weigh(cpu, O, P, V, panel, dv, waiting):
    """Compute O += V^T P for the key pairs in `waiting`; if operands are floats, do nothing."""


# -- dQ -------------------------------------------------------------------------------------------


@or_pairs(steps.left_of_lanes)
def left_of_lanes(cpu, dS, s0, ld, rows, left, row):
    """Store a panel of dS as columns of a left operand of pairs; for floats, do nothing."""


@or_pairs(steps.prepare_dq)
def prepare_dq(cpu, part_dq, padded, left, row, K, k0, rows, n):
    """Compute dS K before this thread's turn to add to dQ, if operands are pairs."""


@or_pairs(steps.add_dq)
def add_dq(cpu, dq, to, padded, dS, ld, part_dq, K, k0, rows, n, scale, is_last, counter):
    """Add one tile's dS K to dQ; the last addition checks a float dQ for NaN and infinity."""
    for x in range(0, padded, cpu.width):
        product_add(cpu, dq, to + x, padded, dS, 0, ld, 1, K, k0 + x, padded, rows, n)
    if is_last:
        look(counter, dq, to, rows * padded)
