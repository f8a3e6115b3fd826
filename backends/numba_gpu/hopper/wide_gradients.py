"""Numba intrinsics for the KV-outer backward with a head_dim above 128.

Warpgroups exchange a tile pair's P and dS through shared memory. In shared memory, a row of P or dS
is one key with 64 queries. In `backward_wide`, a row of scores is a key. In `backward_roles`, a row
of scores is a query. A row of dQ is a query, so dQ is staged differently than in `gradients`.
"""

from functools import partial

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import (
    FRAGMENT,
    I1,
    I64,
    Like,
    Rounded,
    Values,
    emitted,
    f32,
    floats,
    i32,
)
from flashsim.backends.numba_gpu.hopper import ptx as ptx_hopper
from flashsim.backends.numba_gpu.hopper.wgmma_tiles import rounded, store_output, transposed_quad
from flashsim.backends.numba_gpu.mma_tiles import lane_of

int32, int64, float32 = types.int32, types.int64, types.float32


def _warp(b: ir.IRBuilder) -> ir.Value:
    """Return the index (0 to 3) of the thread's warp in its warpgroup."""
    return b.and_(b.lshr(ptx.special(b, "tid.x"), i32(5)), i32(3))


def _slope(b: ir.IRBuilder, score: ir.Value, inverse: ir.Value) -> ir.Value:
    """Return the softcap's derivative, 1 - tanh^2, from the capped score (which may be -inf)."""
    t = ptx.maximum(b, b.fmul(score, inverse), f32(-1.0))
    return b.fsub(f32(1.0), b.fmul(t, t))


# -- scores with keys in rows (`backward_wide`) ---------------------------------------------------


@emitted(int32, int32, int32)
def scores_place(b, tile, group):
    """Return the address of this thread's row of P^T or dS^T in shared memory.

    Each warpgroup computes 32 of a row's 64 queries. `gradients.store_ds` takes this address.
    """
    lane = lane_of(b)
    row = b.add(b.shl(_warp(b), i32(4)), b.and_(lane, i32(15)))
    piece = b.or_(b.shl(group, i32(2)), b.lshr(lane, i32(4)))
    at = b.add(tile, b.shl(row, i32(7)))
    return b.add(at, b.shl(b.xor(piece, b.and_(row, i32(7))), i32(4)))


