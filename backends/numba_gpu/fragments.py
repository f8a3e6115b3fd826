"""Warp-wide tile operations as Numba intrinsics: what Algorithms 1 and 2 do with a score tile.

A warp owns `blocks` blocks of 16 rows. An accumulator fragment of an n-column tile is a tuple of
``blocks * n / 8 * 4`` float32; element ``(i * n / 8 + c) * 4 + x`` lies in block i, 8-column piece c,
at row ``x // 2 * 8 + lane / 4`` and column ``c * 8 + lane % 4 * 2 + x % 2`` (`ptx.mma`). So the four
lanes of a *quad* share rows, and a lane has two rows of each block: its *halves*.

Accumulators of a score tile have the layout that the next product wants of its left operand, but
for the rounding to 16 bits, so P and dS never leave the registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.cuda import types

from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import (
    F32,
    I1,
    I32,
    I64,
    Values,
    emitted,
    f32,
    floats,
    i32,
    words,
)

LOG2E = 1.4426950408889634
NEG_INF = float("-inf")


@dataclass(frozen=True)
class Tile:
    """A rows x cols tile of 16-bit elements in shared memory, without padding.

    A row is cut into 16-byte chunks, and chunk c of row r lies at c XOR f(r), where f spreads 8
    consecutive rows over all 32 banks: `ldmatrix`, which reads a chunk of each of 8 rows at a time,
    then meets no bank conflict.
    """

    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        """Bytes in shared memory."""
        return self.rows * self.cols * 2

    @property
    def chunks(self) -> int:
        """16-byte chunks of a row."""
        return self.cols // 8

    @property
    def spread(self) -> int:
        """How many chunks trade places."""
        return next(s for s in (8, 4, 2) if self.chunks % s == 0)

    @property
    def shift(self) -> int:
        """Rows that share a swizzle, as a power of two: rows of 32 banks hold several short ones."""
        return {8: 0, 4: 1, 2: 2}[self.spread]

    def offset(self, b: ir.IRBuilder, row: ir.Value, chunk: ir.Value) -> ir.Value:
        """Emit the byte offset of a chunk."""
        swizzle = b.and_(b.lshr(row, i32(self.shift)), i32(self.spread - 1))
        return b.add(b.mul(row, i32(self.cols * 2)), b.shl(b.xor(chunk, swizzle), i32(4)))

    def at(
        self, b: ir.IRBuilder, base: ir.Value, row: int, col: int, extra: Any = None
    ) -> ir.Value:
        """Emit the address of the 16 x 16 piece at (row, col [+ extra]), from that at (0, 0).

        The swizzle of row r depends on r % 8 alone, so a piece is one XOR and one constant away:
        `row` must be a multiple of 8 and `col` of 16.
        """
        if extra is None:
            low = col // 8 & (self.spread - 1)
            at = b.xor(base, i32(low << 4)) if low else base
            return b.add(at, i32(row * self.cols * 2 + (col // 8 - low << 4)))
        chunk = b.add(b.lshr(extra, i32(3)), i32(col // 8))
        part = b.and_(chunk, i32(self.spread - 1))
        at = b.xor(base, b.shl(part, i32(4)))
        return b.add(b.add(at, b.shl(b.sub(chunk, part), i32(4))), i32(row * self.cols * 2))


def _lane(b: ir.IRBuilder) -> ir.Value:
    return b.and_(ptx.special(b, "tid.x"), i32(31))


def zeros(count: int) -> Any:
    """``zeros() -> fragment``."""

    @emitted(floats(count))
    def zeros_(b: ir.IRBuilder) -> Values:
        return [f32(0.0)] * count

    return zeros_


def full(count: int, value: float) -> Any:
    """``full() -> fragment``, every element `value`."""

    @emitted(floats(count))
    def full_(b: ir.IRBuilder) -> Values:
        return [f32(value)] * count

    return full_


# -- products ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A product's operand in shared memory.

    `swapped` says that the tile is stored the other way round: A [m][k] and B [k][n] are straight,
    A [k][m] and B [n][k] (K in Q K^T) are swapped. `extra` says that a first column in the tile,
    known only at run time, comes with the address.
    """

    tile: Tile
    swapped: bool = False
    extra: bool = False

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Numba types: the address of the lane's piece at (0, 0), and the first column."""
        return (types.int32, types.int32) if self.extra else (types.int32,)


