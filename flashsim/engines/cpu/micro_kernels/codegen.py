"""The operations of `panels.py` as vector code: LLVM IR with vector types.

Numba's own vectoriser gives a quarter of what a CPU can do on these loops and a BLAS call for each
tile half; what works is to say which values stay in registers. `build_*` write one LLVM function
each, for an element type and a `Blocking`, and know nothing of Numba; `vector.py` passes addresses
to them. LLVM lowers the same IR to AVX2, AVX-512 or NEON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.exponential import Exponential
from flashsim.engines.cpu.micro_kernels.registers import ROWS, Blocking

INT = ir.IntType(64)
VOID = ir.VoidType()
#: How many terms of a sum ahead a product brings its left operand near.
AHEAD = 12
#: Bytes of a cache line.
LINE = 64
#: Heads of which `build_dots` forms sums together.
HEADS = 4
ELEMENT = {4: ir.FloatType(), 8: ir.DoubleType()}
#: Arguments that a product takes besides, by its mode.
MORE = {"rescale": "p", "weigh": "pp"}


class Code:
    """Writes the body of one LLVM function over vectors of one type.

    Parameters
    ----------
    module : ir.Module
        Receives the function, unless it is there already.
    name : str
    block : Blocking
    itemsize : int
        4 (float) or 8 (double).
    args : str
        One letter an argument: ``p`` address of elements, ``i`` integer.
    """

    def __init__(
        self, module: ir.Module, name: str, block: Blocking, itemsize: int, args: str
    ) -> None:
        self.lanes, self.vecs = block.lanes(itemsize), block.vecs
        self.width, self.itemsize = self.lanes * block.vecs, itemsize
        self.element = ELEMENT[itemsize]
        self.vector = ir.VectorType(self.element, self.lanes)
        full = f"flashsim_{name}_{self.vecs}x{self.lanes}x{8 * itemsize}"
        self.is_new = full not in module.globals
        if self.is_new:
            kinds = [self.element.as_pointer() if a == "p" else INT for a in args]
            function = ir.Function(module, ir.FunctionType(VOID, kinds), full)
            function.linkage = "internal"
            function.attributes.add("noinline")  # its registers are its own
            self.b = ir.IRBuilder(function.append_basic_block())
        self.function: ir.Function = module.globals[full]

    # -- values ---------------------------------------------------------------------------------

    def const(self, value: float) -> ir.Constant:
        """A vector with `value` in every lane."""
        return ir.Constant(self.vector, [float(value)] * self.lanes)

    def ints(self, value: int) -> ir.Constant:
        """A vector of integers as wide as the elements."""
        kind = ir.VectorType(ir.IntType(8 * self.itemsize), self.lanes)
        return ir.Constant(kind, [value] * self.lanes)

    def at(self, base, *offsets):
        """The address `base` plus offsets in elements."""
        for offset in offsets:
            if isinstance(offset, int):
                offset = ir.Constant(INT, offset)
            base = self.b.gep(base, [offset])
        return base

    def times(self, x, factor: int):
        """An integer value times a constant."""
        return self.b.mul(x, ir.Constant(INT, factor))

    def load(self, address):
        """One vector from memory; panels need not be aligned."""
        pointer = self.b.bitcast(address, self.vector.as_pointer())
        return self.b.load(pointer, align=self.itemsize)

    def store(self, value, address) -> None:
        """One vector to memory."""
        self.b.store(value, self.b.bitcast(address, value.type.as_pointer()), align=self.itemsize)

    def prefetch(self, address) -> None:
        """Bring a cache line near; any address will do."""
        kind, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        signature = ir.FunctionType(VOID, [kind, flag, flag, flag])
        function = self.function.module.declare_intrinsic("llvm.prefetch", [kind], signature)
        read, near, data = (ir.Constant(flag, value) for value in (0, 3, 1))
        self.b.call(function, [self.b.bitcast(address, kind), read, near, data])

    def vectors(self, address) -> list:
        """The addresses of a panel row's vectors."""
        return [self.at(address, v * self.lanes) for v in range(self.vecs)]

    def spread(self, address):
        """The scalar at `address` in every lane."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        index = ir.IntType(32)
        one = self.b.insert_element(undefined, self.b.load(address), ir.Constant(index, 0))
        zeros = ir.Constant(ir.VectorType(index, self.lanes), [0] * self.lanes)
        return self.b.shuffle_vector(one, undefined, zeros)

    # -- arithmetic -----------------------------------------------------------------------------

    def fma(self, x, y, z):
        """x y + z, rounded once."""
        name = f"llvm.fma.v{self.lanes}f{8 * self.itemsize}"
        module = self.function.module
        if name not in module.globals:
            ir.Function(module, ir.FunctionType(self.vector, [self.vector] * 3), name)
        return self.b.call(module.globals[name], [x, y, z])

    def larger(self, x, y):
        """max(x, y); a NaN in y survives, one in x does not."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def smaller(self, x, y):
        """min(x, y); a NaN in y survives, one in x does not."""
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def whole(self, shifted: list) -> tuple[list, list]:
        """n and 2^n of several vectors that were rounded to n by adding `Exponential.magic`.

        The sum has n + bias in its low bits, whence one shift makes 2^n. Several vectors go step by
        step together, so that their chains overlap.
        """
        e, bits = Exponential.of(self.itemsize), self.ints(0).type
        ns = [self.b.fsub(t, self.const(e.magic)) for t in shifted]
        powers = [
            self.b.bitcast(self.b.shl(self.b.bitcast(t, bits), self.ints(e.mantissa)), self.vector)
            for t in shifted
        ]
        return ns, powers

    def polynomial(self, coefficients: tuple[float, ...], fs: list) -> list:
        """A polynomial, constant term first, of several vectors, step by step together."""
        ps = [self.const(coefficients[-1])] * len(fs)
        for coefficient in coefficients[-2::-1]:
            ps = [self.fma(p, f, self.const(coefficient)) for p, f in zip(ps, fs, strict=True)]
        return ps

    def exp(self, xs: list) -> list:
        """e^x of several vectors, x < bias ln 2, as 2^n 2^f with n + f = x log2 e, |f| <= 1/2.

        x log2 e itself is never rounded: two fused multiply-adds take n and f from it. What is
        below the smallest normal number, -inf with it, gives exactly 0; NaN stays NaN.
        """
        e, log2e = Exponential.of(self.itemsize), self.const(np.log2(np.e))
        low, magic = self.const(-e.bias * np.log(2)), self.const(e.magic)
        xs = [self.larger(low, x) for x in xs]
        ns, powers = self.whole([self.fma(x, log2e, magic) for x in xs])
        fs = [self.fma(x, log2e, self.b.fneg(n)) for x, n in zip(xs, ns, strict=True)]
        ps = self.polynomial(e.coefficients[1:], fs)
        parts = zip(fs, powers, ps, strict=True)
        return [self.fma(p, self.b.fmul(f, power), power) for f, power, p in parts]

    def tanh(self, xs: list, c) -> list:
        """tanh(x / c) of several vectors, within 2 or 3 units in the last place of any result.

        With z = 2 log2 e x / c and y = 2^z - 1 it is y / (y + 2), and y = 2^n (2^f - 1) + (2^n - 1)
        loses nothing where x is small: the polynomial is exact relative to 2^f - 1, and f takes in
        what was rounded off z and off its factor. Beyond 2^+-2 mantissa bits the quotient is +-1
        to the last bit.
        """
        e, b, one, two = Exponential.of(self.itemsize), self.b, self.const(1), self.const(2)
        high, low = (self.const(part) for part in e.twice_log2e)
        factor = b.fdiv(high, c)
        rest = b.fdiv(b.fadd(self.fma(b.fneg(factor), c, high), low), c)
        largest = float(np.finfo(np.float32 if self.itemsize == 4 else np.float64).max)
        edge = self.smaller(self.const(largest), b.fmul(self.const(np.log(2) * e.mantissa), c))
        xs = [self.smaller(edge, self.larger(b.fneg(edge), x)) for x in xs]
        zs = [b.fmul(x, factor) for x in xs]
        lost = [
            self.fma(x, rest, self.fma(x, factor, b.fneg(z))) for x, z in zip(xs, zs, strict=True)
        ]
        ns, powers = self.whole([b.fadd(z, self.const(e.magic)) for z in zs])
        fs = [b.fadd(b.fsub(z, n), rest) for z, n, rest in zip(zs, ns, lost, strict=True)]
        ps = self.polynomial(e.less_one, fs)
        ys = [
            self.fma(p, b.fmul(f, power), b.fsub(power, one))
            for f, power, p in zip(fs, powers, ps, strict=True)
        ]
        return [b.fdiv(y, b.fadd(y, two)) for y in ys]

    def transposed(self, rows: list) -> list:
        """The columns of a square: as many vectors as they have lanes.

        Pairs of vectors that are 1, 2, 4, .. apart exchange blocks as large: of the first one every
        second block moves over, of the other the rest comes back.
        """
        size = 1
        while size < self.lanes:
            lanes = range(self.lanes)
            first = [lane + (self.lanes - size) * (lane // size % 2) for lane in lanes]
            second = [lane + size for lane in first]
            for i in range(self.lanes):
                if i // size % 2 == 0:
                    pair = rows[i], rows[i + size]
                    rows[i], rows[i + size] = (self.pick(*pair, m) for m in (first, second))
            size *= 2
        return rows

    def summed(self, sums: list) -> Any:
        """A vector whose lanes are the sums of as many vectors' lanes: a `transposed` that adds."""
        size = 1
        while len(sums) > 1:
            lanes = range(self.lanes)
            first = [lane + (self.lanes - size) * (lane // size % 2) for lane in lanes]
            second = [lane + size for lane in first]
            pairs = zip(sums[::2], sums[1::2], strict=True)
            sums = [self.b.fadd(self.pick(x, y, first), self.pick(x, y, second)) for x, y in pairs]
            size *= 2
        return sums[0]

    def pick(self, x, y, lanes: list[int]):
        """A vector of lanes of x and, counted on from there, of y."""
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), lanes)
        return self.b.shuffle_vector(x, y, mask)

    def step(self, left, right, total):
        """What one row of B adds to a sum of a product."""
        return self.fma(left, right, total)

    # -- control --------------------------------------------------------------------------------

    def loop(self, count, carried: list, body: Callable, by: int = 1) -> list:
        """Do ``carried = body(i, carried)`` for i = 0, by, .. while i + by <= count; the last."""
        b, f = self.b, self.function
        before = b.block
        head, inside, after = (f.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(INT)
        i.add_incoming(ir.Constant(INT, 0), before)
        values = [b.phi(value.type) for value in carried]
        for phi, value in zip(values, carried, strict=True):
            phi.add_incoming(value, before)
        next_i = b.add(i, ir.Constant(INT, by))
        b.cbranch(b.icmp_signed("<=", next_i, count), inside, after)
        b.position_at_end(inside)
        results = body(i, values)
        i.add_incoming(next_i, b.block)
        for phi, value in zip(values, results, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return values

    def done(self) -> ir.Function:
        """End the function."""
        self.b.ret_void()
        return self.function


def build_step(
    module: ir.Module,
    block: Blocking,
    itemsize: int,
    mode: str,
    rows: int,
    writer: type[Code] = Code,
):
    """`rows` rows of a product, all accumulators in registers: C, ldc, A, row, step, B, ldb, n.

    For each x: one scalar of A a row is spread over the lanes and multiplied with the vectors of
    B's row x. `mode` is "set", "add", "rescale" (which takes the address of alpha as well, one a
    lane) or "weigh" (alpha, one a row, and an array of which as much is brought near as B has).
    """
    args = "pipiipii" + MORE.get(mode, "")
    code = writer(module, f"{mode}_{rows}", block, itemsize, args)
    if not code.is_new:
        return code.function
    C, ldc, A, row, step, B, ldb, n, *more = code.function.args
    for pointer in (C, A, B):
        pointer.add_attribute("noalias")
    c_rows, a_rows = [C], [A]
    for _ in range(1, rows):
        c_rows.append(code.at(c_rows[-1], ldc))
        a_rows.append(code.at(a_rows[-1], row))
    places = [c for c_row in c_rows for c in code.vectors(c_row)]
    if mode != "set" and block.prefetch:
        for place in places:  # used after the loop, by when they are near
            code.prefetch(place)

    def body(x, sums):
        right = [code.load(address) for address in code.vectors(code.at(B, code.b.mul(x, ldb)))]
        along = code.b.mul(x, step)
        if block.prefetch:
            next_step = code.at(A, code.times(row, rows), code.times(x, rows))
            ahead = code.at(A, along, code.times(step, AHEAD))
            code.prefetch(next_step if mode == "set" else ahead)
        if mode == "weigh":
            for address in code.vectors(code.at(more[1], code.times(x, code.width))):
                code.prefetch(address)
        left = [code.spread(code.at(a, along)) for a in a_rows]
        products = [(a, b) for a in left for b in right]
        return [code.step(a, b, s) for (a, b), s in zip(products, sums, strict=True)]

    sums = code.loop(n, [code.const(0)] * len(places), body)
    factors = []
    if mode == "rescale":
        factors = [code.load(address) for address in code.vectors(more[0])] * rows
    if mode == "weigh":
        factors = [code.spread(code.at(more[0], r)) for r in range(rows) for _ in range(code.vecs)]
    for i, (value, place) in enumerate(zip(sums, places, strict=True)):
        if mode == "add":
            value = code.b.fadd(code.load(place), value)
        elif factors:
            value = code.fma(code.load(place), factors[i], value)
        code.store(value, place)
    return code.done()


def build_product(
    module: ir.Module, block: Blocking, itemsize: int, mode: str, writer: type[Code] = Code
):
    """Any number of rows: `ROWS` at a time, then what is left: C, ldc, A, row, step, B, ldb, rows,
    n and what `build_step` takes besides.
    """
    args = "pipiipiii" + MORE.get(mode, "")
    code = writer(module, mode, block, itemsize, args)
    if not code.is_new:
        return code.function
    C, ldc, A, row, step, B, ldb, rows, n, *more = code.function.args
    b = code.b

    def rest(first, count: int) -> None:
        function = build_step(module, block, itemsize, mode, count, writer)
        c, a = code.at(C, b.mul(first, ldc)), code.at(A, b.mul(first, row))
        rest_of = [code.at(more[0], first), more[1]] if mode == "weigh" else more
        b.call(function, [c, ldc, a, row, step, B, ldb, n, *rest_of])

    def body(r, _):
        rest(r, ROWS)
        return []

    code.loop(rows, [], body, by=ROWS)
    left = b.srem(rows, ir.Constant(INT, ROWS))
    first = b.sub(rows, left)
    after = code.function.append_basic_block("done")
    switch = b.switch(left, after)
    for count in range(1, ROWS):
        case = code.function.append_basic_block()
        switch.add_case(ir.Constant(INT, count), case)
        b.position_at_end(case)
        rest(first, count)
        b.branch(after)
    b.position_at_end(after)
    return code.done()


def build_online_softmax(module: ir.Module, block: Blocking, itemsize: int):
    """S, rows, m, l, alpha: see `panels.online_softmax`."""
    code = Code(module, "online_softmax", block, itemsize, "pippp")
    if not code.is_new:
        return code.function
    S, rows, m, l, alpha = code.function.args
    b, minus_inf = code.b, code.const(-np.inf)

    def in_turn(body: Callable, carried: list) -> list:
        """``sums = body(addresses, sums)`` for every row, two at a time, each with sums of its own.

        That makes two short chains of one long one, which rounds off half as much, too.
        """

        def rows_from(base, height: int) -> Callable:
            def several(r, sums):
                for k in range(height):
                    row = code.vectors(code.at(base, code.times(r, code.width), k * code.width))
                    sums = sums[code.vecs :] + body(row, sums[: code.vecs])
                return sums

            return several

        odd = b.and_(rows, ir.Constant(INT, 1))
        sums = code.loop(rows, carried * 2, rows_from(S, 2), by=2)
        last = code.at(S, code.times(b.sub(rows, odd), code.width))
        return code.loop(odd, sums, rows_from(last, 1))

    def largest(row, tops):
        return [code.larger(code.load(x), top) for x, top in zip(row, tops, strict=True)]

    tops = in_turn(largest, [minus_inf] * code.vecs)
    tops = [code.larger(x, y) for x, y in zip(tops, tops[code.vecs :], strict=False)]
    before = [code.load(x) for x in code.vectors(m)]
    tops = [code.larger(t, old) for t, old in zip(tops, before, strict=True)]
    seen = [b.fcmp_ordered("!=", top, minus_inf) for top in tops]
    bases = [b.select(s, top, code.const(0)) for s, top in zip(seen, tops, strict=True)]
    steps = [b.fsub(old, base) for old, base in zip(before, bases, strict=True)]
    alphas = code.exp(steps)
    for values, address in ((tops, m), (alphas, alpha)):
        for value, x in zip(values, code.vectors(address), strict=True):
            code.store(value, x)

    def exponentials(row, sums):
        powers = code.exp([b.fsub(code.load(x), y) for x, y in zip(row, bases, strict=True)])
        for p, x in zip(powers, row, strict=True):
            code.store(p, x)
        return [b.fadd(x, p) for x, p in zip(sums, powers, strict=True)]

    sums = in_turn(exponentials, [code.const(0)] * code.vecs)
    both = [b.fadd(x, y) for x, y in zip(sums, sums[code.vecs :], strict=False)]
    for a, total, x in zip(alphas, both, code.vectors(l), strict=True):
        code.store(code.fma(a, code.load(x), total), x)
    return code.done()


def build_grad_scores(module: ir.Module, block: Blocking, itemsize: int, by_row: bool):
    """S, dP, ld, rows, L, delta: see `panels.grad_scores_by_row` and `_by_lane`."""
    name = "grad_scores_by_row" if by_row else "grad_scores_by_lane"
    code = Code(module, name, block, itemsize, "ppiipp")
    if not code.is_new:
        return code.function
    S, dP, ld, rows, L, delta = code.function.args
    b = code.b

    def statistics(r) -> list[list]:
        if by_row:
            return [[code.spread(code.at(x, r))] * code.vecs for x in (L, delta)]
        return [[code.load(y) for y in code.vectors(x)] for x in (L, delta)]

    outside = None if by_row else statistics(None)  # read once, where no row changes them

    def body(r, _):
        lse, d = outside or statistics(r)
        start = b.mul(r, ld)
        s_at, dp_at = code.vectors(code.at(S, start)), code.vectors(code.at(dP, start))
        differences = [b.fsub(code.load(x), y) for x, y in zip(s_at, lse, strict=True)]
        ps = code.exp(differences)
        for i, p in enumerate(ps):
            code.store(p, s_at[i])
            code.store(b.fmul(p, b.fsub(code.load(dp_at[i]), d[i])), dp_at[i])
        return []

    code.loop(rows, [], body)
    return code.done()


def build_soft_cap(module: ir.Module, block: Blocking, itemsize: int, gated: bool):
    """S, ld, rows, constants and, if `gated`, gate: see `panels.soft_cap`."""
    name = "soft_cap_gated" if gated else "soft_cap"
    code = Code(module, name, block, itemsize, "piip" + "p" * gated)
    if not code.is_new:
        return code.function
    S, ld, rows, cap, *gate = code.function.args
    b, c, one = code.b, code.spread(cap), code.const(1)

    def body(r, _):
        start = b.mul(r, ld)
        addresses = code.vectors(code.at(S, start))
        ts = code.tanh([code.load(x) for x in addresses], c)
        for t, x in zip(ts, addresses, strict=True):
            code.store(b.fmul(t, c), x)
        for t, x in zip(ts, code.vectors(code.at(gate[0], start)) if gated else (), strict=False):
            code.store(b.fsub(one, b.fmul(t, t)), x)
        return []

    code.loop(rows, [], body)
    return code.done()


def build_transpose(module: ir.Module, block: Blocking, itemsize: int, out: bool):
    """panels, X, rows, cols, d, factors: see `panels.transpose_in` and, if `out`, `_out`."""
    code = Code(module, "transpose_out" if out else "transpose_in", block, itemsize, "ppiiip")
    if not code.is_new:
        return code.function
    panels, X, rows, cols, d, factors = code.function.args
    b, width = code.b, ir.Constant(INT, code.width)

    def square(row, x) -> None:
        column = b.add(b.mul(b.sdiv(row, width), d), x)
        inside = code.at(panels, b.mul(column, width), b.srem(row, width))
        lanes = range(code.lanes)
        rows_at = [code.at(X, b.mul(b.add(row, ir.Constant(INT, k)), d), x) for k in lanes]
        lanes_at = [code.at(inside, k * code.width) for k in lanes]
        scales = [code.spread(code.at(factors, row, k)) for k in lanes]
        values = [code.load(address) for address in (lanes_at if out else rows_at)]
        if out:
            values = [b.fmul(v, s) for v, s in zip(code.transposed(values), scales, strict=True)]
        else:
            values = code.transposed([b.fmul(v, s) for v, s in zip(values, scales, strict=True)])
        for value, address in zip(values, rows_at if out else lanes_at, strict=True):
            code.store(value, address)

    def along(row):
        def body(x, _):
            square(row, x)
            return []

        return body

    def body(row, _):
        code.loop(cols, [], along(row), by=code.lanes)
        return []

    code.loop(rows, [], body, by=code.lanes)
    return code.done()


def build_dots(module: ir.Module, block: Blocking, itemsize: int):
    """S, ld, K, Q, near, rows, heads, n, d: see `panels.dots`.

    A vector's worth of sums at a time: of `HEADS` heads (a register may have fewer lanes) with as
    many keys as that leaves, so that one reduction serves all of them.
    """
    code = Code(module, "dots", block, itemsize, "pipppiiii")
    if not code.is_new:
        return code.function
    S, ld, K, Q, near, rows, heads, n, d = code.function.args
    b, of_head = code.b, min(HEADS, code.lanes)
    keys = code.lanes // of_head
    short = ir.VectorType(code.element, of_head)

    def several(r, h) -> None:
        k_rows = [code.at(K, b.mul(b.add(r, ir.Constant(INT, k)), d)) for k in range(keys)]
        q_rows = [code.at(Q, b.mul(b.add(h, ir.Constant(INT, k)), d)) for k in range(of_head)]
        # Line by line as they lie, which the CPU's own prefetcher follows.
        ahead = code.at(near, b.mul(r, d))

        def body(x, sums):
            for k in range(keys):
                code.prefetch(code.at(ahead, code.times(x, keys), k * code.lanes))
            right = [code.load(code.at(q, x)) for q in q_rows]
            left = [code.load(code.at(k, x)) for k in k_rows]
            pairs = [(k, q) for k in left for q in right]
            return [code.fma(k, q, s) for (k, q), s in zip(pairs, sums, strict=True)]

        total = code.summed(code.loop(n, [code.const(0)] * code.lanes, body, by=code.lanes))
        for k in range(keys):
            lanes = [ir.Constant(ir.IntType(32), k * of_head + i) for i in range(of_head)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), of_head), lanes)
            one = b.shuffle_vector(total, ir.Constant(total.type, ir.Undefined), mask)
            address = code.at(S, b.mul(b.add(r, ir.Constant(INT, k)), ld), h)
            b.store(one, b.bitcast(address, short.as_pointer()), align=itemsize)

    def along(r):
        def body(h, _):
            several(r, h)
            return []

        return body

    def body(r, _):
        code.loop(heads, [], along(r), by=of_head)
        return []

    code.loop(rows, [], body, by=keys)
    return code.done()
