"""Predict how long a kernel launch takes, in order to find the fastest tile size.

A work tile is one outer tile of one head, such as a row tile in the forward pass. A visit is one
tile pair: one iteration of a work tile's inner loop. A work tile takes a measured fixed time, plus
a measured time per visit. The model computes how many work tiles and visits there are, and when
each SM finishes its last work tile.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flashsim.backends.launch.device_tables import Lowered, in_shares, lower, parts_of
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch.passes import KernelPass
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import WHOLE, Split
from flashsim.schedule.tiling import Tiling


class Times(NamedTuple):
    """A thread block's times in µs: a fixed time per work tile (`item`), plus a time per visit."""

    item: float
    visit: float

    def items(self, visits: np.ndarray) -> np.ndarray:
        """Return the times in µs of work tiles, from their numbers of visits."""
        return self.item + self.visit * visits


class Queue(NamedTuple):
    """The work tiles of a launch, in the order in which SMs or clusters take them.

    `takes` holds the times of one head's work tiles. The `walks` heads run in head groups of
    `clump` heads. SMs take the first work tile of every head in a group, followed by every head's
    second work tile, and so on. A work tile that follows another one begins `late` after its end.
    """

    takes: Sequence[float]
    walks: int
    clump: int
    late: float = 0.0


#: Times of the Hopper forward on an H200, by the larger of head_dim and head_dim_v (up to) and by
#: tile. `python benchmarks/tile_times.py` measures and fits them. A faster or slower GPU scales all
#: of them.
HOPPER_FORWARD: dict[int, dict[Tiling, Times]] = {
    32: {
        Tiling(192, 128): Times(1.47, 1.10),
        Tiling(192, 144): Times(1.63, 1.21),
        Tiling(128, 128): Times(1.20, 0.84),
        Tiling(128, 208): Times(1.45, 1.32),
    },
    64: {
        Tiling(192, 128): Times(1.72, 1.45),
        Tiling(128, 128): Times(1.35, 1.14),
        Tiling(128, 208): Times(1.71, 1.67),
    },
    96: {
        Tiling(192, 112): Times(2.40, 1.53),
        Tiling(128, 176): Times(2.34, 1.69),
        Tiling(128, 128): Times(2.28, 1.26),
    },
    128: {
        Tiling(128, 176): Times(3.20, 1.89),
        Tiling(128, 128): Times(3.09, 1.41),
    },
}
#: The same for head dims above 128, on an H100. The visits' times are fitted in the same way. The
#: work tiles' times are fitted so that launches of a persistent block with 240 to 1,500 tokens have
#: the measured order.
HOPPER_FORWARD_WIDE: dict[int, dict[Tiling, Times]] = {
    192: {
        Tiling(128, 112): Times(6.0, 1.55),
        Tiling(128, 96): Times(5.9, 1.34),
        Tiling(128, 80): Times(5.7, 1.19),
        Tiling(128, 64): Times(5.3, 1.03),
    },
    256: {
        Tiling(128, 80): Times(5.5, 1.46),
        Tiling(128, 64): Times(5.1, 1.26),
    },
}


class BackwardTimes(NamedTuple):
    """Times of three Hopper backward kernels: dK and dV, dQ alone, and all gradients."""

    dkdv: Times
    dq: Times
    fused: Times


