"""What crosses between L2 and the SMs besides the problem's own bytes, from the kernels' own tiles.

Three things. Rows in HBM are filled up to 16 bytes: an array whose head_dim is no multiple of 8 is
copied so before it is launched on. Hopper's copy engine delivers whole boxes: columns that a row
does not have, rows that a sequence does not have; they are zeros that no memory is asked for, but
they arrive at the SM. And products are made of whole tiles, of whole steps of the head_dim.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flashsim.backends.families import hopper as family
from flashsim.backends.launch.kernel import padded_dims, row_elements
from flashsim.counts.traffic import Traffic
from flashsim.counts.work import stage_work, total_flops
from flashsim.schedule import plans
from flashsim.schedule.tensors import COL, ROW, shape

#: Tensors that Hopper's copy engine loads; True: they are as wide as V.
BOXED = {"Q": False, "K": False, "V": True, "dO": True}


def crossing(traffic: Traffic, stage: plans.Stage, op: str, *, hopper: bool) -> int:
    """Bytes of an operation that a stage's kernel moves, all heads.

    Parameters
    ----------
    op : {"load", "store", "reduce"}
    hopper : bool
        Whether the kernel is of the Hopper family, which loads through the copy engine.
    """
    p, total = traffic.problem, 0
    for (name, kind, tensor), nbytes in traffic.transfers.items():
        if (name, kind) != (stage.name, op):
            continue
        its = shape(p, tensor)
        if hopper and op == "load" and tensor in BOXED:
            columns = family.tile_columns(stage.name, p)[BOXED[tensor]]
            total += _box_rows(traffic, stage, tensor) * columns * its.itemsize
        elif its.axis in (ROW, COL) and not its.vector:
            total += nbytes // its.elements * row_elements(its.elements)
        else:
            total += nbytes
    return total


def _box_rows(traffic: Traffic, stage: plans.Stage, tensor: str) -> int:
    """Rows of a tensor's boxes, all heads: whole tiles, also where a sequence ends in one."""
    p, schedule, tiling = traffic.problem, traffic.schedule(stage), traffic.tiling
    walks, _ = plans.heads_of(stage, p)
    rows = shape(p, tensor).axis == ROW
    table, block = (schedule.rows, tiling.block_q) if rows else (schedule.cols, tiling.block_k)
    if any(move.tensor == tensor for move in stage.before):
        return walks * len(table) * block
    # The other side's tiles, once for each of their visits.
    ptr = (schedule.row_csr if rows else schedule.col_csr)[0]
    members = p.group if stage.per == "group" else 1
    return walks * int(np.diff(ptr).sum()) * members * block


def tensor_flops(traffic: Traffic, stage: plans.Stage, *, hopper: bool) -> int:
    """FLOPs of the matrix products on tensor cores: whole tiles, masked and ragged ones as well."""
    p, tiling = traffic.problem, traffic.tiling
    if hopper and stage.name != "forward":
        d, dv = family.tile_columns(stage.name, p)
    else:
        d, dv = padded_dims(p)
    wide = replace(p, head_dim=d, head_dim_v=dv)
    visit = stage_work(wide, traffic.algorithm, traffic.direction, stage.name).visit
    sides = tiling.block_q, tiling.block_k, tiling.block_q * tiling.block_k
    walks, _ = plans.heads_of(stage, p)
    members = p.group if stage.per == "group" else 1
    each = total_flops(visit, *sides)["matmul"]
    return each * traffic.schedule(stage).sums.visits * walks * members
