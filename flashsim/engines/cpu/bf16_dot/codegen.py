"""LLVM IR of the operations on bfloat16 pairs (`operations.py`), as vector code or AMX tiles."""

import functools
from collections.abc import Callable

import numpy as np
from llvmlite import ir

from flashsim.engines.cpu.bf16_dot.amx_tiles import BLOCK, SIDE, build_tiles
from flashsim.engines.cpu.micro_kernels.codegen import build_product
from flashsim.engines.cpu.micro_kernels.exponential import SLACK
from flashsim.engines.cpu.micro_kernels.pair_writer import PairCode, pair_builder
from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.engines.cpu.micro_kernels.writer import INT


def build_any_product(module: ir.Module, block: Blocking, itemsize: int, mode: str):
    """Write the vector or AMX code of `plain.product_set` or `plain.product_add`."""
    builders = {"": build_product, "amx": build_tile_product, "vdpbf16ps": build_vector_product}
    return builders[block.pairs](module, block, itemsize, mode=mode)


@pair_builder("pipiipiii")
def build_vector_product(code: PairCode, C, ldc, A, row, _step, *rest, mode: str) -> None:
    """Write the vector code of a matrix product whose elements are bfloat16 pairs."""
    whole = build_product(*code.target, mode=mode, writer=PairCode)
    code.b.call(whole, [C, ldc, A, row, ir.Constant(INT, 1), *rest])


@pair_builder("pipiipiii")
def build_tile_product(
    code: PairCode, C, ldc, A, row, _step, B, ldb, rows, n, *, mode: str
) -> None:
    """Write AMX code for a matrix product C = A B, with up to 2 x 2 tiles of C at once."""
    b, columns = code.b, code.width // SIDE
    steps = [(at, min(BLOCK, columns - at)) for at in range(0, columns, BLOCK)]

    def blocks(first, height: int) -> None:
        for at, width in steps:
            step = build_tiles(*code.target, mode=mode, rows=height, columns=width)
            c = code.at(C, b.mul(first, ldc), SIDE * at)
            a, right = code.at(A, b.mul(first, row)), code.at(B, SIDE * at)
            b.call(step, [c, ldc, a, row, right, ldb, n])

    code.loop(rows, [], lambda r, _: blocks(r, BLOCK), by=BLOCK * SIDE)
    left = b.and_(rows, ir.Constant(INT, SIDE))
    code.loop(left, [], lambda *_: blocks(b.sub(rows, left), 1), by=SIDE)


@pair_builder("pippppp")
def build_pair_softmax(code: PairCode, S, rows, m, l, alpha, factor, P) -> None:
    """Write the vector code of `operations.online_softmax_pairs`."""
    b, minus_inf, unit = code.b, code.const(-np.inf), ir.Constant(INT, 1)
    masked = code.masked()
    scale, last = code.spread(factor), b.sub(rows, unit)

    def scores(r, extra: int = 0) -> list:
        return code.vectors(code.at(S, code.times(r, code.width), extra * code.width))

    def largest(r, tops, height: int = 1):
        places = [x for extra in range(height) for x in scores(r, extra)]
        return [code.larger(code.load(x), top) for x, top in zip(places, tops, strict=True)]

    tops = code.loop(rows, [minus_inf] * (2 * code.vecs), lambda r, t: largest(r, t, 2), by=2)
    tops = [code.larger(x, y) for x, y in zip(tops, tops[code.vecs :], strict=False)]
    tops = code.loop(b.and_(rows, unit), tops, lambda _, t: largest(last, t))
    before = [code.load(x) for x in code.vectors(m)]
    needed = [b.fmul(top, scale) for top in tops]
    after = [
        b.select(b.fcmp_ordered(">", new, old), b.fadd(new, code.const(SLACK)), old)
        for new, old in zip(needed, before, strict=True)
    ]
    seen = [b.fcmp_ordered(">", x, masked) for x in after]
    bases = [b.select(s, x, code.const(0)) for s, x in zip(seen, after, strict=True)]
    alphas = [code.power(b.fsub(old, base)) for old, base in zip(before, bases, strict=True)]
    for values, address in ((after, m), (alphas, alpha)):
        for value, x in zip(values, code.vectors(address), strict=True):
            code.store(value, x)
    less = [b.fneg(base) for base in bases]

    def power(address, base):
        return code.power(code.fma(code.load(address), scale, base))

    def keep(r, first, second, sums) -> list:
        """Emit code that stores two rows of P, and adds them to each lane's running sum."""
        row = code.at(P, code.times(b.lshr(r, unit), code.width))
        for i, address in enumerate(code.vectors(row)):
            x = power(first[i], less[i])
            y = power(second[i], less[i]) if second else code.const(0)
            code.store(code.pair(x, y), address)
            sums = [b.fadd(s, b.fadd(x, y)) if k == i else s for k, s in enumerate(sums)]
        return sums

    sums = [code.const(0)] * code.vecs
    sums = code.loop(rows, sums, lambda r, s: keep(r, scores(r), scores(r, 1), s), by=2)
    sums = code.loop(b.and_(rows, unit), sums, lambda _, s: keep(last, scores(last), [], s))
    for a, total, x in zip(alphas, sums, code.vectors(l), strict=True):
        code.store(code.fma(a, code.load(x), total), x)


