"""Store dK and dV of the KV-outer backward, also where the blocks of a cluster add them up."""

from types import SimpleNamespace
from typing import Any

from numba import cuda
from numba.cuda import types

from flashsim.backends.numba_gpu import mma_tiles
from flashsim.backends.numba_gpu.hopper import gradients
from flashsim.backends.numba_gpu.hopper import smem_layout as word
from flashsim.backends.numba_gpu.hopper import wgmma_tiles as hopper
from flashsim.backends.numba_gpu.hopper.smem_layout import ByKeys
from flashsim.backends.numba_gpu.traversal import device, quotient

int32, int64, float32 = types.int32, types.int64, types.float32
#: A named barrier: no product of a work tile that a cluster shares reads a tile any more.
_TILES_READ = 6


def key_gradients(
    c: SimpleNamespace,
    at: ByKeys,
    w: Any,
    columns: int,
    pieces: int,
    store_sums: Any,
    place_of: Any,
) -> Any:
    """Return ``put(a, shared, slot, kv_heads, row0, group, dk, dv)``, which stores dK and dV.

    The function multiplies dK by the scale. `dk` and `dv` have `columns` columns, of which
    `pieces` times 32 exist. ``store_sums(row_of)`` returns a function with the parameters of
    `wgmma_tiles.store_output`, and `group`. The pieces of dV follow those of dK.
    ``place_of(piece, which, group)`` returns where a piece of dK (`which` is 0) or dV (1) begins:
    the number of its first sum among a thread's sums, and its column in HBM.

    The blocks of a cluster add up their sums. Each block writes its sums to shared memory, over
    tiles that it no longer needs. Each block then adds up all blocks' sums of some pieces, in the
    order of the blocks.
    """
    k_at, get = at.region("k"), hopper.get
    store_dk, store_dv = store_sums(c.key_row), store_sums(c.value_row)
    blocks, across = c.cluster, at.row_of_threads
    tiles_end = at.region("dout") + at.regions["dout"]
    assert blocks == 1 or columns * across <= tiles_end, "room for both"
    lay_down, add_from = gradients.lay_down(across), gradients.add_from(across)
    new_piece, uncounted = mma_tiles.zeros(16), hopper.uncounted
    store_piece_dk = hopper.store_output(bool(c.bf16), c.key_row, later=True)
    store_piece_dv = hopper.store_output(bool(c.bf16), c.value_row, later=True)
    tiles_read, cluster_sync = hopper.named_sync(128 * at.groups), hopper.cluster_sync

    @device
    def store(a, shared, slot, kv_heads, row0, group, dk, dv):
        walk, stop = get(slot + word.WALK), get(slot + word.STOP)
        batch, head = w.batch_and_head(walk, kv_heads)
        key = int32(get(slot + word.START) + row0)
        tile_count = w.tile_count(a, walk, get(slot + word.OUTER))
        to = a.dk_data + (batch * a.dk_batch + head * a.dk_head) * 2
        factors = a.scale, a.scale
        w.report(tile_count + 8, store_dk(to, a.dk_row * 2, dk, factors, key, stop, group))
        to = a.dv_data + (batch * a.dv_batch + head * a.dv_head) * 2
        ones = float32(1.0), float32(1.0)
        w.report(tile_count + 12, store_dv(to, a.dv_row * 2, dv, ones, key, stop, group))

    @device
    def add_up(a, shared, slot, kv_heads, row0, group, dk, dv):
        mine = int32(shared + k_at + (int32(cuda.threadIdx.x) - 128) * 4)
        tiles_read(int32(_TILES_READ))  # no product reads a tile any more
        lay_down(mine, dk)
        lay_down(mine + columns // 2 * across, dv)
        cluster_sync()  # all blocks' sums are written
        walk, stop = get(slot + word.WALK), get(slot + word.STOP)
        batch, head = w.batch_and_head(walk, kv_heads)
        key = int32(get(slot + word.START) + row0)
        to_dk = a.dk_data + (batch * a.dk_batch + head * a.dk_head) * 2
        to_dv = a.dv_data + (batch * a.dv_batch + head * a.dv_head) * 2
        scales, ones = (a.scale, a.scale), (float32(1.0), float32(1.0))
        piece, dk_bytes, dv_bytes = int32(cuda.blockIdx.x & (blocks - 1)), int32(0), int32(0)
        while piece < 2 * pieces:
            which = quotient(piece, pieces)  # 0: dK, 1: dV
            place, column = place_of(piece, which, group)
            source, sums, block = int32(mine + place * across), new_piece(), int32(0)
            while block < blocks:
                sums = add_from(sums, source, block)
                block = uncounted(block + 1)
            if which == 0:
                row_bytes = a.dk_row * 2
                dk_bytes += store_piece_dk(to_dk, row_bytes, sums, scales, key, stop, column)
            else:
                row_bytes = a.dv_row * 2
                dv_bytes += store_piece_dv(to_dv, row_bytes, sums, ones, key, stop, column)
            piece = uncounted(piece + blocks)
        cluster_sync()  # the other blocks have read this block's sums
        tile_count = w.tile_count(a, walk, get(slot + word.OUTER))
        w.report(tile_count + 8, dk_bytes)
        w.report(tile_count + 12, dv_bytes)

    return store if blocks == 1 else add_up