#: Times of the Hopper backward on an H200, by the larger of head_dim and head_dim_v (up to), at the
#: default tiles. They are fitted to both forms, fused and three-pass, on short and long sequences
#: (docs/notebooks/hopper.md, "Which form").
HOPPER_BACKWARD = {
    64: BackwardTimes(Times(2.39, 1.38), Times(2.56, 1.21), Times(2.59, 2.03)),
    80: BackwardTimes(Times(2.53, 1.13), Times(3.04, 0.97), Times(2.85, 1.72)),
    128: BackwardTimes(Times(2.53, 1.26), Times(3.04, 1.08), Times(2.85, 1.72)),
    192: BackwardTimes(Times(5.34, 1.56), Times(2.90, 0.82), Times(6.00, 2.08)),
}
#: The times of dQ alone at these head dims, if its tiles have 128 rows instead of 64.
DQ_OF_128_ROWS = {80: Times(3.5, 1.9), 128: Times(3.5, 2.1)}
#: The tile of backward_roles.cu, the fused kernel for head dims of 129 to 192 whose warpgroups have
#: different roles, and its times. They are fitted to its speed relative to tile 64 x 64 at twenty
#: shapes with head dims of 160 to 192.
ROLES = Tiling(64, 96)
HOPPER_FUSED_WIDE = {ROLES: Times(6.75, 2.20), Tiling(64, 64): HOPPER_BACKWARD[192].fused}
#: Times of the fused kernel if each row tile has one visit ("flash2-once"), by the larger of
#: head_dim and head_dim_v. They are fitted to 1, 8 and 64 sequences of 64 to 128 tokens.
#: `WITHOUT_DELTA` is the time of this pass in µs, relative to the other forms, for having no delta
#: kernel. The saving is small, because a delta kernel also hides the start of the next kernel.
HOPPER_ONCE = {64: Times(3.4, 2.0), 128: Times(2.0, 2.5)}
WITHOUT_DELTA = -1.0
#: Extra times of the fused form: µs of one more launch; and the fraction of HBM's bandwidth at
#: which float32 dQ is cleared, read again and stored.
CONVERTING, CONVERTED = 1.1, 0.6
#: The time of the flags and waits of "flash2-fused-first", divided by that of the zeros that it
#: does not write (docs/notebooks/hopper.md, "The first visit stores dQ").
FLAGS = 0.4
#: Extra µs of three passes in which some of dQ's work tiles wait for those of dK and dV: a block
#: needs a whole SM, so it loads its first tiles only after another block has left.
WAITING = 2.0
#: Extra µs for a cluster to start together and to add its blocks' shares of a work tile.
ADDING_UP = {64: 3.8, 128: 5.4}
#: Blocks per cluster, and the fraction of the SMs that clusters of this size keep busy. If not all
#: clusters run at once, a cluster waits until enough SMs of one group are free. Clusters with equal
#: work tiles (`TOGETHER`) begin and end together, so they wait less. On an H100, the driver says
#: that 66, 30 and 15 clusters run at once.
CLUSTERS = {1: 1.0, 2: 1.0, 4: 0.8, 8: 0.75}
TOGETHER = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91}
#: The µs by which a wave of clusters begins late after another wave of the same launch: the SMs of
#: a group become free one after the other. The two SMs of a pair become free together more often,
#: so a launch of unequal work tiles in clusters of two does not lose this time.
NEXT_WAVE = 6.0
#: Relative difference of two times below which either may be the shorter one.
_DOUBT = 0.02
#: For head groups of several waves: the relative difference of two ends below which smaller groups
#: are better; the most that a row tile of each head may take of L2; and by how many waves a group
#: may differ from whole ones.
_SAME, LIVE, _BESIDE = 0.003, 1 / 5, 1 / 6
_LONG = 150.0  # µs
#: Number of waves from which on the assignment of work tiles no longer matters.
_ROUNDS = 12


@lru_cache(maxsize=512)
def microseconds(
    problem: Problem,
    tiling: Tiling,
    times: Times,
    processors: int,
    split: Split = WHOLE,
    part_rows: int = 0,
) -> float:
    """Return the predicted µs of a forward launch that has one block per SM.

    `part_rows` is `Family.part_rows`.
    """
    schedule = Schedule(problem, tiling, split=split)
    walks = problem.batch * problem.heads // schedule.members
    visits = schedule.visit_counts
    if part_rows and schedule.row_spans is not None:
        visits = effective_visits(in_shares(lower(schedule, "row"), part_rows))
    return _launch(times.items(visits), walks, processors)


