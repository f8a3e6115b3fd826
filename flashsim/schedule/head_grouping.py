"""How many heads a launch works on together, so that what their blocks share stays in L2."""

from __future__ import annotations

from flashsim.problem.problem import Problem
from flashsim.schedule.plans import Stage, heads_of


def clump_size(
    stage: Stage, problem: Problem, tiles: int, *, l2_bytes: int, processors: int
) -> int:
    """How many walks are worked on together, so that what their blocks share stays in L2.

    A launch hands out the outer tiles of one clump, the longest first, then those of the next. The
    next clump fills the places that one leaves idle at its end, but nothing follows the last, which
    has whatever walks remain: the fewer, the longer most of the GPU waits for a few long tiles. So
    of the sizes that fit, this is the one that leaves the most for the last clump, and of several
    such sizes the smallest.

    What fits takes at most 0.4 of L2, of which either half of a large one keeps a copy: K and V,
    which query heads of a group share, with queries outside; Q, dO and a float32 dQ with keys
    outside. Walks whose tiles all run at once share L2 in any order, so as many as that fit,
    whatever they take.

    Parameters
    ----------
    tiles : int
        Outer tiles of a walk.
    l2_bytes : int
    processors : int
        How many blocks run at once, at least: one on every SM.
    """
    p, room = problem, 2 * l2_bytes // 5
    # Heads that share K and V stay together.
    step = p.group if stage.outer == "queries" and stage.per == "head" else 1
    steps = heads_of(stage, p)[0] // step
    most = min(steps, max(1, room // held(stage, p), processors // (tiles * step)))
    return step * max(range(1, most + 1), key=lambda size: ((steps - 1) % size, -size))


def held(stage: Stage, problem: Problem) -> int:
    """Bytes that the blocks of a walk go through, all of them the same.

    Of queries outside K and V, which heads of a group share; of keys outside Q, dO and a float32
    dQ, of the group's heads.
    """
    p = problem
    row = (p.head_dim + p.head_dim_v) * p.itemsize
    return p.n_kv * row if stage.outer == "queries" else p.group * p.n_q * (row + 4 * p.head_dim)
