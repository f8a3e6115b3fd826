"""Pass work tiles from a block's producer to the consumers, through slots in shared memory.

A work tile is one row tile of a head with all its visits or, in a KV-outer kernel, one column tile.
A visit is one query tile times one key tile.
"""

from types import SimpleNamespace
from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import ROUND
from flashsim.backends.numba_gpu.hopper import smem_layout as word
from flashsim.backends.numba_gpu.hopper.smem_layout import ITEM, SmemLayout
from flashsim.backends.numba_gpu.hopper.wgmma_tiles import (
    arrive,
    fetch_count,
    get,
    put,
    stage,
    wait_full,
)
from flashsim.backends.numba_gpu.traversal import (
    TILE_STAMPS,
    VISIT_STAMPS,
    by_name,
    device,
    read_int,
    walk_functions,
)

int32, int64 = types.int32, types.int64


def item_functions(
    c: SimpleNamespace, at: SmemLayout, *, by_row: bool = True, part: bool = False
) -> Any:
    """Return device functions that read and write slots, for one kernel's constants and layout.

    The result also has the functions of `traversal.walk_functions`. Each warp role (the producer,
    or a consumer warpgroup) records separate time stamps. `part` is true if the launch computes
    only some of its pass's work tiles.

    - ``first(a)`` is the number of the launch's first work tile, and ``stop(a)`` is one more than
      the last number.
    - ``write(a, slot, number)`` writes work tile `number` to a slot of shared memory.
    - ``after(a, counter)`` requests the number of the next work tile.
    - ``take(shared, item)`` waits for a work tile and returns its slot.
    - ``leave(shared, item, speaking)`` signals that a warp no longer needs a work tile's slot.
    - ``visits(slot)`` returns a work tile's visits in the form of ``begin``.
    - ``place(row, stop, batch)`` returns the coordinates of a row for a tensor map.
    - ``visit_stamps(a, walk, first, role)`` and ``tile_stamps(a, walk, outer, role)`` return the
      addresses of a role's time stamps.
    """
    # block size of the inner loop's side
    block, varlen = c.block_k if by_row else c.block_q, bool(c.varlen)
    w = walk_functions(c, every=128)  # one thread per warpgroup
    own_tile = w.row_tile if by_row else w.col_tile
    roles = at.groups + 1
    visit_words, tile_words = roles * VISIT_STAMPS, roles * TILE_STAMPS
    items, full, free = at.items, at.barrier("item_full"), at.barrier("item_free")

    @device
    def visit_stamps(a, walk, first, role):
        number = int64(walk) * a.n_visits + first
        return a.visit_stamps + (number * visit_words + role * VISIT_STAMPS) * 8

    @device
    def tile_stamps(a, walk, outer, role):
        number = int64(walk) * a.tiles + outer
        return a.tile_stamps + (number * tile_words + role * TILE_STAMPS) * 8

    @device
    def place(row, stop, batch):
        # Row and last axis. A map of packed sequences has a view per end of a tile (`tensor_maps`),
        # in which the row before `stop` is the last.
        if varlen:
            return int32(ROUND - stop + row), stop
        return row, batch

    @device
    def first(a):
        return a.first if part else int32(0)

    @device
    def stop(a):
        return a.stop if part else a.walks * a.tiles

    @device
    def write(a, slot, number):
        walk, outer = w.item(a, number)
        start, stop, offset = own_tile(a, outer)
        first, count, lo, full_lo, full_hi = w.begin(a, outer)
        base, end = int32(0), a.n_kv if by_row else a.n_q
        if varlen:
            end = read_int(a.rows if by_row else a.cols, outer * 4 + 3)
            if count > 0:
                tile, _ = w.visit(a, (first, count, lo, full_lo, full_hi), int32(0))
                other = a.cols if by_row else a.rows
                base = int32(read_int(other, tile * 4) - tile * block)
        put(slot + word.WALK, walk)
        put(slot + word.OUTER, outer)
        put(slot + word.START, start)
        put(slot + word.STOP, stop)
        put(slot + word.OFFSET, offset)
        put(slot + word.BASE, base)
        put(slot + word.END, end)
        put(slot + word.FIRST, first)
        put(slot + word.COUNT, count)
        put(slot + word.LO, lo)
        put(slot + word.FULL_LO, full_lo)
        put(slot + word.FULL_HI, full_hi)

    @device
    def visits(slot):
        span = get(slot + word.LO), get(slot + word.FULL_LO), get(slot + word.FULL_HI)
        return get(slot + word.FIRST), get(slot + word.COUNT), span[0], span[1], span[2]

    @device
    def after(a, counter):
        number = int32(0x7FFFFFFF)
        if counter != 0:  # otherwise no block gets a second work tile
            last = int32(stop(a) - first(a) - 1)  # requesting this number resets the counter to 0
            number = int32(first(a) + cuda.gridDim.x + fetch_count(counter, last))
        return number

    @device
    def take(shared, item):
        slot = int32(shared + items + (item & 1) * ITEM)
        wait_full(shared + full, item)
        return slot

    @device
    def leave(shared, item, speaking):
        cuda.syncwarp()  # the whole warp is done with the work tile
        arrive(stage(shared + free, item), speaking)

    own = by_name(first, stop, after, take, leave, visit_stamps, tile_stamps, place, write, visits)
    vars(w).update(vars(own), visit_words=visit_words)
    return w
