"""What kernels multiply: floats, or pairs of bfloat16 where the CPU has an instruction for them.

Each function here has one form for floats and, in `pairs`, one for pairs; which one is compiled
follows from the CPU's kind, so a kernel is written once. Floats are read where they lie, 16-bit
numbers after they were widened; pairs are packed in whole tiles, with zeros where numbers end.

A left operand gives one scalar (or pair) per row and term of the sum, a right one a row of lanes
per term: see `micro_kernels.plain` and `bf16_dot.operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flashsim.engines.cpu.bf16_dot import packing, steps
from flashsim.engines.cpu.bf16_dot.operations import scale_panel
from flashsim.engines.cpu.bf16_dot.packing import Left, pair_tiles_of
from flashsim.engines.cpu.bf16_dot.tiles import SIDE
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

#: Keys whose scores exist at a time: a panel of them, P and Q fit the first-level cache.
CHUNK = 64
#: Keys whose P is kept: a row tile takes as many, of several column tiles, and multiplies P of all
#: of them with V at once, unless a maximum moves in between. So O, which is larger than what is
#: multiplied, is loaded and stored once for eight tiles along the sum in place of two.
KEPT = 256


class RowSums(NamedTuple):
    """What a row tile's visits add up: O, the statistics of its softmax, and their last factor."""

    O: np.ndarray
    m: np.ndarray
    l: np.ndarray
    alpha: np.ndarray


def or_pairs(of_pairs: Callable, pipeline: type[Part] = Part) -> Callable:
    """Let compiled callers of the decorated function use `of_pairs` on CPUs that multiply pairs."""

    def decorate(of_floats: Callable) -> Callable:
        def choose(cpu, *_):
            return of_pairs if BLOCKING[cpu.instance_class].pairs else of_floats

        using(pipeline, of_floats, choose)
        return of_floats

    return decorate


# -- sizes and room -------------------------------------------------------------------------------


@or_pairs(lambda cpu: 2)
def per_term(cpu):
    """How many numbers along a sum are one term."""
    return 1


@or_pairs(lambda cpu: SIDE)
def side(cpu):
    """Rows of results, and terms of sums, come in multiples of it."""
    return 1


@part
def rows_of(cpu, n):
    """How many rows a result of n rows is written with."""
    return (n + side(cpu) - 1) // side(cpu) * side(cpu)