@pair_builder("piip")
def build_pairs_of_rows(code: PairCode, X, ld, rows, P) -> None:
    """Write the vector code of `operations.pairs_of_rows`."""
    b, unit = code.b, ir.Constant(INT, 1)

    def keep(r, second) -> None:
        row = code.at(P, code.times(b.lshr(r, unit), code.width))
        above = code.vectors(code.at(X, b.mul(r, ld)))
        for x, y, address in zip(above, second, code.vectors(row), strict=True):
            code.store(code.pair(code.load(x), y), address)

    def two(r, _):
        below = code.vectors(code.at(X, b.mul(b.add(r, unit), ld)))
        keep(r, [code.load(y) for y in below])

    zeros = [code.const(0)] * code.vecs
    code.loop(rows, [], two, by=2)
    code.loop(b.and_(rows, unit), [], lambda *_: keep(b.sub(rows, unit), zeros))


@pair_builder("piipi")
def build_pairs_of_lanes(code: PairCode, X, ld, rows, P, row) -> None:
    """Write the vector code of `operations.pairs_of_lanes`."""
    b = code.b
    half = ir.VectorType(ir.IntType(16), code.lanes).as_pointer()

    def body(r, _):
        to = b.mul(r, row)
        for i, x in enumerate(code.vectors(code.at(X, b.mul(r, ld)))):
            address = b.bitcast(code.at(P, to, i * code.lanes // 2), half)
            b.store(code.halves(code.load(x)), address, align=4)

    code.loop(rows, [], body)


def _squares(code: PairCode, down, across, fetch: Callable, put: Callable) -> None:
    """Emit code that transposes a panel of `down` x `across` elements, one square block at a time.

    ``fetch(y, x, r)`` loads row r of the square that starts at (y, x). ``put(y, x, r, value)``
    stores row r of the transposed square.
    """

    def square(y, x) -> None:
        values = code.transposed([fetch(y, x, r) for r in range(code.lanes)])
        for r, value in enumerate(values):
            put(y, x, r, value)

    def row(y, _):
        code.loop(across, [], lambda x, _: square(y, x), by=code.lanes)

    code.loop(down, [], row, by=code.lanes)


def _at16(code: PairCode, base, *offsets):
    """Return the address `base` plus offsets that count 16-bit numbers."""
    return code.at(code.b.bitcast(base, ir.IntType(16).as_pointer()), *offsets)


@pair_builder("pipiii")
def build_transpose_columns(code: PairCode, out, row, X, d, pairs, columns) -> None:
    """Write the vector code of `operations.transpose_columns`."""
    b, halves = code.b, ir.VectorType(ir.IntType(16), code.lanes)

    def fetch(y, x, r: int):
        """Emit a load of rows 2 (y + r) and 2 (y + r) + 1 of X, from column x on, as pairs."""
        start = b.mul(code.times(code.plus(y, r), 2), d)
        places = (_at16(code, X, start, x, *more) for more in ((), (d,)))
        values = (b.load(b.bitcast(at, halves.as_pointer()), align=2) for at in places)
        low, high = (b.zext(value, code.ints(0).type) for value in values)
        return b.bitcast(b.or_(low, b.shl(high, code.ints(16))), code.vector)

    def put(y, x, r: int, value) -> None:
        code.store(value, code.at(out, b.mul(code.plus(x, r), row), y))

    _squares(code, pairs, columns, fetch, put)


@pair_builder("ppiii")
def build_transpose_rows(code: PairCode, out, X, d, rows, pairs) -> None:
    """Write the vector code of `operations.transpose_rows`."""

    def fetch(y, x, r: int):
        """Emit a load of row y + r of X, from column 2 x on; neighbours form pairs."""
        return code.load_at(_at16(code, X, code.b.mul(code.plus(y, r), d), code.times(x, 2)))

    def put(y, x, r: int, value) -> None:
        code.store(value, code.at(out, code.times(code.plus(x, r), code.width), y))

    _squares(code, rows, pairs, fetch, put)


@pair_builder("ppipii")
def build_transpose_panel(code: PairCode, panel, X, d, factors, rows, columns) -> None:
    """Write the vector code of `operations.transpose_panel`."""
    b = code.b

    def fetch(y, x, r: int):
        """Emit a load of row x + r of the panel, from lane y on, times each lane's factor."""
        value = code.load(code.at(panel, code.times(code.plus(x, r), code.width), y))
        return b.fmul(value, code.load(code.at(factors, y)))

    def put(y, x, r: int, value) -> None:
        halves = code.halves(value)
        address = _at16(code, X, b.mul(code.plus(y, r), d), x)
        b.store(halves, b.bitcast(address, halves.type.as_pointer()), align=2)

    _squares(code, rows, columns, fetch, put)


@pair_builder("pipii")
def build_copy_pairs(code: PairCode, out, row, X, rows, pairs) -> None:
    """Write the vector code of `operations.copy_pairs`."""
    b = code.b

    def line(r, _):
        def vector(x, _):
            start = code.times(b.add(b.mul(r, pairs), x), 2)
            value = code.load_at(_at16(code, X, start))
            code.store(value, code.at(out, b.mul(r, row), x))

        code.loop(pairs, [], vector, by=code.lanes)

    code.loop(rows, [], line)


@pair_builder("ppiip")
def build_add_scaled(code: PairCode, Y, X, ld, rows, factor) -> None:
    """Write the vector code of `operations.add_scaled`."""
    scale = code.spread(factor)

    def body(r, _):
        places = (code.vectors(code.at(base, code.b.mul(r, ld))) for base in (Y, X))
        for y, x in zip(*places, strict=True):
            code.store(code.fma(code.load(x), scale, code.load(y)), y)

    code.loop(rows, [], body)


@pair_builder("piip")
def build_scale(code: PairCode, X, ld, rows, factor, *, by_lane: bool) -> None:
    """Write the code of `operations.scale_panel` or, if `by_lane`, of `operations.scale_lanes`."""
    b = code.b
    factors = (
        [code.load(x) for x in code.vectors(factor)]
        if by_lane
        else [code.spread(factor)] * code.vecs
    )

    def body(r, _):
        for f, x in zip(factors, code.vectors(code.at(X, b.mul(r, ld))), strict=True):
            code.store(b.fmul(code.load(x), f), x)

    if by_lane:  # a lane whose maximum did not change keeps its sums
        ones = [b.fcmp_unordered("!=", f, code.const(1)) for f in factors]
        other = functools.reduce(b.or_, ones)
        bits = b.bitcast(other, ir.IntType(code.lanes))
        rows = b.select(
            b.icmp_unsigned("==", bits, ir.Constant(bits.type, 0)), ir.Constant(INT, 0), rows
        )
    code.loop(rows, [], body)
