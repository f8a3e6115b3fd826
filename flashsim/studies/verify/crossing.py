"""Computes the bytes that cross between L2 and the SMs, from the kernels' tiles.

When kernels load and store tiles, more bytes cross than the tiles' elements have, for these
reasons:

- Rows in HBM are padded to 16 bytes.
- L2 sends sectors of 32 bytes. If rows have an odd number of 16-byte pieces, every other row begins
  in the middle of a sector, and a warp's combined request touches one more sector.
- Hopper's TMA delivers whole boxes, with zeros past the ends of rows and sequences.
- If a cluster of thread blocks shares a key tile, K and V arrive at each block, and so do the other
  blocks' parts of dK and dV.
- Kernels also read LSE, delta and a few entries of the schedule's tables in sectors.

Tensor cores multiply whole tiles, with a padded head_dim. The rules were derived from hardware
counters (docs/notebooks/counters.md). Only the rule for clusters in the Python kernels was derived
from the code, and not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flashsim.backends.launch.device_tables import in_shares, lower
from flashsim.backends.launch.kernel import Gpu, padded_dims, row_elements
from flashsim.backends.launch_policy import hopper_kernels
from flashsim.backends.launch_policy.cost_model import ROLES
from flashsim.backends.launch_policy.family import PLAIN
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.backends.launch_policy.portable_kernels import dkdv_kernel
from flashsim.counts.traffic import Traffic
from flashsim.counts.work import stage_work, total_flops
from flashsim.schedule import plans
from flashsim.schedule.tensors import COL, ROW, shape

#: Tensors that Hopper's TMA loads; True if their rows are as wide as V's.
BOXED = {"Q": False, "K": False, "V": True, "dO": True}
#: Bytes of a sector, which L2 sends at once, and of a thread's request.
SECTOR, PIECE = 32, 16
#: Threads of a warp; each reads a row's LSE or delta.
LANES = 32
#: Stages that load tiles in 16-byte pieces; row-wise stages load whole rows at once.
WALKS = ("forward", "dkdv", "dq", "fused")


class SharedItems(NamedTuple):
    """How thread blocks share key tiles in one launch of a KV-outer Hopper backward kernel.

    All heads together have `items` key tiles, and a cluster of `blocks` thread blocks shares each
    key tile. In total, the launch computes and discards `unused` dQ products.
    """

    items: int
    blocks: int = 1
    unused: int = 0


@dataclass(frozen=True)
class StageKernel:
    """The kernel of one stage of a pass, whose bytes and FLOPs are computed.

    Attributes
    ----------
    hopper, python : bool
        Whether it is a Hopper kernel, whose tiles TMA loads; and whether it is written in Python.
    launches : tuple of SharedItems
        How thread blocks share key tiles in each launch, from `shared`. If it is empty, each outer
        tile has one block.
    """

    traffic: Traffic
    stage: plans.Stage
    hopper: bool = False
    python: bool = False
    launches: tuple[SharedItems, ...] = ()

    def shared(self, *, in_turns: bool = False) -> StageKernel:
        """Return the kernel with the launches in which thread blocks of Hopper share key tiles.

        There are none for a Q-outer stage. A kernel may compute the dQ of one visit (inner-loop
        iteration) during the next visit. A block of such a kernel computes and discards one extra
        dQ product per work tile. In the C++ kernels, a block without visits computes an extra dQ
        product too. `in_turns` is true for kernels that add to dQ in a fixed order.
        """
        traffic, stage = self.traffic, self.stage
        if not self.hopper or stage.outer != "keys":
            return self
        gpu, tables = Gpu.like(traffic.device), lower(traffic.schedule(stage), "col")
        steps = tables.visits * (traffic.problem.group if stage.per == "group" else 1)
        found = []
        how = HOPPER.hand_out(stage, tables, gpu, traffic.tiling, ordered=in_turns)
        for blocks, items, late in how.launches:
            # Visits per key tile; if launches differ, all key tiles have equally many
            # (`Hopper.launches`).
            working = np.full_like(steps, blocks)
            working = np.minimum(steps, blocks) if self.python else working
            products = int(working.sum()) * int(items) // tables.tiles
            found.append(SharedItems(int(items), int(blocks), products if late else 0))
        return replace(self, launches=tuple(found))

    def crossing(self, op: str, *, with_l1: bool = False) -> int:
        """Return how many bytes the kernel moves between L2 and the SMs by one operation.

        If `with_l1` is true, sectors that the SM reads from L1 count too.
        """
        traffic, stage, p, total = self.traffic, self.stage, self.traffic.problem, 0
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
                    nbytes = self._statistics(nbytes, with_l1=with_l1)
                total += nbytes
                continue
            rows, width = nbytes // its.width, row_elements(its.elements) * its.itemsize
            if op != "load":
                total += rows * width
            elif self.hopper and tensor in BOXED:
                columns = hopper_kernels.tile_columns(stage.name, p)[BOXED[tensor]]
                boxes = self._box_rows(tensor) * columns * its.itemsize
                # If a row ends in the middle of a sector, its last box has a fifth sector, and
                # every second row, which begins in a sector's middle, has one more for each earlier
                # box.
                uneven = width // (4 * SECTOR) + 2 if width % SECTOR else 0
                split = rows * uneven * SECTOR // 2
                total += boxes + split
                if tensor in own and any(one.blocks > 1 for one in self.launches):
                    each = boxes + rows * (arriving(width) - _whole_boxes(width)) * SECTOR
                    items = sum(one.items for one in self.launches)
                    for n, blocks, _ in self.launches:
                        if blocks > 1:
                            total += int((each * blocks - boxes - split) * n / items)
            else:
                pieces = width // PIECE
                # Two pieces are in one sector if the row begins at a sector's start, else in two.
                uneven = SECTOR // 4 * (pieces + 1) if width % SECTOR and stage.name in WALKS else 0
                total += rows * (width + uneven)
        if op == "load":  # parts of dK and dV, float32
            for n, blocks, _ in self.launches:
                # Beyond 128 columns, the columns of a whole tile are divided between warpgroups.
                columns, _ = hopper_kernels.tile_columns(stage.name, p)
                if columns <= 128:
                    columns, _ = hopper_kernels.product_columns(
                        stage.name, p, traffic.tiling.of(stage.name), blocks
                    )
                total += (blocks - 1) * n * traffic.tiling.block_k * 2 * columns * 4
        if op == "store":
            total += self.stored_first()
        elif op == "reduce":
            total -= self.stored_first()
        return total

    def stored_first(self) -> int:
        """Return the bytes of dQ that first visits store, which `transfers` counts as reduced."""
        traffic, p = self.traffic, self.traffic.problem
        if not self.stage.stores_first:
            return 0
        schedule = traffic.schedule(self.stage)
        rows = int(schedule.heights[schedule.visit_counts > 0].sum())
        heads = p.batch * p.heads // schedule.members
        return heads * rows * row_elements(p.head_dim) * p.compute_itemsize

    def table_reads(self, *, warps: int = 1) -> int:
        """Return the bytes that thread blocks read from the tables of work tiles and visits.

        The visits of each work tile must be contiguous. Per work tile, each of `warps` warps reads
        two sectors: one with the outer tile's number, one with the visits. A Hopper forward in C++
        reads a third, with the visits of each warpgroup. If a Hopper kernel has more work tiles
        than SMs, a block reads one more sector for each next work tile.
        """
        traffic, stage, schedule = self.traffic, self.stage, self.traffic.schedule(self.stage)
        spans = schedule.col_spans if stage.outer == "keys" else schedule.row_spans
        if stage.name not in WALKS or spans is None:
            return 0
        walks, _ = plans.heads_of(stage, traffic.problem)
        sms = traffic.device.sm_count
        total = 0
        for items, blocks, _ in self.launches or [SharedItems(walks * len(spans))]:
            asked = items if self.hopper and blocks == 1 and items > sms else 0
            total += 2 * items * blocks * warps + asked
        if self._warpgroup_visits() is not None:
            total += walks * len(spans)
        return SECTOR * total

    def flag_reads(self) -> int:
        """Return the bytes that kernels read at least to learn which visit of a row tile is first.

        A warp that sends dQ reads a flag per visit, and a conversion one per row tile; each is one
        sector. A warp that waits for the first visit's store reads the flag again, as often as its
        wait allows.
        """
        traffic, stage, p = self.traffic, self.stage, self.traffic.problem
        if not any(one.stores_first for one in traffic.stages):
            return 0
        schedule = traffic.schedule(stage)
        if stage.name == "convert":
            return p.batch * p.heads * schedule.t_r * SECTOR
        if not stage.stores_first:
            return 0
        walks, _ = plans.heads_of(stage, p)
        members = plans.members_of(stage, p, traffic.split)
        # One warp sends dQ if warpgroups have roles, else a warp of each of two warpgroups.
        senders = 1 if traffic.tiling.of(stage.name) == ROLES else 2
        return walks * members * schedule.n_visits * senders * SECTOR

    def tensor_flops(self) -> int:
        """Return how many FLOPs a stage's kernel executes on tensor cores, over all heads.

        Tiles that are masked in part, or cut off at an edge, count as whole tiles. In the Hopper
        forward in C++, these tiles are those of a warpgroup, which has 64 rows. The Hopper backward
        kernels written in Python multiply whole chunks of 64 columns. The FLOPs of dQ products that
        kernels discard count too.
        """
        traffic, stage, hopper, python = self.traffic, self.stage, self.hopper, self.python
        p, tiling = traffic.problem, traffic.tiling.of(stage.name)
        (d, dv), beyond = padded_dims(p), 0
        sides = tiling.block_q, tiling.block_k, tiling.block_q * tiling.block_k
        walks, _ = plans.heads_of(stage, p)
        members = plans.members_of(stage, p, traffic.split)
        visits, total = traffic.schedule(stage).sums.visits * walks * members, 0
        shares = self._warpgroup_visits()
        if shares is not None:
            rows, counts = HOPPER.part_rows(p), shares.astype(np.int64)
            sides = rows, tiling.block_k, rows * tiling.block_k
            visits = int((counts[..., 3] - counts[..., 0]).sum()) * walks
        items = sum(one.items for one in self.launches) or 1
        for n, blocks, unused in self.launches or [SharedItems(1)]:
            if hopper and stage.name != "forward":
                if python and (stage.name == "dq" or max(padded_dims(p)) <= 128):
                    d, dv = hopper_kernels.tile_columns(stage.name, p)
                else:
                    d, beyond = hopper_kernels.product_columns(stage.name, p, tiling, blocks)
                    dv = d
            wide = replace(p, head_dim=d, head_dim_v=dv)
            visit = stage_work(wide, traffic.algorithm, traffic.direction, stage.name).visit
            each = total_flops(visit, *sides)["matmul"] + (2 * sides[2] * beyond if visit else 0)
            if hopper and not python and stage.name in ("dkdv", "fused"):
                # 16 more columns of S and dP
                adds = hopper_kernels.adds_statistics(p, tiling, once=stage.once)
                each += 2 * 2 * sides[2] * 16 * adds
            if stage.name == "fused" and not hopper and p.itemsize == 2:
                each += 2 * sides[2] * (self._columns_of_dq() - d)
            # If launches differ, all work tiles are equally long (`Hopper.launches`). If dQ may be
            # deferred, only the products of dQ have columns beyond d.
            total += each * (visits * n // items) + unused * 2 * sides[2] * (d + beyond)
        return total

    def _statistics(self, nbytes: int, *, with_l1: bool) -> int:
        """Return the bytes of LSE or delta that kernels request, in whole sectors, for all heads.

        One sector holds the values of eight rows. If heads have a number of rows that is no
        multiple of eight, most heads begin in the middle of a sector. In a KV-outer loop, a warp
        reads the values of 32 rows at a time. If two such reads touch the same sector, the second
        one hits in L1, so only `with_l1` counts it. Hopper's dQ kernel reads the values of eight
        rows at a time and bypasses L1. If the tiles have 64 rows, each of the dQ kernel's two
        warpgroups reads all values.
        """
        traffic, stage = self.traffic, self.stage
        p, schedule = traffic.problem, traffic.schedule(stage)
        block = schedule.tiling.block_q
        past_l1 = self.hopper and stage.name == "dq"
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

    def _warpgroup_visits(self) -> np.ndarray | None:
        """Return `Lowered.shares` of a Hopper kernel; None if each warpgroup has all visits."""
        p = self.traffic.problem
        if not self.hopper or self.python or self.stage.name != "forward" or p.fp8:
            return None
        rows = HOPPER.part_rows(p)
        return (
            in_shares(lower(self.traffic.schedule(self.stage), "row"), rows).shares
            if rows
            else None
        )

    def _box_rows(self, tensor: str) -> int:
        """Return the number of rows in all TMA boxes of a tensor, over all heads.

        Tiles that the sequence's end cuts off count with all their rows.
        """
        traffic, stage = self.traffic, self.stage
        p, schedule, tiling = (
            traffic.problem,
            traffic.schedule(stage),
            traffic.tiling.of(stage.name),
        )
        walks, _ = plans.heads_of(stage, p)
        rows = shape(p, tensor).axis == ROW
        table, block = (schedule.rows, tiling.block_q) if rows else (schedule.cols, tiling.block_k)
        if any(move.tensor == tensor for move in stage.before):
            return walks * len(table) * block
        members = plans.members_of(stage, p, traffic.split)
        return walks * schedule.n_visits * members * block  # inner tiles: once per visit

    def _columns_of_dq(self) -> int:
        """Return the number of dQ columns that the portable fused kernel computes, with padding.

        Each warp gets the same number of columns, a multiple of 16. Columns past the last one are
        skipped, except if a warp's share is 32 columns of which only 16 exist.
        """
        traffic, gpu = self.traffic, Gpu.like(self.traffic.device)
        fused = replace(PLAIN, fused=True)
        kernel = dkdv_kernel(traffic.problem, traffic.tiling, fused, gpu)
        constants = dict(kernel.constants)
        pairs, across = constants["FS_D"] // 16, constants["FS_WARPS"] // constants["FS_WARPS_Q"]
        share = -(-pairs // across)
        return 16 * (pairs if share > 2 else share * -(-pairs // share))


#: The sectors of a row that arrive at each block of a cluster, by the row's bytes, if they are more
#: than the row's boxes have. A multicast delivers some sectors of a box that the row's end cuts
#: more than once. The figures are an H100's counters (for 320 bytes, an H200's), exact to the byte.
#: They were measured for clusters of 2, 4 and 8 blocks, but 64 and 320 bytes only for 2 and 4, and
#: 224 and 400 bytes only for 2. The cause is unknown.
MULTICAST = {48: 5.5, 64: 5, 80: 6.5, 96: 6.5, 112: 7.5, 144: 11, 160: 9.5, 176: 10.5, 192: 9}
MULTICAST |= {208: 11.5, 224: 11, 240: 12.5, 320: 13, 400: 21}


def arriving(width: int) -> float:
    """Return how many 32-byte sectors per row of K or V arrive at each block of a cluster.

    TMA boxes that begin past the row's end do not count.
    """
    return MULTICAST.get(width, _whole_boxes(width))


def _whole_boxes(width: int) -> int:
    """Return the number of 32-byte sectors in the TMA boxes that cover a row of `width` bytes."""
    return -(-width // (4 * SECTOR)) * 4
