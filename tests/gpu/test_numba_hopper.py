"""What only Hopper's kernels in Python do, on a Hopper GPU: test_hopper.py has what both do.

Its inputs, error budget and list of features are used; outputs and shared memory begin as NaN.
"""

import pytest
from cupy_checks import (  # noqa: F401
    ON_HOPPER,
    PYTHON_HOPPER,
    Truth,
    check,
    check_bits,
    check_counts,
    check_timelines,
    families,
    gradients,
    make,
    poisoned,
    run,
    within,
)
from test_hopper import FEATURES, choose, choose_clusters, clusters_of  # noqa: F401

from flashsim import Problem, Tiling

#: The form whose dQ may be deferred.
(FUSED,) = families("python-hopper", forms=(False,))
pytestmark = [*FUSED.marks, pytest.mark.promise("twice plain attention's error")]
(FUSED,) = FUSED.values


@pytest.fixture
def deferring(choose):  # noqa: F811
    """Also where walks are so short that it would not be."""
    choose("defers", lambda self, walk, *_: walk.stage.name == "fused")


def check_fused(problem, tiling):
    """The gradients of the fused form with a tile that no rule takes in Python."""
    truth = Truth(problem, "normal", tf32=False)
    result = run(problem, truth.x, PYTHON_HOPPER)
    grads = gradients(result, truth.x["dout"], False, tiling=tiling)
    assert grads.kernel == "hopper"
    for which, (exact, plain) in truth.gradients.items():
        within(getattr(grads, which), exact, plain, problem, which)


@pytest.mark.parametrize("name", ["causal", "ragged", "varlen", "many items"])
@pytest.mark.usefixtures("deferring")
def test_dq_deferred_in_rows_of_80(name):
    check_fused(Problem(head_dim=128, dtype="float16", **FEATURES[name]), Tiling(80, 128))


@pytest.mark.parametrize("name", ["causal", "window", "varlen", "many items", "softcap"])
def test_the_fused_backward_that_divides_columns(name):
    p = Problem(head_dim=176, head_dim_v=192, dtype="float16", **FEATURES[name])
    check_fused(p, Tiling(64, 64))


@pytest.mark.parametrize(("name", "head_dim"), [("causal", 128), ("window", 64), ("varlen", 96)])
@pytest.mark.usefixtures("deferring")
def test_timelines_where_dq_is_deferred(name, head_dim):
    check_timelines(Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name]), FUSED)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_fused_form_gives_the_same_bits(head_dim, deferred, choose):  # noqa: F811
    """Long walks and several items a block, with dQ deferred and not."""
    choose("defers", lambda self, walk, *_: deferred and walk.stage.name == "fused")
    p = Problem(1024, 1024, head_dim, heads=40, dtype="bfloat16", causal=True)
    check_bits(p, FUSED, runs=60)


@pytest.mark.parametrize("blocks", [2, 4, 8])
@pytest.mark.parametrize("head_dims", [(32, 20), (59, 111), (80, 80)])
def test_clusters_of_other_head_dims(head_dims, blocks, choose):  # noqa: F811
    """Of whose columns a cluster's blocks take 32 at a time."""
    choose_clusters(choose, blocks)
    p = Problem(300, 500, *head_dims, heads=4, kv_heads=2, dtype="float16", causal=True)
    assert clusters_of(PYTHON_HOPPER, p) == (blocks,)
    check(p, PYTHON_HOPPER)
    check_counts(p, PYTHON_HOPPER)


@pytest.mark.parametrize("blocks", [2, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["1 x 1", "causal", "softcap", "negative scale", "more keys"])
@pytest.mark.usefixtures("deferring")
def test_clusters_that_compute_dq_a_visit_later(name, head_dim, blocks, choose):  # noqa: F811
    """With blocks that have no visit among them."""
    choose_clusters(choose, blocks)
    p = Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name])
    assert clusters_of(PYTHON_HOPPER, p) == (blocks,)
    check(p, FUSED)


@pytest.mark.parametrize("name", ["causal", "window", "varlen", "softcap", "ragged"])
def test_the_widest_fused_backward(name, choose):  # noqa: F811
    """Which the rule never takes."""
    choose("fuses", lambda *_: True)
    p = Problem(head_dim=200, head_dim_v=250, dtype="bfloat16", **FEATURES[name])
    check(p, FUSED)
    check_counts(p, FUSED)


@pytest.mark.parametrize("sides", [(128, 128), (192, 128), (128, 64)])
def test_the_tiling_given_is_the_one_that_runs(sides):
    p, tiling = Problem(500, 700, 64, heads=2, dtype="float16", causal=True), Tiling(*sides)
    check(p, PYTHON_HOPPER, tiling=tiling)
    assert run(p, make(p), PYTHON_HOPPER, tiling=tiling, trace=True).trace.tiling == tiling
