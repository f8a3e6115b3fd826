"""Which tile is fastest: rounds of items, times visits of an item, times what a visit takes.

A persistent block takes items (a row tile of a head) until none is left; an item costs a fixed time
and one for each visit. How many items there are, how many visits they make and how they fill the
multiprocessors follow from the problem, its tiling and the GPU; only the two times were measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch.passes import KernelPass
from flashsim.problem.problem import Problem
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling


class Times(NamedTuple):
    """What a block spends, in µs: on an item beside its visits, and on a visit."""

    item: float
    visit: float

    def items(self, visits: np.ndarray) -> np.ndarray:
        """Of items of so many visits each."""
        return self.item + self.visit * visits


#: The Hopper forward's, by the widest of head_dim and head_dim_v (up to) and tile, on an H200:
#: `python benchmarks/tile_times.py` measures and fits them. A slower or faster GPU multiplies all.
HOPPER_FORWARD: dict[int, dict[Tiling, Times]] = {
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


class Backward(NamedTuple):
    """What the passes of a Hopper backward take: dK and dV alone, dQ alone, all three in one."""

    dkdv: Times
    dq: Times
    fused: Times


#: By the widest of head_dim and head_dim_v (up to), at its tiles, on an H200: fitted to both forms
#: of short and long sequences (docs/notebooks/hopper.md, "Which form").
HOPPER_BACKWARD = {
    64: Backward(Times(2.39, 1.38), Times(2.56, 1.21), Times(2.59, 2.03)),
    128: Backward(Times(2.53, 1.26), Times(3.04, 1.08), Times(2.85, 1.72)),
    192: Backward(Times(5.34, 1.56), Times(2.90, 0.82), Times(6.00, 2.08)),
}
#: The tile of the fused kernel of 129 to 192 columns that has roles (backward_roles.cu), and what
#: it takes: fitted to how far it was from 64 x 64 at twenty shapes, head_dims of 160 to 192.
ROLES = Tiling(64, 96)
HOPPER_FUSED_WIDE = {ROLES: Times(6.75, 2.20), Tiling(64, 64): HOPPER_BACKWARD[192].fused}
#: What the fused kernel takes where each row tile has one visit ("flash2-once"), by the widest of
#: head_dim and head_dim_v: fitted to 1, 8 and 64 sequences of 64 to 128 tokens. And what its pass
#: takes besides, in µs, less than the others do: no delta, which hides how their kernels begin.
HOPPER_ONCE = {64: Times(3.4, 2.0), 128: Times(2.0, 2.5)}
WITHOUT_DELTA = -1.0
#: What the fused form takes besides: µs of one launch more, and of float32 dQ, which is cleared,
#: read again and stored, its bytes at this part of the bandwidth of the GPU's memory.
CONVERTING, CONVERTED = 1.1, 0.6
#: What it takes a cluster to begin together and to add up its blocks' shares of an item, in µs.
ADDING_UP = {64: 3.8, 128: 5.4}
#: Blocks of a cluster, and the share of the multiprocessors that clusters of so many keep busy.
CLUSTERS = {1: 1.0, 2: 1.0, 4: 0.8, 8: 0.75}
#: What a launch more should save at least, in µs: of those that saved less, some lost.
_LAUNCHED = 12.0
#: Of two times this much apart, relatively, either may be the shorter one.
_DOUBT = 0.02
_LONG = 150.0  # µs
#: In so many rounds of items the longest may leave multiprocessors idle for long. A cluster should
#: then be faster by more than clusters have been slower than they should.
_FEW_ROUNDS, _CLUSTERS_DOUBT = 2, 0.08
#: Beyond so many rounds, who gets which item no longer matters.
_ROUNDS = 12


@lru_cache(maxsize=512)
def microseconds(problem: Problem, tiling: Tiling, times: Times, processors: int) -> float:
    """A forward launch, one block a multiprocessor, the longest items first."""
    visits = Schedule(problem, tiling).visit_counts
    return _launch(times.items(visits), problem.batch * problem.heads, processors)


@lru_cache(maxsize=512)
def microseconds_by_keys(problem: Problem, tiling: Tiling, times: Times, processors: int) -> float:
    """A backward launch with keys outside, whose items have all query heads of a key head."""
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


def backward_times(problem: Problem, tiling: Tiling) -> Backward:
    """What a Hopper backward's passes take of a problem."""
    d = max(problem.head_dim, problem.head_dim_v)
    known = HOPPER_BACKWARD[min((w for w in HOPPER_BACKWARD if d <= w), default=192)]
    return known._replace(fused=HOPPER_FUSED_WIDE[ROLES]) if tiling == ROLES else known


