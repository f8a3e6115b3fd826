"""Code that all tensor-core kernels share: the loop over tile pairs, copies and reports."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types

from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import I8, I32, I64, emitted, i32
from flashsim.backends.numba_gpu.mma_tiles import RowWidth, Tile

device = cuda.jit(device=True, inline="always")
int32, int64 = types.int32, types.int64
SLOTS, VISIT_STAMPS, TILE_STAMPS = launch.SLOTS, launch.VISIT_STAMPS, launch.TILE_STAMPS


def constants(kernel: Kernel) -> SimpleNamespace:
    """Return an object with a kernel's constants; ``FS_BLOCK_Q`` is the attribute ``block_q``.

    The attribute ``key_row`` is the row width in HBM of Q, K, dQ and dK, and ``value_row`` that of
    V, O, dO and dV.
    """
    c = SimpleNamespace(**{k.removeprefix("FS_").lower(): v for k, v in kernel.constants})
    c.key_row = RowWidth(c.head_dim, c.counted)
    c.value_row = RowWidth(c.head_dim_v, c.counted_v)
    return c


def by_name(*functions: Any) -> Any:
    """Return an object whose attributes are these device functions, by name.

    The object is a module: in a kernel, Numba resolves the attributes of modules, but not those of
    other objects.
    """
    found = ModuleType("device functions")
    vars(found).update({function.__name__: function for function in functions})
    return found


# -- memory ---------------------------------------------------------------------------------------


@emitted(types.int32)
def shared_base(b):
    """Return the address of the launch's dynamic shared memory."""
    name, kind = "flashsim_shared", ir.ArrayType(I8, 0)
    module = b.module
    if name not in module.globals:
        variable = ir.GlobalVariable(module, kind, name, addrspace=3)
        # TMA's swizzle pattern repeats every 1024 bytes.
        variable.linkage, variable.align = "external", 1024
    return b.ptrtoint(module.globals[name], I32)


