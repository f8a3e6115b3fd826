"""benchmarks/fp8_backward.py without a GPU: its gradients, and the kernels that it times."""

from dataclasses import replace

import numpy as np
import pytest
from compiled import compiled
from gpus import H200
from repository import script

from flashsim import Problem
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.problem import oracle
from flashsim.studies.precision import draw

pytestmark = pytest.mark.promise("kernels compile")


@pytest.fixture
def bench():
    return script("fp8_backward")


def test_gradients_without_rounding_are_the_oracles(bench):
    """Also where a rotation is undone; bfloat16 is near, and FP8 between 5 and 50 times as far."""
    inputs = draw("normal", 256, 128)
    q, k, v, dout = (x[0, 0] for x in inputs)
    true = oracle.gradients(*inputs, Problem(256, 256, 128, dtype="float64"))
    found = bench.gradients(None, q, k, v, dout)
    every = {how.name: how for how in bench.BACKWARDS}
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(found[name], true[name][0, 0], atol=1e-12)
    ways = every["bfloat16"], every["all, e4m3"], every["all, e4m3"]._replace(rotate=True)
    for name in ("dq", "dk", "dv"):
        near, far, turned = (
            np.linalg.norm(bench.gradients(how, q, k, v, dout)[name] - found[name]) for how in ways
        )
        assert near < 0.01 * np.linalg.norm(found[name])
        assert 5 * near < far < 50 * near
        assert 0.8 * far < turned < 1.25 * far


@pytest.mark.parametrize("part", ["scores", "all"])
def test_the_kernels_with_fp8_products_compile(bench, part):
    problem = Problem(4096, 4096, 128, heads=16, dtype="bfloat16")
    (fused,) = (
        one.kernel
        for one in HOPPER.backward_passes(problem, None, H200, "ascending", "", "flash2-fused")
        if one.stage.name == "fused"
    )
    number = bench.PARTS.index(part)
    kernel = replace(fused, constants=(*fused.constants, (bench._SWITCH, number)))
    log, cubin = compiled(kernel, kernel.options, bench.source(kernel))
    assert cubin, log
    assert "serialized" not in log
    assert "wait is injected" not in log
