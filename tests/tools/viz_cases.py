"""Small traces for the tests of flashsim.viz, with every stage of every algorithm."""

from functools import cache

import numpy as np

import flashsim
from flashsim.schedule.plans import GENERAL as ALGORITHMS
from flashsim.trace.events import PHASES, TIMELINE
from flashsim.trace.trace import Trace

TILING = flashsim.Tiling(16, 16)


def arrays(n=96, d=8, heads=1):
    rng = np.random.default_rng(7)
    return tuple(rng.standard_normal((3, heads, n, d), dtype=np.float32))


@cache
def result(algorithm="flash2", causal=True, n=96, heads=1):
    return flashsim.run(
        *arrays(n, heads=heads), algorithm=algorithm, causal=causal, tiling=TILING, trace=True
    )


@cache
def trace(algorithm="flash2", direction="forward", causal=True, n=96):
    forward = result(algorithm, causal, n)
    if direction == "forward":
        return forward.trace
    return forward.backward(arrays(n)[0], tiling=TILING).trace


PASSES = [(a, d) for a in ALGORITHMS for d in ("forward", "backward")]


def with_timeline(sm_count=3, shared=2):
    """Return a trace whose visits ran on `sm_count` SMs, `shared` blocks at a time on each."""
    source = trace(causal=False)
    schedule, spans, free = source.schedule, [], np.zeros((sm_count, shared), np.int64)
    for i in range(schedule.t_r):
        sm, lane = np.unravel_index(np.argmin(free), free.shape)
        now = int(free[sm, lane])
        for visit in schedule.visits(i):
            start, where = now, (0, i, visit.j, visit.index)
            for phase, took in (("load", 300), ("scores", 120), ("softmax", 90), ("output", 130)):
                spans.append((0, PHASES.index(phase), 0, sm, *where, now, now + took))
                now += took
            spans.append((0, 0, 0, sm, *where, start, now))
        free[sm, lane] = now
    return _timed(source, spans)


def with_roles():
    """Return a trace of one warp-specialised block per SM, where visits overlap.

    The next visit begins during this one's output. The producer runs ahead; two consumers make the
    same visits, the second 50 ns later.
    """
    source = trace(causal=False)
    spans = []
    for i in range(source.schedule.t_r):
        for visit in source.schedule.visits(i):
            now, where = 400 * (visit.index % source.schedule.t_c), (0, i, visit.j, visit.index)
            spans.append((0, PHASES.index("visit"), 1, i, *where, now, now + 390))
            spans.append((0, PHASES.index("load"), 1, i, *where, now + 300, now + 390))
            for role, at in ((2, now + 400), (3, now + 450)):
                start = at
                for phase, took in (
                    ("load", 20),
                    ("scores", 150),
                    ("softmax", 200),
                    ("output", 400),
                ):
                    spans.append((0, PHASES.index(phase), role, i, *where, at, at + took))
                    at += took
                spans.append((0, PHASES.index("visit"), role, i, *where, start, at))
        for role in (2, 3):
            where = (0, i, -1, -1)
            spans.append((0, PHASES.index("store"), role, i, *where, at, at + 250))
    return _timed(source, spans)


def _timed(source, spans):
    return Trace(
        source.problem, source.device, source.algorithm, source.direction, "cupy", source.stages,
        source.provenance, np.array(spans, TIMELINE),
    )  # fmt: skip