def _pointer(b: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    pointer = b.inttoptr(address, ir.PointerType(kind, 1))
    return b.gep(pointer, [b.sext(index, I64)])


@emitted(types.int32, types.int64, types.int32)
def read_int(b, address, index):
    """Read ``int32[index]`` of a table in HBM."""
    return b.load(_pointer(b, address, index, I32))


@emitted(types.int32, types.int32, types.int32)
def quotient(b, x, y):
    """Return x // y for non-negative 32-bit integers; Python's operator would take 64 bits."""
    return b.udiv(x, y)


@emitted(None, types.int64, types.int32, types.int64)
def write_word(b, address, index, value):
    """Write ``int64[index] = value`` to HBM."""
    b.store(value, _pointer(b, address, index, I64))


@emitted(None, types.int64)
def write_zeros(b, address):
    """Write 16 bytes of zeros to HBM."""
    ptx.store_16(b, address, [i32(0)] * 4)


#: ``copy_in_float(to, source, taken)`` starts the copy of one float32 from HBM to shared memory; if
#: `taken` is 0, it writes 0. ``copies_wait()`` waits for this thread's copies.
copy_in_float = emitted(None, types.int32, types.int64, types.int32)(ptx.cp_async_4)
copies_wait = emitted(None)(ptx.cp_async_wait)


def tile_copies(tile: Tile, row: RowWidth, threads: int) -> Any:
    """Return device functions that copy a tile between HBM and shared memory.

    The functions are ``load(to, source, row_bytes, rows)`` and ``store(address, to, row_bytes,
    rows)``. ``load`` and ``store`` return the bytes that this thread moved, excluding padding. In
    rows past the end of the tensor, ``load`` fills the tile with zeros.
    """
    width = row.width
    total, step = tile.rows * tile.chunks, threads // tile.chunks
    # A thread's rows are then a multiple of 8 apart, with the same swizzle at constant distances.
    even = total % threads == 0 and threads % tile.chunks == 0 and step % 8 == 0
    counts = types.int32, types.int32

    @emitted(types.int32, types.int32, types.int64, *counts)
    def load(b, to, source, row_bytes, rows):
        # Both are read again, so that LLVM hoists nothing out of the loop into scarce registers.
        thread = ptx.special(b, "tid.x", effects=True)
        row_bytes = ptx.again(b, row_bytes)
        moved = cgutils.alloca_once(b, I32)
        if not (even and width == tile.cols):
            part(b, thread, to, source, row_bytes, rows, moved)
            return b.load(moved)
        with b.if_else(b.icmp_signed("==", rows, i32(tile.rows))) as (whole, ragged):
            with whole:  # nearly every tile needs no comparison
                r, c = b.udiv(thread, i32(tile.chunks)), b.urem(thread, i32(tile.chunks))
                at, source_ = place(b, to, source, row_bytes, r, c)
                stride = b.sext(b.mul(row_bytes, i32(step)), I64)
                for e in range(total // threads):
                    ptx.cp_async_16(b, b.add(at, i32(e * step * tile.cols * 2)), source_)
                    source_ = b.add(source_, stride)
                b.store(b.mul(row.piece_bytes(b, c), i32(total // threads)), moved)
            with ragged:
                part(b, thread, to, source, row_bytes, rows, moved)
        return b.load(moved)

    def place(b, to, source, row_bytes, r, c):
        """Return the addresses of a 16-byte chunk, in shared memory and in HBM."""
        far = b.add(b.mul(r, row_bytes), b.shl(c, i32(4)))
        return b.add(to, tile.offset(b, r, c)), b.add(source, b.sext(far, I64))

    def part(b, thread, to, source, row_bytes, rows, moved):
        b.store(i32(0), moved)
        with _steps(b, thread, total, threads) as at:
            r, c = b.udiv(at, i32(tile.chunks)), b.urem(at, i32(tile.chunks))
            inside = exists(b, r, c, rows)
            near, far = place(b, to, source, row_bytes, r, c)
            taken = b.select(inside, i32(16), i32(0))
            ptx.cp_async_16(b, near, b.select(inside, far, source), taken)
            count = b.select(inside, row.piece_bytes(b, c), i32(0))
            b.store(b.add(b.load(moved), count), moved)

    def exists(b, r, c, rows):
        inside = b.icmp_signed("<", r, rows)
        if width < tile.cols:
            inside = b.and_(inside, b.icmp_unsigned("<", c, i32(width // 8)))
        return inside

    @emitted(types.int32, types.int32, types.int64, *counts)
    def store(b, address, to, row_bytes, rows):
        moved = cgutils.alloca_once(b, I32)
        b.store(i32(0), moved)
        with _steps(b, ptx.special(b, "tid.x"), total, threads) as at:
            r, c = b.udiv(at, i32(tile.chunks)), b.urem(at, i32(tile.chunks))
            with b.if_then(exists(b, r, c, rows)):
                near, far = place(b, address, to, row_bytes, r, c)
                ptx.copy_out_16(b, far, near)
                b.store(b.add(b.load(moved), row.piece_bytes(b, c)), moved)
        return b.load(moved)

    return by_name(load, store)


@contextmanager
def _steps(b: ir.IRBuilder, first: ir.Value, stop: int, step: int) -> Iterator[ir.Value]:
    """Emit the loop ``for at in range(first, stop, step)``, where `first` must be below `stop`."""
    body, after = b.append_basic_block("steps"), b.append_basic_block("steps_end")
    before = b.block
    b.cbranch(b.icmp_unsigned("<", first, i32(stop)), body, after)
    b.position_at_end(body)
    at = b.phi(I32)
    at.add_incoming(first, before)
    yield at
    following = b.add(at, i32(step))
    at.add_incoming(following, b.block)
    latch = b.cbranch(b.icmp_unsigned("<", following, i32(stop)), body, after)
    latch.set_metadata("llvm.loop", _not_unrolled(b.module))
    b.position_at_end(after)


def _not_unrolled(module: ir.Module) -> Any:
    disable = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    node = module.add_metadata([disable])
    # the first operand of a loop's metadata node must be the node itself
    node.operands = (node, disable)
    return node


@emitted(types.int32, types.int32)
def piece_bytes(b, piece, *, row):
    """Return the bytes of a row's 16-byte piece that are not padding."""
    return row.piece_bytes(b, piece)


def vector_load(rows_all: int, threads: int) -> Any:
    """Return ``load(to, source, rows)``, which copies a float32 per row to shared memory."""

    @device
    def load(to, source, rows):
        moved = int32(0)
        for r in range(int32(cuda.threadIdx.x), rows_all, threads):
            taken = int32(4) if r < rows else int32(0)
            copy_in_float(to + r * 4, source + (r * 4 if r < rows else 0), taken)
            moved += taken
        return int32(moved)

    return load


# -- reports --------------------------------------------------------------------------------------


@emitted(None, types.int64, types.int32)
def _report(b, slot, count):
    total = ptx.warp_sum(b, count)
    leads = b.icmp_unsigned("==", b.and_(ptx.special(b, "tid.x"), i32(31)), i32(0))
    with b.if_then(leads):
        ptx.add_count(b, slot, total)


_report_one = emitted(None, types.int64, types.int32)(ptx.add_count)
_cycles = emitted(types.int64)(ptx.cycles)
_nanoseconds = emitted(types.int64)(ptx.nanoseconds)
_sm = emitted(types.int32)(ptx.multiprocessor)
_wait_for_what_ran_before = emitted(None)(ptx.wait_for_what_ran_before)
_let_what_runs_next_start = emitted(None)(ptx.let_what_runs_next_start)


# -- the loop -------------------------------------------------------------------------------------


def walk_functions(c: SimpleNamespace, every: int = 1024) -> Any:
    """Return the device functions that loop over tile pairs, for one kernel's constants.

    A visit is one query tile times one key tile.

    - ``item(a, n)`` returns work tile number n as (index over batch and heads, outer tile).
      ``take_work(a)`` returns this block's work tile in the form of ``item``.
    - ``row_tile`` and ``col_tile`` return a tile's (start, stop, offset).
    - ``begin(a, outer)`` returns an outer tile's first visit, its number of visits, and three
      bounds of its span of inner tiles.
    - ``visit(a, walk, n)`` returns (inner tile, masked) of the n-th visit, where `walk` is the
      result of ``begin``.
    - ``batch_and_head(walk, heads)`` divides an index over batch and heads.
    - ``tile_count(a, walk, outer)`` is the address of a work tile's counts, and ``visit_count(a,
      walk, first, n)`` that of the counts of visit number `first` + n.
    - ``report(slot, bytes)`` reports bytes that a warp moved, and ``report_one`` those of a single
      thread. ``stamp(address, slot)`` writes a time stamp in one of every `every` threads. Without
      reports, the functions for reports do nothing.
    - ``wait_for_what_ran_before()`` and ``let_what_runs_next_start()`` do nothing if launches do
      not overlap.
    """
    block_q, block_k, varlen = c.block_q, c.block_k, bool(c.varlen)
    spans, descending = bool(c.spans), bool(c.descending)
    counts, stamps = bool(c.trace), bool(c.timeline)
    numbered, overlap = counts or stamps, bool(c.overlap)

    @device
    def item(a, number):
        # A group of `clump` heads, whose tensors fit in L2 together, is finished before the next.
        # Within a group, the outer tiles with the most visits come first.
        whole = int32(a.clump * a.tiles)
        clump = quotient(number, whole)
        first, rest = int32(clump * a.clump), int32(number - clump * whole)
        size = int32(min(a.clump, a.walks - first))
        rank = quotient(rest, size)
        return int32(first + rest - rank * size), int32(read_int(a.order, rank))

    @device
    def take_work(a):
        return item(a, int32(cuda.blockIdx.x))  # blocks start in index order

    @device
    def row_tile(a, i):
        if varlen:
            return read_int(a.rows, i * 4), read_int(a.rows, i * 4 + 1), read_int(a.rows, i * 4 + 2)
        return int32(i * block_q), int32(min((i + 1) * block_q, a.n_q)), int32(a.n_kv - a.n_q)

    @device
    def col_tile(a, j):
        if varlen:
            return read_int(a.cols, j * 4), read_int(a.cols, j * 4 + 1), read_int(a.cols, j * 4 + 2)
        return int32(j * block_k), int32(min((j + 1) * block_k, a.n_kv)), int32(a.n_kv - a.n_q)

    @device
    def begin(a, outer):
        if spans:
            at, lo = outer * 4, read_int(a.spans, outer * 4)
            full_lo, full_hi = read_int(a.spans, at + 1), read_int(a.spans, at + 2)
            first = read_int(a.ptr, outer) if numbered else int32(0)
            return first, int32(read_int(a.spans, at + 3) - lo), lo, full_lo, full_hi
        first, zero = read_int(a.ptr, outer), int32(0)
        return first, int32(read_int(a.ptr, outer + 1) - first), zero, zero, zero

    @device
    def visit(a, walk, n):
        first, count, lo, full_lo, full_hi = walk
        if spans:
            tile = int32(lo + count - 1 - n) if descending else int32(lo + n)
            return tile, tile < full_lo or tile >= full_hi
        return read_int(a.index, first + n), read_int(a.kind, first + n) != 0

    @device
    def batch_and_head(walk, heads):
        batch = quotient(walk, heads)
        return batch, int32(walk - batch * heads)

    @device
    def tile_count(a, walk, outer):
        return a.tile_counts + (int64(walk) * a.tiles + outer) * (SLOTS * 4)

    @device
    def visit_count(a, walk, first, n):
        return a.visit_counts + (int64(walk) * a.n_visits + first + n) * (SLOTS * 4)

    @device
    def report(slot, moved):
        if counts:
            _report(slot, moved)

    @device
    def report_one(slot, moved):
        if counts:
            _report_one(slot, moved)

    @device
    def stamp(address, slot):
        if stamps and int32(cuda.threadIdx.x) % every == 0:
            write_word(address, slot, _cycles())

    @device
    def stamp_block(address, end):
        if stamps and int32(cuda.threadIdx.x) % every == 0:
            write_word(address, 0, _sm())
            write_word(address, 3 if end else 1, _cycles())
            write_word(address, 4 if end else 2, _nanoseconds())

    @device
    def wait_for_what_ran_before():
        if overlap:
            _wait_for_what_ran_before()

    @device
    def let_what_runs_next_start():
        if overlap:
            _let_what_runs_next_start()

    return by_name(
        *(item, take_work, row_tile, col_tile, begin, visit, report, report_one, stamp),
        *(stamp_block, wait_for_what_ran_before, let_what_runs_next_start),
        *(batch_and_head, tile_count, visit_count),
    )
