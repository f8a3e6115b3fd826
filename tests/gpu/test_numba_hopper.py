"""Hopper's instructions from Python, on a Hopper GPU: besides what test_hopper.py asks of both.

Its inputs, error budget and list of features are used; outputs and shared memory begin as NaN.
"""

from dataclasses import replace
from functools import partial

import cupy_checks
import pytest
from cupy_checks import (  # noqa: F401
    ON_HOPPER,
    PYTHON_HOPPER,
    Truth,
    check,
    check_bits,
    check_counts,
    check_timelines,
    cupy,
    gradients,
    make,
    poisoned,
    within,
)
from test_hopper import (  # noqa: F401
    FEATURES,
    SEVERAL_LAUNCHES,
    WIDE_IN_CLUSTERS,
    by_columns,
    by_roles,
    choose,
    choose_clusters,
    choose_launches,
    clusters_of,
)

from flashsim import Problem, Tiling
from flashsim.backends.launch_policy.cost_model import CLUSTERS, ROLES
from flashsim.errors import BackendUnavailable, UnsupportedError

try:
    import flashsim.backends.numba_gpu.engine  # noqa: F401
    from flashsim.backends.numba_gpu import launch_policy
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [*ON_HOPPER, pytest.mark.promise("twice plain attention's error")]
run = partial(cupy_checks.run, family=PYTHON_HOPPER)
#: The form whose dQ may be deferred.
FUSED = replace(PYTHON_HOPPER, forms=(False,))


@pytest.fixture
def deferring(choose):  # noqa: F811
    """Also where walks are so short that it would not be."""
    choose("defers", lambda self, walk, *_: walk.stage.name == "fused")


@pytest.mark.parametrize("name", ["causal", "ragged", "varlen", "many items"])
@pytest.mark.usefixtures("deferring")
def test_dq_deferred_in_rows_of_80(name):
    """Which no rule takes in Python."""
    p = Problem(head_dim=128, dtype="float16", **FEATURES[name])
    truth = Truth(p, "normal", tf32=False)
    grads = gradients(run(p, truth.x), truth.x["dout"], False, tiling=Tiling(80, 128))
    assert grads.kernel == "hopper"
    for which, (exact, plain) in truth.gradients.items():
        within(getattr(grads, which), exact, plain, p, which)


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


@pytest.mark.parametrize("blocks", CLUSTERS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["1 x 1", "ragged", "causal", "window", "varlen", "blocks"])
def test_every_cluster(name, head_dim, blocks, choose):  # noqa: F811
    choose_clusters(choose, blocks)
    p = Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name])
    assert clusters_of(launch_policy.HOPPER, p) == (blocks,)
    check(p, PYTHON_HOPPER)
    check_counts(p, PYTHON_HOPPER)


@pytest.mark.parametrize("blocks", [2, 4, 8])
@pytest.mark.parametrize("head_dims", [(32, 20), (59, 111), (80, 80)])
def test_clusters_of_other_head_dims(head_dims, blocks, choose):  # noqa: F811
    """Of whose columns a cluster's blocks take 32 at a time."""
    choose_clusters(choose, blocks)
    p = Problem(300, 500, *head_dims, heads=4, kv_heads=2, dtype="float16", causal=True)
    assert clusters_of(launch_policy.HOPPER, p) == (blocks,)
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
    assert clusters_of(launch_policy.HOPPER, p) == (blocks,)
    check(p, FUSED)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("problem", "launches"), SEVERAL_LAUNCHES)
def test_launches_of_several_cluster_sizes(problem, launches, deferred, choose):  # noqa: F811
    """Also where that does not save as much time as it should; always the same bits."""
    choose_launches(choose, launches, deferred=deferred)
    assert clusters_of(launch_policy.HOPPER, problem) == tuple(blocks for blocks, _ in launches)
    check(problem, PYTHON_HOPPER)
    check_bits(problem, FUSED, runs=20)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dims", [(40, 24), (64, 128), (80, 80), (192, 128), (256, 256)])
def test_head_dims(head_dims, dtype):
    check(Problem(300, 500, *head_dims, heads=2, dtype=dtype, causal=True), PYTHON_HOPPER)


@pytest.mark.parametrize("head_dims", [(136, 136), (176, 150), (192, 192)])
@pytest.mark.parametrize("name", [name for name in FEATURES if name != "blocks"])
@pytest.mark.usefixtures("by_roles")
def test_the_backward_by_roles(name, head_dims):
    d, dv = head_dims
    p = Problem(head_dim=d, head_dim_v=dv, dtype="bfloat16", **FEATURES[name])
    check(p, FUSED)
    check_counts(p, FUSED)
    grads = run(p, make(p)).backward(make(p)["dout"], deterministic=False)
    assert (grads.kernel, grads.tiling) == ("hopper", ROLES)


@pytest.mark.parametrize("blocks", [2, 8])
@pytest.mark.parametrize("head_dims", [(160, 136), (200, 256)])
@pytest.mark.parametrize("name", WIDE_IN_CLUSTERS)
@pytest.mark.usefixtures("by_columns")
def test_every_cluster_that_divides_columns(name, head_dims, blocks, choose):  # noqa: F811
    choose_clusters(choose, blocks)
    choose("fuses", lambda self, problem, gpu: max(head_dims) <= 192)
    p = Problem(head_dim=head_dims[0], head_dim_v=head_dims[1], dtype="bfloat16", **FEATURES[name])
    assert clusters_of(launch_policy.HOPPER, p) == (blocks,)
    check(p, PYTHON_HOPPER)
    check_counts(p, PYTHON_HOPPER)


