"""Emits code that reads K and V in memory order, as floats, 16-bit numbers or bfloat16 pairs."""

from collections.abc import Callable

from llvmlite import ir

from flashsim.engines.cpu.micro_kernels import registers
from flashsim.engines.cpu.micro_kernels.float16 import BFLOAT16, SHORT, as_floats
from flashsim.engines.cpu.micro_kernels.pair_writer import PairCode
from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.engines.cpu.micro_kernels.writer import INT, LINE, Code, builder

#: How many bytes ahead rows are prefetched (docs/notebooks/cpu.md). The CPU's own prefetcher stops
#: at each page of 4 KiB, and when a kernel goes from K to V. Data is prefetched into the L1 cache,
#: except on AMD's CPUs, which allow few outstanding lines to L1, and more to L2.
AHEAD = 8 << 10
#: The number of keys, and of heads, whose dot products are computed together.
KEYS = HEADS = 4
#: Keys after which a product continues with other heads or columns, so that rows stay in the cache.
CHUNK = 16


class Stretch:
    """A part of an array of K or V, read as floats or, with a `PairCode`, as bfloat16 pairs.

    `start` is the number of array elements before this part. `kind` names the 16-bit type of the
    numbers, or is None for floats.
    """

    def __init__(self, code: Code, base, start, kind: int | None) -> None:
        self.code, self.kind, self.pairs = code, kind, isinstance(code, PairCode)
        self.numbers = numbers_of(code)
        self.element = SHORT if kind else code.element
        self.size = 2 if kind else code.itemsize
        self.first = code.b.gep(code.b.bitcast(base, self.element.as_pointer()), [start])

    def load(self, at, some=None):
        """Load a vector from number `at` on; lanes outside the mask `some` are 0 and not read."""
        code, b = self.code, self.code.b
        vector = ir.VectorType(self.element, self.numbers)
        address = b.bitcast(b.gep(self.first, [at]), vector.as_pointer())
        if some is None:
            value = b.load(address, align=self.size)
        else:
            letter = "i" if self.kind else "f"
            name = f"llvm.masked.load.v{self.numbers}{letter}{8 * self.size}.p0"
            kinds = [address.type, ir.IntType(32), some.type, vector]
            module = code.function.module
            function = module.globals.get(name) or ir.Function(
                module, ir.FunctionType(vector, kinds), name
            )
            nothing = ir.Constant(vector, [0] * self.numbers)
            value = b.call(function, [address, ir.Constant(kinds[1], self.size), some, nothing])
        if self.pairs:
            return value
        return as_floats(code, value, self.kind) if self.kind else value

    def bring_near(self, at, count: int) -> None:
        """Prefetch `count` numbers that are `AHEAD` bytes after number `at`."""
        cache = 2 if registers.zen() else 1
        for line in range(0, count * self.size, LINE):
            ahead = ir.Constant(INT, (AHEAD + line) // self.size)
            self.code.prefetch(self.code.b.gep(self.first, [self.code.b.add(at, ahead)]), cache)


def by_kind(args: str, of_tiles: Callable | None = None) -> Callable:
    """Return a decorator, similar to `builder`, for code that depends on the `kind` of K and V."""

    def writer(block: Blocking, kind: int | None) -> type[Code]:
        return PairCode if block.pairs and kind == BFLOAT16 else Code

    def decorate(body: Callable[..., None]) -> Callable[..., ir.Function]:
        of_vectors = builder(args, writer)(body)

        def build(module: ir.Module, block: Blocking, itemsize: int, kind: int | None = None):
            if of_tiles and kind == BFLOAT16 and block.pairs == "amx":
                return of_tiles(module, block, itemsize)
            return of_vectors(module, block, itemsize, kind=kind)

        return build

    return decorate


def numbers_of(code: Code) -> int:
    """Return how many numbers of a `Stretch` one vector holds."""
    return code.lanes * (2 if isinstance(code, PairCode) else 1)


def lanes_below(code: Code, count):
    """Return a mask for the first `count` numbers of a vector of a `Stretch`."""
    b, lanes = code.b, numbers_of(code)
    undefined = ir.Constant(ir.VectorType(INT, lanes), ir.Undefined)
    vector = b.insert_element(undefined, count, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    numbers = ir.Constant(undefined.type, list(range(lanes)))
    return b.icmp_signed("<", numbers, b.shuffle_vector(vector, undefined, zeros))


def in_blocks(code: Code, heads, most: int, body: Callable) -> None:
    """Emit ``body(h, count)`` for all heads, in blocks of `most`, `most` / 2, .. heads."""
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

        code.loop(count, [], block)
        size //= 2
