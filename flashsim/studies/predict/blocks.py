"""Place thread blocks on a GPU's SMs: where and when each starts, shares its SM, and ends."""

from __future__ import annotations

from collections.abc import Sequence

from flashsim.backends.launch_policy import cost_model


def makespan(
    work: Sequence[float],
    latency: Sequence[float],
    walks: int,
    clump: int,
    processors: int,
    together: int,
) -> tuple[float, float]:
    """The time when the last block ends, and the mean time that SMs are busy.

    A block that shares its SM with k - 1 others takes ``k * work + latency``: they share the SM's
    units, but they wait at the same time. Blocks start in order, spread over the SMs; when one
    ends, the next takes its place. The kernel finishes `clump` loops before it begins the next
    ones; among these, the longest tiles start first. When no block is left to start, the blocks
    that remain on an SM speed up.

    Parameters
    ----------
    work, latency : sequence of float
        Seconds on an SM, by outer tile, in launch order.
    walks : int
        How many times the kernel loops over all tiles (for example once per head).
    clump : int
        Loops per head group.
    processors : int
        SMs.
    together : int
        Blocks that fit on an SM.
    """
    items = len(work) * walks
    if not items:
        return 0.0, 0.0
    share = min(together, -(-items // processors))
    slots = min(items, share * processors)
    whole = [share * w + t for w, t in zip(work, latency, strict=True)]
    # A slot: when its block ends, its number (SM: number modulo `processors`), the tile.
    if len({*zip(work, latency, strict=True)}) == 1:  # they end in waves
        waves, rest = divmod(items, slots)
        held = [((waves + (slot < rest)) * whole[0], slot, 0) for slot in range(slots)]
    else:
        held = cost_model.last_items(whole, walks, clump, [0.0] * slots)
    on: list[list[tuple[float, float, float]]] = [[] for _ in range(processors)]
    for end, slot, tile in held:
        on[slot % processors].append((end, work[tile], latency[tile]))
    ends = [_alone(sorted(blocks), share) for blocks in on]
    return max(ends), sum(ends) / processors


def in_launches(
    launches: Sequence[tuple[float, int, int, int]], processors: int
) -> tuple[float, float]:
    """`makespan` for work tiles spread over several launches; each begins as the previous runs out.

    An SM takes blocks of the next launch as soon as it has none of its own left to begin. The
    blocks of a cluster begin together, on SMs that become free at about the same time.

    Parameters
    ----------
    launches : sequence of (float, int, int, int)
        Per launch: seconds per work tile, number of work tiles, SMs that share one, and work tiles
        that can run at a time.
    processors : int
        SMs.
    """
    free = [0.0] * processors
    for seconds, items, cluster, places in launches:
        free = cost_model.ends_of_launch([seconds], items, cluster, places, free)
    return max(free), sum(free) / processors


def _alone(blocks: list[tuple[float, float, float]], share: int) -> float:
    """The time when an SM's last blocks end.

    The given ends assume that `share` blocks use the SM throughout; fewer blocks are faster.
    """
    if not blocks:
        return 0.0
    crowded = len(blocks) == share
    now = blocks[0][0] if crowded else 0.0  # until then nothing changes
    left = [
        ((end - now) / (share * work + latency) if share * work + latency else 0.0, work, latency)
        for end, work, latency in blocks[crowded:]
    ]
    while left:
        k = len(left)
        step = min(part * (k * work + latency) for part, work, latency in left)
        now += step
        left = [
            (part - step / (k * work + latency) if k * work + latency else 0.0, work, latency)
            for part, work, latency in left
        ]
        left = [one for one in left if one[0] > 1e-9]
    return now