@part
def terms(cpu, n):
    """How many terms a sum over n numbers has."""
    return rows_of(cpu, (n + per_term(cpu) - 1) // per_term(cpu))


@part
def whole(cpu, n):
    """How many numbers `terms` of n are: rows of a panel that becomes an operand."""
    return terms(cpu, n) * per_term(cpu)


@part
def aligned(cpu, first):
    """The last row, not after `first`, at which an operand can begin."""
    return first - first % (side(cpu) * per_term(cpu))


@or_pairs(lambda cpu, keys: max(1, KEPT // (2 * pair_tiles_of(keys))))
def slots_of(cpu, keys):
    """How many column tiles of so many keys are multiplied with V at once."""
    return 1


@or_pairs(lambda cpu, keys: min(2 * pair_tiles_of(keys), CHUNK))
def chunk_of(cpu, keys):
    """Of how many keys scores exist at a time."""
    return keys


@or_pairs(lambda cpu, n, dtype: panel_array(n, np.uint32))
def operand_room(cpu, n, dtype):
    """Room for n terms of right operands."""
    return panel_array(n, dtype)


@or_pairs(lambda cpu, rows, n, dtype, rounding: panel_array(rows * pair_tiles_of(n), np.uint32))
def left_room(cpu, rows, n, dtype, rounding):
    """Room for rows of n numbers as a left operand; floats need none."""
    return room_for(rows * n, dtype, rounding)


@or_pairs(lambda cpu, n, dtype, rounding: panel_array(0, dtype))
def wide_room(cpu, n, dtype, rounding):
    """Room in which 16-bit numbers that become no pairs lie as floats."""
    return room_for(n, dtype, rounding)


@or_pairs(lambda cpu, n, dtype: panel_array(n, dtype))
def pairs_room(cpu, n, dtype):
    """Room for what only pairs need."""
    return panel_array(0, dtype)


# -- from memory ----------------------------------------------------------------------------------


@or_pairs(packing.left_of_rows, HotPart)
def left_of_rows(cpu, room, first, X, x0, n, d, rounding):
    """n rows of X (.., d) as a left operand, for sums over d; pairs as rows of `room` from `first`.

    The operand is all of the room's.
    """
    array, start = widened(cpu, room, X, x0, n * d, rounding)
    return Left(array, start, d, 1)


@or_pairs(packing.left_of_columns, HotPart)
def left_of_columns(cpu, room, first, row, block, X, x0, n, d, rounding):
    """Columns of X as a left operand, for sums over its n rows; pairs as terms of `room`'s rows.

    Those are `row` terms long; from that of number `first` on, `block` of them are written.
    """
    array, start = widened(cpu, room, X, x0, n * d, rounding)
    return Left(array, start, 1, d)


@or_pairs(packing.turned)
def turned(cpu, left, room, row, X, x0, n, d):
    """`left_of_columns` of what `left` has the rows of."""
    return Left(left.array, left.start, left.step, left.row)


@or_pairs(packing.right_of_rows, HotPart)
def right_of_rows(cpu, panels, X, x0, n, d, factors, room, rounding):
    """n rows of X in the lanes of panels, for sums over d; floats times their rows' factors."""
    pack_rows(cpu, panels, X, x0, n, d, factors, room, rounding)


@or_pairs(packing.right_of_columns, HotPart)
def right_of_columns(cpu, out, stride, X, x0, n, d, factor, room, rounding):
    """Columns of X in `stride` lanes, for sums over its n rows; floats times a factor."""
    array, start = widened(cpu, room, X, x0, n * d, rounding)
    copy_rows(out, stride, array, start, n, d, factor)


@or_pairs(packing.write_rows)
def write_rows(cpu, panels, X, x0, n, d, factors, room, rounding, counter):
    """Lanes of panels, each times its factor, as rows of X, which are looked at if they can be."""
    unpack_rows(cpu, panels, X, x0, n, d, factors, room, rounding, counter)


# -- products -------------------------------------------------------------------------------------


@part
def set_product(cpu, C, c0, ldc, left, r0, x0, B, b0, ldb, rows, n):
    """C = A B: `rows` rows of the left operand from row r0 on, n numbers of each from x0 on."""
    a0 = left.start + r0 * left.row + x0 // per_term(cpu) * left.step
    product_set(
        *(cpu, C, c0, ldc, left.array, a0, left.row, left.step),
        *(B, b0, ldb, rows_of(cpu, rows), terms(cpu, n)),
    )


@part
def add_product(cpu, C, c0, ldc, left, r0, x0, B, b0, ldb, rows, n):
    """C += A B; as `set_product`."""
    a0 = left.start + r0 * left.row + x0 // per_term(cpu) * left.step
    product_add(
        *(cpu, C, c0, ldc, left.array, a0, left.row, left.step),
        *(B, b0, ldb, rows_of(cpu, rows), terms(cpu, n)),
    )


@or_pairs(lambda cpu, S, s0, ld, rows, scale: scale_panel(cpu, S, s0, ld, rows, scale))
def scale_scores(cpu, S, s0, ld, rows, scale):
    """Scores times ``scale[0]``, which an operand of floats was already."""


@or_pairs(steps.right_of_panel)
def right_of_panel(cpu, X, x0, ld, rows, P, rounding):
    """A panel of P or dS, rounded as inputs are, for sums over its rows: where, and their stride.

    Pairs lie in `P`.
    """
    round_panel(cpu, X, x0, ld, rows, rounding)
    return X, x0, ld


# -- the softmax, and O ---------------------------------------------------------------------------


@or_pairs(steps.scaled)
def scaled(cpu, S, rows, plain, scales):
    """The factor that scores have yet to take, of the softmax scale and 1 (`scales`).

    Pairs leave it to their softmax where nothing comes between, and it is not negative.
    """
    return rest(scales, 1)


@or_pairs(steps.take_scores)
def take_scores(cpu, sums, S, rows, scale, P, V, key, panel, dv, rounding, waiting):
    """A panel of scores becomes P, and O = alpha O + V^T P; the keys begin at number `key` of V's.

    Pairs keep P in the place of its keys until `weigh` multiplies it: which pairs of keys are
    `waiting` for that, begin and end, comes in and goes out. What waits is multiplied here if a
    maximum has moved, or if keys in between were left out.
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
    """O += V^T P of what is `waiting` for it."""


# -- dQ -------------------------------------------------------------------------------------------


@or_pairs(steps.left_of_lanes)
def left_of_lanes(cpu, dS, s0, ld, rows, left, row):
    """A panel of dS as columns of a left operand, for sums over its lanes; floats are one."""


@or_pairs(steps.prepare_dq)
def prepare_dq(cpu, part_dq, padded, left, row, K, k0, rows, n):
    """What of ``dS K`` can be computed before its turn: of pairs all, unscaled."""


@or_pairs(steps.add_dq)
def add_dq(cpu, dq, to, padded, dS, ld, part_dq, K, k0, rows, n, scale, is_last, counter):
    """dQ += dS K for one tile; the last time, floats are looked at."""
    for x in range(0, padded, cpu.width):
        product_add(cpu, dq, to + x, padded, dS, 0, ld, 1, K, k0 + x, padded, rows, n)
    if is_last:
        look(counter, dq, to, rows * padded)
