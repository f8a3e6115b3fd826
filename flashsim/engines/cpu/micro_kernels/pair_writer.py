"""Extends the module `writer`, which writes LLVM IR for floats, to bfloat16 pairs."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.exponential import POWER_FROM_0
from flashsim.engines.cpu.micro_kernels.float16 import SHORT, rounded_bits
from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.engines.cpu.micro_kernels.writer import Code, builder

WORD = ir.IntType(32)


class PairCode(Code):
    """Writes LLVM functions whose 32-bit elements are floats or pairs of bfloat16 numbers."""

    def __init__(
        self, module: ir.Module, name: str, block: Blocking, itemsize: int, args: str
    ) -> None:
        del itemsize  # of the caller's first array, which may have 16-bit numbers
        super().__init__(module, f"{block.pairs}_{name}", block, 4, args)
        self.native = block.native

    def step(self, left, right, total):
        """Add each lane's dot product of the pairs in `left` and `right` to `total`."""
        whole = self.ints(0).type
        pairs = (self.b.bitcast(value, whole) for value in (left, right))
        return self._call("x86.avx512bf16.dpbf16ps.512", self.vector, total, *pairs)

    def halves(self, x):
        """Round each float to the nearest bfloat16; return the bits in 16-bit lanes."""
        bits = ir.VectorType(SHORT, self.lanes)
        if self.native:
            return self._call("x86.avx512bf16.cvtneps2bf16.512", bits, x)
        return self.b.trunc(self.b.lshr(rounded_bits(self, x), self.ints(16)), bits)

    def pair(self, x, y):
        """Round the vectors x and y to bfloat16; each pair has one number of x and one of y."""
        if self.native:
            kind = ir.VectorType(SHORT, 2 * self.lanes)
            # Puts x's numbers before y's.
            both = self._call("x86.avx512bf16.cvtne2ps2bf16.512", kind, y, x)
            turns = [lane + self.lanes * second for lane in range(self.lanes) for second in (0, 1)]
            return self.b.bitcast(self.pick(both, both, turns), self.vector)
        low, high = (self.b.zext(self.halves(value), self.ints(0).type) for value in (x, y))
        return self.b.bitcast(self.b.or_(low, self.b.shl(high, self.ints(16))), self.vector)

    def in_a_row(self, x, y):
        """Round two vectors of floats to bfloat16; return one vector of pairs of neighbours."""
        if self.native:
            kind = ir.VectorType(SHORT, 2 * self.lanes)
            both = self._call("x86.avx512bf16.cvtne2ps2bf16.512", kind, y, x)
        else:
            lanes = list(range(2 * self.lanes))
            both = self.pick(self.halves(x), self.halves(y), lanes)
        return self.b.bitcast(both, self.vector)

    def exp2(self, x):
        """Compute 2^x for x < 128 as 2^floor(x) 2^f with 0 <= f < 1; NaN stays NaN.

        Results below 2^-126 are 0, because AVX-512 takes 130 cycles to multiply by a power of two
        if the result is subnormal.
        """
        b, zero = self.b, self.const(0)
        seen = b.fcmp_unordered(">=", x, self.const(-126))
        if self.native:
            # Raises no flag; rounds as MXCSR says.
            down, here = ir.Constant(WORD, 9), ir.Constant(WORD, 4)
            every, mask = ir.Constant(SHORT, -1), b.bitcast(seen, SHORT)
            f = self._call("x86.avx512.mask.reduce.ps.512", self.vector, x, down, zero, every, here)
            q = self.polynomial(POWER_FROM_0, [f])[0]
            return self._call("x86.avx512.mask.scalef.ps.512", self.vector, q, x, zero, mask, here)
        n, integers = self._call(f"floor.v{self.lanes}f32", self.vector, x), self.ints(0).type
        q = self.polynomial(POWER_FROM_0, [b.fsub(x, n)])[0]
        n = self._call(f"fptosi.sat.v{self.lanes}i32.v{self.lanes}f32", integers, n)
        power = b.bitcast(b.shl(b.add(n, self.ints(127)), self.ints(23)), self.vector)
        return b.select(seen, b.fmul(q, power), zero)

    def power(self, x):
        """Compute e^x for x < 88 by the method `exp2`."""
        return self.exp2(self.b.fmul(x, self.const(np.log2(np.e))))

    def load_at(self, address):
        """Load one vector from an address that is aligned to 16 bits."""
        return self.b.load(self.b.bitcast(address, self.vector.as_pointer()), align=2)

    def _call(self, name: str, result: ir.Type, *values) -> Any:
        """Call an LLVM intrinsic in any version of LLVM; pass bfloat16 numbers as integers."""
        name, module = f"llvm.{name}", self.function.module
        if name not in module.globals:
            ir.Function(module, ir.FunctionType(result, [v.type for v in values]), name)
        return self.b.call(module.globals[name], values)


def pair_builder(args: str) -> Callable:
    """Return the decorator `writer.builder(args)` for functions over bfloat16 pairs."""
    return builder(args, lambda *_, **__: PairCode)
