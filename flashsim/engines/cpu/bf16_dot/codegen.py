"""LLVM IR of the operations on bfloat16 pairs (`operations.py`), as vector code or AMX tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from llvmlite import ir

from flashsim.engines.cpu.bf16_dot import amx_tiles
from flashsim.engines.cpu.micro_kernels.codegen import build_product
from flashsim.engines.cpu.micro_kernels.exponential import SLACK
from flashsim.engines.cpu.micro_kernels.pair_writer import PairCode
from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.engines.cpu.micro_kernels.writer import INT, Code


def build_any_product(module: ir.Module, block: Blocking, itemsize: int, mode: str):
    """Build `plain.product_set` or `plain.product_add`.

    The arguments are C, ldc, A, row, step, B, ldb, rows, n.
    """
    if not block.pairs:
        return build_product(module, block, itemsize, mode)
    return PRODUCTS[block.pairs](module, block, mode)


def build_vector_product(
    module: ir.Module, block: Blocking, mode: str, writer: type[Code] = PairCode
):
    """Build a product as `codegen.build_product` does, with bfloat16 pairs as elements."""
    code = PairCode(module, f"product_{mode}", block, 4, "pipiipiii")
    if code.is_new:
        C, ldc, A, row, _, *rest = code.function.args
        whole = build_product(module, block, 4, mode, writer)
        code.b.call(whole, [C, ldc, A, row, ir.Constant(INT, 1), *rest])
        code.done()
    return code.function


def build_tile_product(
    module: ir.Module, block: Blocking, mode: str, lower: Callable = amx_tiles.lower
):
    """Build a product of AMX tiles, 2 x 2 tiles of C at a time.

    The arguments `rows` and `n` must be multiples of a tile's sides.
    """
    code = PairCode(module, f"product_{mode}", block, 4, "pipiipiii")
    if not code.is_new:
        return code.function
    C, ldc, A, row, _, B, ldb, rows, n = code.function.args
    b, columns = code.b, code.width // amx_tiles.SIDE
    steps = [(at, min(amx_tiles.BLOCK, columns - at)) for at in range(0, columns, amx_tiles.BLOCK)]

    def blocks(first, height: int) -> None:
        for at, width in steps:
            step = lower(module, block, mode, height, width)
            c = code.at(C, b.mul(first, ldc), amx_tiles.SIDE * at)
            a, right = code.at(A, b.mul(first, row)), code.at(B, amx_tiles.SIDE * at)
            b.call(step, [c, ldc, a, row, right, ldb, n])

    def body(r, _):
        blocks(r, amx_tiles.BLOCK)
        return []

    code.loop(rows, [], body, by=amx_tiles.BLOCK * amx_tiles.SIDE)
    left = b.and_(rows, ir.Constant(INT, amx_tiles.SIDE))

    def last(_r, _):
        blocks(b.sub(rows, left), 1)
        return []

    code.loop(left, [], last, by=amx_tiles.SIDE)
    return code.done()


#: The builders of products, by `Blocking.pairs`.
PRODUCTS: dict[str, Callable] = {"vdpbf16ps": build_vector_product, "amx": build_tile_product}


def build_configure(module: ir.Module, block: Blocking, itemsize: int):
    """Build `operations.begin_tiles`."""
    return TILES.get(block.pairs, (_nothing, _nothing))[0](module, block, itemsize)


def build_release(module: ir.Module, block: Blocking, itemsize: int):
    """Build `operations.end_tiles`."""
    return TILES.get(block.pairs, (_nothing, _nothing))[1](module, block, itemsize)


def _nothing(module: ir.Module, block: Blocking, itemsize: int):
    code = Code(module, "no_tiles", block, itemsize, "p")
    return code.done() if code.is_new else code.function


#: The code that a thread runs before its first tile and after its last tile.
TILES: dict[str, tuple[Callable, Callable]] = {
    "amx": (amx_tiles.build_configure, amx_tiles.build_release)
}


def build_pair_softmax(module: ir.Module, block: Blocking, itemsize: int):
    """Build `operations.online_softmax_pairs`, with arguments S, rows, m, l, alpha, factor, P."""
    code = PairCode(module, "softmax", block, 4, "pippppp")
    if not code.is_new:
        return code.function
    S, rows, m, l, alpha, factor, P = code.function.args
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
        """Compute P and its sums for two rows, one vector at a time, all in registers."""
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
    return code.done()


def build_pairs_of_rows(module: ir.Module, block: Blocking, itemsize: int):
    """Build `operations.pairs_of_rows`, with arguments X, ld, rows, P."""
    code = PairCode(module, "pairs_of_rows", block, 4, "piip")
    if not code.is_new:
        return code.function
    X, ld, rows, P = code.function.args
    b, unit = code.b, ir.Constant(INT, 1)

    def keep(r, second) -> None:
        row = code.at(P, code.times(b.lshr(r, unit), code.width))
        above = code.vectors(code.at(X, b.mul(r, ld)))
        for x, y, address in zip(above, second, code.vectors(row), strict=True):
            code.store(code.pair(code.load(x), y), address)

    def two(r, _):
        below = code.vectors(code.at(X, b.mul(b.add(r, unit), ld)))
        keep(r, [code.load(y) for y in below])
        return []

    def odd(_r, _):
        keep(b.sub(rows, unit), [code.const(0)] * code.vecs)
        return []

    code.loop(rows, [], two, by=2)
    code.loop(b.and_(rows, unit), [], odd)
    return code.done()


def build_pairs_of_lanes(module: ir.Module, block: Blocking, itemsize: int):
    """Build `operations.pairs_of_lanes`, with arguments X, ld, rows, P, row."""
    code = PairCode(module, "pairs_of_lanes", block, 4, "piipi")
    if not code.is_new:
        return code.function
    X, ld, rows, P, row = code.function.args
    b = code.b
    half = ir.VectorType(ir.IntType(16), code.lanes).as_pointer()

    def body(r, _):
        to = b.mul(r, row)
        for i, x in enumerate(code.vectors(code.at(X, b.mul(r, ld)))):
            address = b.bitcast(code.at(P, to, i * code.lanes // 2), half)
            b.store(code.halves(code.load(x)), address, align=4)
        return []

    code.loop(rows, [], body)
    return code.done()


def _squares(name: str, args: str, fetch: Callable, put: Callable) -> Callable:
    """Return a builder of a function that transposes a panel, one square at a time.

    The function ``fetch(code, arguments, y, x, r)`` loads row r of the square that starts at (y,
    x), and ``put`` stores row r of the transposed square. The last two arguments of the built
    function are the panel's height and width in elements, both in whole squares.
    """

    def build(module: ir.Module, block: Blocking, itemsize: int):
        code = PairCode(module, name, block, 4, args + "ii")
        if not code.is_new:
            return code.function
        *operands, down, across = code.function.args

        def row(y, _):
            def square(x, _):
                values = code.transposed(
                    [fetch(code, operands, y, x, r) for r in range(code.lanes)]
                )
                for r, value in enumerate(values):
                    put(code, operands, y, x, r, value)
                return []

            code.loop(across, [], square, by=code.lanes)
            return []

        code.loop(down, [], row, by=code.lanes)
        return code.done()

    return build


def _load16(code: PairCode, address):
    """Load 16-bit numbers into 32-bit lanes."""
    kind = ir.VectorType(ir.IntType(16), code.lanes)
    value = code.b.load(code.b.bitcast(address, kind.as_pointer()), align=2)
    return code.b.zext(value, code.ints(0).type)


def _at16(code: PairCode, base, *offsets):
    """Return the address of the 16-bit number at the sum of the offsets."""
    return code.at(code.b.bitcast(base, ir.IntType(16).as_pointer()), *offsets)


def _plus(code: PairCode, x, r: int):
    return code.b.add(x, ir.Constant(INT, r))


def _fetch_columns(code: PairCode, operands, y, x, r: int):
    """Load the two rows of X in row pair y + r, merged into pairs, columns from x on."""
    _, _, X, d = operands
    start = code.b.mul(code.times(_plus(code, y, r), 2), d)
    low, high = (_load16(code, _at16(code, X, start, x, *more)) for more in ((), (d,)))
    pair = code.b.or_(low, code.b.shl(high, code.ints(16)))
    return code.b.bitcast(pair, code.vector)


def _put_columns(code: PairCode, operands, y, x, r: int, value) -> None:
    out, row, _, _ = operands
    code.store(value, code.at(out, code.b.mul(_plus(code, x, r), row), y))


#: out, row, X, d, pairs, columns: see `operations.transpose_columns`.
build_transpose_columns = _squares("columns", "pipi", _fetch_columns, _put_columns)


def _fetch_rows(code: PairCode, operands, y, x, r: int):
    """Load row y + r of X as pairs of neighbours, from pair x on."""
    _, X, d = operands
    return code.load_at(_at16(code, X, code.b.mul(_plus(code, y, r), d), code.times(x, 2)))


def _put_rows(code: PairCode, operands, y, x, r: int, value) -> None:
    code.store(value, code.at(operands[0], code.times(_plus(code, x, r), code.width), y))


#: out, X, d, rows, pairs: see `operations.transpose_rows`.
build_transpose_rows = _squares("rows", "ppi", _fetch_rows, _put_rows)


def _fetch_panel(code: PairCode, operands, y, x, r: int):
    """Load row x + r of the panel from lane y on, and multiply each lane by its factor."""
    panel, _, _, factors = operands
    value = code.load(code.at(panel, code.times(_plus(code, x, r), code.width), y))
    return code.b.fmul(value, code.load(code.at(factors, y)))


def _put_panel(code: PairCode, operands, y, x, r: int, value) -> None:
    _, X, d, _ = operands
    halves = code.halves(value)
    address = _at16(code, X, code.b.mul(_plus(code, y, r), d), x)
    code.b.store(halves, code.b.bitcast(address, halves.type.as_pointer()), align=2)


#: panel, X, d, factors, rows, columns: see `operations.transpose_panel`.
build_transpose_panel = _squares("panel", "ppip", _fetch_panel, _put_panel)


def build_copy_pairs(module: ir.Module, block: Blocking, itemsize: int):
    """Build `operations.copy_pairs`, with arguments out, row, X, rows, pairs."""
    code = PairCode(module, "copy_pairs", block, 4, "pipii")
    if not code.is_new:
        return code.function
    out, row, X, rows, pairs = code.function.args
    b = code.b

    def line(r, _):
        def vector(x, _):
            start = code.times(b.add(b.mul(r, pairs), x), 2)
            value = code.load_at(_at16(code, X, start))
            code.store(value, code.at(out, b.mul(r, row), x))
            return []

        code.loop(pairs, [], vector, by=code.lanes)
        return []

    code.loop(rows, [], line)
    return code.done()


def build_add_scaled(module: ir.Module, block: Blocking, itemsize: int):
    """Build `operations.add_scaled`, with arguments Y, X, ld, rows, factor."""
    code = PairCode(module, "add_scaled", block, 4, "ppiip")
    if not code.is_new:
        return code.function
    Y, X, ld, rows, factor = code.function.args
    scale = code.spread(factor)

    def body(r, _):
        places = (code.vectors(code.at(base, code.b.mul(r, ld))) for base in (Y, X))
        for y, x in zip(*places, strict=True):
            code.store(code.fma(code.load(x), scale, code.load(y)), y)
        return []

    code.loop(rows, [], body)
    return code.done()


def build_scale(module: ir.Module, block: Blocking, itemsize: int, by_lane: bool):
    """Build `operations.scale_panel` or `scale_lanes`, with arguments X, ld, rows, factor."""
    name = "scale_lanes" if by_lane else "scale_panel"
    code = PairCode(module, name, block, 4, "piip")
    if not code.is_new:
        return code.function
    X, ld, rows, factor = code.function.args
    b = code.b
    factors = (
        [code.load(x) for x in code.vectors(factor)]
        if by_lane
        else [code.spread(factor)] * code.vecs
    )

    def body(r, _):
        for f, x in zip(factors, code.vectors(code.at(X, b.mul(r, ld))), strict=True):
            code.store(b.fmul(code.load(x), f), x)
        return []

    if by_lane:  # a lane whose maximum did not change keeps its sums
        ones = [b.fcmp_unordered("!=", f, code.const(1)) for f in factors]
        other = functools.reduce(b.or_, ones)
        bits = b.bitcast(other, ir.IntType(code.lanes))
        rows = b.select(
            b.icmp_unsigned("==", bits, ir.Constant(bits.type, 0)), ir.Constant(INT, 0), rows
        )
    code.loop(rows, [], body)
    return code.done()
