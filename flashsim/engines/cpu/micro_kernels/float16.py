"""Vector code that rounds floats to float16 or bfloat16, and converts arrays of these types.

Kernels get 16-bit arrays as float32 arrays over the same memory, so one kernel serves float16 and
bfloat16.
"""

from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.engines.cpu.micro_kernels.writer import INT, Code, builder

#: The type of 16-bit inputs. For other inputs it is None, and Numba then removes the code for
#: 16-bit numbers before it compiles. P and dS are rounded to this type before they are multiplied
#: by V, K and Q.
BFLOAT16, FLOAT16 = 1, 2

SHORT = ir.IntType(16)


def rounded_bits(code: Code, x):
    """Return 32-bit integers whose upper halves are the nearest bfloat16 numbers to the floats."""
    b, ints = code.b, code.ints
    bits = b.bitcast(x, ints(0).type)
    odd = b.and_(b.lshr(bits, ints(16)), ints(1))
    rounded = b.add(b.add(bits, ints(0x7FFF)), odd)
    # A NaN with a payload only in the lower bits would become infinity.
    quiet = b.or_(bits, ints(0x00400000))
    return b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)


def rounded(code: Code, x, kind: int | None):
    """Round each float of a vector to the 16-bit type `kind`, unless `kind` is None."""
    b = code.b
    if kind is None:
        return x
    if kind == BFLOAT16:
        return b.bitcast(b.and_(rounded_bits(code, x), code.ints(0xFFFF0000)), code.vector)
    return b.fpext(b.fptrunc(x, ir.VectorType(ir.HalfType(), code.lanes)), code.vector)


def as_floats(code: Code, value, kind: int):
    """Convert a vector of 16-bit numbers exactly to floats."""
    b = code.b
    if kind == FLOAT16:
        return b.fpext(b.bitcast(value, ir.VectorType(ir.HalfType(), code.lanes)), code.vector)
    return b.bitcast(b.shl(b.zext(value, code.ints(0).type), code.ints(16)), code.vector)


@builder("pii")
def build_round(code: Code, X, ld, rows, *, kind: int | None) -> None:
    """Write the vector code of `plain.round_panel`."""

    def body(r, _):
        for x in code.vectors(code.at(X, code.b.mul(r, ld))):
            code.store(rounded(code, code.load(x), kind), x)

    if kind:
        code.loop(rows, [], body)


@builder("ppii")
def build_convert(code: Code, floats, halves, h0, n, *, kind: int, narrow: bool) -> None:
    """Write the vector code of `plain.widen` or, if `narrow`, of `plain.narrow`."""
    b = code.b
    shorts, half = (ir.VectorType(kind, code.lanes) for kind in (SHORT, ir.HalfType()))
    first = b.gep(b.bitcast(halves, SHORT.as_pointer()), [h0])

    def convert(value):
        if narrow and kind == FLOAT16:
            return b.bitcast(b.fptrunc(value, half), shorts)
        if narrow:
            return b.trunc(b.lshr(rounded_bits(code, value), code.ints(16)), shorts)
        return as_floats(code, value, kind)

    def body(i, _):
        there = [b.bitcast(x, shorts.as_pointer()) for x in code.vectors(b.gep(first, [i]))]
        for wide, short in zip(code.vectors(code.at(floats, i)), there, strict=True):
            if narrow:
                b.store(convert(code.load(wide)), short, align=2)
            else:
                code.store(convert(b.load(short, align=2)), wide)

    if code.itemsize == 4:  # 16-bit inputs are computed in float32
        code.loop(n, [], body, by=code.width)
        if code.width > 1:
            left = b.srem(n, ir.Constant(INT, code.width))
            done = b.sub(n, left)
            one_lane = code.function.module, Blocking(4, 1), 4
            rest = build_convert(*one_lane, kind=kind, narrow=narrow)
            b.call(rest, [code.at(floats, done), halves, b.add(h0, done), left])
