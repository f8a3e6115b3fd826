"""Vector code for decoding one query per head, which reads K and V row by row in memory order.

Memory bandwidth limits a kernel with one query per head. So the code loads every cache line of K
and V once, converts 16-bit numbers in registers, and prefetches data `AHEAD` bytes in advance.
Scores of a head are stored side by side, one key per lane, so one vector exponential serves a
vector of scores.
"""

from collections.abc import Callable

from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.decode_gemv_amx import dots_in_tiles, weigh_in_tiles
from flashsim.engines.cpu.micro_kernels.decode_gemv_bf16 import weigh_pairs
from flashsim.engines.cpu.micro_kernels.float16 import rounded
from flashsim.engines.cpu.micro_kernels.kv_stream import (
    CHUNK,
    HEADS,
    KEYS,
    Stretch,
    by_kind,
    in_blocks,
    lanes_below,
    numbers_of,
)
from flashsim.engines.cpu.micro_kernels.pair_writer import PairCode
from flashsim.engines.cpu.micro_kernels.writer import INT, Code


@by_kind("pipiipiiip", dots_in_tiles)
def build_dots(
    code: Code, S, ld, K, k0, d, Q, ldq, rows, heads, factor, *, kind: int | None
) -> None:
    """Write the vector code of `plain.dots`."""
    b, keys, most = code.b, Stretch(code, K, k0, kind), HEADS
    numbers = numbers_of(code)
    if code.vecs == 2:  # AVX2 has half the registers
        most = HEADS // 2
    rest, times = b.srem(d, ir.Constant(INT, numbers)), code.spread(factor)
    whole, some = b.sub(d, rest), lanes_below(code, rest)
    # The last block of rows overlaps with the block before it. If there are fewer rows than a
    # block has, each row is processed on its own.
    enough = b.icmp_signed(">=", rows, ir.Constant(INT, KEYS))
    step = b.select(enough, ir.Constant(INT, KEYS), ir.Constant(INT, 1))
    stride, last = b.select(enough, d, ir.Constant(INT, 0)), b.sub(rows, step)

    groups, near = b.sdiv(b.sub(b.add(rows, step), ir.Constant(INT, 1)), step), CHUNK // KEYS

    def several(group, n, h, count: int) -> None:
        """Emit code that computes the scores of `count` heads against n groups of keys."""
        q_rows = [code.at(Q, b.mul(code.plus(h, k), ldq)) for k in range(count)]
        s_rows = [code.at(S, b.mul(code.plus(h, k), ld)) for k in range(count)]

        def scores(i, _):
            r = code.least(b.mul(b.add(group, i), step), last)
            first = b.mul(r, d)
            k_rows = [b.add(first, code.times(stride, k)) for k in range(KEYS)]

            def products(x, sums, some=None):
                keys.bring_near(b.add(first, code.times(x, KEYS)), KEYS * numbers)
                left = [keys.load(b.add(k, x), some) for k in k_rows]
                at = b.sdiv(x, ir.Constant(INT, numbers // code.lanes))
                right = [code.load(code.at(q, at)) for q in q_rows]
                both = [(k, q) for q in right for k in left]
                return [code.step(k, q, s) for (k, q), s in zip(both, sums, strict=True)]

            sums = code.loop(d, [code.const(0)] * (KEYS * count), products, by=numbers)
            left_over = b.zext(b.icmp_signed("!=", rest, ir.Constant(INT, 0)), INT)
            sums = code.loop(left_over, sums, lambda _, x: products(whole, x, some))
            together = min(code.lanes, len(sums))
            width = min(KEYS, together)
            for begin in range(0, len(sums), together):
                total = b.fmul(code.summed(sums[begin : begin + together]), times)
                for lane in range(0, together, width):
                    head, key = divmod(begin + lane, KEYS)
                    lanes = list(range(lane, lane + width))
                    code.store(code.pick(total, total, lanes), code.at(s_rows[head], r, key))

        code.loop(n, [], scores)

    def body(i, _):
        group = code.times(i, near)
        n = code.least(b.sub(groups, group), ir.Constant(INT, near))
        in_blocks(code, heads, most, lambda h, count: several(group, n, h, count))

    code.loop(b.sdiv(code.plus(groups, near - 1), ir.Constant(INT, near)), [], body)


@by_kind("pipipiiii", weigh_in_tiles)
def build_weigh(code: Code, O, ldo, P, ldp, V, v0, dv, keys, heads, *, kind: int | None) -> None:
    """Write the vector code of `plain.weigh`."""
    if isinstance(code, PairCode):
        weigh_pairs(code, O, ldo, P, ldp, V, v0, dv, keys, heads)
        return
    O.add_attribute("noalias")
    b, values, chunk = code.b, Stretch(code, V, v0, kind), ir.Constant(INT, CHUNK)
    rest = b.srem(dv, ir.Constant(INT, code.width))
    whole = b.sub(dv, rest)

    def several(r0, n, x, h, count: int, vecs: int, some=None) -> None:
        columns = [code.at(O, b.mul(code.plus(h, k), ldo), x) for k in range(count)]
        weights = [code.at(P, b.mul(code.plus(h, k), ldp), r0) for k in range(count)]
        places = [code.at(c, v * code.lanes) for c in columns for v in range(vecs)]
        top, near = b.add(b.mul(r0, dv), x), b.add(b.mul(r0, dv), b.mul(x, n))

        def products(r, sums):
            values.bring_near(b.add(near, code.times(r, vecs * code.lanes)), vecs * code.lanes)
            row = b.add(top, b.mul(r, dv))
            right = [values.load(code.plus(row, v * code.lanes), some) for v in range(vecs)]
            left = [code.spread(code.at(p, r)) for p in weights]
            pairs = [(p, v) for p in left for v in right]
            return [code.fma(p, v, s) for (p, v), s in zip(pairs, sums, strict=True)]

        sums = code.loop(n, [code.const(0)] * len(places), products)
        for total, address in zip(sums, places, strict=True):
            code.store(b.fadd(code.load(address), total), address)

    def body(i, _):
        r0 = b.mul(i, chunk)
        n = code.least(b.sub(keys, r0), chunk)

        def wide(x, _):
            def all_columns(h, count: int) -> None:
                vecs = min(code.vecs, 16 // count)
                for v in range(0, code.vecs, vecs):
                    several(r0, n, code.plus(x, v * code.lanes), h, count, vecs)

            in_blocks(code, heads, 2 * HEADS, all_columns)

        def one_vector(at, _):
            x = b.add(whole, at)
            some = lanes_below(code, b.sub(dv, x))
            in_blocks(code, heads, 2 * HEADS, lambda h, count: several(r0, n, x, h, count, 1, some))

        code.loop(whole, [], wide, by=code.width)
        code.loop(code.plus(rest, code.lanes - 1), [], one_vector, by=code.lanes)

    code.loop(b.sdiv(code.plus(keys, CHUNK - 1), chunk), [], body)


@by_kind("piiippp")
def build_softmax_along(code: Code, S, ld, heads, n, m, l, alpha, *, kind: int | None) -> None:
    """Write the vector code of `plain.softmax_along`."""
    b, masked = code.b, code.masked()
    pairs = code if isinstance(code, PairCode) else None
    at_once = 2 if pairs else 1  # two vectors of floats make one of pairs
    most = HEADS if code.block.register != 32 else 1  # AVX2 has half the registers

    def folded(value, operation: Callable):
        """Combine all lanes of `value` by `operation`, and return the result in every lane."""
        size = 1
        while size < code.lanes:
            value = operation(value, code.pick(value, value, [x ^ size for x in range(code.lanes)]))
            size *= 2
        return value

    def power(xs: list) -> list:
        return [pairs.power(x) for x in xs] if pairs else code.exp(xs)

    def put(values, places) -> None:
        for value, address in zip(values, places, strict=True):
            b.store(b.extract_element(value, ir.Constant(ir.IntType(32), 0)), address)

    def several(h, count: int) -> None:
        rows = [code.at(S, b.mul(code.plus(h, k), ld)) for k in range(count)]
        at_m, at_l, at_alpha = ([code.at(x, h, k) for k in range(count)] for x in (m, l, alpha))

        def largest(x, tops):
            return [
                code.larger(code.load(code.at(row, x)), top)
                for row, top in zip(rows, tops, strict=True)
            ]

        before = [code.spread(x) for x in at_m]
        tops = code.loop(n, before, largest, by=code.lanes)
        tops = [folded(top, code.larger) for top in tops]
        seen = [b.fcmp_ordered(">", top, masked) for top in tops]
        bases = [b.select(s, top, code.const(0)) for s, top in zip(seen, tops, strict=True)]

        def exponentials(x, sums):
            places = [code.at(row, x) for row in rows]
            scores = [code.load(code.at(p, i * code.lanes)) for p in places for i in range(at_once)]
            each = [base for base in bases for _ in range(at_once)]
            ps = power([b.fsub(s, base) for s, base in zip(scores, each, strict=True)])
            if pairs:  # the pairs overwrite only numbers that were read already
                for row, two in zip(rows, zip(ps[::2], ps[1::2], strict=True), strict=True):
                    address = code.at(row, b.lshr(x, ir.Constant(INT, 1)))
                    code.store(pairs.in_a_row(*two), address)
                ps = [
                    b.fadd(first_sum, other)
                    for first_sum, other in zip(ps[::2], ps[1::2], strict=True)
                ]
            else:
                for p, address in zip(ps, places, strict=True):
                    code.store(rounded(code, p, kind), address)
            return [b.fadd(total, p) for total, p in zip(sums, ps, strict=True)]

        sums = code.loop(n, [code.const(0)] * count, exponentials, by=at_once * code.lanes)
        sums = [folded(total, b.fadd) for total in sums]
        alphas = power([b.fsub(old, base) for old, base in zip(before, bases, strict=True)])
        sums = [code.fma(a, code.spread(x), s) for a, x, s in zip(alphas, at_l, sums, strict=True)]
        for values, places in ((tops, at_m), (sums, at_l), (alphas, at_alpha)):
            put(values, places)

    in_blocks(code, heads, most, several)
