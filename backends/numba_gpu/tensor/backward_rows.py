"""The backward pass's row-wise kernels, `flash_delta` (first) and `flash_convert` (last).

`flash_delta` computes delta = rowsum(dO * O), minus the LSE's gradient, if any. `flash_delta` also
clears dQ's float32 accumulator, if any. `flash_convert` rounds dQ's accumulator to 16 bits. Block
(i, head) handles row tile i. The kernels use no shared memory, and access rows in HBM 16 bytes at a
time.
"""

from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import (
    F32,
    FRAGMENT,
    I32,
    I64,
    Like,
    emitted,
    f32,
    floats,
    i32,
)
from flashsim.backends.numba_gpu.traversal import (
    constants,
    piece_bytes,
    walk_functions,
    write_zeros,
)

int32, int64, float32 = types.int32, types.int64, types.float32


#: Loads per thread and tensor that are in flight together, as in the C++ kernels.
DEEP = 4


@emitted([floats(DEEP), int32], int64, int64, int64, int64, int32)
def dots(b, x, y, x_step, y_step, left, *, bf16, apart):
    """Return the dot products of rows, and the number of rows.

    In each row, the function multiplies two pieces of 8 elements. The function reads up to `DEEP`
    rows, `apart` rows from each other, starting at `x` and `y`. Only the first `left` rows exist.
    """
    exists = [b.icmp_signed("<", i32(j * apart), left) for j in range(DEEP)]
    pieces = []
    for j, there in enumerate(exists):
        far = ir.Constant(I64, j * apart)
        for first, step in ((x, x_step), (y, y_step)):
            pieces.append(ptx.load_16_if(b, b.add(first, b.mul(far, step)), there))
    sums, rows = [], i32(0)
    for j, there in enumerate(exists):
        total: ir.Value = f32(0.0)
        for pair in zip(*pieces[2 * j : 2 * j + 2], strict=True):
            for one, other in zip(*(ptx.unpack(b, bf16, word) for word in pair), strict=True):
                total = b.fma(one, other, total)
        sums.append(total)
        rows = b.add(rows, b.zext(there, I32))
    return [sums, rows]


@emitted(Like(0), FRAGMENT)
def summed(b, sums, *, lanes):
    """Add each sum over `lanes` lanes (a power of two)."""
    mask = lanes // 2
    while mask:
        sums = [b.fadd(x, ptx.shuffle_xor(b, x, mask)) for x in sums]
        mask //= 2
    return sums


@emitted(None, int64, FRAGMENT, int32)
def write_rows(b, to, sums, left, *, apart):
    """Write sums to every `apart`-th row in HBM."""
    pointer = b.inttoptr(to, ir.PointerType(F32, 1))
    for j, total in enumerate(sums):
        with b.if_then(b.icmp_signed("<", i32(j * apart), left)):
            b.store(total, b.gep(pointer, [i32(j * apart)]))


@emitted(Like(0), FRAGMENT, int64, int32)
def less_rows(b, sums, source, left, *, apart):
    """Subtract a float32 per row, of every `apart`-th row in HBM; only `left` rows exist."""
    subtracted = []
    for j in range(DEEP):
        at = b.add(source, ir.Constant(I64, j * apart * 4))
        subtracted.append(ptx.load_float_if(b, at, b.icmp_signed("<", i32(j * apart), left)))
    return [b.fsub(total, x) for total, x in zip(sums, subtracted, strict=True)]


@emitted(int32, int64, int64, int64, int32, int32, float32)
def rounded(b, to, step, source, first, pieces, scale, *, bf16, row, per_row, apart):
    """Scale float32 numbers, round them to 16 bits, and return the number of bytes stored.

    The function converts up to `DEEP` pieces of 8 float32. Pieces begin with number `first`, and
    are `apart` pieces from each other. A row has `per_row` pieces, and all rows have `pieces`
    pieces in total.
    """
    numbers = [b.add(first, i32(j * apart)) for j in range(DEEP)]
    exists = [b.icmp_signed("<", number, pieces) for number in numbers]
    loaded, stored = [], i32(0)
    for number, there in zip(numbers, exists, strict=True):
        at = b.add(source, b.mul(b.sext(number, I64), ir.Constant(I64, 32)))
        half = b.add(at, ir.Constant(I64, 16))
        loaded.append(ptx.load_16_if(b, at, there) + ptx.load_16_if(b, half, there))
    for number, there, eight in zip(numbers, exists, loaded, strict=True):
        r, piece = b.udiv(number, i32(per_row)), b.urem(number, i32(per_row))
        x = [b.fmul(b.bitcast(word, F32), scale) for word in eight]
        four = [ptx.pack(b, bf16, x[e], x[e + 1]) for e in (0, 2, 4, 6)]
        at = b.add(b.add(to, b.mul(b.sext(r, I64), step)), b.sext(b.shl(piece, i32(4)), I64))
        with b.if_then(there):
            ptx.store_16(b, at, four)
        stored = b.add(stored, b.select(there, row.piece_bytes(b, piece), i32(0)))
    return stored


