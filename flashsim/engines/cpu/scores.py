"""Applies softcap, bias, score function and mask to a panel of scores before the softmax.

The lanes of a panel are either queries or keys. A start and two strides (per row and per lane) give
each score's index in the bias, index in the mask's bits, and distance from the diagonal.
"""

from typing import NamedTuple

import numpy as np

from flashsim.engines.cpu.functions import DERIVATIVE, SCORE, SUMMING, call_panel
from flashsim.engines.cpu.micro_kernels.plain import soft_cap, soft_cap_gated
from flashsim.engines.cpu.operands import aligned
from flashsim.engines.cpu.primitives.inline_jit import part
from flashsim.schedule.tables import MASKED


class Rules(NamedTuple):
    """The scale, softcap, mask and bias that a problem applies to its scores.

    A band mask keeps score (q, k) if ``-left <= k - (q + offset) <= right``. `banded` says whether
    a band is the complete mask. If `banded` is false, MASKED tiles have mask bits of shape (rows of
    a panel, keep_slots, lanes). The mask bits of (batch, head) are in slot ``batch * keep_batch +
    head * keep_head``. In the flat array `bias`, the bias of (batch, head) starts at element
    ``batch * bias_batch + head * bias_head``. Without a bias, `bias` is empty; without sinks,
    `sinks` (heads,) is empty; without a softcap, `softcap` (1,) is 0. `rounding` is the type of
    16-bit inputs (`float16.BFLOAT16` or `FLOAT16`), or None. `calls` holds the addresses of the
    score function and its derivatives (see `functions`), or zeros. `captured` holds the addresses
    of the arrays that score functions read or add to.
    """

    scale: float
    softcap: np.ndarray
    left: int
    right: int
    banded: bool
    rounding: int | None
    bias: np.ndarray
    bias_batch: int
    bias_head: int
    keep_batch: int
    keep_head: int
    keep_slots: int
    calls: np.ndarray
    captured: np.ndarray
    sinks: np.ndarray


class Place(NamedTuple):
    """The positions of row 0, lane 0 of a panel, and their strides per row and per lane.

    `rel` is k - (q + offset), the distance from the diagonal. `bias` is an index into the bias, and
    `keep` an index into the mask's bits (-1 without mask bits). `b`, `h`, `q` and `k` are the score
    function's arguments. If lanes are queries, q grows by 1 per lane and k by 1 per row; if lanes
    are keys, k grows per lane and q per row. `edge` is an index into `Tiles.edges`. Only rows
    `hide_first` to `hide_last` - 1 have mask bits that are 0.
    """

    rel: int
    rel_row: int
    rel_lane: int
    bias: int
    bias_row: int
    bias_lane: int
    keep: int
    keep_row: int
    b: int
    h: int
    q: int
    k: int
    edge: int
    hide_first: int
    hide_last: int


@part
def is_plain(cpu, rules, masked, lanes):
    """Return whether a panel's scores need no softcap, bias, score function or mask."""
    simple = rules.softcap[0] == 0 and rules.bias.size == 0 and rules.calls[SCORE] == 0
    return not masked and lanes == cpu.width and simple


@part
def visible_rows(rules, rel, rel_row, rows, lanes):
    """Return the rows (first, last + 1) of a panel in which the band keeps a score."""
    if rel_row > 0:  # rows are keys
        return max(0, -rules.left - rel), min(rows, rules.right - rel + lanes)
    return max(0, rel - rules.right), min(rows, rel + lanes + rules.left)


@part
def kept_rows(tiles, position, rows):
    """Return the rows (first, last + 1) of a panel in which the mask bits, if any, keep a score."""
    if position.keep < 0:
        return 0, rows
    return tiles.edges[position.edge], tiles.edges[position.edge + 1]


@part
def rows_in_mask(cpu, rules, shape, tiles, v, h, own, other, q_lanes, panel, rows, lanes):
    """Return the rows (first, last + 1) of a panel in which the mask keeps a score.

    The first row is rounded down to a possible start of an operand. If the mask keeps no score, the
    second number is at most the first. The arguments are those of `place_of`.
    """
    first, last = 0, rows
    if tiles.kind[v] == MASKED:
        position = place_of(cpu, rules, shape, tiles, v, h, own, other, q_lanes, 0, panel)
        if rules.banded:
            first, last = visible_rows(rules, position.rel, position.rel_row, rows, lanes)
        else:
            first, last = kept_rows(tiles, position, rows)
        if last > first:
            first = aligned(cpu, first)
    return first, last


@part
def only_if_hiding(rules, position, masked, first, last):
    """Return whether a panel's mask must be applied to rows first .. last - 1."""
    if rules.banded or not masked:
        return masked
    return position.keep >= 0 and max(first, position.hide_first) < min(last, position.hide_last)


@part
def hides(rules, rel, rows, lanes):
    """Return whether the band hides a score of a panel of queries; `rel` is as in `Place`."""
    return rel - (lanes - 1) < -rules.left or rel + rows - 1 > rules.right


