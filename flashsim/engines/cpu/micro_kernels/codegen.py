"""Writes the operations of `plain.py` as vector code: LLVM IR with vector types.

As Numba loops, the operations reach a quarter of a CPU's peak throughput; with one BLAS call per
tile, they reach half. So this module decides which values stay in registers. Each `build_*`
function writes one LLVM function for an element type and a `Blocking`, without Numba (see
`writer.builder`). The module `vector` makes Numba's compiled code call the LLVM functions.
"""

from collections.abc import Callable

import numpy as np
from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.registers import ROWS
from flashsim.engines.cpu.micro_kernels.writer import INT, Code, builder

#: How many terms of a sum ahead a product prefetches its left operand.
AHEAD = 12


def _product(args: str) -> Callable:
    """Return a `builder` of matrix products; mode "rescale" adds one argument."""
    return builder(
        lambda mode, **_: args + "p" * (mode == "rescale"), lambda block, writer=Code, **_: writer
    )


@_product("pipiipii")
def build_step(
    code: Code, C, ldc, A, row, step, B, ldb, n, *alpha, mode: str, rows: int, writer=Code
) -> None:
    """Write an LLVM function that computes `rows` rows of a matrix product in registers.

    For each term x of the sums, one scalar per row of A is copied to all lanes, and multiplied by
    the vectors of B's row x. `mode` is "set", "add" or "rescale"; "rescale" has one more argument,
    the address of alpha (one per lane).
    """
    for pointer in (C, A, B):
        pointer.add_attribute("noalias")
    c_rows, a_rows = [C], [A]
    for _ in range(1, rows):
        c_rows.append(code.at(c_rows[-1], ldc))
        a_rows.append(code.at(a_rows[-1], row))
    places = [c for c_row in c_rows for c in code.vectors(c_row)]
    if mode != "set" and code.block.prefetch:
        for c_address in places:  # used after the loop, by when they are near
            code.prefetch(c_address)

    def body(x, sums):
        right = [code.load(address) for address in code.vectors(code.at(B, code.b.mul(x, ldb)))]
        along = code.b.mul(x, step)
        if code.block.prefetch:
            next_step = code.at(A, code.times(row, rows), code.times(x, rows))
            ahead = code.at(A, along, code.times(step, AHEAD))
            code.prefetch(next_step if mode == "set" else ahead)
        left = [code.spread(code.at(a, along)) for a in a_rows]
        products = [(a, b) for a in left for b in right]
        return [code.step(a, b, s) for (a, b), s in zip(products, sums, strict=True)]

    sums = code.loop(n, [code.const(0)] * len(places), body)
    factors = [code.load(address) for x in alpha for address in code.vectors(x)] * rows
    for i, (value, c_address) in enumerate(zip(sums, places, strict=True)):
        if mode == "add":
            value = code.b.fadd(code.load(c_address), value)
        elif factors:
            value = code.fma(code.load(c_address), factors[i], value)
        code.store(value, c_address)


@_product("pipiipiii")
def build_product(
    code: Code, C, ldc, A, row, step, B, ldb, rows, n, *alpha, mode: str, writer=Code
) -> None:
    """Write an LLVM function that computes a matrix product, `ROWS` rows at a time."""
    b = code.b

    def rest(first, count: int) -> None:
        function = build_step(*code.target, mode=mode, rows=count, writer=writer)
        c, a = code.at(C, b.mul(first, ldc)), code.at(A, b.mul(first, row))
        b.call(function, [c, ldc, a, row, step, B, ldb, n, *alpha])

    code.loop(rows, [], lambda r, _: rest(r, ROWS), by=ROWS)
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


@builder("pippp")
def build_online_softmax(code: Code, S, rows, m, l, alpha) -> None:
    """Write the vector code of `plain.online_softmax`."""
    b, minus_inf, masked = code.b, code.const(-np.inf), code.masked()

    def in_turn(body: Callable, carried: list) -> list:
        """Emit a loop that computes ``sums = body(addresses, sums)`` for every row.

        Two rows at a time have separate sums: shorter chains of additions take less time and halve
        the rounding error.
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
    seen = [b.fcmp_ordered(">", top, masked) for top in tops]
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


@builder("ppiipp")
def build_grad_scores(code: Code, S, dP, ld, rows, L, delta, *, by_row: bool) -> None:
    """Write the vector code of `plain.grad_scores_by_row` or `plain.grad_scores_by_lane`."""
    b = code.b

    def statistics(r) -> list[list]:
        if by_row:
            return [[code.spread(code.at(x, r))] * code.vecs for x in (L, delta)]
        return [[code.load(y) for y in code.vectors(x)] for x in (L, delta)]

    outside = None if by_row else statistics(None)  # the same for all rows, so read once

    def body(r, _):
        lse, d = outside or statistics(r)
        start = b.mul(r, ld)
        s_at, dp_at = code.vectors(code.at(S, start)), code.vectors(code.at(dP, start))
        differences = [b.fsub(code.load(x), y) for x, y in zip(s_at, lse, strict=True)]
        ps = code.exp(differences)
        for i, p in enumerate(ps):
            code.store(p, s_at[i])
            code.store(b.fmul(p, b.fsub(code.load(dp_at[i]), d[i])), dp_at[i])

    code.loop(rows, [], body)


@builder(lambda gated: "piip" + "p" * gated)
def build_soft_cap(code: Code, S, ld, rows, cap, *gate, gated: bool) -> None:
    """Write the vector code of `plain.soft_cap` or, if `gated`, of `plain.soft_cap_gated`."""
    b, c, unit = code.b, code.spread(cap), code.const(1)

    def body(r, _):
        start = b.mul(r, ld)
        addresses = code.vectors(code.at(S, start))
        ts = code.tanh([code.load(x) for x in addresses], c)
        for t, x in zip(ts, addresses, strict=True):
            code.store(b.fmul(t, c), x)
        for t, x in zip(ts, code.vectors(code.at(gate[0], start)) if gated else (), strict=False):
            code.store(b.fsub(unit, b.fmul(t, t)), x)

    code.loop(rows, [], body)


@builder("ppiiip")
def build_transpose(code: Code, panels, X, rows, cols, d, factors, *, out: bool) -> None:
    """Write the vector code of `plain.transpose_in` or, if `out`, of `plain.transpose_out`."""
    b, width = code.b, ir.Constant(INT, code.width)

    def square(row, x) -> None:
        column = b.add(b.mul(b.sdiv(row, width), d), x)
        inside = code.at(panels, b.mul(column, width), b.srem(row, width))
        lanes = range(code.lanes)
        rows_at = [code.at(X, b.mul(code.plus(row, k), d), x) for k in lanes]
        lanes_at = [code.at(inside, k * code.width) for k in lanes]
        scales = [code.spread(code.at(factors, row, k)) for k in lanes]
        values = [code.load(address) for address in (lanes_at if out else rows_at)]
        if out:
            values = [b.fmul(v, s) for v, s in zip(code.transposed(values), scales, strict=True)]
        else:
            values = code.transposed([b.fmul(v, s) for v, s in zip(values, scales, strict=True)])
        for value, address in zip(values, rows_at if out else lanes_at, strict=True):
            code.store(value, address)

    def body(row, _):
        code.loop(cols, [], lambda x, _: square(row, x), by=code.lanes)

    code.loop(rows, [], body, by=code.lanes)
