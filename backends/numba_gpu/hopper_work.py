"""What the Hopper kernels share: shared memory, and items, the portions of work of a block.

Blocks are persistent: each takes the next item (a tile and a head) of the launch's list, and its
producer tells the other warps through slots in shared memory, of which there are two.
"""

from __future__ import annotations

from types import SimpleNamespace

from numba import cuda
from numba.cuda import types

from flashsim.backends.numba_gpu import hopper_tiles as hopper
from flashsim.backends.numba_gpu.walk import device, quotient, read_int

int32 = types.int32

#: Words of an item slot, as byte offsets: the walk (-1: no work is left), the block's own tile and
#: its elements; where tile 0 of the other side would start, and where that side's sequence ends;
#: the visits as `walk.begin` gives them.
WALK, OUTER, START, STOP, OFFSET, BASE, END, FIRST, COUNT, LO, FULL_LO, FULL_HI = range(0, 48, 4)
_ITEM = 48
_BARRIER = 8


class Shared:
    """Where everything of a kernel lies in shared memory.

    Parameters
    ----------
    parts : dict of str to int
        Bytes of each tile or ring of tiles, in their order, each a multiple of 1024 but for the
        last ones.
    barriers : dict of str to (int, int)
        Kinds of mbarriers: how many, and the arrivals that end a phase.
    readers : int
        Warps that read an item.
    """

    def __init__(
        self, parts: dict[str, int], barriers: dict[str, tuple[int, int]], readers: int
    ) -> None:
        barriers = {**barriers, "item_full": (2, 1), "item_free": (2, readers)}
        at = 0
        self.offsets: dict[str, int] = {}
        for name, size in (*parts.items(), *((k, n * _BARRIER) for k, (n, _) in barriers.items())):
            self.offsets[name] = at
            at += size
        self.items = at
        self.nbytes = at + 2 * _ITEM
        self.arrivals = {
            self.offsets[name] + x * _BARRIER: arrivals
            for name, (count, arrivals) in barriers.items()
            for x in range(count)
        }

    def __getitem__(self, name: str) -> int:
        """The byte offset of a part or of the first barrier of a kind."""
        return self.offsets[name]


def item_functions(
    c: SimpleNamespace, w: SimpleNamespace, at: Shared, *, by_row: bool
) -> SimpleNamespace:
    """Device functions by which a kernel's warps hand items on.

    The producer's ``offer(a, shared, item, number) -> bool`` writes the launch's item `number` as
    the block's `item`-th, if there is one; others get their ``slot(shared, item)`` with
    ``take(shared, item)`` and are done with it at ``done(shared, item, speaking)``. ``visits_of``
    reads the visits from a slot, ``next_number(counter)`` claims an item.
    """
    items, item_full, item_free = at.items, at["item_full"], at["item_free"]
    block = c.block_k if by_row else c.block_q  # of the tiles visited
    own_tile = w.row_tile if by_row else w.col_tile
    item_of, begin, visit_of, varlen = w.item, w.begin, w.visit, bool(c.varlen)
    put, get, arrive, stage = hopper.put, hopper.get, hopper.arrive, hopper.stage
    wait_full, wait_free, fetch_add = hopper.wait_full, hopper.wait_free, hopper.fetch_add

    @device
    def slot(shared, item):
        return int32(shared + items + (item & 1) * _ITEM)

    @device
    def offer(a, shared, item, number):
        to = slot(shared, item)
        wait_free(shared + item_free, item)  # every warp is done with the slot's last item
        exists = number < a.walks * a.tiles
        if exists:
            walk, outer = item_of(a, number)
            start, stop, offset = own_tile(a, outer)
            first, count, lo, full_lo, full_hi = begin(a, outer)
            base, end = int32(0), a.n_kv if by_row else a.n_q
            if varlen:
                own, other = (a.rows, a.cols) if by_row else (a.cols, a.rows)
                end = read_int(own, outer * 4 + 3)
                if count > 0:
                    tile, _ = visit_of(a, (first, count, lo, full_lo, full_hi), int32(0))
                    base = int32(read_int(other, tile * 4) - tile * block)
            put(to + WALK, walk)
            put(to + OUTER, outer)
            put(to + START, start)
            put(to + STOP, stop)
            put(to + OFFSET, offset)
            put(to + BASE, base)
            put(to + END, end)
            put(to + FIRST, first)
            put(to + COUNT, count)
            put(to + LO, lo)
            put(to + FULL_LO, full_lo)
            put(to + FULL_HI, full_hi)
        else:
            put(to + WALK, int32(-1))
        arrive(stage(shared + item_full, item), True)  # releases the item to its readers
        return exists

    @device
    def take(shared, item):
        wait_full(shared + item_full, item)
        return slot(shared, item)

    @device
    def done(shared, item, speaking):
        cuda.syncwarp()  # the whole warp is done with it
        arrive(stage(shared + item_free, item), speaking)

    @device
    def visits_of(at):
        span = get(at + LO), get(at + FULL_LO), get(at + FULL_HI)
        return get(at + FIRST), get(at + COUNT), span[0], span[1], span[2]

    @device
    def next_number(counter):  # the first items go by block number
        return int32(cuda.gridDim.x + fetch_add(counter, 1))

    @device
    def place(a, walk):
        heads = a.heads if by_row else quotient(a.heads, a.group)
        batch = quotient(walk, heads)
        return batch, int32(walk - batch * heads)

    return SimpleNamespace(
        slot=slot,
        offer=offer,
        take=take,
        done=done,
        visits_of=visits_of,
        next_number=next_number,
        place=place,
    )
