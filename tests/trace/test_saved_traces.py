"""Traces that earlier versions saved still load, and say what this version records.

``saved_0_1`` was written by `save` at commit 64e28fd, the last with one flat package; likewise, a
change of the file format gets a folder of what the code before it wrote:

    python tests/trace/test_saved_traces.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import pytest

import flashsim
from flashsim import Tiling, Trace

pytestmark = pytest.mark.promise("traces round-trip")

HERE = Path(__file__).parent
ALGORITHMS = ("standard", "flash1", "flash2", "flash2-fused")


def traces(algorithm):
    """{direction: trace} of a small problem with grouped heads and ragged tiles."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, *s, 4)).astype("float32") for s in ((2, 20), (1, 28)))
    given = {"algorithm": algorithm, "causal": True, "tiling": Tiling(8, 8), "trace": True}
    result = flashsim.run(q, k, k, **given)
    return {"forward": result.trace, "backward": result.backward(q, tiling=Tiling(8, 8)).trace}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("folder", sorted(HERE.glob("saved_*")), ids=lambda f: f.name)
def test_an_older_versions_file(folder, algorithm, direction):
    loaded = Trace.load(folder / f"{algorithm}-{direction}.npz")
    ours = traces(algorithm)[direction]
    assert loaded.same_events(ours)
    assert loaded.problem == ours.problem
    assert (loaded.algorithm, loaded.backend) == (algorithm, "simulator")  # said "numpy" then
    assert loaded.transfers == ours.transfers


if __name__ == "__main__":
    for algorithm in ALGORITHMS:
        for direction, trace in traces(algorithm).items():
            trace.save(Path(sys.argv[1]) / f"{algorithm}-{direction}.npz")
