"""Which tile is fastest: rounds of items, times visits of an item, times what a visit takes.

A persistent block takes items (a row tile of a head) until none is left; an item costs a fixed time
and one for each visit. How many items there are, how many visits they make and how they fill the
multiprocessors follow from the problem, its tiling and the GPU; only the two times were measured.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flashsim.problem.problem import Problem
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling


class Times(NamedTuple):
    """What a block spends, in µs: on an item beside its visits, and on a visit."""

    item: float
    visit: float


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
#: The Hopper backward's, keys outside, likewise; and what it takes a cluster to begin together and
#: to add up its blocks' shares of an item (docs/notebooks/hopper.md).
HOPPER_BACKWARD = {64: Times(4.6, 2.4), 128: Times(5.8, 2.06)}
ADDING_UP = {64: 3.8, 128: 4.6}  # µs
#: Blocks of a cluster, and the share of the multiprocessors that clusters of so many keep busy.
CLUSTERS = {1: 1.0, 2: 1.0, 4: 0.8, 8: 0.75}
#: Of two times this much apart, relatively, either may be the shorter one.
_DOUBT = 0.02
_LONG = 150.0  # µs
#: Beyond so many rounds, who gets which item no longer matters.
_ROUNDS = 12


@lru_cache(maxsize=512)
def microseconds(problem: Problem, tiling: Tiling, times: Times, processors: int) -> float:
    """A forward launch, one block a multiprocessor, the longest items first."""
    schedule = Schedule(problem, tiling)
    visits = schedule.visit_counts
    walks = problem.batch * problem.heads
    items = times.item + times.visit * visits
    rounds = walks * len(items) / processors
    if rounds > _ROUNDS:
        return float(items.sum()) * walks / processors
    return makespan(items, walks, processors)


def fastest_cluster(
    walks: int, steps: np.ndarray, times: Times, adding_up: float, processors: int
) -> int:
    """Of how many blocks a cluster should be that shares an item: 1 where items suffice.

    Parameters
    ----------
    walks : int
    steps : ndarray of int64, (tiles,)
        Visits of each item of a walk, which the blocks share out.
    times : Times
    adding_up : float
        µs of an item that only a cluster takes.
    """
    if walks * len(steps) >= processors:
        return 1

    def took(cluster: int) -> float:
        items = times.item + times.visit * -(-steps // cluster) + adding_up * (cluster > 1)
        return makespan(items, walks, int(processors * CLUSTERS[cluster]) // cluster)

    return min((c for c in CLUSTERS if c <= processors * CLUSTERS[c]), key=took)


@lru_cache(maxsize=512)
def busy_at_once(problem: Problem, tiling: Tiling) -> tuple[float, float]:
    """Blocks that a pass with queries outside keeps busy, and one with keys outside, on average.

    A block has an item, and is busy for as long as its visits take of the longest item's.
    """
    visits = Schedule(problem, tiling).visit_counts
    share = problem.batch * float(visits.mean() / max(visits.max(), 1))
    columns = -(-problem.n_kv // tiling.block_k)
    return share * problem.heads * len(visits), share * problem.kv_heads * columns


def makespan(items: np.ndarray, walks: int, places: int, clump: int | None = None) -> float:
    """When the last of `walks` times these items is done, in so many places.

    Of `clump` walks, or all, the longest items come first, before the next walks begin.
    """
    until, size = [0.0] * places, clump or walks
    for first in range(0, walks, size):
        for item in np.repeat(np.sort(items)[::-1], min(size, walks - first)).tolist():
            heapq.heapreplace(until, until[0] + item)
    return max(until)


def fastest_first(
    problem: Problem, times: dict[Tiling, Times], processors: int
) -> tuple[Tiling, ...]:
    """Tilings in the order of the time that they should take.

    In a launch that takes long the first is only given up for one that is faster by more than the
    times are sure of: it has the most arithmetic to a byte of shared memory, which a chip that runs
    hot likes.
    """
    took = {t: microseconds(problem, t, times[t], processors) for t in times}
    first = next(iter(times))
    if took[first] > _LONG:
        took[first] *= 1 - _DOUBT
    return tuple(sorted(took, key=lambda t: took[t]))
