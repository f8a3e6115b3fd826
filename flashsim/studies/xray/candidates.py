"""The bytes that an attention kernel of each known form moves with each plausible tile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from flashsim.counts.traffic import Traffic
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.split import Split
from flashsim.schedule.tensors import COL, ROW, shape
from flashsim.schedule.tiling import Tiling
from flashsim.studies.verify.crossing import arriving

#: Sides of plausible tiles: multiples of the tensor cores' 16, and larger powers of two.
SIDES = (*range(16, 257, 16), 512)
#: Possible numbers of thread blocks per cluster.
CLUSTERS = (2, 4, 8)
#: The 4-byte registers of an SM, in which the scores and accumulators of a tile must fit.
REGISTERS = 65536
#: bfloat16 columns of a TMA box; columns past a row's end arrive as zeros.
BOX_BYTES = 128
#: The closed forms need a device, but the bytes of a tile do not depend on it.
_ANY = Device.get("H100")


@dataclass(frozen=True)
class Fit:
    """A possible kernel: its form (such as "dq"), its tile, and the bytes that it would move.

    Attributes
    ----------
    form : str
        One of `FORMS`.
    block_q, block_k : int
        The tile. For "dkdv and dq", `block_k` is the key tile of dK and dV, and `block_q` is the
        query tile of dQ.
    read, reduced, written : int
        The bytes that the SMs read from L2, add in L2 and store in L2.
    blocks : int
        The number of thread blocks, if each has one outer tile.
    scores : int
        The number of scores in all visited tiles, over all heads.
    packed, boxes, dense : bool
        Whether a tile's rows are the queries of all query heads that share a key head; whether the
        kernel reads whole boxes, as TMA does; and whether it visits fully masked tiles.
    cluster : int
        The number of thread blocks that share a key tile and add up their parts of dK and dV.
    """

    form: str
    block_q: int
    block_k: int
    read: int
    reduced: int = 0
    written: int = 0
    blocks: int = 0
    scores: int = 0
    packed: bool = False
    boxes: bool = False
    dense: bool = False
    cluster: int = 1


#: The forms of a kernel, with a description.
FORMS = {
    "forward": "FlashAttention-2 forward",
    "split keys": "forward with split keys",
    "combine": "combines the parts of split keys",
    "fused": "backward in one pass, dQ by atomic additions",
    "dkdv": "dK and dV pass",
    "dq": "dQ pass",
    "dkdv and dq": "dK, dV and dQ in one launch",
    "delta": "row sums of O and dO",
    "convert": "rounds dQ",
    "other": "no known form of FlashAttention-2",
}


@cache
def candidates(form: str, problem: Problem, splits: int = 1) -> tuple[Fit, ...]:
    """Return the bytes that a kernel of one form (such as "dq") moves with each plausible tile.

    A tile may have several `Fit` objects, because kernels may treat partial tiles, masked tiles and
    groups of heads differently.
    """
    return tuple(_listed(form, problem, splits))


def _listed(form: str, problem: Problem, splits: int) -> Iterator[Fit]:
    plain = replace(problem, causal=False, window=None, mask=None, block_mask=None)
    masked = plain != problem
    for dense in (False, True)[: 1 + masked]:
        p = plain if dense else problem
        for grouped in (False, True)[: 1 + (p.group > 1)]:
            for q, k in _sides(form, p, packed=grouped):
                yield from _counted(form, p, Tiling(q, k), splits, grouped, dense)


def _sides(form: str, p: Problem, *, packed: bool) -> Iterator[tuple[int, int]]:
    """Yield the tile sizes (rows, columns) to try for a kernel of one form (such as "dq").

    A tile's scores and accumulators (O, or dK and dV) must fit together in an SM's registers.
    """
    rows = p.n_q * (p.group if packed and form in ("forward", "split keys") else 1)
    forward = form in ("forward", "split keys")
    for q in _up_to(rows):
        for k in _up_to(p.n_kv):
            held = q * (k + p.head_dim_v) if forward or form == "dq" else k * (q + p.head_dim)
            if held <= REGISTERS * 3 // 4 or (q, k) == (SIDES[0], SIDES[0]):
                yield q, k


def _up_to(n: int) -> Sequence[int]:
    """Return the tile sides to try for n rows or n keys.

    Sides below n or up to 128 are tried, and the next larger side, because kernels pad short
    sequences.
    """
    beyond = [side for side in SIDES if side >= n]
    return [side for side in SIDES if side < n or side <= 128 or side in beyond[:1]]


_STAGES = {
    "forward": ("flash2", "forward", ("forward",)),
    "fused": ("flash2-fused", "backward", ("fused",)),
    "dkdv": ("flash2", "backward", ("dkdv",)),
    "dq": ("flash2", "backward", ("dq",)),
    "dkdv and dq": ("flash2", "backward", ("dkdv", "dq")),
}


def _counted(
    form: str, p: Problem, tiling: Tiling, splits: int, grouped: bool, dense: bool
) -> Iterator[Fit]:
    """Yield the bytes that a kernel with this tile would move, as one or several fits.

    The kernel may cut off tiles at the ends of sequences, or move whole TMA boxes; each case has
    its own fit if the bytes differ.
    """
    split = Split()
    if form == "split keys" or (form == "forward" and grouped):
        algorithm, direction = "flash-decode", "forward"
        names: tuple[str, ...] = ("split",)
        split = Split(splits, pack_gqa=grouped)
    else:
        algorithm, direction, names = _STAGES[form]
        if grouped:  # K and V may have been copied to one head per query head
            p = replace(p, kv_heads=p.heads)
    traffic = Traffic(p, tiling, algorithm, direction, _ANY, "ascending", split)
    loads = whole = pairs = reduces = padded = stores = blocks = scores = 0
    for stage in traffic.stages:
        if stage.name not in names:
            continue
        schedule = traffic.schedule(stage)
        outer = schedule.rows if stage.outer == "queries" else schedule.cols
        heads = plans.heads_of(stage, p)[0]
        blocks += heads * len(outer) * splits
        members = plans.members_of(stage, p, split)
        scores = heads * members * schedule.n_visits * tiling.block_q * tiling.block_k
        for (name, op, tensor), nbytes in traffic.transfers.items():
            if name == stage.name and op == "load":
                if form == "split keys" and tensor == "Q":
                    nbytes = _of_parts(traffic, stage, splits)
                loads += nbytes
                full, even = _whole(traffic, stage, tensor, nbytes, columns=True)
                whole, pairs = whole + full, pairs + even
            elif name == stage.name and op == "store":
                stores += nbytes
            elif name == stage.name and op == "reduce":
                reduces += nbytes
                padded += _whole(traffic, stage, tensor, nbytes, columns=False)[0]
    packed = grouped and algorithm == "flash-decode"
    sides = tiling.block_q, tiling.block_k
    made = Fit(form, *sides, loads, reduces, stores, blocks, scores, packed, False, dense)
    for read, boxes in dict(((pairs, True), (whole, True), (loads, False))).items():
        for reduced in {reduces, padded}:
            one = replace(made, read=read, reduced=reduced, boxes=boxes)
            yield one
            if boxes and form in ("dkdv", "fused"):
                yield from (_in_clusters(one, p, blocks) for blocks in CLUSTERS)


def _in_clusters(fit: Fit, p: Problem, blocks: int) -> Fit:
    """Return a fit in which a cluster of `blocks` thread blocks shares each key tile.

    K and V arrive at each block of the cluster (by multicast). Each block also reads the other
    blocks' float32 parts of dK and dV, in pieces of 32 columns (see `verify.crossing`).
    """
    more = 0
    for width in (p.head_dim * p.itemsize, p.head_dim_v * p.itemsize):
        box = -(-width // BOX_BYTES) * BOX_BYTES
        again = p.batch * p.kv_heads * p.n_kv * int(32 * arriving(width) - box)
        parts = -(-max(p.head_dim, p.head_dim_v) // 32) * 32 * 4
        more += (blocks - 1) * fit.blocks * fit.block_k * (box + parts) + again * blocks
    return replace(fit, read=fit.read + more, blocks=fit.blocks * blocks, cluster=blocks)


def _of_parts(traffic: Traffic, stage: plans.Stage, splits: int) -> int:
    """Return the bytes of Q that a kernel loads if every row tile splits its keys into equal parts.

    For each part of the keys, the kernel loads Q of the row tile once.
    """
    p, schedule = traffic.problem, traffic.schedule(stage)
    every = -(-len(schedule.cols) // splits)
    parts = -(-schedule.visit_counts // every)
    rows = np.diff(schedule.rows[:, :2])[:, 0]
    walks, _ = plans.heads_of(stage, p)
    return walks * int((rows * parts).sum()) * shape(p, "Q").width


def _whole(
    traffic: Traffic, stage: plans.Stage, tensor: str, nbytes: int, *, columns: bool
) -> tuple[int, int]:
    """Return the bytes of a tensor's tiles if partial tiles at the end are moved as full tiles.

    The second number is for thread blocks in clusters of two: the number of outer tiles is rounded
    up to an even number. If `columns` is true, rows are padded to whole TMA boxes.
    """
    p, schedule, tiling = traffic.problem, traffic.schedule(stage), traffic.tiling
    its = shape(p, tensor)
    if its.vector or its.axis not in (ROW, COL):
        return nbytes, nbytes
    width = -(-its.width // BOX_BYTES) * BOX_BYTES if columns else its.width
    rows = its.axis == ROW
    table, block = (schedule.rows, tiling.block_q) if rows else (schedule.cols, tiling.block_k)
    lengths = (table[:, 1] - table[:, 0]).astype(np.int64)
    if (stage.outer == "queries") == rows:
        tiles, cut = len(lengths), int(lengths.sum())
        even = tiles + tiles % 2
    elif (lengths == block).all():
        return (nbytes // its.width * width,) * 2
    else:
        _, other = (schedule.col_csr if rows else schedule.row_csr)[:2]
        tiles = even = len(other)
        cut = int(lengths[other].sum())
    if not cut:
        return nbytes, nbytes
    full, paired = (nbytes * n * block // cut // its.width * width for n in (tiles, even))
    return full, paired