@emitted(int32, int32)
def zeros_bytes(b, column, *, row):
    """Return the bytes of four float32 from `column` on, less padding."""
    return row.counted(b, column, 4, 4)


def flash_delta_kernel(kernel: Kernel) -> Any:
    """Return the kernel's Python function of a `launch.ARGS`, for the constants of `kernel`."""
    c = constants(kernel)
    w = walk_functions(c)
    head_dim, threads, fused = c.head_dim, kernel.threads, bool(c.fused)
    value_bytes, cleared_bytes = piece_bytes(c.value_row), zeros_bytes(c.key_row)
    chunks = c.head_dim_v // 8
    lanes = next(n for n in (1, 2, 4, 8, 16, 32) if n >= chunks)  # lanes that share a row
    apart = threads // lanes
    dot_products, lane_sums = dots(bool(c.bf16), apart), summed(lanes)
    write, subtract = write_rows(apart), less_rows(apart)
    dlse, delta_slot = bool(c.dlse), 12 if c.dlse else 8

    def flash_delta(a):
        w.wait_for_what_ran_before()
        w.let_what_runs_next_start()  # all other inputs of the next kernel are complete too
        i, walk, thread = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.threadIdx.x)
        batch, head, lane = walk // a.heads, walk % a.heads, thread % lanes
        start, stop, _ = w.row_tile(a, i)
        slot = w.tile_count(a, walk, i)
        o = a.o_data + (batch * a.o_batch + head * a.o_head) * 2 + lane * 16
        dout = a.dout_data + (batch * a.dout_batch + head * a.dout_head) * 2 + lane * 16
        o_row, dout_row = a.o_row * 2, a.dout_row * 2
        loaded, loaded_dlse, stored, cleared = 0, 0, 0, 0
        for r0 in range(start, stop, DEEP * apart):  # uniform: the sums below need every lane
            r = int32(r0 + thread // lanes)
            left = int32(stop - r if lane < chunks else 0)
            sums, rows = dot_products(o + r * o_row, dout + r * dout_row, o_row, dout_row, left)
            sums = lane_sums(sums)
            if lane == 0:
                if dlse:
                    sums = subtract(sums, a.dlse + (int64(walk) * a.n_q + r) * 4, left)
                    loaded_dlse += rows * 4
                write(a.delta + (int64(walk) * a.n_q + r) * 4, sums, left)
                stored += rows * 4
            loaded += rows * value_bytes(lane)
        if fused:
            to = a.dq_acc + (int64(walk) * a.n_q + start) * (head_dim * 4)
            for at in range(thread, (stop - start) * (head_dim // 4), threads):
                write_zeros(to + at * 16)
                cleared += cleared_bytes(at % (head_dim // 4) * 4)
        w.report(slot, loaded)  # O and dO: one piece of each at a time
        w.report(slot + 4, loaded)
        if dlse:
            w.report(slot + 8, loaded_dlse)
        w.report(slot + delta_slot, stored)
        w.report(slot + delta_slot + 4, cleared)

    return flash_delta


def flash_convert_kernel(kernel: Kernel) -> Any:
    """Return the kernel's Python function of a `launch.ARGS`, for the constants of `kernel`."""
    c = constants(kernel)
    w = walk_functions(c)
    head_dim, threads = c.head_dim, kernel.threads
    per_row = c.head_dim // 8
    convert = rounded(bool(c.bf16), c.key_row, per_row, threads)

    def flash_convert(a):
        w.wait_for_what_ran_before()
        i, walk, thread = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.threadIdx.x)
        start, stop, _ = w.row_tile(a, i)
        slot = w.tile_count(a, walk, i)
        source = a.dq_acc + (int64(walk) * a.n_q + start) * (head_dim * 4)
        step = a.dq_row * 2
        to = a.dq_data + (walk // a.heads * a.dq_batch + walk % a.heads * a.dq_head) * 2
        to += start * step
        pieces, stored = int32((stop - start) * per_row), 0
        for first in range(thread, pieces, DEEP * threads):
            stored += convert(to, step, source, first, pieces, a.scale)
        w.report(slot, 2 * stored)
        w.report(slot + 4, stored)

    return flash_convert
