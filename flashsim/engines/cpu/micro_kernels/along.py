"""Vector code for one query a head: K and V are read along their rows, as they lie in memory.

Such a walk is as fast as memory. So every line of K and V goes through the registers once, 16-bit
numbers become floats there, and each row brings near what lies `AHEAD` further on in its array.
Scores lie by head, keys in the lanes: as many exponentials as there are scores.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir

from flashsim.engines.cpu.micro_kernels import registers
from flashsim.engines.cpu.micro_kernels.halves import BFLOAT16, SHORT, as_floats, rounded
from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.engines.cpu.micro_kernels.writer import INT, LINE, Code

#: How far ahead, in bytes, rows are brought near (docs/notebooks/cpu.md): the CPU's own prefetcher
#: stops at each page of 4 KiB, and where a walk turns from K to V. Into the first cache, but for
#: AMD's CPUs, where few lines may be on their way there, and more to the second.
AHEAD = 8 << 10
#: Keys whose dot products are formed together, with as many heads.
KEYS = HEADS = 4
#: Keys after which a product goes on with other heads or columns: their rows stay near.
CHUNK = 16


class Stretch:
    """Numbers in memory, floats or 16-bit numbers in the place of floats, that are read as floats.

    `start` counts numbers; `kind` is `BFLOAT16`, `FLOAT16` or None.
    """

    def __init__(self, code: Code, base, start, kind: int | None) -> None:
        self.code, self.kind = code, kind
        self.element = SHORT if kind else code.element
        self.size = 2 if kind else code.itemsize
        self.first = code.b.gep(code.b.bitcast(base, self.element.as_pointer()), [start])

    def load(self, at, some=None):
        """The vector from number `at` on; of lanes that are not `some` (all are) nothing is read,
        and they are 0.
        """
        code, b = self.code, self.code.b
        vector = ir.VectorType(self.element, code.lanes)
        address = b.bitcast(b.gep(self.first, [at]), vector.as_pointer())
        if some is None:
            value = b.load(address, align=self.size)
        else:
            letter = "i" if self.kind else "f"
            name = f"llvm.masked.load.v{code.lanes}{letter}{8 * self.size}.p0"
            kinds = [address.type, ir.IntType(32), some.type, vector]
            module = code.function.module
            function = module.globals.get(name) or ir.Function(
                module, ir.FunctionType(vector, kinds), name
            )
            nothing = ir.Constant(vector, [0] * code.lanes)
            value = b.call(function, [address, ir.Constant(kinds[1], self.size), some, nothing])
        return as_floats(code, value, self.kind == BFLOAT16) if self.kind else value

    def bring_near(self, at, count: int) -> None:
        """The `count` numbers that lie `AHEAD` of number `at`."""
        cache = 2 if registers.zen() else 1
        for line in range(0, count * self.size, LINE):
            ahead = ir.Constant(INT, (AHEAD + line) // self.size)
            self.code.prefetch(self.code.b.gep(self.first, [self.code.b.add(at, ahead)]), cache)


def lanes_below(code: Code, count):
    """The lanes of a vector whose number is below `count`."""
    b, undefined = code.b, ir.Constant(ir.VectorType(INT, code.lanes), ir.Undefined)
    one = b.insert_element(undefined, count, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), code.lanes), [0] * code.lanes)
    numbers = ir.Constant(undefined.type, list(range(code.lanes)))
    return b.icmp_signed("<", numbers, b.shuffle_vector(one, undefined, zeros))


def in_blocks(code: Code, heads, most: int, body: Callable) -> None:
    """``body(h, count)`` for blocks of heads: as many of `most` as there are, then halves of it."""
    size = most
    while size:
        count = code.b.sdiv(heads, ir.Constant(INT, size))
        if size < most:
            count = code.b.srem(count, ir.Constant(INT, 2))
            first = code.b.sub(heads, code.b.srem(heads, ir.Constant(INT, 2 * size)))
        else:
            first = ir.Constant(INT, 0)

        def block(i, _, first=first, size=size):
            body(code.b.add(first, code.times(i, size)), size)
            return []

        code.loop(count, [], block)
        size //= 2


def build_dots(module: ir.Module, block: Blocking, itemsize: int, kind: int | None = None):
    """S, ld, K, k0, d, Q, ldq, rows, heads: see `plain.dots`."""
    code = Code(module, f"dots_{kind}", block, itemsize, "pipiipiii")
    if not code.is_new:
        return code.function
    S, ld, K, k0, d, Q, ldq, rows, heads = code.function.args
    b, keys, most = code.b, Stretch(code, K, k0, kind), HEADS
    if block.vecs == 2:  # AVX2 has half the registers
        most = HEADS // 2
    rest = b.srem(d, ir.Constant(INT, code.lanes))
    whole, some = b.sub(d, rest), lanes_below(code, rest)
    # The last rows are taken with some before them; where there are fewer, each as if it were all.
    enough = b.icmp_signed(">=", rows, ir.Constant(INT, KEYS))
    step = b.select(enough, ir.Constant(INT, KEYS), ir.Constant(INT, 1))
    stride, last = b.select(enough, d, ir.Constant(INT, 0)), b.sub(rows, step)

    groups, near = b.sdiv(b.sub(b.add(rows, step), ir.Constant(INT, 1)), step), CHUNK // KEYS

    def several(group, n, h, count: int) -> None:
        """Scores of n groups of keys with some heads."""
        q_rows = [code.at(Q, b.mul(b.add(h, ir.Constant(INT, k)), ldq)) for k in range(count)]
        s_rows = [code.at(S, b.mul(b.add(h, ir.Constant(INT, k)), ld)) for k in range(count)]

        def scores(i, _):
            at = b.mul(b.add(group, i), step)
            r = b.select(b.icmp_signed("<", at, last), at, last)
            first = b.mul(r, d)
            k_rows = [b.add(first, code.times(stride, k)) for k in range(KEYS)]

            def products(x, sums, some=None):
                keys.bring_near(b.add(first, code.times(x, KEYS)), KEYS * code.lanes)
                left = [keys.load(b.add(k, x), some) for k in k_rows]
                right = [code.load(code.at(q, x)) for q in q_rows]
                pairs = [(k, q) for q in right for k in left]
                return [code.fma(k, q, s) for (k, q), s in zip(pairs, sums, strict=True)]

            sums = code.loop(d, [code.const(0)] * (KEYS * count), products, by=code.lanes)
            left_over = b.zext(b.icmp_signed("!=", rest, ir.Constant(INT, 0)), INT)
            sums = code.loop(left_over, sums, lambda _, x: products(whole, x, some))
            together = min(code.lanes, len(sums))
            width = min(KEYS, together)
            for begin in range(0, len(sums), together):
                total = code.summed(sums[begin : begin + together])
                for lane in range(0, together, width):
                    head, key = divmod(begin + lane, KEYS)
                    lanes = list(range(lane, lane + width))
                    code.store(code.pick(total, total, lanes), code.at(s_rows[head], r, key))
            return []

        code.loop(n, [], scores)

    def body(i, _):
        group = code.times(i, near)
        left = b.sub(groups, group)
        n = b.select(b.icmp_signed("<", left, ir.Constant(INT, near)), left, ir.Constant(INT, near))
        in_blocks(code, heads, most, lambda h, count: several(group, n, h, count))
        return []

    code.loop(b.sdiv(b.add(groups, ir.Constant(INT, near - 1)), ir.Constant(INT, near)), [], body)
    return code.done()


def build_weigh(module: ir.Module, block: Blocking, itemsize: int, kind: int | None = None):
    """O, ldo, P, ldp, V, v0, dv, keys, heads: see `plain.weigh`."""
    code = Code(module, f"weigh_{kind}", block, itemsize, "pipipiiii")
    if not code.is_new:
        return code.function
    O, ldo, P, ldp, V, v0, dv, keys, heads = code.function.args
    O.add_attribute("noalias")
    b, values, chunk = code.b, Stretch(code, V, v0, kind), ir.Constant(INT, CHUNK)
    rest = b.srem(dv, ir.Constant(INT, code.width))
    whole = b.sub(dv, rest)

    def several(r0, n, x, h, count: int, vecs: int, some=None) -> None:
        columns = [code.at(O, b.mul(b.add(h, ir.Constant(INT, k)), ldo), x) for k in range(count)]
        weights = [code.at(P, b.mul(b.add(h, ir.Constant(INT, k)), ldp), r0) for k in range(count)]
        places = [code.at(c, v * code.lanes) for c in columns for v in range(vecs)]
        top, near = b.add(b.mul(r0, dv), x), b.add(b.mul(r0, dv), b.mul(x, n))

        def products(r, sums):
            values.bring_near(b.add(near, code.times(r, vecs * code.lanes)), vecs * code.lanes)
            row = b.add(top, b.mul(r, dv))
            right = [
                values.load(b.add(row, ir.Constant(INT, v * code.lanes)), some) for v in range(vecs)
            ]
            left = [code.spread(code.at(p, r)) for p in weights]
            pairs = [(p, v) for p in left for v in right]
            return [code.fma(p, v, s) for (p, v), s in zip(pairs, sums, strict=True)]

        sums = code.loop(n, [code.const(0)] * len(places), products)
        for total, place in zip(sums, places, strict=True):
            code.store(b.fadd(code.load(place), total), place)

    def body(i, _):
        r0 = b.mul(i, chunk)
        left = b.sub(keys, r0)
        n = b.select(b.icmp_signed("<", left, chunk), left, chunk)

        def wide(x, _):
            def all_columns(h, count: int) -> None:
                vecs = min(code.vecs, 16 // count)
                for v in range(0, code.vecs, vecs):
                    several(r0, n, code.b.add(x, ir.Constant(INT, v * code.lanes)), h, count, vecs)

            in_blocks(code, heads, 2 * HEADS, all_columns)
            return []

        def one_vector(at, _):
            x = b.add(whole, at)
            some = lanes_below(code, b.sub(dv, x))
            in_blocks(code, heads, 2 * HEADS, lambda h, count: several(r0, n, x, h, count, 1, some))
            return []

        code.loop(whole, [], wide, by=code.width)
        code.loop(b.add(rest, ir.Constant(INT, code.lanes - 1)), [], one_vector, by=code.lanes)
        return []

    chunks = b.sdiv(b.add(keys, ir.Constant(INT, CHUNK - 1)), chunk)
    code.loop(chunks, [], body)
    return code.done()


def build_softmax_along(module: ir.Module, block: Blocking, itemsize: int, kind: int | None = None):
    """S, ld, heads, n, m, l, alpha: see `plain.softmax_along`."""
    code = Code(module, f"softmax_along_{kind}", block, itemsize, "piiippp")
    if not code.is_new:
        return code.function
    S, ld, heads, n, m, l, alpha = code.function.args
    b, minus_inf = code.b, code.const(-np.inf)
    most = HEADS if block.register != 32 else 1  # AVX2 has half the registers

    def folded(value, operation: Callable):
        """Of all lanes, in every lane."""
        size = 1
        while size < code.lanes:
            value = operation(value, code.pick(value, value, [x ^ size for x in range(code.lanes)]))
            size *= 2
        return value

    def put(values, places) -> None:
        for value, place in zip(values, places, strict=True):
            b.store(b.extract_element(value, ir.Constant(ir.IntType(32), 0)), place)

    def several(h, count: int) -> None:
        rows = [code.at(S, b.mul(b.add(h, ir.Constant(INT, k)), ld)) for k in range(count)]
        at_m, at_l, at_alpha = ([code.at(x, h, k) for k in range(count)] for x in (m, l, alpha))

        def largest(x, tops):
            return [
                code.larger(code.load(code.at(row, x)), top)
                for row, top in zip(rows, tops, strict=True)
            ]

        before = [code.spread(x) for x in at_m]
        tops = code.loop(n, before, largest, by=code.lanes)
        tops = [folded(top, code.larger) for top in tops]
        seen = [b.fcmp_ordered("!=", top, minus_inf) for top in tops]
        bases = [b.select(s, top, code.const(0)) for s, top in zip(seen, tops, strict=True)]

        def exponentials(x, sums):
            places = [code.at(row, x) for row in rows]
            scores = [code.load(place) for place in places]
            ps = code.exp([b.fsub(s, base) for s, base in zip(scores, bases, strict=True)])
            for p, place in zip(ps, places, strict=True):
                code.store(rounded(code, p, kind == BFLOAT16) if kind else p, place)
            return [b.fadd(total, p) for total, p in zip(sums, ps, strict=True)]

        sums = code.loop(n, [code.const(0)] * count, exponentials, by=code.lanes)
        sums = [folded(total, b.fadd) for total in sums]
        alphas = code.exp([b.fsub(old, base) for old, base in zip(before, bases, strict=True)])
        sums = [code.fma(a, code.spread(x), s) for a, x, s in zip(alphas, at_l, sums, strict=True)]
        for values, places in ((tops, at_m), (sums, at_l), (alphas, at_alpha)):
            put(values, places)

    in_blocks(code, heads, most, several)
    return code.done()
