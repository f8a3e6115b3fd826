"""Bytes between L2 and the SMs beyond the problem's own bytes, computed from the kernels' tiles.

Rows in HBM are padded to 16 bytes: an array whose head_dim is no multiple of 8 is copied to padded
rows before a launch. L2 sends sectors of 32 bytes. If rows have an odd number of 16-byte pieces,
every other row begins in the middle of a sector, and a combined request touches one sector more.
Hopper's TMA delivers whole boxes. Columns past a row's end and rows past a sequence's end are zeros
that are not read from memory, but they arrive at the SM. A cluster shares a
tile of keys in all of a launch, or in its last partial wave. There K and V arrive at each of its
blocks, and so do the other blocks' parts of dK and dV. LSE and delta are read in sectors, too. A
work tile costs a few sectors more: its entries in the schedule's tables. Products are computed on
whole tiles and on whole steps of the head_dim. Each rule was derived from counters
(docs/notebooks/counters.md), except the rule for clusters in the Python kernels: it follows from
their code and was not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from flashsim.backends.launch.device_tables import lower
from flashsim.backends.launch.kernel import Gpu, padded_dims, row_elements
from flashsim.backends.launch_policy import hopper_kernels
from flashsim.backends.launch_policy.family import PLAIN
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.backends.launch_policy.portable_kernels import dkdv_kernel
from flashsim.counts.traffic import Traffic
from flashsim.counts.work import stage_work, total_flops
from flashsim.schedule import plans
from flashsim.schedule.tensors import COL, ROW, shape

#: Tensors that Hopper's copy engine loads; True: they are as wide as V.
BOXED = {"Q": False, "K": False, "V": True, "dO": True}
#: Bytes that L2 sends at a time, and that a thread asks for.
SECTOR, PIECE = 32, 16
#: Threads of a warp; each reads a row's LSE or delta.
LANES = 32
#: Stages that load tiles by pieces; the row-wise ones ask for whole rows at once.
WALKS = ("forward", "dkdv", "dq", "fused")


class SharedItems(NamedTuple):
    """Tiles of keys, for all heads, in one launch of a Hopper backward kernel that is KV-outer.

    `blocks` thread blocks share each tile. `unused` is the number of dQ products that all of them
    compute and discard.
    """

    items: int
    blocks: int = 1
    unused: int = 0


def shares(
    traffic: Traffic, stage: plans.Stage, *, in_turns: bool = False, python: bool = False
) -> tuple[SharedItems, ...]:
    """The launches of a stage of Hopper's kernels; empty for Q-outer stages.

    Where dQ is deferred by one visit (inner-loop iteration), a block computes one product more per
    work tile than it has visits. The first visit has no dQ to compute, but the tensor cores work as
    in the others. In C++ this also holds for a block without visits.

    Parameters
    ----------
    in_turns : bool
        Whether dQ is added to in a fixed order.
    python : bool
        Whether the kernels are the ones written in Python.
    """
    if stage.outer != "keys":
        return ()
    gpu, tables = Gpu.like(traffic.device), lower(traffic.schedule(stage), "col")
    steps = tables.visits * (traffic.problem.group if stage.per == "group" else 1)
    found = []
    for blocks, items, late in HOPPER.hand_out(stage, tables, gpu, ordered=in_turns).launches:
        # Of each tile of keys; where launches differ, all are equally long (`Hopper.remainder`).
        working = np.minimum(steps, blocks) if python else np.full_like(steps, blocks)
        products = int(working.sum()) * int(items) // tables.tiles
        found.append(SharedItems(int(items), int(blocks), products if late else 0))
    return tuple(found)


def crossing(
    traffic: Traffic,
    stage: plans.Stage,
    op: str,
    *,
    hopper: bool,
    launches: Sequence[SharedItems] = (),
    with_l1: bool = False,
) -> int:
    """Bytes that a stage's kernel moves in one kind of operation, for all heads.

    Parameters
    ----------
    op : {"load", "store", "reduce"}
    hopper : bool
        Whether the kernel is of the Hopper family, which loads through TMA.
    launches : sequence of SharedItems
        Result of `shares`. Default: each outer tile has one block.
    with_l1 : bool
        Whether sectors that L1 answers count as well.
    """
    p, total = traffic.problem, 0
    own = {move.tensor for move in stage.before}
    for (name, kind, tensor), nbytes in traffic.transfers.items():
        if (name, kind) != (stage.name, op):
            continue
        its = shape(p, tensor)
        if its.axis not in (ROW, COL):
            total += nbytes
            continue
        if its.vector:
            if op == "load":
                nbytes = _statistics(traffic, stage, nbytes, hopper=hopper, with_l1=with_l1)
            total += nbytes
            continue
        rows, width = nbytes // its.width, row_elements(its.elements) * its.itemsize
        if op != "load":
            total += rows * width
        elif hopper and tensor in BOXED:
            columns = hopper_kernels.tile_columns(stage.name, p)[BOXED[tensor]]
            boxes = _box_rows(traffic, stage, tensor) * columns * its.itemsize
            split = rows * _split_sectors(width) * SECTOR // 2
            total += boxes + split
            if tensor in own and any(one.blocks > 1 for one in launches):
                each = boxes + rows * (arriving(width) - _whole_boxes(width)) * SECTOR
                items = sum(one.items for one in launches)
                for n, blocks, _ in launches:
                    if blocks > 1:
                        total += int((each * blocks - boxes - split) * n / items)
        else:
            pieces = width // PIECE
            # By twos, in one sector where the row begins with one, else in two.
            uneven = SECTOR // 4 * (pieces + 1) if width % SECTOR and stage.name in WALKS else 0
            total += rows * (width + uneven)
    if op == "load":  # parts of dK and dV, float32
        for n, blocks, _ in launches:
            columns, _ = hopper_kernels.product_columns(stage.name, p, traffic.tiling, blocks)
            total += (blocks - 1) * n * traffic.tiling.block_k * 2 * columns * 4
    return total


#: Sectors of a row that arrive at each block of a cluster, by the row's bytes, where they are more
#: than the row's boxes have: a multicast brings parts of a box that the row's end cuts again. As an
#: H100 counts them, to the byte, for clusters of 2, 4 and 8 blocks (224: of 2 only). The cause is
#: unknown.
MULTICAST = {48: 5.5, 80: 6.5, 96: 6.5, 112: 7.5, 144: 11, 160: 9.5, 176: 10.5, 192: 9}
MULTICAST |= {208: 11.5, 224: 11, 240: 12.5}


def arriving(width: int) -> float:
    """Sectors of a row's boxes that arrive at each block of a cluster that shares a tile of keys.

    Empty boxes past the row's end come on top.
    """
    return MULTICAST.get(width, _whole_boxes(width))


def _whole_boxes(width: int) -> int:
    """Sectors of the boxes that a row of so many bytes needs."""
    return -(-width // (4 * SECTOR)) * 4


def _statistics(
    traffic: Traffic, stage: plans.Stage, nbytes: int, *, hopper: bool, with_l1: bool
) -> int:
    """Bytes of LSE or delta that kernels request, in whole sectors, for all heads.

    If a head's rows are no multiple of a sector's eight, most heads begin inside a sector. In a
    KV-outer loop a warp reads 32 rows of a tile at a time, so two reads share a sector. L1 answers
    the second: it does not arrive at the SM, but `with_l1` counts it. Hopper's dQ kernel reads
    eight rows at a time past L1, and with tiles of 64 rows both of its warpgroups read all of them.
    """
    p, schedule, block = traffic.problem, traffic.schedule(stage), traffic.tiling.block_q
    past_l1 = hopper and stage.name == "dq"
    times, a_sector = 1 + (past_l1 and block == 64), SECTOR // 4
    spans = schedule.col_spans if stage.outer == "keys" else None
    unknown = stage.name not in WALKS or (stage.outer == "keys" and spans is None)
    if unknown or p.n_q % a_sector == 0 or len(p.sequences) > 1:
        return nbytes * times
    times_read: int | np.ndarray = times
    if spans is not None:
        seen = spans[spans[:, 3] > spans[:, 0]]
        first, stop = seen[:, 0] * block, np.minimum(seen[:, 3] * block, p.n_q)
        if with_l1:
            tiles = np.arange(0, p.n_q, block)[:, None]
            pieces = tiles + np.arange(0, block, LANES)
            ends = np.minimum(np.minimum(pieces + LANES, tiles + block), p.n_q)
            visits = (first <= tiles) & (tiles < stop)
            times_read = np.broadcast_to(visits.sum(axis=1)[:, None], pieces.shape)
            exists = pieces < p.n_q
            first, stop, times_read = pieces[exists], ends[exists], times_read[exists]
    else:
        step = a_sector if past_l1 else block
        first = np.arange(0, p.n_q, step)
        stop = np.minimum(first + step, p.n_q)
    into = (np.arange(p.batch * p.heads) * p.n_q % a_sector)[:, None]
    sectors = -(-(into + stop) // a_sector) - (into + first) // a_sector
    return int((sectors * times_read).sum()) * SECTOR


def table_reads(
    traffic: Traffic,
    stage: plans.Stage,
    *,
    hopper: bool,
    launches: Sequence[SharedItems] = (),
    warps: int = 1,
) -> int:
    """Bytes of the schedule's tables that blocks request, for loops over contiguous visits.

    For each work tile, each of `warps` reads two entries, in a sector each: which outer tile it is,
    and which visits it has. Where a Hopper kernel has more work tiles than SMs, a counter answers
    each request for the next one, with a sector.
    """
    schedule = traffic.schedule(stage)
    spans = schedule.col_spans if stage.outer == "keys" else schedule.row_spans
    if stage.name not in WALKS or spans is None:
        return 0
    walks, _ = plans.heads_of(stage, traffic.problem)
    sms = traffic.device.sm_count
    total = 0
    for items, blocks, _ in launches or [SharedItems(walks * len(spans))]:
        asked = items if hopper and blocks == 1 and items > sms else 0
        total += 2 * items * blocks * warps + asked
    return SECTOR * total


def _split_sectors(width: int) -> int:
    """Half-sectors per tensor row beyond 4 sectors per box row, as a mean over two adjacent rows.

    A box's row is split where sectors end and where the tensor's row ends. If the tensor's row ends
    in the middle of a sector, the last box that is not empty has a fifth part. A full box before it
    has a fifth part in every other row, namely in rows that begin in the middle of a sector.
    """
    return width // (4 * SECTOR) + 2 if width % SECTOR else 0


def _box_rows(traffic: Traffic, stage: plans.Stage, tensor: str) -> int:
    """Rows of a tensor's boxes, for all heads; a tile cut by a sequence's end counts whole."""
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


def tensor_flops(
    traffic: Traffic,
    stage: plans.Stage,
    *,
    hopper: bool,
    launches: Sequence[SharedItems] = (),
    python: bool = False,
) -> int:
    """FLOPs of the matrix products on tensor cores: whole tiles, including masked and ragged ones.

    Hopper's backward in Python takes whole chunks of 64 columns. `launches` is as for `crossing`.
    The dQ products that they compute and discard come on top of one product per visit.
    """
    p, tiling = traffic.problem, traffic.tiling
    (d, dv), beyond = padded_dims(p), 0
    sides = tiling.block_q, tiling.block_k, tiling.block_q * tiling.block_k
    walks, _ = plans.heads_of(stage, p)
    members = p.group if stage.per == "group" else 1
    visits, total = traffic.schedule(stage).sums.visits * walks * members, 0
    items = sum(one.items for one in launches) or 1
    for n, blocks, unused in launches or [SharedItems(1)]:
        if hopper and stage.name != "forward":
            if python:
                d, dv = hopper_kernels.tile_columns(stage.name, p)
            else:
                d, beyond = hopper_kernels.product_columns(stage.name, p, tiling, blocks)
                dv = d
        wide = replace(p, head_dim=d, head_dim_v=dv)
        visit = stage_work(wide, traffic.algorithm, traffic.direction, stage.name).visit
        each = total_flops(visit, *sides)["matmul"] + (2 * sides[2] * beyond if visit else 0)
        if stage.name == "fused" and not hopper and p.itemsize == 2:
            each += 2 * sides[2] * (_columns_of_dq(traffic) - d)
        # Where launches differ, all items are equally long (`Hopper.remainder`). Where dQ may be
        # deferred, its products alone have columns beyond d.
        total += each * (visits * n // items) + unused * 2 * sides[2] * (d + beyond)
    return total


def _columns_of_dq(traffic: Traffic) -> int:
    """Columns of dQ that the portable fused kernel multiplies: steps of 16, equally many per warp.

    A warp past the last column does nothing. If a warp has one pair of fragments left and its share
    is two, it computes two (larger shares stop at a branch).
    """
    device = traffic.device
    gpu = Gpu(device.name, device.compute_capability, device.sram_bytes, device.l2_bytes)
    kernel = dkdv_kernel(traffic.problem, traffic.tiling, replace(PLAIN, fused=True), gpu)
    constants = dict(kernel.constants)
    pairs, across = constants["FS_D"] // 16, constants["FS_WARPS"] // constants["FS_WARPS_Q"]
    share = -(-pairs // across)
    return 16 * (pairs if share > 2 else share * -(-pairs // share))