@lru_cache(maxsize=512)
def backward_microseconds(passes: tuple[KernelPass, ...], gpu: Gpu) -> float:
    """A Hopper backward, but for delta, which its forms begin with, but for "flash2-once".

    A pass begins on each multiprocessor as the one before it leaves that: dQ's beside dK's and
    dV's. The conversion waits for all of them.
    """
    p, free, more = passes[0].tables.schedule.problem, [0.0] * gpu.multiprocessors, 0.0
    width = 64 if max(p.head_dim, p.head_dim_v) <= 64 else 128
    for one in passes:
        known = backward_times(p, one.tables.schedule.tiling)._asdict()
        if one.stage.once:
            known["fused"], more = HOPPER_ONCE[width], WITHOUT_DELTA
        if one.stage.converts:
            row = 4 * 2 + p.itemsize  # bytes for each column
            moved = p.batch * p.heads * p.n_q * p.head_dim * row
            more = CONVERTING + moved / (CONVERTED * gpu.hbm_bandwidth) * 1e6
        elif one.stage.name in known:
            steps = one.tables.visits * (p.group if one.stage.per == "group" else 1)
            times = known[one.stage.name], ADDING_UP[width]
            for part in (*one.before, one):
                walks, each = one.walks, steps
                if one.before:  # all items are alike
                    walks, each = len(part.items), steps[:1]
                free = shared_out(walks, each, *times, part.kernel.cluster, free)
    return max(free) + more


