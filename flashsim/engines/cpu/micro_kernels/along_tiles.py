"""What `along` does otherwise where AMX's tiles multiply pairs (`pairs.tiles`): 16 heads at a time.

Neither K nor V is rearranged. Rows of K are a left operand as they lie in memory, and Q a right
one, so scores come with keys for rows and heads for columns, and are turned over. Rows of V are a
right operand as they lie, whose pairs are columns 2 i and 2 i + 1 of one key: with P in the lower
halves of its words and zeros in the upper ones, a product has the even columns of O, and the odd
ones with P in the upper halves. So each P is multiplied with a zero as well; merging rows of V in
registers, which this spares, takes longer.

Heads beyond the last have columns, and rows, of their own: nobody asks what becomes of these.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.halves import BFLOAT16, SHORT
from flashsim.engines.cpu.micro_kernels.pair_writer import PairCode
from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.engines.cpu.micro_kernels.stretch import (
    AHEAD,
    HEADS,
    Stretch,
    in_blocks,
    lanes_below,
)
from flashsim.engines.cpu.micro_kernels.writer import INT, LINE
from flashsim.engines.cpu.pairs import tiles
from flashsim.engines.cpu.pairs.tiles import SIDE

#: What writes a product of tiles, by `Blocking.pairs`.
TILED: dict[str, Callable] = {"amx": tiles.lower}
#: Numbers of a row of a tile, and keys whose scores are one product.
NUMBERS = KEYS = 2 * SIDE
#: Keys whose scores are turned over together, so that no store is waited for; a multiple of `KEYS`.
TOGETHER = 128
#: Keys after which a product with V goes on with other columns: their rows stay near.
CHUNK = 128


def tiled(block: Blocking, kind: int | None) -> bool:
    """Whether numbers of this kind are multiplied by tiles."""
    return kind == BFLOAT16 and block.pairs in TILED


def side_by_side_in_tiles(module: ir.Module, block: Blocking, itemsize: int) -> ir.Function:
    """`along_pairs.build_side_by_side`: each 16 rows become a right operand, 16 words a pair."""
    code = PairCode(module, "side_by_side_in_tiles", block, itemsize, "pii")
    if not code.is_new:
        return code.function
    Q, ld, rows = code.function.args
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
            return []

        code.loop(ld, [], square, by=NUMBERS)
        _copy(code, first, turned, words)
        return []

    code.loop(b.add(rows, ir.Constant(INT, SIDE - 1)), [], heads, by=SIDE)
    return code.done()


def in_order_in_tiles(module: ir.Module, block: Blocking, itemsize: int) -> ir.Function:
    """`along.build_in_order`: each 16 rows' even columns come first, and then their odd ones."""
    code = PairCode(module, "in_order_in_tiles", block, itemsize, "pii")
    if not code.is_new:
        return code.function
    O, ld, rows = code.function.args
    b, half = code.b, code.b.lshr(ld, ir.Constant(INT, 1))
    words = code.times(ld, SIDE)
    ordered = _scratch(code, words)

    def heads(h, _):
        first = code.at(O, b.mul(h, ld))

        def row(r, _):
            even, odd = (code.at(first, b.mul(b.add(r, side), half)) for side in (_int(0), _side()))

            def columns(x, _):
                two = code.load(code.at(even, x)), code.load(code.at(odd, x))
                to = code.at(ordered, b.mul(r, ld), code.times(x, 2))
                for first in (0, SIDE // 2):
                    lanes = [n for x in range(first, first + SIDE // 2) for n in (x, SIDE + x)]
                    code.store(code.pick(*two, lanes), code.at(to, 2 * first))
                return []

            code.loop(half, [], columns, by=SIDE)
            return []

        code.loop(_side(), [], row)
        _copy(code, first, ordered, words)
        return []

    code.loop(b.add(rows, ir.Constant(INT, SIDE - 1)), [], heads, by=SIDE)
    return code.done()


def dots_in_tiles(module: ir.Module, block: Blocking, itemsize: int) -> ir.Function:
    """`along.build_dots`. A tile has rows of 32 numbers, so other rows, and fewer, are copied."""
    code = PairCode(module, "dots_in_tiles", block, itemsize, "pipiipiiip")
    if not code.is_new:
        return code.function
    S, ld, K, k0, d, Q, ldq, rows, heads, factor = code.function.args
    b, keys, most = code.b, Stretch(code, K, k0, BFLOAT16), _int(KEYS)
    zero, times, pairs = _int(0), code.spread(factor), b.lshr(ldq, _int(1))
    enough = b.icmp_signed(">=", rows, most)
    as_it_lies = b.and_(_whole(code, d), enough)
    put = _row_copier(code, keys, d)
    room, scores = _scratch(code, code.times(pairs, KEYS)), _scratch(code, (TOGETHER + 1) * SIDE)
    # The last rows are taken with some before them.
    last = b.select(enough, b.sub(rows, most), zero)
    product = TILED[block.pairs](module, block, "set", KEYS // SIDE, 1, near=KEYS // SIDE)
    blocks = b.sdiv(b.add(rows, _int(KEYS - 1)), most)

    def products(r, i) -> None:
        def copy(row, _):
            at = _smaller(code, b.add(r, row), b.sub(rows, _int(1)))
            put(at, code.at(room, b.mul(row, pairs)))
            return []

        code.loop(b.select(as_it_lies, zero, most), [], copy)
        lies, to = _words(code, keys, b.mul(r, d)), code.at(scores, code.times(i, KEYS * SIDE))
        left, ahead = b.select(as_it_lies, lies, room), code.at(lies, AHEAD // 4)
        b.call(product, [to, _side(), left, pairs, Q, _side(), pairs, ahead])

    def turned_over(r, i, h, count: int) -> None:
        """Scores of `count` heads up to 4: four keys' in each 16 bytes, and these transposed."""
        first = code.at(scores, code.times(i, KEYS * SIDE))
        for half in range(0, KEYS, SIDE):
            quarters = [_four(code, first, (half + row) * SIDE, h) for row in range(SIDE)]
            vectors = [_joined(code, quarters[i::4]) for i in range(4)]
            for k, value in enumerate(_turned(code, vectors)[:count]):
                row = code.at(S, b.mul(b.add(h, _int(k)), ld), r, half)
                code.store(b.fmul(value, times), row)

    def body(first, _):
        n = _smaller(code, b.sub(blocks, first), _int(TOGETHER // KEYS))

        def each(do: Callable) -> None:
            def block(i, _):
                do(_smaller(code, code.times(b.add(first, i), KEYS), last), i)
                return []

            code.loop(n, [], block)

        each(products)
        each(
            lambda r, i: in_blocks(code, heads, HEADS, lambda h, count: turned_over(r, i, h, count))
        )
        return []

    step = TOGETHER // KEYS
    code.loop(b.add(blocks, _int(step - 1)), [], body, by=step)
    return code.done()


def weigh_in_tiles(module: ir.Module, block: Blocking, itemsize: int) -> ir.Function:
    """`along.build_weigh`: of each 16 heads' O the even columns come first, then the odd ones."""
    code = PairCode(module, "weigh_in_tiles", block, itemsize, "pipipiiii")
    if not code.is_new:
        return code.function
    O, ldo, P, ldp, V, v0, dv, keys, heads = code.function.args
    b, values, zero = code.b, Stretch(code, V, v0, BFLOAT16), _int(0)
    half, put = b.lshr(ldo, _int(1)), _row_copier(code, values, dv)
    whole = _whole(code, dv)
    weights, room = _scratch(code, 2 * SIDE * CHUNK), _scratch(code, code.times(half, SIDE))
    wide, narrow = (
        TILED[block.pairs](module, block, "add", 2, columns, near=columns) for columns in (2, 1)
    )
    shorts = ir.VectorType(SHORT, SIDE)

    def multiply(left, right, n, begin) -> None:
        """O += P V of n keys, whole tiles of them, from `begin` on."""
        ahead = code.at(_words(code, values, b.mul(begin, dv)), AHEAD // 4)

        def columns(x, _, product=wide):
            more = code.at(right, x), half, n, code.at(ahead, b.mul(n, x))
            b.call(product, [code.at(O, x), half, left, _int(CHUNK), *more])
            return []

        code.loop(half, [], columns, by=2 * SIDE)
        with b.if_then(b.icmp_signed("!=", b.and_(half, _side()), zero)):
            columns(b.sub(half, _side()), None, narrow)

    def chunk(r0, _):
        n = _smaller(code, b.sub(keys, r0), _int(CHUNK))
        lie = b.select(whole, b.and_(n, _int(-SIDE)), zero)

        def words_of_head(h, _):
            row = code.at(P, b.mul(h, ldp), b.lshr(r0, _int(1)))
            to = code.at(weights, code.times(h, CHUNK))

            def words(x, _):
                place = b.bitcast(code.at(row, b.lshr(x, _int(1))), shorts.as_pointer())
                low = b.zext(b.load(place, align=4), code.ints(0).type)
                for value, at in ((low, 0), (b.shl(low, code.ints(16)), SIDE * CHUNK)):
                    code.store(b.bitcast(value, code.vector), code.at(to, x, at))
                return []

            code.loop(b.add(n, _int(SIDE - 1)), [], words, by=SIDE)
            return []

        def copied(x, _):
            """16 rows and fewer, or rows that a tile does not divide, with zeros below them."""
            at = b.add(lie, x)
            count = _smaller(code, b.sub(n, at), _side())

            def row(i, _):
                put(b.add(b.add(r0, at), i), code.at(room, b.mul(i, half)))
                return []

            def nothing(i, _):
                code.store(code.const(0), code.at(room, b.mul(count, half), i))
                return []

            code.loop(count, [], row)
            code.loop(b.mul(b.sub(_side(), count), half), [], nothing, by=SIDE)
            multiply(code.at(weights, at), room, _side(), b.add(r0, at))
            return []

        code.loop(heads, [], words_of_head)
        with b.if_then(b.icmp_signed(">", lie, zero)):
            multiply(weights, _words(code, values, b.mul(r0, dv)), lie, r0)
        code.loop(b.add(b.sub(n, lie), _int(SIDE - 1)), [], copied, by=SIDE)
        return []

    code.loop(b.add(keys, _int(CHUNK - 1)), [], chunk, by=CHUNK)
    return code.done()


def _int(value: int) -> ir.Constant:
    return ir.Constant(INT, value)


def _side() -> ir.Constant:
    return _int(SIDE)


def _smaller(code: PairCode, x, y):
    return code.b.select(code.b.icmp_signed("<", x, y), x, y)


def _whole(code: PairCode, d):
    """Whether tiles divide rows of d numbers."""
    return code.b.icmp_signed("==", code.b.and_(d, _int(NUMBERS - 1)), _int(0))


def _words(code: PairCode, numbers: Stretch, at):
    """Where number `at` of a stretch lies, which begins a word."""
    return code.b.bitcast(code.b.gep(numbers.first, [at]), code.element.as_pointer())


def _scratch(code: PairCode, words):
    """Room for 32-bit words as long as the function runs, from the beginning of a line on."""
    place = code.b.alloca(code.element, _int(words) if isinstance(words, int) else words)
    place.align = LINE
    return place


def _copy(code: PairCode, to, source, words) -> None:
    def body(x, _):
        code.store(code.load(code.at(source, x)), code.at(to, x))
        return []

    code.loop(words, [], body, by=SIDE)


def _row_copier(code: PairCode, numbers: Stretch, d) -> Callable:
    """``put(r, to)`` copies row r of d numbers, with zeros up to whole tiles."""
    b = code.b
    rest = b.and_(d, _int(NUMBERS - 1))
    whole, some = b.sub(d, rest), lanes_below(code, rest)

    def put(r, to) -> None:
        first = b.mul(r, d)

        def vector(x, which=None) -> list:
            value = numbers.load(b.add(first, x), which)
            code.store(value, code.at(to, b.lshr(x, _int(1))))
            return []

        code.loop(whole, [], lambda x, _: vector(x), by=NUMBERS)
        with b.if_then(b.icmp_signed("!=", rest, _int(0))):
            vector(whole, some)

    return put


def _four(code: PairCode, base, at: int, h):
    """Four floats."""
    kind = ir.VectorType(code.element, 4).as_pointer()
    return code.b.load(code.b.bitcast(code.at(base, h, at), kind), align=4)


def _joined(code: PairCode, parts: list):
    """Vectors one after another."""
    while len(parts) > 1:
        lanes = list(range(2 * parts[0].type.count))
        parts = [code.pick(x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _turned(code: PairCode, rows: list) -> list:
    """Of four vectors, each 16 bytes' 4 x 4 floats transposed."""
    n, groups = code.lanes, range(0, code.lanes, 4)

    def mixed(pair: list, lanes: tuple[int, ...]):
        return code.pick(pair[0], pair[1], [group + lane for group in groups for lane in lanes])

    halves = (0, n, 1, n + 1), (2, n + 2, 3, n + 3)
    pairs = [[mixed(two, lanes) for two in (rows[:2], rows[2:])] for lanes in halves]
    ends = (0, 1, n, n + 1), (2, 3, n + 2, n + 3)
    return [mixed(pair, lanes) for pair in pairs for lanes in ends]