@pytest.mark.parametrize("name", ["causal", "window", "varlen", "many items", "softcap"])
def test_the_fused_backward_that_divides_columns(name):
    p = Problem(head_dim=176, head_dim_v=192, dtype="float16", **FEATURES[name])
    truth = Truth(p, "normal", tf32=False)
    grads = gradients(run(p, truth.x), truth.x["dout"], False, tiling=Tiling(64, 64))
    assert grads.kernel == "hopper"
    for which, (exact, plain) in truth.gradients.items():
        within(getattr(grads, which), exact, plain, p, which)


@pytest.mark.usefixtures("by_roles")
def test_bits_and_timelines_of_the_backward_by_roles():
    p = Problem(1024, 1024, 192, heads=4, dtype="float16", causal=True)
    check_bits(p, PYTHON_HOPPER, runs=60)
    check_timelines(Problem(head_dim=160, dtype="float16", **FEATURES["window"]), PYTHON_HOPPER)


@pytest.mark.parametrize("name", ["causal", "window", "varlen", "softcap", "ragged"])
def test_the_widest_fused_backward(name, choose):  # noqa: F811
    """Which the rule never takes."""
    choose("fuses", lambda *_: True)
    p = Problem(head_dim=200, head_dim_v=250, dtype="bfloat16", **FEATURES[name])
    check(p, FUSED)
    check_counts(p, FUSED)


@pytest.mark.parametrize("sides", [(128, 128), (192, 128), (128, 64)])
def test_the_tiling_given_is_the_one_that_runs(sides):
    p = Problem(500, 700, 64, heads=2, dtype="float16", causal=True)
    check(p, PYTHON_HOPPER, tiling=Tiling(*sides))
    assert run(p, make(p), tiling=Tiling(*sides), trace=True).trace.tiling == Tiling(*sides)


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.promise("three counts equal")
def test_counts_are_the_simulators(name, order):
    check_counts(Problem(head_dim=96, dtype="bfloat16", **FEATURES[name]), PYTHON_HOPPER, order)


@pytest.mark.parametrize("head_dims", [(59, 111), (111, 59), (250, 7)])
def test_counts_are_of_what_exists(head_dims):
    p = Problem(300, 500, *head_dims, heads=2, dtype="float16", causal=True)
    check_counts(p, PYTHON_HOPPER, "ascending")


@pytest.mark.parametrize(
    ("name", "head_dim"), [("causal", 128), ("window", 64), ("varlen", 96), ("varlen", 256)]
)
def test_timeline_and_counts_of_every_visit(name, head_dim):
    check_timelines(Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name]), PYTHON_HOPPER)


@pytest.mark.parametrize("at_end", [False, True], ids=["begins", "ends"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_are_read_where_nothing_lies_before_or_behind(head_dim, at_end):
    """A map that began before its tensor made the copy engine fail now and then."""
    from island import Island

    p = Problem(head_dim=head_dim, dtype="float16", **FEATURES["varlen"])
    x = cupy_checks.on_gpu(make(p))
    alone = {name: Island().put(a, at_end=at_end) for name, a in x.items()}
    expected = run(p, x)
    grads = gradients(expected, x["dout"], None)
    for _ in range(100):
        got = gradients(run(p, alone), alone["dout"], None)
        assert all((getattr(got, n) == getattr(grads, n)).all() for n in ("dq", "dk", "dv"))
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.promise("deterministic")
def test_two_hundred_runs_give_the_same_bits(head_dim, causal):
    p = Problem(4096, 4096, head_dim, heads=4, dtype="float16", causal=causal)
    check_bits(p, PYTHON_HOPPER)


def test_what_runs_is_chosen_by_rule_and_named():
    p = Problem(256, 256, 64, dtype="bfloat16")
    x = make(p)
    result = run(p, x, kernel="auto")
    assert result.kernel == "hopper"
    assert result.backward(x["dout"]).kernel == "hopper"
    assert result.backward(x["dout"], tiling=Tiling(64, 64)).kernel == "tensor"
    assert run(p, x, kernel="auto", tiling=Tiling(64, 64)).kernel == "tensor"
    assert run(p, x, kernel="tensor").kernel == "tensor"
    with pytest.raises(UnsupportedError, match="they have no 64 x 64 tiles"):
        run(p, x, tiling=Tiling(64, 64))
    wide = Problem(256, 256, 192, dtype="bfloat16")
    assert run(wide, make(wide)).backward(make(wide)["dout"]).kernel == "hopper"


def test_launches_side_by_side_count_their_own_items():
    p = Problem(700, 700, 64, heads=64, batch=2, dtype="float16", causal=True)
    x = cupy_checks.on_gpu(make(p))
    result = run(p, x)
    expected = [gradients(result, x["dout"], form).dv for form in PYTHON_HOPPER.forms]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        got = []
        for stream in streams:
            with stream:
                got += [gradients(result, x["dout"], form).dv for form in PYTHON_HOPPER.forms]
        cupy.cuda.Device().synchronize()
        assert all((a == b).all() for a, b in zip(got, 3 * expected, strict=True))
