"""Computes how many heads a kernel processes at once, so that L2 holds the heads' shared data."""

from flashsim.problem.problem import Problem
from flashsim.schedule.plans import Stage, heads_of


def clump_size(
    stage: Stage, problem: Problem, tiles: int, *, l2_bytes: int, processors: int
) -> int:
    """Return how many heads (or GQA groups) a kernel processes at once, so that L2 has all data.

    The kernel processes one head group after another, and starts each group with its longest outer
    tiles. A last group with few heads leaves most of the GPU idle, because no further group
    follows. So, among the group sizes that fit in L2, the function returns the size with the most
    heads in the last group. A tie goes to the smallest size.

    A group size fits if the group's shared data (`held`) takes at most 0.4 of L2, because each half
    of a large L2 keeps a copy. A group size is also allowed if all outer tiles of the group run at
    once, because such tiles share L2 in any order. `tiles` is the number of outer tiles per head
    (or GQA group). `processors` is the number of SMs.
    """
    p, room = problem, 2 * l2_bytes // 5
    # Heads that share K and V stay together.
    step = p.group if stage.outer == "queries" and stage.per == "head" else 1
    steps = heads_of(stage, p)[0] // step
    most = min(steps, max(1, room // held(stage, p), processors // (tiles * step)))
    return step * max(range(1, most + 1), key=lambda size: ((steps - 1) % size, -size))


def held(stage: Stage, problem: Problem) -> int:
    """Return the bytes of the data that all thread blocks of one head (or GQA group) share.

    A Q-outer loop's blocks share K and V. A KV-outer loop's blocks share Q, dO and a float32 dQ of
    the group's heads.
    """
    p = problem
    row = (p.head_dim + p.head_dim_v) * p.itemsize
    return p.n_kv * row if stage.outer == "queries" else p.group * p.n_q * (row + 4 * p.head_dim)