@emitted([Like(0), Like(0)], FRAGMENT, FRAGMENT, float32, float32)
def column_probabilities(b, s, lse, to_log2, cap, *, softcap):
    """Return P = exp2(c S - lse), and P times the softcap's derivative (P without a softcap).

    `lse` is the negative log-sum-exp, in base 2, of each of the lane's columns.
    """
    p = [ptx.exp2(b, b.fma(x, to_log2, lse[e // 4 * 2 + e % 2])) for e, x in enumerate(s)]
    if not softcap:
        return [p, p]
    inverse = ptx.reciprocal(b, cap)
    return [p, [b.fmul(x, _slope(b, y, inverse)) for x, y in zip(p, s, strict=True)]]


@emitted(Rounded(0), *[FRAGMENT] * 3)
def column_gradients(b, p, dp, delta, *, bf16):
    """Return dS = P (dP + delta), rounded.

    `delta` is the negative delta of each of the lane's columns.
    """
    ds = [
        b.fmul(x, b.fadd(y, delta[e // 4 * 2 + e % 2]))
        for e, (x, y) in enumerate(zip(p, dp, strict=True))
    ]
    return rounded(b, ds, bf16=bf16)


@emitted(Like(0), FRAGMENT, FRAGMENT)
def add_to_columns(b, dp, values):
    """Return dP with one number added to each column."""
    return [b.fadd(x, values[e // 4 * 2 + e % 2]) for e, x in enumerate(dp)]


@emitted(
    lambda c: floats((c.at.wide + c.at.narrow) // 2), lambda c: [*[FRAGMENT] * c.more, *[int32] * 3]
)
def queue_columns(b, *operands, bf16, at, down, more):
    """Queue a product for the warpgroup's columns; the operands are scores, a tile and the group.

    The scores are P^T or dS^T. With `down`, they are transposed, so that the left operand is dS.
    With `more`, the operands begin with sums, to which the product is added. The tile is one of K,
    Q or dO. Sums of wide columns precede sums of narrow columns (`ColumnsDivided`). The wide
    columns and the narrow columns are two groups of products.
    """
    *sums, scores, tile, group = operands
    parts = [(at.wide, 2 * at.block_q * 128, 0, 0)]
    if at.narrow:
        parts.append((at.narrow, 64, at.block_q * 128, at.wide // 2))
    right_at = [ptx_hopper.down_rows(x) for x in range(4)]
    left_at = right_at if down else [ptx_hopper.along_row(x, 64) for x in range(4)]
    found = []
    for n, apart, first, begin in parts:
        where = b.add(b.add(tile, i32(first)), b.mul(group, i32(apart)))
        found += ptx_hopper.wgmma(
            *(b, bf16, n, sums[0][begin : begin + n // 2] if more else None),
            ptx_hopper.descriptor(b, scores, 0),
            ptx_hopper.descriptor(b, where, at.block_q * 128),
            *(left_at, right_at),
            left_down=down,
            right_down=True,
        )
    return found


@emitted(int32, int64, int32, FRAGMENT, FRAGMENT, *[int32] * 3)
def store_columns(b, address, row_bytes, sums, factors, row, stop, group, *, bf16, at, row_of):
    """Round and store 64 rows of the warpgroup's columns, and return the number of bytes.

    The parameters are those of `wgmma_tiles.store_output`.
    """
    store = partial(store_output.__wrapped__, b, address, row_bytes)
    how = {"bf16": bf16, "row_of": row_of, "later": True}
    cut, first = at.wide // 2, b.shl(group, i32(7))
    stored = store(sums[:cut], factors, row, stop, first, **how)
    if at.narrow:
        first = b.add(i32(64), b.shl(group, i32(5)))
        more = store(sums[cut:], factors, row, stop, first, **how)
        stored = b.add(stored, more)
    return stored


@emitted(int32, int64, FRAGMENT, int32, int32)
def add_columns(b, address, dq, rows, group, *, at, row_of):
    """Add dQ to its accumulator in HBM, and return the number of bytes.

    `address` is where the tile's row 0 begins in the accumulator. Only the first `rows` rows of the
    tile exist.
    """
    assert not at.narrow, "the narrow columns are not added"
    lane, added = lane_of(b), i32(0)
    column = b.add(b.shl(group, i32(7)), b.shl(b.and_(lane, i32(3)), i32(1)))
    for half in range(2):
        row = b.add(b.shl(_warp(b), i32(4)), b.lshr(lane, i32(2)))
        row = b.add(row, i32(8 * half))
        first = b.add(b.mul(row, i32(row_of.width)), column)
        to = b.add(address, b.sext(b.shl(first, i32(2)), I64))
        inside = b.icmp_signed("<", row, rows)
        for j in range(at.wide // 8):
            where, exists = b.add(column, i32(8 * j)), inside
            if row_of.width < at.d:
                exists = b.and_(exists, b.icmp_signed("<", where, i32(row_of.width)))
            e = 4 * j + 2 * half
            with b.if_then(exists):
                ptx.add_float(b, b.add(to, ir.Constant(I64, 32 * j)), dq[e : e + 2])
            count = row_of.counted(b, where, 2, 4)
            added = b.add(added, b.select(exists, count, i32(0)))
    return added


# -- scores with queries in rows (`backward_roles`) -----------------------------------------------


@emitted(floats(2), int32)
def load_rows(b, address):
    """Load one float32 for each of this thread's two rows from shared memory at `address`."""
    row = b.add(b.shl(_warp(b), i32(4)), b.lshr(lane_of(b), i32(2)))
    mine = b.add(address, b.shl(row, i32(2)))
    return [ptx.load_shared_float(b, b.add(mine, i32(32 * half))) for half in range(2)]


@emitted(int32, int32)
def keys_place(b, tile):
    """Return where this thread stores the first keys of P^T or dS^T in `tile`."""
    lane = lane_of(b)
    key = b.add(b.shl(b.lshr(lane, i32(4)), i32(3)), b.and_(lane, i32(7)))
    piece = b.add(b.shl(_warp(b), i32(1)), b.and_(b.lshr(lane, i32(3)), i32(1)))
    at = b.add(tile, b.shl(key, i32(7)))
    return b.add(at, b.shl(b.xor(piece, b.and_(key, i32(7))), i32(4)))


@emitted(Like(1), int32, FRAGMENT, FRAGMENT, float32, float32)
def store_probabilities(b, place, s, lse, to_log2, cap, *, bf16, softcap):
    """Store P = exp2(c S - lse); return P times the softcap's derivative (P without a softcap).

    `lse` is the negative log-sum-exp, in base 2, of the thread's rows. Storing 16 keys overlaps
    with the exponentials of the next 16 keys.
    """
    inverse = ptx.reciprocal(b, cap) if softcap else None
    found: Values = []
    for first in range(0, len(s), 8):
        some = s[first : first + 8]
        p = [ptx.exp2(b, b.fma(x, to_log2, lse[e // 2 % 2])) for e, x in enumerate(some)]
        at = b.add(place, i32(first // 8 * 16 * 128))
        ptx_hopper.store_transposed(b, at, rounded(b, p, bf16=bf16))
        if softcap:
            p = [b.fmul(x, _slope(b, y, inverse)) for x, y in zip(p, some, strict=True)]
        found += p
    return found


@emitted(None, int32, *[FRAGMENT] * 3)
def store_gradients(b, place, p, dp, delta, *, bf16):
    """Store dS = P (dP + delta), rounded.

    `delta` is the negative delta of each of the thread's rows.
    """
    for first in range(0, len(p), 8):
        ds = [b.fmul(p[e], b.fadd(dp[e], delta[e // 2 % 2])) for e in range(first, first + 8)]
        at = b.add(place, i32(first // 8 * 16 * 128))
        ptx_hopper.store_transposed(b, at, rounded(b, ds, bf16=bf16))


@emitted(lambda c: floats(c.n // 2), int32, int32)
def queue_dq(b, ds, k, *, bf16, n, keys):
    """Queue dQ = dS K (64 queries, `n` columns)."""
    steps = [ptx_hopper.down_rows(x) for x in range(keys // 16)]
    tiles = ptx_hopper.descriptor(b, ds, 0), ptx_hopper.descriptor(b, k, keys * 128)
    ways = {"left_down": True, "right_down": True}
    return ptx_hopper.wgmma(b, bf16, n, None, *tiles, steps, steps, **ways)


@emitted(Like(0), FRAGMENT, int32, int32)
def queue_sum(b, c, chunk, scores, *, bf16):
    """Queue a product to add to the sum `c`: dO^T P (for dV^T) or Q^T dS (for dK^T).

    The product has 64 rows, one per column of a chunk of dO or Q, and one column per key.
    """
    keys = 2 * len(c)
    left_at = [ptx_hopper.down_rows(x) for x in range(4)]
    right_at = [ptx_hopper.along_row(x, keys) for x in range(4)]
    tiles = ptx_hopper.descriptor(b, chunk, 0), ptx_hopper.descriptor(b, scores, 0)
    return ptx_hopper.wgmma(b, bf16, keys, c, *tiles, left_at, right_at, left_down=True)


@emitted(int32, int64, int32, *[FRAGMENT] * 3, float32, int32, int32)
def store_sums(b, address, row_bytes, low, middle, high, factor, first, stop, *, bf16, row_of):
    """Round and store three results of `queue_sum`, whose rows are keys; return their bytes.

    `first` is the first key of the tile. The function skips keys from `stop` on, and columns past
    the row width `row_of`.
    """
    lane, stored = lane_of(b), i32(0)
    odd, up = b.trunc(lane, I1), b.trunc(b.lshr(lane, i32(1)), I1)
    mine = b.add(b.shl(_warp(b), i32(4)), b.shl(b.and_(lane, i32(1)), i32(3)))
    row = b.add(first, b.shl(b.and_(b.lshr(lane, i32(1)), i32(1)), i32(3)))
    row = b.add(row, b.lshr(lane, i32(2)))
    for chunk, c in enumerate((low, middle, high)):
        column = b.add(mine, i32(64 * chunk))
        fits = b.icmp_unsigned("<", column, i32(row_of.width))
        for j in range(len(c) // 8):
            pairs = [c[8 * j + 2 * x : 8 * j + 2 * x + 2] for x in range(4)]
            four = [ptx.pack(b, bf16, *(b.fmul(x, factor) for x in pair)) for pair in pairs]
            four = [ptx_hopper.transposed(b, x) for x in four]
            four = transposed_quad(b, four, odd, up)
            here = b.add(row, i32(16 * j))
            inside = b.and_(fits, b.icmp_signed("<", here, stop))
            far = b.mul(b.sext(here, I64), b.sext(row_bytes, I64))
            line = b.add(b.add(address, far), b.sext(b.shl(column, i32(1)), I64))
            with b.if_then(inside):
                ptx.store_16(b, line, four)
            count = row_of.counted(b, column, 8, 2)
            stored = b.add(stored, b.select(inside, count, i32(0)))
    return stored


# -- dQ with queries in rows: staged in shared memory, then sent ----------------------------------


@emitted(int32, int32)
def rows_place(b, dq):
    """Return the shared-memory address at which this thread stages dQ.

    A row of dQ's staging area has 32 columns per box. The 16-byte pieces of a row are swizzled with
    the row number. In odd rows, a thread begins with the second half of a box's columns, to avoid
    bank conflicts between rows.
    """
    lane = lane_of(b)
    row = b.add(b.shl(_warp(b), i32(4)), b.lshr(lane, i32(2)))
    piece = b.xor(b.and_(b.lshr(lane, i32(1)), i32(1)), b.and_(row, i32(7)))
    piece = b.xor(piece, b.shl(b.and_(row, i32(1)), i32(2)))
    at = b.add(b.add(dq, b.shl(row, i32(7))), b.shl(b.and_(lane, i32(1)), i32(3)))
    return b.add(at, b.shl(piece, i32(4)))


@emitted(None, int32, FRAGMENT)
def stage_rows(b, to, dq, *, rows):
    """Write `rows` rows of dQ to shared memory."""
    odd = b.trunc(b.lshr(lane_of(b), i32(2)), I1)  # the thread's rows are odd
    for box in range(len(dq) // 16):
        for j in range(4):
            at = b.add(b.xor(to, i32(32 * j)), i32(box * rows * 128))
            for half in range(2):
                mine = 16 * box + 4 * j + 2 * half
                other = 16 * box + 4 * (j ^ 2) + 2 * half
                x, y = (b.select(odd, dq[other + e], dq[mine + e]) for e in range(2))
                ptx_hopper.store_pair(b, b.add(at, i32(1024 * half)), x, y)
