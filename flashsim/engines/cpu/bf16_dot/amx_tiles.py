"""Writes matrix products as AMX tile instructions, and translates these to LLVM IR.

AMX, Intel's matrix unit, has eight tile registers of 16 rows of 64 bytes: 16 x 16 float32 or 16 x
32 bfloat16 numbers. For each element (i, j) of tile c, ``TDPBF16PS c, a, b`` adds the dot products
of 16 bfloat16 pairs in row i of tile a and column j of tile b. Instructions name tile registers by
number, so LLVM neither spills nor moves a tile. Each thread must configure its tile registers'
shapes (`CONFIG`) before the first product.
"""

from itertools import product
from typing import NamedTuple

from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.writer import VOID, Code, builder

#: Rows of a tile, and its 32-bit columns: float32 sums, or pairs of bfloat16.
SIDE = 16
#: Rows and columns of C's tiles that one program keeps in registers, besides two tiles of A and two
#: of B.
BLOCK = 2
#: The data that LDTILECFG reads: palette 1, then bytes per row and rows of each of the eight tiles.
CONFIG = bytes(
    [1, *[0] * 15, *[4 * SIDE, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8],
)

BYTE = ir.IntType(8)


class Zero(NamedTuple):
    """AMX instruction that fills tile register `tile` with zeros."""

    tile: int


class Load(NamedTuple):
    """AMX instruction that loads a tile register from (`row`, `column`) of the matrix `operand`."""

    tile: int
    operand: str
    row: int
    column: int


class Store(NamedTuple):
    """AMX instruction that stores a tile register to (`row`, `column`) of the matrix `operand`."""

    tile: int
    operand: str
    row: int
    column: int


class Dot(NamedTuple):
    """AMX instruction that adds the product of tile registers `a` and `b` to register `c`."""

    c: int
    a: int
    b: int


Instruction = Zero | Load | Store | Dot


class Program(NamedTuple):
    """AMX instructions before a loop over bfloat16 pairs, in each iteration, and after the loop.

    Each iteration adds the dot products of 16 pairs to each element of C. The next iteration reads
    one tile further right in A and one tile further down in B.
    """

    before: tuple[Instruction, ...]
    each: tuple[Instruction, ...]
    after: tuple[Instruction, ...]


def program(mode: str, rows: int, columns: int) -> Program:
    """Return the AMX instructions that compute a block of `rows` x `columns` tiles of C.

    `rows` and `columns` are at most `BLOCK`. `mode` is "set" (C = A B) or "add" (C += A B). The
    tiles of C have the lowest register numbers; those of A and of B follow.
    """
    cells = [
        (r * columns + c, r, c) for r, c in product(range(rows), range(columns))
    ]  # (tile, row, column)
    start: list[Instruction] = [
        Zero(tile) if mode == "set" else Load(tile, "C", r, c) for tile, r, c in cells
    ]
    a, b = rows * columns, rows * columns + rows
    each: list[Instruction] = []
    for tile, r, c in cells:  # a tile is fetched where it is first needed
        if c == 0:
            each.append(Load(a + r, "A", r, 0))
        if r == 0:
            each.append(Load(b + c, "B", 0, c))
        each.append(Dot(tile, a + r, b + c))
    return Program(tuple(start), tuple(each), tuple(Store(t, "C", r, c) for t, r, c in cells))


@builder("pipipii")
def build_tiles(
    code: Code, C, ldc, A, lda, B, ldb, n, *, mode: str, rows: int, columns: int
) -> None:
    """Write an LLVM function that computes a block of C by AMX instructions, over n pairs.

    Addresses and leading dimensions refer to 32-bit elements.
    """
    base, leading = {"C": C, "A": A, "B": B}, {"C": ldc, "A": lda, "B": ldb}
    bytes_a_row = {name: code.times(ld, 4) for name, ld in leading.items()}
    start, each, after = program(mode, rows, columns)

    def address(name: str, row: int, column: int, x):
        offsets = [code.times(leading[name], SIDE * row), SIDE * column]
        if name == "A":
            offsets.append(x)
        if name == "B":
            offsets.append(code.b.mul(leading[name], x))
        at_tile = code.at(base[name], *(o for o in offsets if not isinstance(o, int) or o))
        return code.b.bitcast(at_tile, BYTE.as_pointer())

    def emit(instruction: Instruction, x=None) -> None:
        numbers = [ir.Constant(BYTE, t) for t in instruction if isinstance(t, int)]
        if isinstance(instruction, Zero):
            call(code, "tilezero", *numbers)
        elif isinstance(instruction, Dot):
            call(code, "tdpbf16ps", *numbers)
        else:
            name = instruction.operand
            at_tile = address(name, instruction.row, instruction.column, x)
            kind = "tileloadd64" if isinstance(instruction, Load) else "tilestored64"
            call(code, kind, numbers[0], at_tile, bytes_a_row[name])

    def round_(x, _):
        for instruction in each:
            emit(instruction, x)

    for instruction in start:
        emit(instruction)
    code.loop(n, [], round_, by=SIDE)
    for instruction in after:
        emit(instruction)


def call(code: Code, name: str, *values) -> None:
    """Emit a call of one of LLVM's AMX intrinsics."""
    module, full = code.function.module, f"llvm.x86.{name}"
    if full not in module.globals:
        ir.Function(module, ir.FunctionType(VOID, [v.type for v in values]), full)
    code.b.call(module.globals[full], values)


@builder("p")
def build_configure(code: Code, _any_array) -> None:
    """Write the LLVM function that sets a thread's AMX tile shapes, and zeroes the tiles."""
    kind = ir.ArrayType(BYTE, len(CONFIG))
    data = ir.GlobalVariable(code.function.module, kind, "flashsim_tiles_config")
    data.global_constant, data.linkage, data.align = True, "internal", len(CONFIG)
    data.initializer = ir.Constant(kind, list(CONFIG))
    call(code, "ldtilecfg", code.b.bitcast(data, BYTE.as_pointer()))


@builder("p")
def build_release(code: Code, _any_array) -> None:
    """Write the LLVM function that releases AMX tiles, so that thread switches do not save them."""
    call(code, "tilerelease")
