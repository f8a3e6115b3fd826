"""The steps between matrix products of bfloat16 pairs; module `operands` has them for floats."""

from __future__ import annotations

import numpy as np

from flashsim.engines.cpu.bf16_dot.operations import (
    add_scaled,
    online_softmax_pairs,
    pairs_of_lanes,
    pairs_of_rows,
    scale_lanes,
    scale_panel,
)
from flashsim.engines.cpu.bf16_dot.packing import pair_tiles_of, tiles_of
from flashsim.engines.cpu.micro_kernels.plain import product_add, product_set
from flashsim.engines.cpu.primitives.arrays import rest
from flashsim.engines.cpu.primitives.inline_jit import part


def scaled(cpu, S, rows, plain, scales):
    """Return the scale if the softmax can apply the scale; else multiply S by it and return 1.

    The softmax can apply a scale of at least 0, if no step (softcap, bias, function or mask) comes
    between the product and the softmax.
    """
    if plain and scales[0] >= 0:
        return scales
    scale_panel(cpu, S, 0, cpu.width, rows, scales)
    return rest(scales, 1)


def right_of_panel(cpu, X, x0, ld, rows, P, rounding):
    """Round a panel to bfloat16, merge its rows in pairs, and pad with zeros to whole tiles."""
    pairs_of_rows(cpu, X, x0, ld, rows, P, 0)
    clear_pairs(cpu, P, 0, rows)
    return P, 0, cpu.width


def take_scores(cpu, sums, S, rows, scale, P, V, key, panel, dv, rounding, waiting):
    """Compute P from scores, and keep P until `weigh` multiplies it by V.

    If the maximum of any lane has changed or keys were skipped, the function multiplies the P that
    earlier calls kept by V now.
    """
    O, m, l, alpha = sums
    w, (begin, end), start, o_rows = cpu.width, waiting, key // 2, tiles_of(dv)
    online_softmax_pairs(cpu, S, 0, rows, m, l, alpha, panel * w, scale, P, start * w)
    clear_pairs(cpu, P, start * w, rows)
    if end != start or moved(cpu, alpha, panel * w):
        weigh(cpu, O, P, V, panel, dv, (begin, end))
        begin = start
        scale_lanes(cpu, O, panel * o_rows * w, w, o_rows, alpha, panel * w)
    return begin, start + pair_tiles_of(rows)


@part
def weigh(cpu, O, P, V, panel, dv, waiting):
    """Compute O += V^T P for the pairs of keys whose P `take_scores` kept."""
    (begin, end), w, o_rows = waiting, cpu.width, tiles_of(dv)
    if begin < end:
        product_add(
            *(cpu, O, panel * o_rows * w, w, V.array, begin, V.row, 1),
            *(P, begin * w, w, o_rows, end - begin),
        )


@part
def moved(cpu, alpha, at):
    """Return whether any lane's sums must be rescaled, because the lane's alpha is not 1."""
    changed = False
    for c in range(cpu.width):
        changed |= alpha[np.uint64(at + c)] != 1
    return changed


@part
def clear_pairs(cpu, P, p0, rows):
    """Pad the pairs that hold `rows` rows of P with zeros to whole tiles."""
    w = cpu.width
    for at in range(p0 + (rows + 1) // 2 * w, p0 + pair_tiles_of(rows) * w):
        P[at] = 0


def left_of_lanes(cpu, dS, s0, ld, rows, left, row):
    """Store dS as a left operand, rounded to bfloat16; two neighbouring lanes form a pair."""
    pairs_of_lanes(cpu, dS, s0, ld, rows, left, s0 // 2, row)


def prepare_dq(cpu, part_dq, padded, left, row, K, k0, rows, n):
    """Compute dS K, not yet multiplied by the scale, before this thread's turn to add to dQ."""
    for x in range(0, padded, cpu.width):
        product_set(
            *(cpu, part_dq, x, padded, left, 0, row, 1),
            *(K, k0 + x, padded, tiles_of(rows), pair_tiles_of(n)),
        )


def add_dq(cpu, dq, to, padded, dS, ld, part_dq, K, k0, rows, n, scales, is_last, counter):
    """Add dS K, which `prepare_dq` computed, times the scale to dQ."""
    for x in range(0, padded, cpu.width):
        add_scaled(cpu, dq, to + x, part_dq, x, padded, rows, scales)
