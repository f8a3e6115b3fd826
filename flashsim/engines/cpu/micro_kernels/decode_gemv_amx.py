"""The AMX version of `decode_gemv`: AMX tiles multiply bfloat16 pairs for 16 heads at once.

Rows of K are used in place as a left operand, and Q is packed as a right operand. So a tile of
scores has keys as rows and heads as columns, and must be transposed. The softmax writes P in the
layout of a left operand. With fewer than 16 heads, the code does not read missing heads' tile rows
or columns.
"""

from llvmlite import ir

from flashsim.engines.cpu.bf16_dot.amx_tiles import SIDE, build_tiles
from flashsim.engines.cpu.micro_kernels.float16 import BFLOAT16
from flashsim.engines.cpu.micro_kernels.kv_stream import HEADS, Stretch, in_blocks, lanes_below
from flashsim.engines.cpu.micro_kernels.pair_writer import PairCode, pair_builder
from flashsim.engines.cpu.micro_kernels.writer import INT, LINE

#: Numbers per row of a tile, and keys whose scores are computed at once.
NUMBERS = KEYS = 2 * SIDE
#: 32-bit words of merged rows of V that fit in the L1 cache besides the data that is read.
MERGED = 4096


@pair_builder("pii")
def side_by_side_in_tiles(code: PairCode, Q, ld, rows) -> None:
    """Write the AMX version of `build_side_by_side`, which packs 16 rows of Q at a time."""
    b = code.b
    words = code.times(ld, SIDE // 2)
    turned = _scratch(code, words)

    def heads(h, _):
        first = code.at(Q, b.mul(h, ld))

        def square(x, _):
            places = [code.at(first, b.mul(ld, ir.Constant(INT, r)), x) for r in range(SIDE)]
            pairs = [code.in_a_row(code.load(p), code.load(code.at(p, SIDE))) for p in places]
            for r, row in enumerate(code.transposed(pairs)):
                code.store(row, code.at(turned, code.times(x, SIDE // 2), r * SIDE))

        def back(x, _):
            code.store(code.load(code.at(turned, x)), code.at(first, x))

        code.loop(ld, [], square, by=NUMBERS)
        code.loop(words, [], back, by=SIDE)

    code.loop(code.plus(rows, SIDE - 1), [], heads, by=SIDE)


@pair_builder("pipiipiiip")
def dots_in_tiles(code: PairCode, S, ld, K, k0, d, Q, ldq, rows, heads, factor) -> None:
    """Write the AMX version of `build_dots`, which copies those rows of K that fill no tile."""
    b, keys, most = code.b, Stretch(code, K, k0, BFLOAT16), ir.Constant(INT, KEYS)
    zero, times = ir.Constant(INT, 0), code.spread(factor)
    pairs, rest = b.lshr(ldq, ir.Constant(INT, 1)), b.srem(d, ir.Constant(INT, NUMBERS))
    some, whole = lanes_below(code, rest), b.sub(d, rest)
    enough = b.icmp_signed(">=", rows, most)
    as_it_lies = b.and_(b.icmp_signed("==", rest, zero), enough)
    copied = b.select(as_it_lies, zero, most)
    room, scores = _scratch(code, code.times(pairs, KEYS)), _scratch(code, (KEYS + 1) * SIDE)
    # The last block of rows overlaps with the block before it.
    last = b.select(enough, b.sub(rows, most), zero)
    product = build_tiles(*code.target, mode="set", rows=KEYS // SIDE, columns=1)

    def turned_over(r, h, count: int) -> None:
        """Emit code that transposes the scores of up to 4 heads, and stores one row per head."""
        for half in range(0, KEYS, SIDE):
            quarters = [_four(code, scores, (half + row) * SIDE, h) for row in range(SIDE)]
            vectors = [_joined(code, quarters[i::4]) for i in range(4)]
            for k, value in enumerate(_turned(code, vectors)[:count]):
                row = code.at(S, b.mul(code.plus(h, k), ld), r, half)
                code.store(b.fmul(value, times), row)

    def body(i, _):
        r = code.least(code.times(i, KEYS), last)
        first = b.mul(r, d)

        def near(x, _):
            keys.bring_near(b.add(first, x), NUMBERS)

        def copy(row, _):
            at = b.add(r, row)
            at = b.mul(code.least(at, b.sub(rows, ir.Constant(INT, 1))), d)
            to = code.at(room, b.mul(row, pairs))

            def numbers(x, _):
                place = code.at(to, b.lshr(x, ir.Constant(INT, 1)))
                code.store(keys.load(b.add(at, x)), place)

            code.loop(whole, [], numbers, by=NUMBERS)
            with b.if_then(b.icmp_signed("!=", rest, zero)):
                place = code.at(to, b.lshr(whole, ir.Constant(INT, 1)))
                code.store(keys.load(b.add(at, whole), some), place)

        code.loop(code.times(d, KEYS), [], near, by=NUMBERS)
        code.loop(copied, [], copy)
        lies = b.bitcast(b.gep(keys.first, [first]), code.element.as_pointer())
        left = b.select(as_it_lies, lies, room)
        b.call(product, [scores, _side(), left, pairs, Q, _side(), pairs])
        in_blocks(code, heads, HEADS, lambda h, count: turned_over(r, h, count))

    code.loop(b.sdiv(code.plus(rows, KEYS - 1), most), [], body)


@pair_builder("pipipiiii")
def weigh_in_tiles(code: PairCode, O, ldo, P, ldp, V, v0, dv, keys, _heads) -> None:
    """Write the AMX version of `decode_gemv.build_weigh`, which merges two rows of V into pairs."""
    b, values, one = code.b, Stretch(code, V, v0, BFLOAT16), ir.Constant(INT, 1)
    rest = b.srem(dv, ir.Constant(INT, NUMBERS))
    whole, some = b.sub(dv, rest), lanes_below(code, rest)
    sides = b.sdiv(ir.Constant(INT, MERGED // SIDE), ldo)
    most = code.times(b.select(b.icmp_signed(">", sides, one), sides, one), SIDE)
    merged = _scratch(code, b.mul(most, ldo))
    product = build_tiles(*code.target, mode="add", rows=1, columns=NUMBERS // SIDE)

    def chunk(r0) -> None:
        """Emit code that multiplies P by up to ``2 * most`` rows of V, from row r0 on."""
        pairs = code.least(b.lshr(b.add(b.sub(keys, r0), one), one), most)
        lines = b.and_(code.plus(pairs, SIDE - 1), ir.Constant(INT, -SIDE))

        def pair(i, _):
            r = b.add(r0, code.times(i, 2))
            last = b.sub(keys, one)
            # An odd last row is paired with itself, with a second weight of 0.
            below = b.select(b.icmp_signed("<", r, last), b.add(r, one), last)
            rows, to = [b.mul(row, dv) for row in (r, below)], code.at(merged, b.mul(i, ldo))

            def numbers(x, some=None):
                upper, lower = (values.load(b.add(row, x), some) for row in rows)
                for half in range(0, NUMBERS, SIDE):
                    lanes = [n for x in range(half, half + SIDE) for n in (x, NUMBERS + x)]
                    both = b.bitcast(code.pick(upper, lower, lanes), code.vector)
                    code.store(both, code.at(to, x, half))

            def near(x, _):
                values.bring_near(b.add(rows[0], x), NUMBERS)

            code.loop(code.times(dv, 2), [], near, by=NUMBERS)
            code.loop(whole, [], lambda x, _: numbers(x), by=NUMBERS)
            with b.if_then(b.icmp_signed("!=", rest, ir.Constant(INT, 0))):
                numbers(whole, some)

        def nothing(x, _):
            code.store(code.const(0), code.at(merged, b.mul(pairs, ldo), x))

        def product_of(x, _):
            left = code.at(P, b.lshr(r0, one))
            b.call(product, [code.at(O, x), ldo, left, ldp, code.at(merged, x), ldo, lines])

        code.loop(pairs, [], pair)
        code.loop(b.mul(b.sub(lines, pairs), ldo), [], nothing, by=SIDE)
        code.loop(ldo, [], product_of, by=NUMBERS)

    rows = code.times(most, 2)
    chunks = b.sdiv(b.sub(b.add(keys, rows), one), rows)
    code.loop(chunks, [], lambda i, _: chunk(b.mul(i, rows)))


def _side() -> ir.Constant:
    return ir.Constant(INT, SIDE)


def _scratch(code: PairCode, words):
    """Emit code that allocates 32-bit words on the stack, aligned to a cache line."""
    count = ir.Constant(INT, words) if isinstance(words, int) else words
    place = code.b.alloca(code.element, count)
    place.align = LINE
    return place


def _four(code: PairCode, base, at: int, h):
    """Emit code that loads four neighbouring floats as one vector."""
    kind = ir.VectorType(code.element, 4).as_pointer()
    return code.b.load(code.b.bitcast(code.at(base, h, at), kind), align=4)


def _joined(code: PairCode, parts: list):
    """Concatenate vectors into one vector."""
    while len(parts) > 1:
        lanes = list(range(2 * parts[0].type.count))
        parts = [code.pick(x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _turned(code: PairCode, rows: list) -> list:
    """Transpose 4 x 4 floats in each 16-byte group of four vectors."""
    n, groups = code.lanes, range(0, code.lanes, 4)

    def mixed(pair: list, lanes: tuple[int, ...]):
        return code.pick(pair[0], pair[1], [group + lane for group in groups for lane in lanes])

    halves = (0, n, 1, n + 1), (2, n + 2, 3, n + 3)
    pairs = [[mixed(two, lanes) for two in (rows[:2], rows[2:])] for lanes in halves]
    ends = (0, 1, n, n + 1), (2, 3, n + 2, n + 3)
    return [mixed(pair, lanes) for pair in pairs for lanes in ends]