@part
def finish_scores(cpu, S, s0, ld, first, last, lanes, rules, position, masked, bits, gate, raw):
    """Apply softcap, bias, score function and mask to rows first .. last - 1 of a panel.

    Lanes from `lanes` on are padding, and are masked. The softcap's derivative, 1 - tanh^2, goes to
    `gate`, and the score function's inputs go to `raw`. `gate` and `raw` have the layout of S, or
    are None.
    """
    if rules.softcap[0] > 0:
        x0 = s0 + first * ld
        if gate is None:
            soft_cap(cpu, S, x0, ld, last - first, rules.softcap)
        else:
            soft_cap_gated(cpu, S, x0, ld, last - first, rules.softcap, gate, x0)
    if rules.bias.size > 0:
        for r in range(first, last):
            at = position.bias + r * position.bias_row
            for c in range(lanes):
                S[np.uint64(s0 + r * ld + c)] += rules.bias[at + c * position.bias_lane]
    if rules.calls[SCORE] != 0:
        if raw is not None:
            for r in range(first, last):
                for c in range(lanes):
                    raw[np.uint64(s0 + r * ld + c)] = S[np.uint64(s0 + r * ld + c)]
        call_function(rules, SCORE, S, S, s0, ld, first, last, lanes, position)
    if masked and rules.banded:
        for r in range(first, last):
            rel = position.rel + r * position.rel_row
            if position.rel_lane > 0:
                begin, end = -rules.left - rel, rules.right - rel + 1
            else:
                begin, end = rel - rules.right, rel + rules.left + 1
            for c in range(lanes):
                if c < begin or c >= end:
                    S[np.uint64(s0 + r * ld + c)] = -np.inf
    for r in range(first, last if lanes < cpu.width else first):
        for c in range(lanes, cpu.width):
            S[np.uint64(s0 + r * ld + c)] = -np.inf
    if position.keep >= 0:
        for r in range(max(first, position.hide_first), min(last, position.hide_last)):
            at = position.keep + r * position.keep_row
            for c in range(lanes):
                x = np.uint64(s0 + r * ld + c)
                S[x] = S[x] if bits[np.uint64(at + c)] != 0 else -np.inf


@part
def call_function(rules, which, S, raw, s0, ld, first, last, lanes, position):
    """Call the score function, or one of its derivatives, on rows first .. last - 1 of a panel."""
    by_row = position.rel_row > 0  # rows are keys
    q_row, k_row = (0, 1) if by_row else (1, 0)
    q, k, x0 = position.q + first * q_row, position.k + first * k_row, s0 + first * ld
    numbers = (
        *(ld, last - first, lanes, q, q_row, 1 - q_row, k, k_row, 1 - k_row),
        *(position.b, position.h),
    )
    call_panel(rules.calls[which], S, x0, raw, x0, numbers, rules.captured)


@part
def apply_derivative(rules, dS, raw, s0, ld, first, last, lanes, position, summing):
    """Replace the gradients of a score function's results by those of its inputs."""
    if rules.calls[SCORE] != 0:
        which = SUMMING if summing else DERIVATIVE
        call_function(rules, which, dS, raw, s0, ld, first, last, lanes, position)


@part
def apply_gate(dS, gate, s0, ld, first, last, lanes):
    """Multiply a panel of dS by the softcap's derivative, which `gate` contains."""
    for r in range(first, last):
        for c in range(lanes):
            dS[np.uint64(s0 + r * ld + c)] *= gate[np.uint64(s0 + r * ld + c)]


@part
def add_bias_gradient(dbias, dS, s0, ld, first, last, lanes, position):
    """Add a panel of dS to the bias's gradient."""
    for r in range(first, last):
        at = position.bias + r * position.bias_row
        for c in range(lanes):
            dbias[at + c * position.bias_lane] += dS[np.uint64(s0 + r * ld + c)]


@part
def place_of(cpu, rules, shape, tiles, v, h, own, other, q_lanes, row0, panel):
    """Return the `Place` (positions) of a panel's scores, from row `row0` of the panel on.

    The panel belongs to the tile pair of visit v. `h` is a query head's number in the batch. With
    `q_lanes`, lanes are queries, rows are keys, and `own` is a row tile. Without `q_lanes`, lanes
    are keys, rows are queries, and `own` is a column tile.
    """
    keep, n_kv, b, head = tiles.keep_at[v], shape.n_kv, h // shape.heads, h % shape.heads
    lane0, edge, hide_first, hide_last = panel * cpu.width, 0, 0, 0
    bias = b * rules.bias_batch + head * rules.bias_head
    slot, slots = b * rules.keep_batch + head * rules.keep_head, rules.keep_slots
    if keep >= 0:
        edge = tiles.edges_at[v] + (panel * slots + slot) * 4
        hide_first, hide_last = tiles.edges[edge + 2] - row0, tiles.edges[edge + 3] - row0
    hidden = edge, hide_first, hide_last
    lane, row = tiles.own[own, 0] + lane0, tiles.other[other, 0] + row0
    offset, wide = tiles.own[own, 2], tiles.own[own, 1] - tiles.own[own, 0]
    local_lane, local_row = lane - tiles.own[own, 4], row - tiles.other[other, 4]
    if keep >= 0:
        keep += (row0 * slots + slot) * wide + lane0
    if q_lanes:
        rel, bias = row - (lane + offset), bias + lane * n_kv + row
        at = b, head, local_lane, local_row
        return Place(rel, 1, -1, bias, 1, n_kv, keep, wide * slots, *at, *hidden)
    rel, bias = lane - (row + offset), bias + row * n_kv + lane
    at = b, head, local_row, local_lane
    return Place(rel, -1, 1, bias, n_kv, 1, keep, wide * slots, *at, *hidden)
