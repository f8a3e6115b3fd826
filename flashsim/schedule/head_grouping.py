"""The number of heads that a launch works on together, so that their shared data stays in L2."""

from __future__ import annotations

from flashsim.problem.problem import Problem
from flashsim.schedule.plans import Stage, heads_of


def clump_size(
    stage: Stage, problem: Problem, tiles: int, *, l2_bytes: int, processors: int
) -> int:
    """The number of heads (or groups) to work on together, so that their shared data stays in L2.

    A launch hands out the outer tiles of one head group, the longest first, and then those of the
    next head group. When a head group runs out of tiles, the next one fills the idle SMs. Nothing
    follows the last head group, which has the remaining heads: the fewer they are, the longer most
    of the GPU waits for a few long tiles. So of the sizes that fit, the function returns the one
    that leaves the most heads for the last head group, and of several such sizes the smallest.

    A size fits if its shared data takes at most 0.4 of L2, because either half of a large L2 keeps
    its own copy. In a Q-outer loop the shared data is K and V, which the query heads of a GQA group
    have in common. In a KV-outer loop it is Q, dO and a float32 dQ. If the tiles of several heads
    all run at once, they share L2 in any order. So as many heads as run at once always fit, however
    much they take.

    Parameters
    ----------
    tiles : int
        Outer tiles per head (or per GQA group, for a stage that runs per group).
    l2_bytes : int
    processors : int
        The least number of blocks that run at once: one on every SM.
    """
    p, room = problem, 2 * l2_bytes // 5
    # Heads that share K and V stay together.
    step = p.group if stage.outer == "queries" and stage.per == "head" else 1
    steps = heads_of(stage, p)[0] // step
    most = min(steps, max(1, room // held(stage, p), processors // (tiles * step)))
    return step * max(range(1, most + 1), key=lambda size: ((steps - 1) % size, -size))


def held(stage: Stage, problem: Problem) -> int:
    """Bytes that every block of one head (or group) reads or writes over its inner loop.

    In a Q-outer loop these are K and V, which heads of a GQA group share. In a KV-outer loop they
    are Q, dO and a float32 dQ of the group's heads.
    """
    p = problem
    row = (p.head_dim + p.head_dim_v) * p.itemsize
    return p.n_kv * row if stage.outer == "queries" else p.group * p.n_q * (row + 4 * p.head_dim)