def effective_visits(tables: Lowered) -> np.ndarray:
    """Return, for each row tile, the visits that take as long if all warpgroups compute them.

    A warpgroup that computes fewer visits leaves the tensor cores to the others, but the row tile
    ends with the last of them. The result is halfway between the mean and the largest number of a
    warpgroup's visits.
    """
    if tables.shares is None:
        return tables.visits
    parts = parts_of(tables).astype(np.int64)
    visits = parts[..., 3] - parts[..., 0]
    return (visits.mean(1) + visits.max(1)) / 2


@lru_cache(maxsize=512)
def microseconds_by_keys(problem: Problem, tiling: Tiling, times: Times, processors: int) -> float:
    """Return the predicted µs of a KV-outer launch; each work tile covers a GQA group's heads."""
    schedule = Schedule(problem, tiling, "keys")
    spans = schedule.col_spans
    visits = np.diff(schedule.col_csr[0]) if spans is None else spans[:, 3] - spans[:, 0]
    items = times.items(problem.group * visits)
    return _launch(items, problem.batch * problem.kv_heads, processors)


def _launch(items: np.ndarray, walks: int, processors: int) -> float:
    rounds = walks * len(items) / processors
    if rounds > _ROUNDS:
        return float(items.sum()) * walks / processors
    return makespan(items, walks, processors)


def backward_times(problem: Problem, tiling: Tiling) -> BackwardTimes:
    """Return the times of the Hopper backward's kernels for a problem with this tiling."""
    d = max(problem.head_dim, problem.head_dim_v)
    width = min((w for w in HOPPER_BACKWARD if d <= w), default=192)
    known = HOPPER_BACKWARD[width]
    if tiling.block_q == 128 and width in DQ_OF_128_ROWS:
        return known._replace(dq=DQ_OF_128_ROWS[width])
    return known._replace(fused=HOPPER_FUSED_WIDE[ROLES]) if tiling == ROLES else known


@lru_cache(maxsize=512)
def backward_microseconds(passes: tuple[KernelPass, ...], gpu: Gpu) -> float:
    """Return the predicted µs of a Hopper backward, excluding its delta kernel.

    "flash2-once" is the only backward algorithm without a delta kernel. The prediction for
    "flash2-once" includes `WITHOUT_DELTA`. The model assumes that a kernel begins on an SM as soon
    as the previous kernel has left that SM. The kernel that converts dQ starts when all SMs have
    finished. If dQ's own pass needs SMs that are not idle, the prediction includes `WAITING`.
    """
    p, free, more = passes[0].tables.schedule.problem, [0.0] * gpu.multiprocessors, 0.0
    width = 64 if max(p.head_dim, p.head_dim_v) <= 64 else 128
    for one in passes:
        known = backward_times(p, one.tables.schedule.tiling)._asdict()
        if one.stage.once:
            known["fused"], more = HOPPER_ONCE[width], WITHOUT_DELTA
        if one.stage.converts:
            zeros = any((m.op, m.tensor) == ("store", "dQ_acc") for m in passes[0].stage.moves)
            row = 4 * (1 + (zeros or FLAGS)) + p.itemsize  # bytes per column
            moved = p.batch * p.heads * p.n_q * p.head_dim * row
            more = CONVERTING + moved / (CONVERTED * gpu.hbm_bandwidth) * 1e6
        elif one.stage.name in known:
            if one.stage.name == "dq" and one.walks * one.tables.tiles > free.count(0.0):
                more = WAITING
            steps = one.tables.visits * (p.group if one.stage.per == "group" else 1)
            times = known[one.stage.name], ADDING_UP[width]
            for part in (*one.before, one):
                walks, each, cluster = one.walks, steps, part.kernel.cluster
                at_once = dict(gpu.clusters).get(cluster, 0)
                if equal := has_equal_tiles(one.stage, one.tables):
                    walks, each, at_once = len(part.items), steps[:1], together(cluster, gpu)
                free = shared_out(walks, each, *times, cluster, free, at_once, in_waves=equal)
    return max(free) + more


