"""Writes matrix products as AMX tile instructions in LLVM IR.

AMX, Intel's matrix unit, has eight tile registers of 16 rows of 64 bytes: 16 x 16 float32 or 16 x
32 bfloat16 numbers. For each element (i, j) of tile c, ``TDPBF16PS c, a, b`` adds the dot products
of 16 bfloat16 pairs in row i of tile a and column j of tile b. Instructions name tile registers by
number, so LLVM neither spills nor moves a tile. Each thread must configure its tile registers'
shapes (`CONFIG`) before the first product.
"""

from llvmlite import ir

from flashsim.engines.cpu.micro_kernels.writer import VOID, Code, builder

#: Rows of a tile, and its 32-bit columns: float32 sums, or pairs of bfloat16.
SIDE = 16
#: Rows and columns of C's tiles that one function keeps in registers, besides two tiles of A and
#: two of B.
BLOCK = 2
#: The data that LDTILECFG reads: palette 1, then bytes per row and rows of each of the eight tiles.
CONFIG = bytes([1, *[0] * 15, *[4 * SIDE, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8])
#: What the names of LLVM's AMX intrinsics begin with.
INTRINSICS = "llvm.x86."

BYTE = ir.IntType(8)


@builder("pipipii")
def build_tiles(
    code: Code, C, ldc, A, lda, B, ldb, n, *, mode: str, rows: int, columns: int
) -> None:
    """Write an LLVM function that computes a block of `rows` x `columns` tiles of C, over n pairs.

    `rows` and `columns` are at most `BLOCK`. `mode` is "set" (C = A B) or "add" (C += A B).
    Addresses and leading dimensions refer to 32-bit elements. The tiles of C have the lowest
    register numbers; those of A and of B follow.
    """
    cells = [(r * columns + c, r, c) for r in range(rows) for c in range(columns)]
    first_a, first_b = rows * columns, rows * columns + rows
    operands = {"C": (C, ldc), "A": (A, lda), "B": (B, ldb)}
    bytes_a_row = {name: code.times(ld, 4) for name, (_, ld) in operands.items()}

    def move(instruction: str, tile: int, operand: str, row: int, column: int, x=None) -> None:
        """Emit a load or a store of one tile; the tiles of A and of B are those of pair x."""
        base, leading = operands[operand]
        offsets = [code.times(leading, SIDE * row), *[SIDE * column] * (column > 0)]
        if x is not None:
            offsets.append(x if operand == "A" else code.b.mul(leading, x))
        address = code.b.bitcast(code.at(base, *offsets), BYTE.as_pointer())
        call(code, instruction, ir.Constant(BYTE, tile), address, bytes_a_row[operand])

    def multiply(x, _) -> None:
        for tile, r, c in cells:  # a tile is loaded where it is first needed
            a, b = first_a + r, first_b + c
            if c == 0:
                move("tileloadd64", a, "A", r, 0, x)
            if r == 0:
                move("tileloadd64", b, "B", 0, c, x)
            call(code, "tdpbf16ps", *(ir.Constant(BYTE, register) for register in (tile, a, b)))

    for tile, r, c in cells:
        if mode == "set":
            call(code, "tilezero", ir.Constant(BYTE, tile))
        else:
            move("tileloadd64", tile, "C", r, c)
    code.loop(n, [], multiply, by=SIDE)
    for tile, r, c in cells:
        move("tilestored64", tile, "C", r, c)


def call(code: Code, name: str, *values) -> None:
    """Emit a call of one of LLVM's AMX intrinsics."""
    module, full = code.function.module, f"{INTRINSICS}{name}"
    if full not in module.globals:
        ir.Function(module, ir.FunctionType(VOID, [v.type for v in values]), full)
    code.b.call(module.globals[full], values)


@builder("p")
def build_configure(code: Code, _any_array) -> None:
    """Write the LLVM function that sets a thread's AMX tile shapes, and zeroes the tiles.

    On CPUs without AMX, this function and that of `build_release` do nothing.
    """
    if code.block.pairs != "amx":
        return
    kind = ir.ArrayType(BYTE, len(CONFIG))
    data = ir.GlobalVariable(code.function.module, kind, "flashsim_tiles_config")
    data.global_constant, data.linkage, data.align = True, "internal", len(CONFIG)
    data.initializer = ir.Constant(kind, list(CONFIG))
    call(code, "ldtilecfg", code.b.bitcast(data, BYTE.as_pointer()))


@builder("p")
def build_release(code: Code, _any_array) -> None:
    """Write the LLVM function that releases AMX tiles, so that thread switches do not save them."""
    if code.block.pairs == "amx":
        call(code, "tilerelease")
