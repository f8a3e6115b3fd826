"""Choose how many thread blocks share a work tile, in one launch or in several.

Only the KV-outer passes of the Hopper backward have clusters of blocks that share a work tile.
"""

from itertools import product

import numpy as np

from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy.cost_model import (
    CLUSTERS,
    NEXT_WAVE,
    Times,
    shared_out,
    together,
)

#: Minimum saving of an additional launch, in µs and as a fraction of the pass: some launches with a
#: smaller predicted saving were slower.
_LAUNCHED, _LAUNCHED_SHARE = 12.0, 0.005
#: Number of waves of equal work tiles from which on clusters only take the last one.
_MANY_WAVES = 2
#: With at most so many waves, the longest work tile may leave SMs idle for long. A cluster must
#: then be predicted to be faster by more than the largest observed error of the prediction.
_FEW_ROUNDS, _CLUSTERS_DOUBT = 2, 0.08


def fastest_cluster(
    walks: int,
    steps: np.ndarray,
    times: Times,
    adding_up: float,
    processors: int,
    clusters: tuple[tuple[int, int], ...] = (),
) -> int:
    """Return the predicted fastest cluster size; it is 1 if there are many work tiles per SM.

    `clusters` is `Gpu.clusters` if all of the GPU's SMs are free for the launch.
    """
    rounds = walks * len(steps) / processors
    if rounds > _FEW_ROUNDS:
        return 1

    def took(cluster: int) -> float:
        free, at_once = [0.0] * processors, dict(clusters).get(cluster, 0)
        return max(shared_out(walks, steps, times, adding_up, cluster, free, at_once))

    best = min((c for c in CLUSTERS if c <= processors * CLUSTERS[c]), key=took)
    return best if rounds < 1 or took(best) < (1 - _CLUSTERS_DOUBT) * took(1) else 1


def shared_launches(
    items: int, steps: int, times: Times, adding_up: float, gpu: Gpu
) -> tuple[tuple[int, int], ...]:
    """Return the launches that compute `items` equal work tiles, in launch order.

    Each launch is a pair (blocks per cluster, number of work tiles). Every work tile has `steps`
    visits. A cluster of blocks shares a work tile, which costs `adding_up` extra µs.

    Full waves have one block per work tile. A last, partial wave leaves SMs idle, so waves of
    clusters may end sooner. Clusters run first, the largest of them before the others, and take as
    many work tiles as run at once. So the single blocks share L2 and power with few others. Each
    launch after the first must save more than `_LAUNCHED` and `_LAUNCHED_SHARE` together. From
    `_MANY_WAVES` on, clusters take only the last wave's work tiles (`_last_wave`).
    """
    if items >= _MANY_WAVES * gpu.multiprocessors:
        last = _last_wave(items, steps, times, adding_up, gpu)
        return (*last, (1, items - sum(n for _, n in last)))
    places = {c: together(c, gpu) for c in CLUSTERS if together(c, gpu)}

    def takes(cluster: int, count: int) -> float:
        """Return the predicted µs of a launch."""
        each, waves = times.item + times.visit * -(-steps // cluster), -(-count // places[cluster])
        return waves * each + (waves * (adding_up + NEXT_WAVE) - NEXT_WAVE) * (cluster > 1)

    found: dict[tuple[tuple[int, int], ...], float]
    found = {((c, items),): takes(c, items) for c in places}
    sizes = sorted(places, reverse=True)
    for used in product((False, True), repeat=len(sizes) - 1):
        shares, left = list[tuple[int, int]](), items
        for cluster, uses in zip(sizes, (*used, True), strict=True):
            taken = min(left, places[cluster]) if cluster > 1 else left
            if uses and taken:
                shares.append((cluster, taken))
                left -= taken
        found[tuple(shares)] = sum(takes(*share) for share in shares)

    def cost(shares: tuple[tuple[int, int], ...]) -> float:
        return found[shares] + (len(shares) - 1) * (_LAUNCHED + _LAUNCHED_SHARE * found[shares])

    return min(found, key=cost)


def _last_wave(
    items: int, steps: int, times: Times, adding_up: float, gpu: Gpu
) -> tuple[tuple[int, int], ...]:
    """Return extra launches that compute the work tiles of the last, partial wave.

    If there are two extra launches, the first uses clusters of more than two blocks. The second
    uses clusters of two blocks, as many as the GPU can run at the same time. The result is empty
    unless the extra launches save more than `_LAUNCHED` µs each.
    """

    def takes(cluster: int) -> float:
        return times.item + times.visit * -(-steps // cluster) + adding_up * (cluster > 1)

    # With many waves, SMs do not become free together, and a last wave costs less than a whole one.
    few = items < 2 * _MANY_WAVES * gpu.multiprocessors
    fewer = {c: int(gpu.multiprocessors * CLUSTERS[c]) // c for c in CLUSTERS}
    places = {c: together(c, gpu) if few else fewer[c] for c in CLUSTERS if c > 1}
    rest, pairs = items % gpu.multiprocessors, places[2]
    if not rest:
        return ()
    found: dict[tuple[tuple[int, int], ...], float]
    found = {((c, rest),): takes(c) for c in places if rest <= places[c]}
    found |= {
        ((c, rest - pairs), (2, pairs)): takes(c) + takes(2)
        for c in places
        if c > 2 and 0 < rest - pairs <= places[c]
    }
    best = min(found, key=lambda shares: found[shares] + _LAUNCHED * len(shares), default=())
    return best if best and takes(1) - found[best] > _LAUNCHED * len(best) else ()
