"""Traces that the tests of flashsim.viz draw. Small; every stage of every algorithm."""

from functools import cache

import numpy as np

import flashsim
from flashsim.events import PHASES, TIMELINE
from flashsim.trace import Trace

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


ALGORITHMS = ("standard", "flash1", "flash2", "flash2-fused")
PASSES = [(a, d) for a in ALGORITHMS for d in ("forward", "backward")]


def with_timeline(sm_count=3, shared=2):
    """A trace whose visits ran on `sm_count` SMs, `shared` blocks at a time on each."""
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
    timeline = np.array(spans, TIMELINE)
    return Trace(
        source.problem, source.device, source.algorithm, source.direction, "cupy", source.stages,
        source.provenance, timeline,
    )  # fmt: skip