def shared_out(
    walks: int,
    steps: np.ndarray,
    times: Times,
    adding_up: float,
    cluster: int,
    free: Sequence[float],
) -> list[float]:
    """When each multiprocessor has done its last item, in µs; in no order.

    Parameters
    ----------
    walks : int
    steps : ndarray of int64, (tiles,)
        Visits of each item of a walk.
    times : Times
    adding_up : float
        µs of an item that only a cluster takes.
    cluster : int
        Blocks that share an item; more than one begin only where nothing ran before.
    free : sequence of float
        When each multiprocessor is free to begin.
    """
    items = times.items(-(-steps // cluster)) + adding_up * (cluster > 1)
    places = int(len(free) * CLUSTERS[cluster]) // cluster
    if walks * len(items) > _ROUNDS * places:
        done = (sum(free[:places]) + walks * float(items.sum())) / places
        return [*[done] * places * cluster, *free[cluster * places :]]
    return ends_of_launch(np.sort(items)[::-1].tolist(), walks, cluster, places, free)


def ends_of_launch(
    takes: Sequence[float], walks: int, cluster: int, places: int, free: Sequence[float]
) -> list[float]:
    """When each multiprocessor is done with a launch's items; in no order.

    Each item is worked on by a `cluster` of multiprocessors, of which there are so many `places`. A
    cluster begins with the last of its multiprocessors that is free, and takes those that are free
    at about the same time. The other parameters are those of `ends`.
    """
    sooner = sorted(free)
    begun = sooner[cluster - 1 : cluster * places : cluster]
    return [*ends(takes, walks, walks, begun) * cluster, *sooner[cluster * places :]]


def remainder(
    items: int, steps: int, times: Times, adding_up: float, gpu: Gpu
) -> tuple[tuple[int, int], ...]:
    """(blocks of a cluster, items): what clusters take of items that are all alike, at first.

    After whole rounds a few are left, and most multiprocessors would wait for these: so they come
    first, shared by clusters, of one size or as many as possible of two blocks and the others of
    more. None where that does not save `_LAUNCHED` for each launch.

    Parameters
    ----------
    items : int
    steps : int
        Visits of each.
    times : Times
    adding_up : float
        µs of an item that only a cluster takes.
    gpu : Gpu
    """

    def takes(cluster: int) -> float:
        return times.item + times.visit * -(-steps // cluster) + adding_up * (cluster > 1)

    places = {c: int(gpu.multiprocessors * CLUSTERS[c]) // c for c in CLUSTERS if c > 1}
    rounds, rest = divmod(items, gpu.multiprocessors)
    if not rest or not rounds:
        return ()
    pairs = places[2]
    found: dict[tuple[tuple[int, int], ...], float]
    found = {((c, rest),): takes(c) for c in places if rest <= places[c]}
    found |= {
        ((c, rest - pairs), (2, pairs)): takes(c) + takes(2)
        for c in places
        if c > 2 and 0 < rest - pairs <= places[c]
    }
    best = min(found, key=lambda shares: found[shares] + _LAUNCHED * len(shares), default=())
    return best if best and takes(1) - found[best] > _LAUNCHED * len(best) else ()


def fastest_cluster(
    walks: int, steps: np.ndarray, times: Times, adding_up: float, processors: int
) -> int:
    """Of how many blocks a cluster should be that shares an item: 1 where items suffice.

    The parameters are `shared_out`'s.
    """
    rounds = walks * len(steps) / processors
    if rounds > _FEW_ROUNDS:
        return 1

    def took(cluster: int) -> float:
        return max(shared_out(walks, steps, times, adding_up, cluster, [0.0] * processors))

    best = min((c for c in CLUSTERS if c <= processors * CLUSTERS[c]), key=took)
    return best if rounds < 1 or took(best) < (1 - _CLUSTERS_DOUBT) * took(1) else 1


@lru_cache(maxsize=512)
def busy_at_once(problem: Problem, tiling: Tiling) -> tuple[float, float]:
    """Blocks that a pass with queries outside keeps busy, and one with keys outside, on average.

    A block has an item, and is busy for as long as its visits take of the longest item's.
    """
    visits = Schedule(problem, tiling).visit_counts
    share = problem.batch * float(visits.mean() / max(visits.max(), 1))
    columns = -(-problem.n_kv // tiling.block_k)
    return share * problem.heads * len(visits), share * problem.kv_heads * columns


def ends(takes: Sequence[float], walks: int, clump: int, free: Sequence[float]) -> list[float]:
    """When each place has done its last item, one at a time; in no order.

    Parameters
    ----------
    takes : sequence of float
        What each item of a walk takes, in the order in which they are taken.
    walks, clump : int
        Of `clump` walks the first items come first, then the second ones; then the next walks
        begin.
    free : sequence of float
        When each place is free to begin.
    """
    return [end for end, _, _ in last_items(takes, walks, clump, free)]


def last_items(
    takes: Sequence[float], walks: int, clump: int, free: Sequence[float]
) -> list[tuple[float, int, int]]:
    """Of each place its last item: when it ends, the place's number, the item's in `takes`.

    The parameters are those of `ends`. An item goes to the place that is free first; a place
    without items has number -1.
    """
    held = [(end, place, -1) for place, end in enumerate(free)]
    heapq.heapify(held)
    for first in range(0, walks, clump):
        for number, item in enumerate(takes):
            for _ in range(min(clump, walks - first)):
                end, place, _ = held[0]
                heapq.heapreplace(held, (end + item, place, number))
    return held


def makespan(items: np.ndarray, walks: int, places: int, clump: int | None = None) -> float:
    """When the last of `walks` times these items is done, in so many places, the longest first."""
    return max(ends(np.sort(items)[::-1].tolist(), walks, clump or walks, [0.0] * places))


def sooner_at_once(walks: int, items: np.ndarray, places: int, clump: int) -> bool:
    """Whether all walks at once end sooner than a clump after the other, by more than L2 may cost.

    Of many rounds of items: no.
    """
    if walks * len(items) > _ROUNDS * places:
        return False
    at_once, one_by_one = (makespan(items, walks, places, x) for x in (walks, clump))
    return at_once < (1 - 2 * _DOUBT) * one_by_one


def fastest_first(
    problem: Problem,
    times: dict[Tiling, Times],
    processors: int,
    launch: Callable[[Problem, Tiling, Times, int], float] = microseconds,
) -> tuple[Tiling, ...]:
    """Tilings in the order of the time that they should take: `launch` says it.

    In a launch that takes long the first is only given up for one that is faster by more than the
    times are sure of: it has the most arithmetic to a byte of shared memory, which a chip that runs
    hot likes.
    """
    took = {t: launch(problem, t, times[t], processors) for t in times}
    first = next(iter(times))
    if took[first] > _LONG:
        took[first] *= 1 - _DOUBT
    return tuple(sorted(took, key=lambda t: took[t]))
