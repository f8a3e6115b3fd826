"""The row-wise passes around a backward pass: `flash_delta` before it, `flash_convert` after.

`flash_delta` computes delta = rowsum(dO * O) and clears the float32 accumulator of dQ where dQ is
reduced into one; `flash_convert` rounds that accumulator. Block (i, head) owns row tile i; no
shared memory, every access to HBM 16 bytes wide.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import F32, I64, emitted, f32
from flashsim.backends.numba_gpu.tiles import RowWidth
from flashsim.backends.numba_gpu.walk import (
    SLOTS,
    constants,
    piece_bytes,
    rows_of,
    walk_functions,
    write_float,
    write_zeros,
)

int32, int64, float32 = types.int32, types.int64, types.float32


def _dot_8(bf16: bool) -> Any:
    """``dot_8(x, y)``: the dot product of 8 elements each at two addresses."""

    @emitted(types.float32, types.int64, types.int64)
    def dot_8(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        total: ir.Value = f32(0.0)
        for left, right in zip(ptx.load_16(b, x), ptx.load_16(b, y), strict=True):
            pairs = zip(ptx.unpack(b, bf16, left), ptx.unpack(b, bf16, right), strict=True)
            for one, other in pairs:
                total = b.fma(one, other, total)
        return total

    return dot_8


def _round_8(bf16: bool) -> Any:
    """``round_8(to, source, scale)``: 8 float32 times scale, rounded to 16 bits."""

    @emitted(None, types.int64, types.int64, types.float32)
    def round_8(b: ir.IRBuilder, to: ir.Value, source: ir.Value, scale: ir.Value) -> None:
        eight = [*ptx.load_16(b, source), *ptx.load_16(b, b.add(source, ir.Constant(I64, 16)))]
        scaled = [b.fmul(b.bitcast(x, F32), scale) for x in eight]
        ptx.store_16(b, to, [ptx.pack(b, bf16, scaled[x], scaled[x + 1]) for x in (0, 2, 4, 6)])

    return round_8


def _lane_sum(lanes: int) -> Any:
    """``lane_sum(x)``: the sum over `lanes` neighbouring lanes, a power of two."""

    @emitted(types.float32, types.float32)
    def lane_sum(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        mask = lanes // 2
        while mask:
            x = b.fadd(x, ptx.shuffle_xor(b, x, mask))
            mask //= 2
        return x

    return lane_sum


def zeros_bytes(row: RowWidth) -> Any:
    """``zeros_bytes(column)``: bytes that exist of four float32 from a column on."""

    @emitted(types.int32, types.int32)
    def zeros_bytes_(b: ir.IRBuilder, column: ir.Value) -> ir.Value:
        return row.counted(b, column, 4, 4)

    return zeros_bytes_


def flash_delta_kernel(kernel: Kernel) -> Any:
    """The kernel, as a Python function of one `launch.ARGS`, for compile-time constants."""
    c = constants(kernel)
    w = walk_functions(c)
    row_tile, report = w.row_tile, w.report
    head_dim, threads, fused = c.head_dim, kernel.threads, bool(c.fused)
    key_row, value_row = rows_of(c)
    value_bytes, cleared_bytes = piece_bytes(value_row), zeros_bytes(key_row)
    chunks = c.head_dim_v // 8
    lanes = next(n for n in (1, 2, 4, 8, 16, 32) if n >= min(chunks, 32))  # that share a row
    per_step = threads // lanes
    dot_8, lane_sum = _dot_8(bool(c.bf16)), _lane_sum(lanes)

    def flash_delta(a):
        i, walk, thread = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.threadIdx.x)
        batch, head, lane = walk // a.heads, walk % a.heads, thread % lanes
        start, stop, _ = row_tile(a, i)
        slot = a.tile_counts + (int64(walk) * a.tiles + i) * (SLOTS * 4)
        o = a.o_data + (batch * a.o_batch + head * a.o_head) * 2
        dout = a.dout_data + (batch * a.dout_batch + head * a.dout_head) * 2
        loaded, stored, cleared = 0, 0, 0
        for r0 in range(start, stop, per_step):  # uniform: the sums below need every lane
            r, total = r0 + thread // lanes, float32(0.0)
            if r < stop:
                for chunk in range(lane, chunks, lanes):
                    at = r * a.o_row * 2 + chunk * 16
                    total += dot_8(o + at, dout + r * a.dout_row * 2 + chunk * 16)
                    loaded += value_bytes(chunk)
            total = lane_sum(total)
            if r < stop and lane == 0:
                write_float(a.delta + (int64(walk) * a.n_q) * 4, r, total)
                stored += 4
        if fused:
            to = a.dq_acc + (int64(walk) * a.n_q + start) * (head_dim * 4)
            for at in range(thread, (stop - start) * (head_dim // 4), threads):
                write_zeros(to + at * 16)
                cleared += cleared_bytes(at % (head_dim // 4) * 4)
        report(slot, loaded)  # O and dO: one piece of each at a time
        report(slot + 4, loaded)
        report(slot + 8, stored)
        report(slot + 12, cleared)

    return flash_delta


def flash_convert_kernel(kernel: Kernel) -> Any:
    """The kernel, as a Python function of one `launch.ARGS`, for compile-time constants."""
    c = constants(kernel)
    w = walk_functions(c)
    row_tile, report = w.row_tile, w.report
    head_dim, threads = c.head_dim, kernel.threads
    per_row, round_8 = c.head_dim // 8, _round_8(bool(c.bf16))
    key_bytes = piece_bytes(rows_of(c)[0])

    def flash_convert(a):
        i, walk, thread = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.threadIdx.x)
        start, stop, _ = row_tile(a, i)
        slot = a.tile_counts + (int64(walk) * a.tiles + i) * (SLOTS * 4)
        source = a.dq_acc + (int64(walk) * a.n_q + start) * (head_dim * 4)
        to = a.dq_data + (walk // a.heads * a.dq_batch + walk % a.heads * a.dq_head) * 2
        stored = 0
        for at in range(thread, (stop - start) * per_row, threads):
            row = to + (start + at // per_row) * a.dq_row * 2
            round_8(row + at % per_row * 16, source + at * 32, a.scale)
            stored += key_bytes(at % per_row)
        report(slot, 2 * stored)
        report(slot + 4, stored)

    return flash_convert
