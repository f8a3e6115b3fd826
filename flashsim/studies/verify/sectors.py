"""Computes which sectors the kernels' stores touch, an upper bound on the bytes written to L2.

If rows have an odd number of 16-byte pieces, every other row begins in the middle of a 32-byte
sector. Two store instructions then write one half each of the sector that two rows share. Depending
on timing, L2 receives one or two requests for such a shared sector. So L2's counter lies between
two exact numbers: the bytes stored, and the bytes of the sectors that instructions touch
(docs/notebooks/counters.md). The kernels define which elements one instruction stores: `store_row`
in hopper/tile_scheduler.cuh, and `store_tile` in portable/mma.cuh and portable/backward_rows.cu.
"""

import numpy as np

from flashsim.backends.launch.kernel import padded_dims, row_elements
from flashsim.counts.traffic import Traffic
from flashsim.schedule import plans
from flashsim.schedule.tensors import COL, ROW, matrices, shape
from flashsim.studies.verify.crossing import PIECE, SECTOR, WALKS, StageKernel

_WARP = 32
_ROWS = 8  # rows per store instruction: the rows of an accumulator's fragment


def sectors_written(kernel: StageKernel) -> int | None:
    """Return the bytes of the sectors that a kernel's store instructions touch, over all heads.

    A sector counts once for each instruction that touches it. The result is None for cases that are
    not implemented: float32 (whose kernels store other pieces), packed sequences, a bias, and other
    algorithms' stages.
    """
    traffic, stage, p = kernel.traffic, kernel.stage, kernel.traffic.problem
    total = kernel.stored_first()
    if p.itemsize != 2 or len(p.sequences) > 1 or stage.name not in (*WALKS, "delta", "convert"):
        return None
    for name, kind, tensor in traffic.transfers:
        if (name, kind) != (stage.name, "store"):
            continue
        its = shape(p, tensor)
        if its.axis not in (ROW, COL):
            return None
        rows = p.n_q if its.axis == ROW else p.n_kv
        heads = matrices(p, its.owner)
        # An instruction stores eight rows; with packed heads, these are of several heads.
        of_head = max(1, _ROWS // traffic.schedule(stage).members)
        if its.vector:
            ids = _of_statistics(traffic, stage, np.arange(rows), of_head)
            total += _touched(ids, its.itemsize, heads)
            continue
        pieces = row_elements(its.elements) * its.itemsize // PIECE
        if stage.name in WALKS:
            row, piece = np.divmod(np.arange(rows * pieces), pieces)
            # One store instruction of a Hopper kernel writes four pieces in each of eight rows.
            group = row // of_head * pieces + piece // 4
            if not kernel.hopper:
                group = _in_order(traffic, tensor, row, piece)
            total += _touched(group, PIECE, heads)
        else:  # each warp stores a whole number of contiguous sectors
            total += heads * rows * pieces * PIECE
    return total


def _touched(instructions: np.ndarray, each: int, heads: int) -> int:
    """Return the bytes of all sectors that store instructions touch, counted per instruction.

    A head has n pieces of `each` bytes, and instruction number ``instructions[i]`` stores piece i.
    The heads are contiguous in memory.
    """
    items, place = SECTOR // each, np.arange(n := len(instructions))
    another = np.diff(instructions) != 0
    total = 0
    for first, those in enumerate(np.bincount(np.arange(heads) * n % items)):
        if those:  # heads that begin at this piece of a sector
            begins = another | (np.diff((first + place) // items) != 0)
            total += int(those) * (1 + int(np.count_nonzero(begins)))
    return SECTOR * total


def _of_statistics(
    traffic: Traffic, stage: plans.Stage, row: np.ndarray, of_head: int
) -> np.ndarray:
    """Return, for each row of a head, which instruction stores the row's LSE or delta."""
    if stage.name != "delta":
        return row // of_head
    p = traffic.problem
    pieces = row_elements(p.head_dim_v) * p.itemsize // PIECE
    lanes = next((n for n in (32, 16, 8, 4) if pieces > n // 2), pieces)  # that share a row
    tile, within = np.divmod(row, traffic.tiling.block_q)
    return tile * traffic.tiling.block_q + within // (_WARP // lanes)


def _in_order(traffic: Traffic, tensor: str, row: np.ndarray, piece: np.ndarray) -> np.ndarray:
    """Return, for each piece of a tensor, which instruction of a portable kernel stores the piece.

    The lanes of a warp store the pieces of a tile in their order in shared memory.
    """
    p, rows = traffic.problem, shape(traffic.problem, tensor).axis == ROW
    block = traffic.tiling.block_q if rows else traffic.tiling.block_k
    width = padded_dims(p)[tensor in ("O", "dV")] * p.itemsize // PIECE
    tile, within = np.divmod(row, block)
    return tile * block * width + (within * width + piece) // _WARP
