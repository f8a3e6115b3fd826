"""Thread blocks on the SMs of a GPU: who starts where and when, who shares an SM, who ends last."""

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
    """When the last block ends, and the mean time that SMs are busy.

    A block that shares its SM with k - 1 others takes ``k * work + latency``: the SM's units are
    shared out, waiting is not. Blocks start in order, spread over the SMs; when one ends, the next
    takes its place. `clump` walks are finished before the next ones begin; inside, the longest
    tiles of all come first. When none are left to start, those that remain on an SM speed up.

    Parameters
    ----------
    work, latency : sequence of float
        Seconds of an SM, by outer tile, in launch order.
    walks : int
        How many times the tiles are walked.
    clump : int
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
    """`makespan` of items that several launches take: each begins as the one before runs out.

    An SM takes blocks of the next launch as soon as none of its own is left to begin; a cluster's
    begin together, on SMs that are free at about the same time.

    Parameters
    ----------
    launches : sequence of (float, int, int, int)
        Seconds of each item, how many there are, how many SMs share one, and how many items can be
        under way at a time.
    processors : int
        SMs.
    """
    free = [0.0] * processors
    for seconds, items, cluster, places in launches:
        free = cost_model.ends_of_launch([seconds], items, cluster, places, free)
    return max(free), sum(free) / processors


def _alone(blocks: list[tuple[float, float, float]], share: int) -> float:
    """When an SM's last blocks have ended, which would end as given if `share` shared it on."""
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