def shared_out(
    walks: int,
    steps: np.ndarray,
    times: Times,
    adding_up: float,
    cluster: int,
    free: Sequence[float],
    at_once: int = 0,
    *,
    in_waves: bool = False,
) -> list[float]:
    """Return the predicted µs, unordered, at which each SM finishes its last work tile.

    `steps` lists the visits (tile pairs) per work tile of each of the `walks` heads. Each work tile
    is shared by `cluster` blocks, which costs `adding_up` extra µs if `cluster` exceeds 1. If there
    are at most `at_once` clusters, all run at the same time; otherwise only part of the SMs can
    form clusters (`CLUSTERS`), and a further wave of them begins late (`NEXT_WAVE`). If `at_once`
    is 0, the number is not known. With `in_waves`, all work tiles are equal, and `at_once` clusters
    run at the same time in any case. `free` holds the µs at which each SM becomes free.
    """
    items = times.items(-(-steps // cluster)) + adding_up * (cluster > 1)
    places = int(len(free) * CLUSTERS[cluster]) // cluster
    if in_waves or places < walks * len(items) <= at_once:
        places = at_once
    if walks * len(items) > _ROUNDS * places:
        done = (sum(free[:places]) + walks * float(items.sum())) / places
        return [*[done] * places * cluster, *free[cluster * places :]]
    late = NEXT_WAVE if cluster > 2 and walks * len(items) > at_once > 0 else 0.0
    queue = Queue(np.sort(items)[::-1].tolist(), walks, walks, late)
    return ends_of_launch(queue, cluster, places, free)


def ends_of_launch(queue: Queue, cluster: int, places: int, free: Sequence[float]) -> list[float]:
    """Return the predicted time, unordered, at which each SM finishes its work in a launch.

    `cluster` SMs share each work tile, and `places` clusters run at the same time. A cluster
    consists of SMs that become free at about the same time, and begins when the last of them is
    free. `free` holds the time at which each SM becomes free.
    """
    sooner = sorted(free)
    begun = sooner[cluster - 1 : cluster * places : cluster]
    return [*ends(queue, begun) * cluster, *sooner[cluster * places :]]


def has_equal_tiles(stage: plans.Stage, tables: Lowered) -> bool:
    """Return whether a pass is a fused one whose work tiles are all equal (`clusters`)."""
    p, visits = tables.schedule.problem, tables.visits
    narrow = max(p.head_dim, p.head_dim_v) <= 128
    return stage.name == "fused" and not stage.once and narrow and bool((visits == visits[0]).all())


def together(cluster: int, gpu: Gpu) -> int:
    """Return how many clusters with equal work tiles run at the same time."""
    share = int(gpu.multiprocessors * TOGETHER[cluster]) // cluster
    return dict(gpu.clusters).get(cluster, share)


@lru_cache(maxsize=512)
def busy_at_once(problem: Problem, tiling: Tiling) -> tuple[float, float]:
    """Return the average number of busy blocks in a Q-outer pass, and in a KV-outer pass.

    The estimate assumes one work tile per thread block. A block is busy for the fraction (its
    number of visits) / (the most visits of any work tile).
    """
    visits = Schedule(problem, tiling).visit_counts
    share = problem.batch * float(visits.mean() / max(visits.max(), 1))
    columns = -(-problem.n_kv // tiling.block_k)
    return share * problem.heads * len(visits), share * problem.kv_heads * columns


def ends(queue: Queue, free: Sequence[float]) -> list[float]:
    """Return the time, unordered, at which each SM or cluster finishes its last work tile.

    `free` holds the time at which each SM (or cluster) becomes free.
    """
    return [end for end, _, _ in last_items(queue, free)]


def last_items(queue: Queue, free: Sequence[float]) -> list[tuple[float, int, int]]:
    """Return each SM's last work tile as (end time, number of the SM, index in `queue.takes`).

    If clusters share the work tiles, "SM" means a cluster. The SM that becomes free first gets the
    next work tile. The index is -1 for an SM that gets no work tile. `free` is that of `ends`.
    """
    takes, walks, clump, late = queue
    held = [(end, place, -1) for place, end in enumerate(free)]
    heapq.heapify(held)
    for first in range(0, walks, clump):
        for number, item in enumerate(takes):
            for _ in range(min(clump, walks - first)):
                end, place, previous = held[0]
                begin = end + late if previous >= 0 else end
                heapq.heapreplace(held, (begin + item, place, number))
    return held


def makespan(items: np.ndarray, walks: int, places: int, clump: int | None = None) -> float:
    """Return the time at which all work tiles are done if the longest start first.

    `items` holds the times of one head's work tiles; all `walks` heads have equal times. `places`
    is the number of SMs (or clusters) that work in parallel.
    """
    return max(ends(Queue(np.sort(items)[::-1].tolist(), walks, clump or walks), [0.0] * places))


def sooner_at_once(walks: int, items: np.ndarray, places: int, clump: int) -> bool:
    """Return whether all heads together run faster than one head group after another.

    The predicted gain must exceed the possible cost of additional L2 misses. With many waves, the
    function returns False without a comparison.
    """
    return bool(_sooner([walks], walks, items, places, clump))


def heads_together(
    walks: int, items: np.ndarray, places: int, clump: int, share: float, drift: int
) -> int:
    """Return how many of the heads `walks` form a head group, if several waves may run together.

    The result is `clump`, which fits in L2, unless larger groups of equal size end sooner. The gain
    must exceed the possible cost of additional L2 misses. Of groups that end at about the same
    time, the smallest are best. If there are many waves, the function returns `clump` without a
    comparison.

    Parameters
    ----------
    walks, places, clump : int
    items : ndarray
        As for `makespan`.
    share : float
        The fraction of L2 that a row tile of one head takes.
    drift : int
        How far blocks get ahead of others, relative to the kernel for head dims up to 128.
    """

    def aligned(size: int) -> bool:
        """Return whether blocks find most rows in L2 that other blocks of the group have read."""
        waves, live = size * len(items) / places, size * share
        if live > LIVE or live * waves * drift > 1:  # blocks drift further apart with each wave
            return False
        # Where a wave has the end of a group and the beginning of the next, these loop over
        # different rows, or in different directions.
        whole = size == walks or abs(waves - max(1, round(waves))) <= _BESIDE
        return whole or (waves >= 1.5 and 8 * live * drift <= 1 and 4 * live * waves <= 1)

    sizes = (-(-walks // groups) for groups in range(1, -(-walks // clump)))
    larger = (size for size in sizes if size > clump and aligned(size))
    ends_at = _sooner(larger, walks, items, places, clump)
    soon = (1 + _SAME) * min(ends_at.values(), default=math.inf)
    return min((size for size, end in ends_at.items() if end <= soon), default=clump)


def _sooner(
    sizes: Iterable[int], walks: int, items: np.ndarray, places: int, clump: int
) -> dict[int, float]:
    """Return the end of the last work tile for head groups of each of `sizes` heads.

    The result is empty if no size ends clearly sooner than `clump`, or if there are many waves.
    """
    if walks * len(items) > _ROUNDS * places:
        return {}
    ends_at = {size: makespan(items, walks, places, size) for size in set(sizes)}
    latest = (1 - 2 * _DOUBT) * makespan(items, walks, places, clump)
    return ends_at if min(ends_at.values(), default=math.inf) < latest else {}


def fastest_first(
    problem: Problem,
    times: dict[Tiling, Times],
    processors: int,
    launch: Callable[[Problem, Tiling, Times, int], float] = microseconds,
) -> tuple[Tiling, ...]:
    """Return the tilings of `times`, sorted from the fastest to the slowest predicted launch.

    `launch` is a function that predicts the time of a launch. In a long launch, the first tiling
    gets a bonus, which is the uncertainty of the prediction. The first tiling reads the least
    shared memory per FLOP, which helps when a hot GPU lowers its clock.
    """
    took = {t: launch(problem, t, times[t], processors) for t in times}
    first = next(iter(times))
    if took[first] > _LONG:
        took[first] *= 1 - _DOUBT
    return tuple(sorted(took, key=lambda t: took[t]))
