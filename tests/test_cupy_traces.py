"""The portable kernels' traces on a GPU: counts equal the simulator's, the timeline nests."""

import numpy as np
import pytest
from cupy_checks import FEATURES, MARKS, check_counts, cupy, make, options, poisoned  # noqa: F401

import flashsim
from flashsim import Problem
from flashsim.events import PHASES

pytestmark = MARKS

#: Padded tiles; rows as wide as a tile's; padded rows; scores that cross warps. (head_dim, value's)
SIDES = [(40, 24), (64, 64), (37, 61), (96, 128)]


@pytest.mark.parametrize(
    ("algorithm", "key_order"),
    [("flash2", "ascending"), ("flash2-fused", "ascending"), ("flash2", "descending")],
)
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(
    ("dtype", "sides"),
    [*((dtype, s) for dtype in ("bfloat16", "float32") for s in SIDES), ("tf32", SIDES[2])],
)
def test_counted_bytes_are_the_simulators(sides, name, dtype, algorithm, key_order):
    head_dim, head_dim_v = sides
    extra = {"kernel": "portable", "allow_tf32": dtype == "tf32"}
    dtype = "float32" if dtype == "tf32" else dtype
    p = Problem(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **FEATURES[name])
    check_counts(p, "cupy", algorithm, key_order, **extra)


@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_timeline_nests_and_lies_on_the_chip(dtype, algorithm):
    p = Problem(1000, 1000, 64, heads=8, dtype=dtype, causal=True)
    x = make(p)
    result = flashsim.run(
        *(x["q"], x["k"], x["v"]),
        backend="cupy",
        kernel="portable",
        algorithm=algorithm,
        causal=True,
        trace="timeline",
    )
    grads = result.backward(x["dout"])
    sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    for trace in (result.trace, grads.trace):
        spans = trace.timeline
        assert spans["sm"].min() >= 0
        assert spans["sm"].max() < sms
        assert (spans["end_ns"] >= spans["start_ns"]).all()
        assert spans["end_ns"].max() < 100_000_000
        for number in np.unique(spans["stage"]):
            stage = spans[spans["stage"] == number]
            visits = stage[stage["phase"] == PHASES.index("visit")]
            assert len(visits) == p.heads * trace.stages[number].schedule.n_visits
            order = ["head", "visit"]
            visits = np.sort(visits, order=order)
            for phase in ("load", "scores", "softmax", "output"):
                part = np.sort(stage[stage["phase"] == PHASES.index(phase)], order=order)
                assert (part["start_ns"] >= visits["start_ns"]).all()
                assert (part["end_ns"] <= visits["end_ns"]).all()
                assert (part["end_ns"] - part["start_ns"]).sum() > 0
