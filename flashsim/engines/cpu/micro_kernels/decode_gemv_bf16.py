"""The version of `decode_gemv` for CPUs that have dot products of bfloat16 pairs.

The code converts no number to float. In memory, two neighbours in a row of K already form a pair,
so Q is rounded to pairs of neighbours too. Two rows of V at a time are merged into pairs.
"""

from __future__ import annotations

from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.decode_gemv_amx import side_by_side_in_tiles, tiled
from flashsim.engines.cpu.micro_kernels.float16 import BFLOAT16, SHORT
from flashsim.engines.cpu.micro_kernels.kv_stream import (
    CHUNK,
    HEADS,
    Stretch,
    in_blocks,
    lanes_below,
    writer_of,
)
from flashsim.engines.cpu.micro_kernels.pair_writer import WORD, PairCode
from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.engines.cpu.micro_kernels.writer import INT


def build_side_by_side(module: ir.Module, block: Blocking, itemsize: int, kind: int | None = None):
    """Build `plain.side_by_side`, with arguments Q, ld, rows."""
    if tiled(block, kind):
        return side_by_side_in_tiles(module, block, itemsize)
    code = writer_of(module, "side_by_side", block, itemsize, "pii", kind)
    if not code.is_new:
        return code.function
    Q, ld, rows = code.function.args
    if isinstance(code, PairCode):
        pairs, half = code, code.b.lshr(ld, ir.Constant(INT, 1))
        shorts = ir.VectorType(SHORT, code.lanes).as_pointer()

        def row(r, _):
            first = pairs.at(Q, pairs.b.mul(r, ld))

            def narrow(x, _):  # overwrites only numbers that were read already
                address = pairs.at(first, pairs.b.lshr(x, ir.Constant(INT, 1)))
                value = pairs.halves(pairs.load(pairs.at(first, x)))
                pairs.b.store(value, pairs.b.bitcast(address, shorts), align=4)
                return []

            def clear(x, _):
                pairs.b.store(ir.Constant(pairs.element, 0), pairs.at(first, half, x))
                return []

            pairs.loop(ld, [], narrow, by=pairs.lanes)
            pairs.loop(half, [], clear)
            return []

        code.loop(rows, [], row)
    return code.done()


def weigh_pairs(code: PairCode) -> ir.Function:
    """Build `decode_gemv.build_weigh` for two rows of V at a time, merged into pairs."""
    O, ldo, P, ldp, V, v0, dv, keys, heads = code.function.args
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
        """Emit the code that updates O of `count` heads, for `vecs` vectors of columns."""
        columns = [code.at(O, b.mul(b.add(h, ir.Constant(INT, k)), ldo), x) for k in range(count)]
        first = b.lshr(r0, unit)
        weights = [
            code.at(P, b.mul(b.add(h, ir.Constant(INT, k)), ldp), first) for k in range(count)
        ]
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
                at = ir.Constant(INT, v * numbers)
                upper, lower = (values.load(b.add(row, at), some) for row in rows)
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
        left = b.sub(keys, r0)
        n = b.select(b.icmp_signed("<", left, chunk), left, chunk)

        def all_columns(h, count: int) -> None:
            vecs = min(code.vecs, 16 // count) // 2

            def wide(x, _):
                for v in range(0, code.vecs // 2, vecs):
                    several(r0, n, b.add(x, ir.Constant(INT, v * numbers)), h, count, vecs)
                return []

            def one_vector(at, _):
                x = b.add(whole, at)
                several(r0, n, x, h, count, 1, lanes_below(code, b.sub(dv, x)))
                return []

            code.loop(whole, [], wide, by=code.width)
            code.loop(b.add(rest, ir.Constant(INT, numbers - 1)), [], one_vector, by=numbers)

        in_blocks(code, heads, 2 * HEADS, all_columns)
        return []

    chunks = b.sdiv(b.add(keys, ir.Constant(INT, CHUNK - 1)), chunk)
    code.loop(chunks, [], body)
    return code.done()
