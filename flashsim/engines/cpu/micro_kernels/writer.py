"""Writes LLVM IR with vectors, which LLVM turns into AVX2, AVX-512 or NEON code; needs no Numba."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.exponential import Exponential
from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.problem.masks import masked_score

INT = ir.IntType(64)
VOID = ir.VoidType()
#: Bytes of a cache line.
LINE = 64
ELEMENT = {4: ir.FloatType(), 8: ir.DoubleType()}


class Code:
    """Writes the body of one LLVM function, whose vectors all have one type.

    If `module` lacks the function, it is added to the module. `itemsize` is 4 (float) or 8
    (double). `args` has one letter per argument: ``p`` for an address of elements, ``i`` for an
    integer.
    """

    def __init__(
        self, module: ir.Module, name: str, block: Blocking, itemsize: int, args: str
    ) -> None:
        self.target, self.block = (module, block, itemsize), block
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
            function.attributes.add("noinline")  # so that LLVM allocates its registers separately
            self.b = ir.IRBuilder(function.append_basic_block())
        self.function: ir.Function = module.globals[full]

    # -- values ---------------------------------------------------------------------------------

    def const(self, value: float) -> ir.Constant:
        """Return a vector with `value` in every lane."""
        return ir.Constant(self.vector, [float(value)] * self.lanes)

    def masked(self) -> ir.Constant:
        """Return a vector with the largest score that counts as masked in every lane."""
        return self.const(masked_score(np.float32 if self.itemsize == 4 else np.float64))

    def ints(self, value: int) -> ir.Constant:
        """Return a vector of integers as wide as elements, with `value` in every lane."""
        kind = ir.VectorType(ir.IntType(8 * self.itemsize), self.lanes)
        return ir.Constant(kind, [value] * self.lanes)

    def at(self, base, *offsets):
        """Return the address `base` plus offsets that count elements."""
        for offset in offsets:
            if isinstance(offset, int):
                offset = ir.Constant(INT, offset)
            base = self.b.gep(base, [offset])
        return base

    def times(self, x, factor: int):
        """Return the product of an integer value and a constant."""
        return self.b.mul(x, ir.Constant(INT, factor))

    def plus(self, x, more: int):
        """Return the sum of an integer value and a constant."""
        return self.b.add(x, ir.Constant(INT, more))

    def least(self, x, y):
        """Return the smaller of two integers."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def load(self, address):
        """Load one vector from memory; panels need not be aligned."""
        pointer = self.b.bitcast(address, self.vector.as_pointer())
        return self.b.load(pointer, align=self.itemsize)

    def store(self, value, address) -> None:
        """Store one vector to memory."""
        self.b.store(value, self.b.bitcast(address, value.type.as_pointer()), align=self.itemsize)

    def prefetch(self, address, cache: int = 1) -> None:
        """Prefetch the cache line of an address, which need not be valid, into L1 or L2."""
        kind, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        signature = ir.FunctionType(VOID, [kind, flag, flag, flag])
        function = self.function.module.declare_intrinsic("llvm.prefetch", [kind], signature)
        read, near, data = (ir.Constant(flag, value) for value in (0, 4 - cache, 1))
        self.b.call(function, [self.b.bitcast(address, kind), read, near, data])

    def vectors(self, address) -> list:
        """Return the addresses of the vectors in the panel row at `address`."""
        return [self.at(address, v * self.lanes) for v in range(self.vecs)]

    def spread(self, address):
        """Return a vector with the scalar at `address` in every lane."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        index = ir.IntType(32)
        vector = self.b.insert_element(undefined, self.b.load(address), ir.Constant(index, 0))
        zeros = ir.Constant(ir.VectorType(index, self.lanes), [0] * self.lanes)
        return self.b.shuffle_vector(vector, undefined, zeros)

    # -- arithmetic -----------------------------------------------------------------------------

    def fma(self, x, y, z):
        """Return x times y plus z, rounded once (a fused multiply-add)."""
        name = f"llvm.fma.v{self.lanes}f{8 * self.itemsize}"
        module = self.function.module
        if name not in module.globals:
            ir.Function(module, ir.FunctionType(self.vector, [self.vector] * 3), name)
        return self.b.call(module.globals[name], [x, y, z])

    def larger(self, x, y):
        """Return max(x, y), which is NaN if y is NaN, but not if x is."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def smaller(self, x, y):
        """Return min(x, y), which is NaN if y is NaN, but not if x is."""
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def whole(self, shifted: list) -> tuple[list, list]:
        """Round x to integers n, and return n and 2^n; `shifted` holds x + `Exponential.magic`.

        The low bits of x + magic are n + bias, and a shift turns these into the float 2^n. Each
        step is emitted for all vectors together, so that dependency chains overlap.
        """
        e, bits = Exponential.of(self.itemsize), self.ints(0).type
        ns = [self.b.fsub(t, self.const(e.magic)) for t in shifted]
        powers = [
            self.b.bitcast(self.b.shl(self.b.bitcast(t, bits), self.ints(e.mantissa)), self.vector)
            for t in shifted
        ]
        return ns, powers

    def polynomial(self, coefficients: tuple[float, ...], fs: list) -> list:
        """Evaluate a polynomial (constant term first) at several vectors in parallel."""
        ps = [self.const(coefficients[-1])] * len(fs)
        for coefficient in coefficients[-2::-1]:
            ps = [self.fma(p, f, self.const(coefficient)) for p, f in zip(ps, fs, strict=True)]
        return ps

    def exp(self, xs: list) -> list:
        """Compute e^x of several vectors as 2^n 2^f, with n + f = x log2 e and |f| <= 1/2.

        x must be below bias ln 2. Fused multiply-adds compute n and f, so x log2 e is not rounded
        separately. Results below the smallest normal number (also for x = -inf) are 0; NaN stays
        NaN.
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
        """Compute tanh(x / c) of several vectors, within 2 or 3 units in the last place.

        With z = 2 log2 e x / c and y = 2^z - 1, tanh is y / (y + 2). The sum y = 2^n (2^f - 1) +
        (2^n - 1) loses no precision for small x. The polynomial's error is small relative to 2^f -
        1, and f is corrected for rounding errors of z and of 2 log2 e / c. |z| is limited to twice
        the number of mantissa bits; beyond this limit, tanh is +-1 to the last bit.
        """
        e, b, unit, two = Exponential.of(self.itemsize), self.b, self.const(1), self.const(2)
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
            self.fma(p, b.fmul(f, power), b.fsub(power, unit))
            for f, power, p in zip(fs, powers, ps, strict=True)
        ]
        return [b.fdiv(y, b.fadd(y, two)) for y in ys]

    def transposed(self, rows: list) -> list:
        """Return the columns of a square matrix, which is passed as vectors of rows.

        In steps n = 1, 2, 4, .., vectors that are n apart exchange blocks of n lanes.
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
        """Return a vector whose lane i is the sum of all lanes of vector i.

        The number of vectors must be a power of two. Each step adds and merges pairs of vectors.
        """
        size, group = 1, 16 // self.itemsize
        while size < self.lanes:
            lanes, half = list(range(self.lanes)), group // 2
            if size < group:
                at = [lane // group * group + lane % size for lane in lanes]
                at = [
                    a + lane % group // (2 * size) * size + lane // size % 2 * self.lanes
                    for a, lane in zip(at, lanes, strict=True)
                ]
                other = [a + half for a in at]
            else:
                at = [2 * (lane - lane % group) + lane % group for lane in lanes]
                other = [a + group for a in at]
            pairs = list(zip(sums[::2], sums[1::2] or sums, strict=True))
            sums = [self.b.fadd(self.pick(x, y, at), self.pick(x, y, other)) for x, y in pairs]
            size *= 2
        return sums[0]

    def pick(self, x, y, lanes: list[int]):
        """Return a vector of chosen lanes of x and y; y's lanes are numbered after x's."""
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
        return self.b.shuffle_vector(x, y, mask)

    def step(self, left, right, total):
        """Return `total` + `left` * `right`; all lanes of `left` hold the same scalar of A."""
        return self.fma(left, right, total)

    # -- control --------------------------------------------------------------------------------

    def loop(self, count, carried: list, body: Callable, by: int = 1) -> list:
        """Emit a loop of ``carried = body(i, carried)`` for i = 0, by, .. while i + by <= count.

        The last value of `carried` is returned. If nothing is carried, `body` may return None.
        """
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
        results = body(i, values) or []
        i.add_incoming(next_i, b.block)
        for phi, value in zip(values, results, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return values

    def done(self) -> ir.Function:
        """End the LLVM function with a return instruction."""
        self.b.ret_void()
        return self.function


def builder(args: str | Callable[..., str], writer: Callable = lambda block, **_: Code) -> Callable:
    """Return the builder of an LLVM function whose body ``body(code, ...)`` writes.

    ``build(module, block, itemsize, **options)`` returns the function in `module`, and writes it if
    it is missing. `args` is passed to `Code`, or is a function that computes this value from the
    options. ``writer(block, **options)`` returns the class of `code`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., ir.Function]:
        def build(module: ir.Module, block: Blocking, itemsize: int, **options) -> ir.Function:
            numbers = [str(x) for x in options.values() if not callable(x)]
            name = "_".join([body.__name__.removeprefix("build_"), *numbers])
            kinds = args if isinstance(args, str) else args(**options)
            code = writer(block, **options)(module, name, block, itemsize, kinds)
            if code.is_new:
                body(code, *code.function.args, **options)
                code.done()
            return code.function

        return wraps(body)(build)

    return decorate
