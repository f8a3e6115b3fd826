"""Functions that each emit one PTX instruction with an LLVM builder, and return its results.

NVIDIA's *PTX ISA* (docs.nvidia.com/cuda/parallel-thread-execution) defines semantics and operand
layouts. A name in quotation marks in a docstring is a section of the *PTX ISA*. All instructions
run on sm_80 and later unless a docstring says otherwise. A *lane* is a thread's index in its warp,
0 to 31.
"""

from llvmlite import ir

from flashsim.backends.numba_gpu.emit import (
    F32,
    I32,
    I64,
    Values,
    asm,
    i32,
    instruction,
    struct_values,
)

_FOUR_WORDS = ir.LiteralStructType([I32] * 4)
_FOUR_FLOATS = ir.LiteralStructType([F32] * 4)


# -- matrix fragments -----------------------------------------------------------------------------


def ldmatrix(b: ir.IRBuilder, address: ir.Value, *, transposed: bool) -> Values:
    """Load four 8 x 8 matrices of 16-bit elements from shared memory ("Warp-level matrix load").

    Lane l supplies the address of one row (16 bytes, 16-byte aligned): row l % 8 of matrix l / 8.
    From each matrix, lane l gets two elements in one register: row l / 4, columns 2 (l % 4) and 2
    (l % 4) + 1. With `transposed`, the instruction transposes each matrix.
    """
    trans = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
    loaded = asm(b, text, "=r,=r,=r,=r,r", [address], _FOUR_WORDS, effects=True)
    return struct_values(b, loaded, 4)


def mma(b: ir.IRBuilder, bf16: bool, c: Values, a: Values, b0: ir.Value, b1: ir.Value) -> Values:
    """Compute C + A B for a 16 x 16 matrix A and a 16 x 8 matrix B, with sums in float32.

    The layout of A, B and C is that of "Matrix fragments for mma.m16n8k16". Let r = lane / 4 and x
    = 2 (lane % 4). From A, a lane holds the elements (r, x), (r + 8, x), (r, x + 8) and (r + 8, x +
    8), each with its right neighbour. From B, a lane holds the elements (x, r) and (x + 8, r), each
    with the neighbour below. From C, a lane holds the elements (r, x), (r, x + 1), (r + 8, x) and
    (r + 8, x + 1).
    """
    kind = "bf16" if bf16 else "f16"
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    sums = asm(b, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [*a, b0, b1, *c], _FOUR_FLOATS)
    return struct_values(b, sums, 4)


