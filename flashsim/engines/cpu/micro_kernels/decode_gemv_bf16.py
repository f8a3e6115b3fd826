"""The version of `decode_gemv` for CPUs with an instruction for dot products of bfloat16 pairs.

Two neighbours in a row of K already form a pair in memory, so K needs no conversion; Q is rounded
to bfloat16.
"""

from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.decode_gemv_amx import side_by_side_in_tiles
from flashsim.engines.cpu.micro_kernels.float16 import BFLOAT16, SHORT
from flashsim.engines.cpu.micro_kernels.kv_stream import (
    CHUNK,
    HEADS,
    Stretch,
    by_kind,
    in_blocks,
    lanes_below,
)
from flashsim.engines.cpu.micro_kernels.pair_writer import WORD, PairCode
from flashsim.engines.cpu.micro_kernels.writer import INT, Code


@by_kind("pii", side_by_side_in_tiles)
def build_side_by_side(code: Code, Q, ld, rows, *, kind: int | None) -> None:
    """Write the vector code of `plain.side_by_side`."""
    if not isinstance(code, PairCode):
        return
    b, half = code.b, code.b.lshr(ld, ir.Constant(INT, 1))
    shorts = ir.VectorType(SHORT, code.lanes).as_pointer()

    def row(r, _):
        first = code.at(Q, b.mul(r, ld))

        def narrow(x, _):  # overwrites only numbers that were read already
            address = code.at(first, b.lshr(x, ir.Constant(INT, 1)))
            value = code.halves(code.load(code.at(first, x)))
            b.store(value, b.bitcast(address, shorts), align=4)

        def clear(x, _):
            b.store(ir.Constant(code.element, 0), code.at(first, half, x))

        code.loop(ld, [], narrow, by=code.lanes)
        code.loop(half, [], clear)

    code.loop(rows, [], row)


def weigh_pairs(code: PairCode, O, ldo, P, ldp, V, v0, dv, keys, heads) -> None:
    """Write the version of `decode_gemv.build_weigh` that merges two rows of V into pairs."""
    O.add_attribute("noalias")
    b, values, chunk = code.b, Stretch(code, V, v0, BFLOAT16), ir.Constant(INT, CHUNK)
    numbers, unit, quarter = values.numbers, ir.Constant(INT, 1), code.lanes // 4
    rest = b.srem(dv, ir.Constant(INT, code.width))
    whole = b.sub(dv, rest)
    # Merging works on groups of 16 bytes: of each 8 columns, 4 go to each of the two vectors.
    starts = [8 * part + x for part in range(quarter) for x in range(4)]
    merged = [
        [at + 4 * half + row * numbers for at in starts for row in (0, 1)] for half in range(2)
    ]
    parts = [
        [[4 * part + x + v * code.lanes for v in (0, 1) for x in range(4)] for part in two]
        for two in (range(quarter // 2), range(quarter // 2, quarter))
    ]
    ordered = [[lane for part in two for lane in part] for two in parts]

    def several(r0, n, x, h, count: int, vecs: int, some=None) -> None:
        """Emit code that updates O for `count` heads and `vecs` vectors of columns."""
        columns = [code.at(O, b.mul(code.plus(h, k), ldo), x) for k in range(count)]
        first = b.lshr(r0, unit)
        weights = [code.at(P, b.mul(code.plus(h, k), ldp), first) for k in range(count)]
        top, near = b.add(b.mul(r0, dv), x), b.add(b.mul(r0, dv), b.mul(x, n))
        last = b.sub(n, unit)

        def products(i, sums):
            r = code.times(i, 2)
            values.bring_near(b.add(near, code.times(r, vecs * numbers)), 2 * vecs * numbers)
            # An odd last row is paired with itself, with a second weight of 0.
            below = b.select(b.icmp_signed("<", r, last), b.add(r, unit), last)
            rows = [b.add(top, b.mul(row, dv)) for row in (r, below)]
            right = []
            for v in range(vecs):
                upper, lower = (values.load(code.plus(row, v * numbers), some) for row in rows)
                right += [b.bitcast(code.pick(upper, lower, to), code.vector) for to in merged]
            left = [code.spread(code.at(row, i)) for row in weights]
            both = [(p, v) for p in left for v in right]
            return [code.step(p, v, s) for (p, v), s in zip(both, sums, strict=True)]

        pairs = b.sdiv(b.add(n, unit), ir.Constant(INT, 2))
        sums = code.loop(pairs, [code.const(0)] * (count * vecs * 2), products)
        for k in range(count):
            for v in range(vecs):
                left, right = sums[2 * (k * vecs + v) : 2 * (k * vecs + v) + 2]
                address = code.at(columns[k], v * numbers)
                more = code.at(address, code.lanes)
                code.store(b.fadd(code.load(address), code.pick(left, right, ordered[0])), address)
                # O may end between the two vectors.
                there = ir.Constant(ir.IntType(1), 1)
                if some is not None:
                    there = b.extract_element(some, ir.Constant(WORD, code.lanes))
                with b.if_then(there):
                    code.store(b.fadd(code.load(more), code.pick(left, right, ordered[1])), more)

    def body(i, _):
        r0 = b.mul(i, chunk)
        n = code.least(b.sub(keys, r0), chunk)

        def all_columns(h, count: int) -> None:
            vecs = min(code.vecs, 16 // count) // 2

            def wide(x, _):
                for v in range(0, code.vecs // 2, vecs):
                    several(r0, n, code.plus(x, v * numbers), h, count, vecs)

            def one_vector(at, _):
                x = b.add(whole, at)
                several(r0, n, x, h, count, 1, lanes_below(code, b.sub(dv, x)))

            code.loop(whole, [], wide, by=code.width)
            code.loop(code.plus(rest, numbers - 1), [], one_vector, by=numbers)

        in_blocks(code, heads, 2 * HEADS, all_columns)

    code.loop(b.sdiv(code.plus(keys, CHUNK - 1), chunk), [], body)
