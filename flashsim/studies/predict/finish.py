"""A stage's time: when its last thread block ends, if each takes the place that is free first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def finish(
    durations: Sequence[float], walks: int, clump: int | None, slots: int
) -> tuple[float, float]:
    """When the last slot ends, and the mean time that slots are busy.

    `clump` walks (None: all) are finished before the next ones; inside, the longest tiles of all
    come first.
    """
    free, clump = [0.0] * slots, clump or walks
    for first in range(0, walks, clump):
        size = min(clump, walks - first)
        for duration in durations:
            for _ in range(size):
                heapq.heapreplace(free, free[0] + float(duration))
    return max(free), sum(free) / slots