def pieces(tile: Tile, *, transposed: bool) -> Any:
    """``pieces(address) -> address``: where this lane reads its row of a tile's first 16 x 16 piece.

    Straight order gives `ldmatrix` the A fragment of a straight tile and two B fragments of a
    straight one; transposed order those of a swapped tile.
    """

    @emitted(types.int32, types.int32)
    def pieces_(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        lane = _lane(b)
        if transposed:
            row = b.add(b.and_(lane, i32(7)), b.shl(b.lshr(lane, i32(4)), i32(3)))
            chunk = b.and_(b.lshr(lane, i32(3)), i32(1))
        else:
            row, chunk = b.and_(lane, i32(15)), b.lshr(lane, i32(4))
        return b.add(address, tile.offset(b, row, chunk))

    return pieces_


def load_fragments(blocks: int, depth: int, tile: Tile) -> Any:
    """``load_fragments(pieces) -> fragment``: A's registers for a whole product, kept from then on."""

    @emitted(words(blocks * depth // 4), types.int32)
    def load_fragments_(b: ir.IRBuilder, base: ir.Value) -> Values:
        return [
            word
            for kk in range(depth // 16)
            for i in range(blocks)
            for word in ptx.ldmatrix(b, tile.at(b, base, i * 16, kk * 16), transposed=False)
        ]

    return load_fragments_


def multiply(bf16: bool, blocks: int, n: int, depth: int, a: Operand | str, right: Operand) -> Any:
    """``multiply(c, a..., b...) -> c + A B``, C being (16 `blocks`, n).

    Parameters
    ----------
    a : Operand, "registers" or "accumulators"
        Where A (16 `blocks`, depth) is: in shared memory; a fragment of `load_fragments`; or an
        earlier product's accumulators, rounded here to 16 bits.
    right : Operand
        B (depth, n).
    """
    count = blocks * n // 2
    if isinstance(a, Operand):
        given = a.parameters
    else:
        given = (words(blocks * depth // 4) if a == "registers" else floats(blocks * depth // 2),)

    @emitted(floats(count), floats(count), *given, *right.parameters)
    def multiply_(b: ir.IRBuilder, c: Values, *operands: Any) -> Values:
        c = list(c)
        left, base = operands[: len(given)], operands[len(given) :]
        for kk in range(depth // 16):
            rows = [left_rows(b, left, i, kk) for i in range(blocks)]
            for piece in range(n // 16):
                place = (piece * 16, kk * 16) if right.swapped else (kk * 16, piece * 16)
                address = right.tile.at(b, base[0], *place, *base[1:])
                w = ptx.ldmatrix(b, address, transposed=not right.swapped)
                for i, row in enumerate(rows):
                    for half in range(2):
                        at = (i * (n // 8) + 2 * piece + half) * 4
                        pair = w[2 * half], w[2 * half + 1]
                        c[at : at + 4] = ptx.mma(b, bf16, c[at : at + 4], row, *pair)
        return c

    def left_rows(b: ir.IRBuilder, left: Any, i: int, kk: int) -> Values:
        if isinstance(a, Operand):
            place = (kk * 16, i * 16) if a.swapped else (i * 16, kk * 16)
            return ptx.ldmatrix(b, a.tile.at(b, left[0], *place, *left[1:]), transposed=a.swapped)
        if a == "registers":
            at = (kk * blocks + i) * 4
            return left[0][at : at + 4]
        at = (i * (depth // 8) + 2 * kk) * 4
        eight = left[0][at : at + 8]
        return [ptx.pack(b, bf16, eight[x], eight[x + 1]) for x in (0, 2, 4, 6)]

    return multiply_


# -- softmax ------------------------------------------------------------------------------------------


def _elements(blocks: int, n: int) -> Iterator[tuple[int, int, int, int]]:
    """Index, block, 8-column piece and x of every element of an accumulator fragment."""
    for i in range(blocks):
        for c in range(n // 8):
            for x in range(4):
                yield (i * (n // 8) + c) * 4 + x, i, c, x


def _tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """1 - 2 / (1 + e^2x): an error of a few 1e-7, where tanh.approx has 5e-4."""
    power = ptx.exp2(b, b.fmul(x, f32(2 * LOG2E)))
    return b.fsub(f32(1.0), b.fmul(f32(2.0), ptx.reciprocal(b, b.fadd(power, f32(1.0)))))


def scale_scores(blocks: int, n: int, softcap: bool) -> Any:
    """``scale_scores(s, scale, cap) -> s``: s = cap tanh(scale s / cap), or scale s without a cap."""
    kind = floats(blocks * n // 2)

    @emitted(kind, kind, types.float32, types.float32)
    def scale_scores_(b: ir.IRBuilder, s: Values, scale: ir.Value, cap: ir.Value) -> Values:
        s = [b.fmul(x, scale) for x in s]
        if not softcap:
            return s
        inverse = ptx.reciprocal(b, cap)
        return [b.fmul(cap, _tanh(b, b.fmul(x, inverse))) for x in s]

    return scale_scores_


def mask_rows(blocks: int, n: int, left: bool, right: bool) -> Any:
    """``mask_rows(s, query, key, offset, key_stop, left, right) -> s``: dropped scores are -inf.

    Query q keeps keys ``q + offset - left <= k <= q + offset + right`` with k < key_stop. `query`
    and `key` are the warp's first ones; a limit that is off costs nothing.
    """
    kind = floats(blocks * n // 2)

    @emitted(kind, kind, *[types.int32] * 6)
    def mask_rows_(
        b: ir.IRBuilder,
        s: Values,
        query: ir.Value,
        key: ir.Value,
        offset: ir.Value,
        key_stop: ir.Value,
        window_left: ir.Value,
        window_right: ir.Value,
    ) -> Values:
        lane, limits = _lane(b), {}
        column = b.add(key, b.shl(b.and_(lane, i32(3)), i32(1)))
        last = b.sub(b.sub(key_stop, i32(1)), column)  # compared with constants from here on
        centre = b.sub(b.add(b.add(query, b.lshr(lane, i32(2))), offset), column)
        for i in range(blocks):
            for half in range(2):
                here = b.add(centre, i32(i * 16 + half * 8))
                end = b.add(here, window_right)
                high = b.select(b.icmp_signed("<", end, last), end, last) if right else last
                limits[i, half] = high, b.sub(here, window_left) if left else None
        made = list(s)
        for at, i, c, x in _elements(blocks, n):
            high, low = limits[i, x // 2]
            place = i32(c * 8 + x % 2)
            keep = b.icmp_signed("<=", place, high)
            if low is not None:
                keep = b.and_(keep, b.icmp_signed(">=", place, low))
            made[at] = b.select(keep, s[at], f32(NEG_INF))
        return made

    return mask_rows_


def row_max(blocks: int, n: int) -> Any:
    """``row_max(m, s) -> m``: the maximum so far of each of the lane's rows."""

    @emitted(floats(2 * blocks), floats(2 * blocks), floats(blocks * n // 2))
    def row_max_(b: ir.IRBuilder, m: Values, s: Values) -> Values:
        top = list(m)
        for at, i, _, x in _elements(blocks, n):
            if x % 2 == 0:  # two neighbours first: half the length of the chain
                row, pair = 2 * i + x // 2, ptx.maximum(b, s[at], s[at + 1])
                top[row] = ptx.maximum(b, top[row], pair)
        for mask in (1, 2):  # the quad's four lanes share the row
            top = [ptx.maximum(b, t, ptx.shuffle_xor(b, t, mask)) for t in top]
        return top

    return row_max_


def softmax_base(blocks: int) -> Any:
    """``softmax_base(top, to_log2) -> base``: the maxima in base 2, 0 for a row without a key yet.

    The 0 avoids inf - inf: such a row's scores are all -inf, and 2^(-inf - 0) = 0.
    """
    kind = floats(2 * blocks)

    @emitted(kind, kind, types.float32)
    def softmax_base_(b: ir.IRBuilder, top: Values, to_log2: ir.Value) -> Values:
        none = [b.fcmp_ordered("==", t, f32(NEG_INF)) for t in top]
        return [b.select(e, f32(0.0), b.fmul(t, to_log2)) for e, t in zip(none, top, strict=True)]

    return softmax_base_


def rescaling(blocks: int) -> Any:
    """``rescaling(m, base, to_log2) -> alpha = exp(m - m_new)``, m the maxima before this visit."""
    kind = floats(2 * blocks)

    @emitted(kind, kind, kind, types.float32)
    def rescaling_(b: ir.IRBuilder, m: Values, base: Values, to_log2: ir.Value) -> Values:
        return [ptx.exp2(b, b.fsub(b.fmul(x, to_log2), y)) for x, y in zip(m, base, strict=True)]

    return rescaling_


def scale_rows(blocks: int, n: int) -> Any:
    """``scale_rows(c, factors) -> c``, each of the lane's rows times its factor."""
    kind = floats(blocks * n // 2)

    @emitted(kind, kind, floats(2 * blocks))
    def scale_rows_(b: ir.IRBuilder, c: Values, factors: Values) -> Values:
        return [b.fmul(c[at], factors[2 * i + x // 2]) for at, i, _, x in _elements(blocks, n)]

    return scale_rows_


def scale_all(count: int) -> Any:
    """``scale_all(c, factor) -> c``."""

    @emitted(floats(count), floats(count), types.float32)
    def scale_all_(b: ir.IRBuilder, c: Values, factor: ir.Value) -> Values:
        return [b.fmul(x, factor) for x in c]

    return scale_all_


def exponentials(blocks: int, n: int) -> Any:
    """``exponentials(s, base, l, alpha, to_log2) -> p, l``: P = exp(S - m_new), l = alpha l + sum P.

    l is summed over the lane's own columns only; the quad adds up once, at the end.
    """
    s_kind, l_kind = floats(blocks * n // 2), floats(2 * blocks)

    @emitted([s_kind, l_kind], s_kind, l_kind, l_kind, l_kind, types.float32)
    def exponentials_(
        b: ir.IRBuilder, s: Values, base: Values, l: Values, alpha: Values, to_log2: ir.Value
    ) -> list[Values]:
        p, l = list(s), [b.fmul(x, y) for x, y in zip(l, alpha, strict=True)]
        minus = [b.fsub(f32(-0.0), x) for x in base]
        for at, i, _, x in _elements(blocks, n):
            row = 2 * i + x // 2
            p[at] = ptx.exp2(b, b.fma(s[at], to_log2, minus[row]))
            l[row] = b.fadd(l[row], p[at])
        return [p, l]

    return exponentials_


def finish_rows(blocks: int) -> Any:
    """``finish_rows(m, l, to_natural) -> 1 / l, lse``; a row without a key gives 0 and -inf."""
    kind = floats(2 * blocks)

    @emitted([kind, kind], kind, kind, types.float32)
    def finish_rows_(b: ir.IRBuilder, m: Values, l: Values, to_natural: ir.Value) -> list[Values]:
        for mask in (1, 2):
            l = [b.fadd(x, ptx.shuffle_xor(b, x, mask)) for x in l]
        inverse, lse = [], []
        for top, total in zip(m, l, strict=True):
            empty = b.fcmp_ordered("==", total, f32(0.0))
            inverse.append(b.select(empty, f32(0.0), ptx.reciprocal(b, total)))
            natural = b.fmul(ptx.log2(b, total), f32(1 / LOG2E))
            value = b.fadd(b.fmul(top, to_natural), natural)
            lse.append(b.select(empty, f32(NEG_INF), value))
        return [inverse, lse]

    return finish_rows_


# -- backward -----------------------------------------------------------------------------------------


def load_rows(blocks: int) -> Any:
    """``load_rows(address) -> values``: one float32 from shared memory for each of the lane's rows."""

    @emitted(floats(2 * blocks), types.int32)
    def load_rows_(b: ir.IRBuilder, address: ir.Value) -> Values:
        mine = b.add(address, b.shl(b.lshr(_lane(b), i32(2)), i32(2)))
        return [
            ptx.load_shared_float(b, b.add(mine, i32((i * 16 + half * 8) * 4)))
            for i in range(blocks)
            for half in range(2)
        ]

    return load_rows_


def load_columns(n: int) -> Any:
    """``load_columns(address) -> values``: the same for each of the lane's n / 4 columns."""

    @emitted(floats(n // 4), types.int32)
    def load_columns_(b: ir.IRBuilder, address: ir.Value) -> Values:
        mine = b.add(address, b.shl(b.and_(_lane(b), i32(3)), i32(3)))
        return [
            value
            for c in range(n // 8)
            for value in ptx.load_shared_pair(b, b.add(mine, i32(c * 32)))
        ]

    return load_columns_


def _per_element(values: Values, by_row: bool, i: int, c: int, x: int) -> ir.Value:
    return values[2 * i + x // 2] if by_row else values[2 * c + x % 2]


def probabilities(blocks: int, n: int, by_row: bool, scaled: bool, softcap: bool) -> Any:
    """``probabilities(s, lse, scale, cap, to_log2) -> p, slope``: P = exp(S - L), from raw Q K^T.

    `lse` has a value for each row (S) or column (S^T) of the lane. `slope` is the softcap's
    derivative, 1 - tanh^2, and one unused 0 without a softcap.
    """
    kind = floats(blocks * n // 2)
    per = floats(2 * blocks if by_row else n // 4)
    slope_kind = kind if softcap else floats(1)

    @emitted([kind, slope_kind], kind, per, *[types.float32] * 3)
    def probabilities_(
        b: ir.IRBuilder,
        s: Values,
        lse: Values,
        scale: ir.Value,
        cap: ir.Value,
        to_log2: ir.Value,
    ) -> list[Values]:
        minus = [b.fmul(x, f32(-LOG2E)) for x in lse]
        inverse = ptx.reciprocal(b, cap) if softcap else None
        p, slope = list(s), []
        for at, i, c, x in _elements(blocks, n):
            score = b.fmul(s[at], scale) if scaled else s[at]
            if softcap:
                y = _tanh(b, b.fmul(score, inverse))
                slope.append(b.fsub(f32(1.0), b.fmul(y, y)))
                score = b.fmul(cap, y)
            p[at] = ptx.exp2(b, b.fma(score, to_log2, _per_element(minus, by_row, i, c, x)))
        return [p, slope or [f32(0.0)]]

    return probabilities_


def score_gradients(blocks: int, n: int, by_row: bool, softcap: bool) -> Any:
    """``score_gradients(p, dp, delta, slope) -> dS = P (dP - delta) slope``."""
    kind = floats(blocks * n // 2)
    per = floats(2 * blocks if by_row else n // 4)

    @emitted(kind, kind, kind, per, kind if softcap else floats(1))
    def score_gradients_(
        b: ir.IRBuilder, p: Values, dp: Values, delta: Values, slope: Values
    ) -> Values:
        ds = list(p)
        for at, i, c, x in _elements(blocks, n):
            ds[at] = b.fmul(p[at], b.fsub(dp[at], _per_element(delta, by_row, i, c, x)))
            if softcap:
                ds[at] = b.fmul(ds[at], slope[at])
        return ds

    return score_gradients_


def mask_probabilities(blocks: int, n: int, by_row: bool, left: bool, right: bool) -> Any:
    """``mask_probabilities(p, query, key, offset, key_stop, left, right) -> p``: dropped ones are 0.

    The rule of `mask_rows`; with `by_row` false the fragment is P^T, rows being keys. L = -inf (a
    row without a key) makes exp(S - L) infinite, so dropping is a selection, never a product.
    """
    kind = floats(blocks * n // 2)

    @emitted(kind, kind, *[types.int32] * 6)
    def mask_probabilities_(
        b: ir.IRBuilder,
        p: Values,
        query: ir.Value,
        key: ir.Value,
        offset: ir.Value,
        key_stop: ir.Value,
        window_left: ir.Value,
        window_right: ir.Value,
    ) -> Values:
        lane = _lane(b)
        down, across = b.lshr(lane, i32(2)), b.shl(b.and_(lane, i32(3)), i32(1))
        q, k = (down, across) if by_row else (across, down)
        q, k = b.add(b.add(query, q), offset), b.add(key, k)
        distance = b.sub(k, q)  # key - (query + offset) at the lane's first element
        room = b.sub(key_stop, k)  # keys from the lane's first to the end
        made = list(p)
        for at, i, c, x in _elements(blocks, n):
            rows, cols = i * 16 + x // 2 * 8, c * 8 + x % 2
            dq, dk = (rows, cols) if by_row else (cols, rows)
            keep = b.icmp_signed(">", room, i32(dk))
            here = b.add(distance, i32(dk - dq))
            if right:
                keep = b.and_(keep, b.icmp_signed("<=", here, window_right))
            if left:
                limit = b.sub(i32(0), window_left)
                keep = b.and_(keep, b.icmp_signed(">=", here, limit))
            made[at] = b.select(keep, p[at], f32(0.0))
        return made

    return mask_probabilities_


# -- out of registers -----------------------------------------------------------------------------------


def stage(bf16: bool, blocks: int, n: int, tile: Tile) -> Any:
    """``stage(address, row, col, c)``: round accumulators to 16 bits into a tile, at (row, col)."""

    @emitted(None, types.int32, types.int32, types.int32, floats(blocks * n // 2))
    def stage_(b: ir.IRBuilder, address: ir.Value, row: ir.Value, col: ir.Value, c: Values) -> None:
        lane = _lane(b)
        first = b.add(row, b.lshr(lane, i32(2)))
        base = b.add(address, b.shl(b.and_(lane, i32(3)), i32(2)))
        chunk = b.lshr(col, i32(3))
        for i in range(blocks):
            for half in range(2):
                r = b.add(first, i32(i * 16 + half * 8))
                for piece in range(n // 8):
                    at = (i * (n // 8) + piece) * 4 + half * 2
                    to = b.add(base, tile.offset(b, r, b.add(chunk, i32(piece))))
                    ptx.store_shared(b, to, ptx.pack(b, bf16, c[at], c[at + 1]))

    return stage_


def store_rows(blocks: int) -> Any:
    """``store_rows(address, values, first, stop) -> bytes``: one float32 a row to HBM, if it exists.

    The first lane of a quad stores; `first` is the warp's first row, `address` that of row 0.
    """

    @emitted(types.int32, types.int64, floats(2 * blocks), types.int32, types.int32)
    def store_rows_(
        b: ir.IRBuilder, address: ir.Value, values: Values, first: ir.Value, stop: ir.Value
    ) -> ir.Value:
        lane, stored = _lane(b), i32(0)
        leads = b.icmp_unsigned("==", b.and_(lane, i32(3)), i32(0))
        for at, value in enumerate(values):
            row = b.add(first, b.add(b.lshr(lane, i32(2)), i32(at * 8)))
            inside = b.and_(leads, b.icmp_signed("<", row, stop))
            with b.if_then(inside):
                to = b.add(address, b.sext(b.mul(row, i32(4)), I64))
                ptr = b.inttoptr(to, ir.PointerType(F32, 1))
                b.store(value, ptr)
            stored = b.add(stored, b.select(inside, i32(4), i32(0)))
        return stored

    return store_rows_


def reduce_tile(blocks: int, n: int, width: int, wide: bool) -> Any:
    """``reduce_tile(address, c, row, col, rows) -> bytes``: add accumulators to float32 rows in HBM.

    Parameters
    ----------
    width : int
        Elements of a row in HBM; columns past it are left out.
    wide : bool
        Four neighbours in one instruction (sm_90): two lanes trade, so that the even one adds the
        left 8-column piece's four and the odd one the right piece's.
    """

    @emitted(types.int32, types.int64, floats(blocks * n // 2), *[types.int32] * 3)
    def reduce_tile_(
        b: ir.IRBuilder,
        address: ir.Value,
        c: Values,
        row: ir.Value,
        col: ir.Value,
        rows: ir.Value,
    ) -> ir.Value:
        fits_down = b.icmp_signed("<=", b.add(row, i32(16 * blocks)), rows)
        whole = b.and_(fits_down, b.icmp_signed("<=", b.add(col, i32(n)), i32(width)))
        with b.if_else(whole) as (then, otherwise):
            with then:  # nearly every tile: no comparison
                all_added = add_all(b, address, c, row, col, None)
                after_whole = b.block
            with otherwise:
                some_added = add_all(b, address, c, row, col, rows)
                after_part = b.block
        added = b.phi(I32)
        added.add_incoming(all_added, after_whole)
        added.add_incoming(some_added, after_part)
        return added

    def add_all(
        b: ir.IRBuilder, address: ir.Value, c: Values, row: ir.Value, col: ir.Value, rows: Any
    ) -> ir.Value:
        lane, added = _lane(b), i32(0)
        odd, pair = b.trunc(lane, I1), b.and_(lane, i32(3))
        for i in range(blocks):
            for half in range(2):
                r = b.add(row, b.add(b.lshr(lane, i32(2)), i32(i * 16 + half * 8)))
                line = b.add(address, b.sext(b.mul(r, i32(width * 4)), I64))
                for piece in range(0, n // 8, 2):
                    at = (i * (n // 8) + piece) * 4 + half * 2
                    four = [c[at], c[at + 1], c[at + 4], c[at + 5]]
                    first = b.add(col, i32(piece * 8))
                    for place, values in additions(b, first, four, odd, pair):
                        size, to = i32(4 * len(values)), b.shl(place, i32(2))
                        to = b.add(line, b.sext(to, I64))
                        if rows is None:
                            ptx.add_float(b, to, values)
                        else:
                            inside = b.icmp_signed("<", r, rows)
                            inside = b.and_(inside, b.icmp_signed("<", place, i32(width)))
                            with b.if_then(inside):
                                ptx.add_float(b, to, values)
                            size = b.select(inside, size, i32(0))
                        added = b.add(added, size)
        return added

    def additions(
        b: ir.IRBuilder, first: ir.Value, four: Values, odd: ir.Value, pair: ir.Value
    ) -> list[tuple[ir.Value, Values]]:
        """What this lane adds, and at which columns, of its four elements of two 8-column pieces."""
        if not wide:
            own = b.add(first, b.shl(pair, i32(1)))
            return [(b.add(own, i32(e // 2 * 8 + e % 2)), [x]) for e, x in enumerate(four)]
        left, right = four[:2], four[2:]
        got = [ptx.shuffle_xor(b, b.select(odd, x, z), 1) for x, z in zip(left, right, strict=True)]
        lower = [b.select(odd, g, x) for g, x in zip(got, left, strict=True)]
        upper = [b.select(odd, z, g) for z, g in zip(right, got, strict=True)]
        own = b.add(b.shl(b.lshr(pair, i32(1)), i32(2)), b.select(odd, i32(8), i32(0)))
        return [(b.add(first, own), lower + upper)]

    return reduce_tile_