def pack(b: ir.IRBuilder, bf16: bool, low: ir.Value, high: ir.Value) -> ir.Value:
    """Round two floats to 16 bits each, and pack them into one register ("cvt")."""
    kind = "bf16x2" if bf16 else "f16x2"
    return asm(b, f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", [high, low], I32)


def unpack(b: ir.IRBuilder, bf16: bool, word: ir.Value) -> Values:
    """Return the two 16-bit elements of a register as floats."""
    if bf16:
        halves = (b.shl(word, i32(16)), b.and_(word, i32(0xFFFF0000)))
        return [b.bitcast(half, F32) for half in halves]
    text = "{.reg .f16 x, y; mov.b32 {x, y}, $2; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y;}"
    two = asm(b, text, "=f,=f,r", [word], ir.LiteralStructType([F32, F32]))
    return struct_values(b, two, 2)


# -- HBM to shared memory, asynchronously ---------------------------------------------------------


def cp_async_16(
    b: ir.IRBuilder, to: ir.Value, source: ir.Value, taken: ir.Value | None = None
) -> None:
    """Copy 16 bytes from HBM to shared memory, without using registers or L1.

    If `taken` < 16, only `taken` bytes are read, and the rest become zero ("Non-bulk copy":
    src-size of `cp.async`).
    """
    if taken is None:
        asm(b, "cp.async.cg.shared.global [$0], [$1], 16;", "r,l", [to, source], effects=True)
    else:
        text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        asm(b, text, "r,l,r", [to, source, taken], effects=True)


#: ``cp_async_4(b, to, source, taken)`` copies 4 bytes from HBM to shared memory through L1, which
#: small copies cannot bypass.
cp_async_4 = instruction("cp.async.ca.shared.global [$0], [$1], 4, $2;", "r,l,r")
#: ``cp_async_wait(b)`` waits until the copies that this thread started have arrived. To wait for
#: copies of other threads, a barrier is needed too.
cp_async_wait = instruction("cp.async.wait_all;")


# -- shared memory and HBM, synchronously ---------------------------------------------------------


#: ``store_shared(b, to, word)`` stores one 32-bit register in shared memory, and
#: ``load_shared_float(b, address)`` loads one float32.
store_shared = instruction("st.shared.b32 [$0], $1;", "r,r")
load_shared_float = instruction("ld.shared.f32 $0, [$1];", "=f,r", F32)


def load_shared_pair(b: ir.IRBuilder, address: ir.Value) -> Values:
    """Load two neighbouring float32 from shared memory."""
    kind = ir.LiteralStructType([F32, F32])
    text = "ld.shared.v2.f32 {$0,$1}, [$2];"
    return struct_values(b, asm(b, text, "=f,=f,r", [address], kind, effects=True), 2)


def copy_out_16(b: ir.IRBuilder, to: ir.Value, address: ir.Value) -> None:
    """Copy 16 bytes from shared memory to HBM, through registers."""
    text = "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];"
    four = asm(b, text, "=r,=r,=r,=r,r", [address], _FOUR_WORDS, effects=True)
    store_16(b, to, struct_values(b, four, 4))


def load_16_if(b: ir.IRBuilder, source: ir.Value, condition: ir.Value) -> Values:
    """Load 16 bytes from HBM if `condition` holds, or otherwise return zeros.

    The load is predicated, so that no branch separates it from the next load.
    """
    text = (
        "{.reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; "
        "mov.b32 $3, 0; @p ld.global.v4.b32 {$0,$1,$2,$3}, [$4];}"
    )
    operands = [source, b.zext(condition, I32)]
    four = asm(b, text, "=&r,=&r,=&r,=&r,l,r", operands, _FOUR_WORDS, effects=True)
    return struct_values(b, four, 4)


def load_float_if(b: ir.IRBuilder, source: ir.Value, condition: ir.Value) -> ir.Value:
    """Load a float32 from HBM if `condition` holds, or otherwise return 0 ("ld").

    The load bypasses L1, which may hold an old value.
    """
    text = (
        "{.reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000; "
        "@p ld.global.cg.f32 $0, [$1];}"
    )
    return asm(b, text, "=&f,l,r", [source, b.zext(condition, I32)], F32, effects=True)


def store_16(b: ir.IRBuilder, to: ir.Value, four: Values) -> None:
    """Store 16 bytes in HBM."""
    text = "st.global.v4.b32 [$0], {$1,$2,$3,$4};"
    asm(b, text, "l,r,r,r,r", [to, *four], effects=True)


def add_float(b: ir.IRBuilder, to: ir.Value, values: Values) -> None:
    """Add to one float32 in HBM or, from sm_90 on, to two or four neighbours ("red")."""
    if len(values) == 1:
        asm(b, "red.global.add.f32 [$0], $1;", "l,f", [to, *values], effects=True)
    elif len(values) == 2:
        asm(b, "red.global.add.v2.f32 [$0], {$1,$2};", "l,f,f", [to, *values], effects=True)
    else:
        text = "red.global.add.v4.f32 [$0], {$1,$2,$3,$4};"
        asm(b, text, "l,f,f,f,f", [to, *values], effects=True)


#: ``add_float_unless_zero(b, to, value)`` adds to one float32 in HBM, unless `value` is 0;
#: predicated, without a branch.
add_float_unless_zero = instruction(
    "{.reg .pred p; setp.neu.f32 p, $1, 0f00000000; @p red.global.add.f32 [$0], $1;}", "l,f"
)
#: ``add_count(b, to, count)`` adds to an unsigned integer in HBM, atomically.
add_count = instruction("red.global.add.u32 [$0], $1;", "l,r")


# -- launches that overlap (sm_90) -----------------------------------------------------------------

#: ``wait_for_what_ran_before(b)`` waits until the previous launch in the stream is complete and its
#: writes are visible. The compiler does not move reads of its data before this wait.
wait_for_what_ran_before = instruction("griddepcontrol.wait;")
#: ``let_what_runs_next_start(b)`` lets the next launch in the stream start before this launch has
#: ended. The next launch runs up to its own wait for this launch.
let_what_runs_next_start = instruction("griddepcontrol.launch_dependents;")


# -- within a warp, and arithmetic ----------------------------------------------------------------


def shuffle_xor(b: ir.IRBuilder, value: ir.Value, mask: int) -> ir.Value:
    """Return the value of the lane whose number is this lane's number XOR `mask` ("shfl.sync")."""
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;"
    return asm(b, text, "=f,f", [value], F32, effects=True)


#: ``warp_sum(b, value)`` returns the sum of an integer over a warp's lanes ("redux.sync").
warp_sum = instruction("redux.sync.add.s32 $0, $1, -1;", "=r,r", I32)


def any_lane(b: ir.IRBuilder, condition: ir.Value) -> ir.Value:
    """Return whether `condition` holds in any lane of the warp ("vote.sync")."""
    text = (
        "{.reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p;}"
    )
    answer = asm(b, text, "=r,r", [b.zext(condition, I32)], I32, effects=True, together=True)
    return b.icmp_unsigned("!=", answer, i32(0))


#: The larger of two floats; if one is NaN, the other ("max").
maximum = instruction("max.f32 $0, $1, $2;", "=f,f,f", F32, effects=False)
#: 2^x and the base-2 logarithm from the special-function unit ("ex2.approx", "lg2.approx").
exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", "=f,f", F32, effects=False)
log2 = instruction("lg2.approx.f32 $0, $1;", "=f,f", F32, effects=False)
#: 1 / x, correctly rounded ("rcp").
reciprocal = instruction("rcp.rn.f32 $0, $1;", "=f,f", F32, effects=False)
#: ``again(b, value)`` returns a 32-bit integer in a way that hides its value from LLVM.
again = instruction("mov.b32 $0, $1;", "=r,r", I32)
#: x ^ y for 32-bit integers in a way that hides the operation from LLVM.
exclusive_or = instruction("xor.b32 $0, $1, $2;", "=r,r,r", I32, effects=False)
#: The SM's 64-bit cycle counter, and the GPU's 64-bit clock (globaltimer) in nanoseconds.
cycles = instruction("mov.u64 $0, %clock64;", "=l", I64)
nanoseconds = instruction("mov.u64 $0, %globaltimer;", "=l", I64)


def special(b: ir.IRBuilder, name: str, *, effects: bool = False) -> ir.Value:
    """Read a 32-bit special register, such as tid.x, ctaid.x or smid."""
    return asm(b, f"mov.u32 $0, %{name};", "=r", [], I32, effects=effects)


def multiprocessor(b: ir.IRBuilder) -> ir.Value:
    """Return the number of the SM on which the thread runs."""
    return special(b, "smid")
