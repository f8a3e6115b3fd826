"""Simulates on which SM each thread block of a launch runs, and when the block starts and ends."""

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
    """Return when a launch's last thread block ends, and an SM's mean busy time, in seconds.

    A block that shares its SM with k - 1 others takes ``k * work + latency``: the blocks share the
    SM's units, but their latencies overlap. Blocks start in order, distributed over the SMs. When a
    block ends, the next block starts on the same SM. Head groups run one after another, and within
    a head group the longest tiles start first. When no block is left to start, the remaining blocks
    of an SM run faster.

    `work` and `latency` are seconds per outer tile, in launch order. `walks` is the number of loops
    over all outer tiles (for example one per head), and `clump` the number of loops per head group.
    `together` is the number of blocks that an SM runs at the same time.
    """
    items = len(work) * walks
    if not items:
        return 0.0, 0.0
    share = min(together, -(-items // processors))
    slots = min(items, share * processors)
    whole = [share * w + t for w, t in zip(work, latency, strict=True)]
    # A slot is the end of its block, its number (its SM is number modulo `processors`), the tile.
    if len({*zip(work, latency, strict=True)}) == 1:  # equal blocks run in waves
        waves, rest = divmod(items, slots)
        held = [((waves + (slot < rest)) * whole[0], slot, 0) for slot in range(slots)]
    else:
        held = cost_model.last_items(cost_model.Queue(whole, walks, clump), [0.0] * slots)
    if share == 1:
        return max(end for end, _, _ in held), sum(end for end, _, _ in held) / processors
    on: list[list[tuple[float, float, float]]] = [[] for _ in range(processors)]
    for end, slot, tile in held:
        on[slot % processors].append((end, work[tile], latency[tile]))
    ends = [_alone(sorted(blocks), share) for blocks in on]
    return max(ends), sum(ends) / processors


def in_launches(
    launches: Sequence[tuple[float, int, int, int]], processors: int
) -> tuple[float, float]:
    """Return when the last of several overlapping launches ends, and an SM's mean busy time (s).

    When all blocks of a launch have started, free SMs start blocks of the next launch. The blocks
    of a cluster start together, on SMs that become free at about the same time. Each launch is a
    tuple: seconds per work tile, number of work tiles, SMs per work tile, and work tiles that run
    at the same time; `processors` is the number of SMs.
    """
    free = [0.0] * processors
    for seconds, items, cluster, places in launches:
        queue = cost_model.Queue([seconds], items, items)
        free = cost_model.ends_of_launch(queue, cluster, places, free)
    return max(free), sum(free) / processors


def _alone(blocks: list[tuple[float, float, float]], share: int) -> float:
    """Return the time at which the last thread block on an SM ends.

    The end times in `blocks` assume that `share` blocks always share the SM. Fewer blocks share the
    SM near the end of the launch, so they run faster than `blocks` assumes.
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
