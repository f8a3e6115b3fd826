"""Computes how many heads a kernel processes together, so that the heads' shared data fits L2."""

from __future__ import annotations

from flashsim.problem.problem import Problem
from flashsim.schedule.plans import Stage, heads_of


def clump_size(
    stage: Stage, problem: Problem, tiles: int, *, l2_bytes: int, processors: int
) -> int:
    """Return how many heads (or GQA groups) a kernel processes together, so that L2 holds the data.

    The heads that a kernel processes together form a head group. The kernel starts the outer tiles
    of one head group, the longest first, and then those of the next head group. When no tile of a
    head group is left to start, the next head group fills the idle SMs. No head group follows the
    last one, which has the remaining heads. If the last group has only a few heads, most of the GPU
    idles until its few long tiles end. So of the group sizes that fit in L2, the function returns
    the one with the most heads in the last group, and of several such sizes the smallest.

    A group size fits if the group's shared data takes at most 0.4 of L2, because each half of a
    large L2 keeps its own copy. In a Q-outer loop, the shared data is K and V, which the query
    heads of a GQA group have in common. In a KV-outer loop, the shared data is Q, dO and a float32
    dQ. Heads whose tiles all run at once share L2 in any order, so a head group may always have
    that many heads.

    Parameters
    ----------
    tiles : int
        Outer tiles per head (or per GQA group, for a stage that runs per group).
    l2_bytes : int
    processors : int
        The least number of blocks that run at once, which is the number of SMs.
    """
    p, room = problem, 2 * l2_bytes // 5
    # Heads that share K and V stay together.
    step = p.group if stage.outer == "queries" and stage.per == "head" else 1
    steps = heads_of(stage, p)[0] // step
    most = min(steps, max(1, room // held(stage, p), processors // (tiles * step)))
    return step * max(range(1, most + 1), key=lambda size: ((steps - 1) % size, -size))


def held(stage: Stage, problem: Problem) -> int:
    """Return the bytes that all blocks of one head (or GQA group) read or write in common.

    In a Q-outer loop, these bytes are K and V, which the heads of a GQA group share. In a KV-outer
    loop, the bytes are Q, dO and a float32 dQ of the group's heads.
    """
    p = problem
    row = (p.head_dim + p.head_dim_v) * p.itemsize
    return p.n_kv * row if stage.outer == "queries" else p.group * p.n_q * (row + 4 * p.head_dim)
