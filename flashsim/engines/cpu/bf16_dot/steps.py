"""Steps between matrix products of bfloat16 pairs; `operands` has these steps for floats."""

import numpy as np

from flashsim.engines.cpu.bf16_dot import operations
from flashsim.engines.cpu.bf16_dot.packing import pair_tiles_of, tiles_of
from flashsim.engines.cpu.micro_kernels.plain import product_add, product_set
from flashsim.engines.cpu.primitives.arrays import rest
from flashsim.engines.cpu.primitives.inline_jit import part


@part
def scaled(cpu, S, rows, plain, scales):
    """Return the factor by which the softmax must multiply the scores S, as an array.

    `plain` means that scores go to the softmax without softcap, bias, function or mask. If `plain`
    is true and the scale is at least 0, the factor is the scale; otherwise S is multiplied by the
    scale, and the factor is 1.
    """
    if plain and scales[0] >= 0:
        return scales
    operations.scale_panel(cpu, S, 0, cpu.width, rows, scales)
    return rest(scales, 1)


@part
def right_of_panel(cpu, X, x0, ld, rows, P, rounding):
    """Round a panel to a right operand of pairs; return its array, offset and stride."""
    operations.pairs_of_rows(cpu, X, x0, ld, rows, P, 0)
    clear_pairs(cpu, P, 0, rows)
    return P, 0, cpu.width


@part
def take_scores(cpu, sums, S, rows, scale, P, V, key, panel, dv, rounding, waiting):
    """Compute P from scores, and keep P until `weigh` multiplies it by V (see `operands`)."""
    O, m, l, alpha = sums
    w, (begin, end), start, o_rows = cpu.width, waiting, key // 2, tiles_of(dv)
    operations.online_softmax_pairs(cpu, S, 0, rows, m, l, alpha, panel * w, scale, P, start * w)
    clear_pairs(cpu, P, start * w, rows)
    if end != start or moved(cpu, alpha, panel * w):
        weigh(cpu, O, P, V, panel, dv, (begin, end))
        begin = start
        operations.scale_lanes(cpu, O, panel * o_rows * w, w, o_rows, alpha, panel * w)
    return begin, start + pair_tiles_of(rows)


@part
def weigh(cpu, O, P, V, panel, dv, waiting):
    """Compute O += V^T P for the key pairs in `waiting`, whose P `take_scores` has stored."""
    (begin, end), w, o_rows = waiting, cpu.width, tiles_of(dv)
    if begin < end:
        product_add(
            *(cpu, O, panel * o_rows * w, w, V.array, begin, V.row, 1),
            *(P, begin * w, w, o_rows, end - begin),
        )


@part
def moved(cpu, alpha, at):
    """Return whether alpha, the factor that rescales sums, differs from 1 in any lane."""
    changed = False
    for c in range(cpu.width):
        changed |= alpha[np.uint64(at + c)] != 1
    return changed


@part
def clear_pairs(cpu, P, p0, rows):
    """Add zeros to the pairs of `rows` rows of P, so that the pairs fill entire AMX tiles."""
    w = cpu.width
    for at in range(p0 + (rows + 1) // 2 * w, p0 + pair_tiles_of(rows) * w):
        P[at] = 0


@part
def left_of_lanes(cpu, dS, s0, ld, rows, left, row):
    """Store dS as a left operand, rounded to bfloat16; two neighbouring lanes form a pair."""
    operations.pairs_of_lanes(cpu, dS, s0, ld, rows, left, s0 // 2, row)


@part
def prepare_dq(cpu, part_dq, padded, left, row, K, k0, rows, n):
    """Compute dS K without the scale, before this thread's turn to add to dQ."""
    for x in range(0, padded, cpu.width):
        product_set(
            *(cpu, part_dq, x, padded, left, 0, row, 1),
            *(K, k0 + x, padded, tiles_of(rows), pair_tiles_of(n)),
        )


@part
def add_dq(cpu, dq, to, padded, dS, ld, part_dq, K, k0, rows, n, scales, is_last, counter):
    """Add the scale times dS K, which `prepare_dq` has computed, to dQ."""
    for x in range(0, padded, cpu.width):
        operations.add_scaled(cpu, dq, to + x, part_dq, x, padded, rows, scales)
