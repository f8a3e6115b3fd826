"""The Hopper kernels on a GPU: against the float64 oracle, the closed-form counts, and themselves.

What `test_cupy.py` asks of the portable kernels, at the Hopper kernels' tiles, in C++ and in Python
(test_numba_hopper.py has what only the latter do). Races hide, and the sanitizer sees no
asynchronous copies: so results are compared bit by bit over many runs, and shared memory is filled
with NaN in between.
"""

from dataclasses import replace
from itertools import product

import cupy_checks
import numpy as np
import pytest
from compiled import star
from cupy_checks import (  # noqa: F401
    HOPPER,
    ON_HOPPER,
    check,
    check_bits,
    check_counts,
    check_timelines,
    cupy,
    families,
    gradients,
    make,
    poisoned,
    without_turns,
)

import flashsim
from flashsim import Device, Problem, Tiling
from flashsim.backends.cupy_gpu import engine
from flashsim.backends.launch_policy import family, hopper
from flashsim.backends.launch_policy.cost_model import CLUSTERS, HOPPER_FORWARD, ROLES, Times
from flashsim.backends.launch_policy.hopper import Hopper
from flashsim.errors import UnsupportedError
from flashsim.problem.masks import BlockMask
from flashsim.trace.events import PHASES

pytestmark = [
    *ON_HOPPER,
    pytest.mark.promise("three counts equal", "twice plain attention's error"),
]


def run(problem, x, family=HOPPER, **more):
    return cupy_checks.run(problem, x, family, **more)


#: The C++ kernels, and those in Python.
BOTH = pytest.mark.parametrize("family", families("hopper", "python-hopper"))


def both(names, cases, in_python):
    """Like `BOTH`, for a test of cases, of which the kernels in Python have others."""
    made = []
    for one, every in zip(families("hopper", "python-hopper"), (cases, in_python), strict=True):
        for case in every:
            case = case if hasattr(case, "marks") else pytest.param(*case)
            values, told = (*one.values, *case.values), "-".join(map(str, (one.id, *case.values)))
            made.append(pytest.param(*values, marks=[*one.marks, *case.marks], id=told))
    return pytest.mark.parametrize(("family", *names), made)


def policy_of(family):
    """The launch policy of a family of Hopper's kernels."""
    if family.backend == "cupy":
        return hopper.HOPPER
    from flashsim.backends.numba_gpu import launch_policy

    return launch_policy.HOPPER


RNG = np.random.default_rng(0)
FEATURES = {
    "causal": dict(n_q=700, n_kv=700, heads=4, kv_heads=2, causal=True),
    "one tile": dict(n_q=128, n_kv=128),
    "one visit": dict(n_q=333, n_kv=120, batch=3, heads=4, kv_heads=2),
    "one visit, causal": dict(n_q=100, n_kv=100, batch=80, heads=4, causal=True),
    "one visit, packed": dict(
        n_q=170,
        n_kv=200,
        heads=2,
        causal=True,
        cu_seqlens_q=(0, 70, 71, 170),
        cu_seqlens_k=(0, 100, 103, 200),
    ),
    "1 x 1": dict(n_q=1, n_kv=1),
    "ragged": dict(n_q=333, n_kv=517, batch=2, heads=2),
    "more queries": dict(n_q=700, n_kv=300, heads=4, kv_heads=1, causal=True),
    "more keys": dict(n_q=300, n_kv=1111, heads=2, causal=True),
    "window": dict(n_q=900, n_kv=1000, heads=3, window=(100, 50)),
    "left window": dict(n_q=600, n_kv=500, heads=2, window=(77, -1), causal=True),
    "softcap": dict(n_q=300, n_kv=500, heads=2, softcap=3.0, causal=True),
    "negative scale": dict(n_q=300, n_kv=200, heads=2, scale=-0.2),
    "blocks": dict(
        n_q=640, n_kv=768, heads=2, block_mask=BlockMask(RNG.random((5, 6)) < 0.4, 128, 128)
    ),
    "varlen": dict(
        n_q=700,
        n_kv=900,
        heads=2,
        kv_heads=1,
        causal=True,
        cu_seqlens_q=(0, 100, 101, 400, 700),
        cu_seqlens_k=(0, 300, 300, 643, 900),
    ),
    "many items": dict(n_q=200, n_kv=200, batch=8, heads=40, causal=True),
}


@BOTH
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, head_dim, family):
    check(Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name]), family)


@pytest.fixture
def choose(monkeypatch):
    """Sets what a method of `Hopper` answers, whatever it would; `_passes` has none of it after."""

    def forget():
        family._passes.cache_clear()
        engine._planned.cache_clear()

    def of(method, answer):
        monkeypatch.setattr(Hopper, method, answer)
        forget()

    yield of
    forget()


def choose_clusters(choose, blocks):
    """That a pass with keys outside has one launch, of which so many blocks share a work tile."""
    one = lambda walk: blocks if walk.stage.outer == "keys" else 1  # noqa: E731
    choose("launches", lambda self, walk: ((one(walk), walk.items),))


@pytest.mark.parametrize("head_dims", [(32, 20), (50, 128), (64, 64), (91, 91), (128, 128)])
@pytest.mark.parametrize("name", [name for name in FEATURES if name.startswith("one ")])
def test_where_row_tiles_have_one_visit(name, head_dims):
    d, dv = head_dims
    p = Problem(head_dim=d, head_dim_v=dv, dtype="float16", **FEATURES[name])
    assert cupy_checks.ONCE in HOPPER.forms_of(p)
    check(p, HOPPER)
    check_timelines(p, HOPPER)
    check_bits(p, HOPPER, runs=20, forms=(cupy_checks.ONCE,))


def test_the_fastest_form_of_short_sequences():
    """Three passes for a few items; and if bits shall be the same, none is added in order."""
    few = Problem(128, 128, 64, heads=12, dtype="bfloat16")
    for p, expected in ((few, "flash2"), (replace(few, batch=8), "flash2-once")):
        result, dout = run(p, make(p), trace=True), make(p)["dout"]
        assert result.backward(dout, deterministic=False).trace.algorithm == expected
        assert result.backward(dout, deterministic=True).trace.algorithm == "flash2-once"
        assert result.backward(dout).trace.algorithm == "flash2"


@BOTH
@pytest.mark.parametrize("blocks", CLUSTERS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "name", ["1 x 1", "ragged", "causal", "window", "varlen", "blocks", "one visit"]
)
def test_every_cluster(name, head_dim, blocks, family, choose):
    choose_clusters(choose, blocks)
    p = Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name])
    assert clusters_of(family, p) == (blocks,)
    check(p, family)
    check_counts(p, family)


@pytest.fixture
def by_columns(monkeypatch):
    """A backward beyond 128 columns that divides columns, fused up to 192, whatever is faster."""
    monkeypatch.setattr(hopper, "HOPPER_FUSED_WIDE", {Tiling(64, 64): Times(1.0, 1.0)})


@both(
    ("head_dims", "blocks"),
    product([(160, 136), (192, 192), (200, 256)], [2, 4, 8]),
    product([(160, 136), (200, 256)], [2, 8]),
)
@pytest.mark.parametrize(
    "name", ["1 x 1", "causal", "more keys", "window", "varlen", "softcap", "blocks"]
)
@pytest.mark.usefixtures("by_columns")
def test_every_cluster_that_divides_columns(name, head_dims, blocks, family, choose):
    """With blocks that have no visit among them."""
    choose_clusters(choose, blocks)
    choose("fuses", lambda self, problem, gpu: max(head_dims) <= 192)
    p = Problem(head_dim=head_dims[0], head_dim_v=head_dims[1], dtype="bfloat16", **FEATURES[name])
    assert clusters_of(family, p) == (blocks,)
    check(p, family)
    check_counts(p, family)


@BOTH
@pytest.mark.parametrize("name", FEATURES)
def test_without_turns(name, family, without_turns):  # noqa: F811
    """Every mask and length where warpgroups queue products as they come."""
    check(Problem(head_dim=128, dtype="bfloat16", **FEATURES[name]), family)


@pytest.mark.parametrize("name", ["causal", "window", "varlen", "many items"])
def test_counts_and_timelines_without_turns(name, without_turns):  # noqa: F811
    check_timelines(Problem(head_dim=128, dtype="bfloat16", **FEATURES[name]), HOPPER)


#: Keys enough at 128 columns for a forward without turns by default.
MANY_KEYS = {
    "full": dict(n_q=140, n_kv=3100, heads=2),
    "causal": dict(n_q=200, n_kv=3000, batch=2, heads=4, kv_heads=2, causal=True),
    "window": dict(n_q=3000, n_kv=2900, window=(300, 20)),
    "softcap": dict(n_q=70, n_kv=3000, softcap=3.0),
}


@BOTH
@pytest.mark.parametrize("name", MANY_KEYS)
def test_many_keys(name, family):
    p = Problem(head_dim=128, dtype="float16", **MANY_KEYS[name])
    (one,) = hopper.HOPPER.forward_passes(p, None, engine.gpu_of(0), "ascending", "")
    assert dict(one.kernel.constants)["FS_TURNS"] == 0
    check(p, family)


@BOTH
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("name", FEATURES)
def test_dq_of_a_visit_computed_in_the_next_one(name, head_dim, family, choose):
    """Also where walks are so short that it would not be."""
    choose("defers", lambda self, walk, *_: walk.stage.name == "fused")
    p = Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name])
    fused = replace(family, forms=(False,))
    check(p, fused)
    check_counts(p, fused)


#: The three passes with taller tiles in dQ's own pass.
TALL_DQ, THREE_PASSES = Tiling(64, 128, dq_rows=128), replace(HOPPER, forms=(None,))


@pytest.mark.parametrize("head_dims", [(80, 80), (91, 128), (128, 128)])
@pytest.mark.parametrize("name", FEATURES)
def test_taller_tiles_of_dq(name, head_dims):
    """Also where they would not be chosen."""
    d, dv = head_dims
    p = Problem(head_dim=d, head_dim_v=dv, dtype="bfloat16", **FEATURES[name])
    check(p, THREE_PASSES, backward_tiling=TALL_DQ)
    check_counts(p, THREE_PASSES, tilings=(None, TALL_DQ))


@pytest.mark.parametrize("d", [80, 128])
def test_bits_and_timelines_of_taller_tiles_of_dq(d):
    p = Problem(512, 512, d, heads=16, dtype="float16", causal=True)
    assert run(p, make(p)).backward(make(p)["dout"]).tiling == TALL_DQ  # by default
    check_bits(p, THREE_PASSES)
    check_timelines(p, THREE_PASSES)


#: Problems without a mask, and the launches of the pass with keys outside: the blocks of a cluster
#: and the number of work tiles.
SEVERAL_LAUNCHES = [
    (Problem(2048, 2048, 128, heads=17, dtype="bfloat16"), ((2, 8), (1, 264))),
    (Problem(1000, 1900, 64, batch=2, heads=9, dtype="float16"), ((8, 6), (1, 264))),
    (
        Problem(1100, 1280, 128, heads=40, kv_heads=20, dtype="bfloat16"),
        ((8, 2), (2, 66), (1, 132)),
    ),
    (Problem(900, 2300, 96, heads=20, kv_heads=5, dtype="bfloat16"), ((4, 30), (2, 60))),
    (Problem(700, 1900, 32, heads=25, kv_heads=5, dtype="float16"), ((8, 15), (2, 60))),
    (Problem(500, 1300, 64, heads=10, dtype="bfloat16"), ((8, 15), (4, 30), (2, 65))),
]


def clusters_of(family, problem):
    """How many blocks share an item, of each launch of the fused backward with keys outside."""
    given = problem, None, engine.gpu_of(0), "ascending", "", "flash2-fused"
    one = policy_of(family).backward_passes(*given)[1]
    return tuple(x.kernel.cluster for x in (*one.before, one))


@BOTH
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("problem", "launches"), SEVERAL_LAUNCHES)
def test_launches_of_several_cluster_sizes(problem, launches, deferred, family, choose):
    """Also where that does not save as much time as it should; always the same bits."""
    fused = lambda walk: walk.stage.name == "fused"  # noqa: E731
    choose("launches", lambda self, walk: launches if fused(walk) else ((1, walk.items),))
    choose("defers", lambda self, walk, *_: deferred and fused(walk))
    assert clusters_of(family, problem) == tuple(blocks for blocks, _ in launches)
    check(problem, family)
    check_bits(problem, family, runs=20, forms=(False,))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(
    "name", ["1 x 1", "causal", "more queries", "window", "varlen", "blocks", "many items"]
)
def test_grouped_heads_in_step(name, head_dim, choose):
    """Also where a pass would not be; back in the first round, on in the second."""
    choose_clusters(choose, 1)
    choose(
        "in_step", lambda self, walk, *_: walk.stage.outer == "keys" and walk.tables.ranks is None
    )
    p = Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name])
    if name == "many items":
        p = replace(p, kv_heads=20)
    check(p, HOPPER)
    check_timelines(p, HOPPER)
    check_bits(p, HOPPER, runs=10)


@pytest.fixture
def by_roles(monkeypatch, choose):
    """A fused backward of 129 to 192 columns, of one tile, whatever the default is."""
    monkeypatch.setattr(hopper, "HOPPER_FUSED_WIDE", {ROLES: Times(1.0, 1.0)})
    choose("fuses", lambda *_: True)


@pytest.mark.parametrize(
    "family", [*families("hopper"), *families("python-hopper", forms=(False,))]
)
@pytest.mark.parametrize("head_dims", [(136, 136), (176, 150), (192, 192)])
@pytest.mark.parametrize("name", [name for name in FEATURES if name != "blocks"])
@pytest.mark.usefixtures("by_roles")
def test_the_backward_by_roles(name, head_dims, family):
    d, dv = head_dims
    p = Problem(head_dim=d, head_dim_v=dv, dtype="bfloat16", **FEATURES[name])
    check(p, family)
    check_counts(p, family)
    grads = run(p, make(p), family).backward(make(p)["dout"], deterministic=False)
    assert (grads.kernel, grads.tiling) == ("hopper", ROLES)


@pytest.mark.parametrize("name", ["causal", "more queries", "varlen", "many items"])
@pytest.mark.usefixtures("by_roles")
def test_grouped_heads_in_step_by_roles(name, choose):
    choose("in_step", lambda self, walk, *_: walk.stage.name == "fused")
    p = Problem(head_dim=192, dtype="bfloat16", **FEATURES[name])
    p = replace(p, kv_heads=20) if name == "many items" else p
    check(p, HOPPER)
    check_timelines(p, HOPPER)


@BOTH
@pytest.mark.usefixtures("by_roles")
def test_bits_and_timelines_of_the_backward_by_roles(family):
    p = Problem(1024, 1024, 192, heads=4, dtype="float16", causal=True)
    check_bits(p, family)
    check_timelines(Problem(head_dim=160, dtype="float16", **FEATURES["window"]), family)


#: Whatever the default is for a shape and a GPU, all that the forward chooses from.
TILES = [(d, t) for d, times in HOPPER_FORWARD.items() for t in times]


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}-{t[1]}".replace(" ", ""))
@pytest.mark.parametrize("name", ["ragged", "causal", "window", "varlen", "many items"])
def test_every_tile_that_may_be_chosen(name, tile):
    head_dim, tiling = tile
    check(Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name]), HOPPER, tiling=tiling)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}-{t[1]}".replace(" ", ""))
def test_counts_and_timelines_of_every_tile(tile):
    head_dim, tiling = tile
    p = Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES["window"])
    check_timelines(p, HOPPER, tiling=tiling)


#: Of queries and keys, and of values; the first are those of the widest backward kernel.
SIDES = [
    *((136, 200), (32, 32), (40, 40), (64, 128), (80, 80), (96, 96), (160, 160)),
    *((192, 192), (192, 128)),
]
IN_PYTHON = [(40, 24), (64, 128), (80, 80), (192, 128), (256, 256)]
HALVES = ["bfloat16", "float16"]


@both(("head_dims", "dtype"), star(SIDES, HALVES), product(IN_PYTHON, HALVES))
def test_head_dims(head_dims, dtype, family):
    check(Problem(300, 500, *head_dims, heads=2, dtype=dtype, causal=True), family)


@BOTH
@pytest.mark.parametrize("kind", ["rising", "falling", "below", "outliers"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kinds_of_scores(head_dim, kind, family):
    check(Problem(333, 517, head_dim, heads=2, dtype="bfloat16"), family, kind=kind)


ORDERS = ["ascending", "descending"]


@both(
    ("name", "head_dim", "order"),
    [
        case
        for d in (96, 200)
        for case in star([*FEATURES], [d], ORDERS, also=[("blocks", d, "descending")])
    ],
    product(FEATURES, [96], ORDERS),
)
def test_counts_are_the_simulators(name, head_dim, order, family):
    check_counts(Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name]), family, order)


PADDED = [(27, 19), (37, 61), (79, 69), (101, 75), (155, 91), (203, 133)]


@both(["head_dims"], product(PADDED), product([(59, 111), (111, 59), (250, 7)]))
def test_counts_leave_out_what_rows_are_padded_with(head_dims, family):
    p = Problem(333, 517, *head_dims, heads=2, dtype="bfloat16", causal=True)
    check_counts(p, family)


@both(
    ("head_dim", "name"),
    star([64, 128, 192, 256], ["window", "causal", "blocks", "varlen"]),
    [(128, "causal"), (64, "window"), (96, "varlen"), (256, "varlen")],
)  # 64, window: three consumers
def test_timeline_and_counts_of_every_visit(name, head_dim, family):
    check_timelines(Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name]), family)


def test_a_producer_runs_ahead_of_its_consumers():
    p = Problem(2048, 2048, 128, heads=16, dtype="bfloat16")
    spans = run(p, make(p), trace="timeline").trace.timeline
    visits = spans[spans["phase"] == PHASES.index("visit")]
    order = np.lexsort((visits["visit"], visits["head"], visits["role"]))
    producer, *consumers = np.split(visits[order], 3)
    for consumer in consumers:
        assert (producer["visit"] == consumer["visit"]).all()
        assert (producer["start_ns"] <= consumer["start_ns"]).mean() > 0.99
        assert (producer["end_ns"] < consumer["end_ns"]).all()


@BOTH
def test_a_packed_sequence_never_meets_its_neighbours(family):
    """Copies end where a sequence does: NaN beyond would reach an output as 0 x NaN."""
    ends = (0, 100, 163, 400)
    p = Problem(400, 400, 64, dtype="bfloat16", causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)
    x = make(p)
    clean = run(p, x, family)
    kept = {form: gradients(clean, x["dout"], form) for form in family.forms}
    for array in x.values():
        array[..., 100:163, :] = np.nan
    result, rest = run(p, x, family), np.r_[0:100, 163:400]
    assert (result.out[..., rest, :] == clean.out[..., rest, :]).all()
    for form, expected in kept.items():
        grads = gradients(result, x["dout"], form)
        for name in ("dq", "dk", "dv"):
            got, want = (getattr(g, name)[..., rest, :] for g in (grads, expected))
            if form is False and name == "dq":  # added in any order
                assert np.isfinite(got.astype(np.float32)).all()
            else:
                assert (got == want).all(), (name, form)


@pytest.mark.parametrize("at_end", [False, True], ids=["begins", "ends"])
@both(["head_dim"], product([64, 128, 192, 256]), product([64, 128]))
def test_packed_sequences_are_read_where_nothing_lies_before_or_behind(head_dim, family, at_end):
    """A map that began before its tensor made the copy engine fail now and then."""
    from island import Island

    p = Problem(head_dim=head_dim, dtype="float16", **FEATURES["varlen"])
    x = cupy_checks.on_gpu(make(p))
    alone = {name: Island().put(a, at_end=at_end) for name, a in x.items()}
    expected = run(p, x, family)
    grads = expected.backward(x["dout"])
    for _ in range(100):
        result = run(p, alone, family)
        assert (result.out == expected.out).all()
        got = result.backward(alone["dout"])
        assert all((getattr(got, n) == getattr(grads, n)).all() for n in ("dq", "dk", "dv"))
        cupy_checks.gradients(result, alone["dout"], False)
    cupy.cuda.Device().synchronize()


def test_traces_of_packed_sequences_are_hoppers():
    p = Problem(head_dim=64, dtype="bfloat16", **FEATURES["varlen"])
    x = make(p)
    result = run(p, x, kernel="auto", trace=True)
    grads = result.backward(x["dout"])
    assert result.kernel == grads.kernel == "hopper"


#: (n, head_dim, dtype, heads): both sizes of tiles that pass through the copy engine, and d = 192
#: and 256, whose kernels are others; in bfloat16 with groups of query heads.
REPEATED = [
    *((n, d, "float16", (4, 4)) for n in (1024, 4096) for d in (64, 128)),
    *((1024, d, "float16", (4, 4)) for d in (192, 256)),
    (1024, 128, "bfloat16", (32, 8)),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@both(("n", "head_dim", "dtype", "heads"), REPEATED, REPEATED[2:4])
@pytest.mark.promise("deterministic")
def test_two_hundred_runs_give_the_same_bits(n, head_dim, dtype, heads, family, causal):
    many, few = heads
    p = Problem(n, n, head_dim, heads=many, kv_heads=few, dtype=dtype, causal=causal)
    check_bits(p, family)


@pytest.mark.parametrize("head_dim", [64, 128, 160])
@pytest.mark.parametrize("heads", [8, 256])
def test_scratch_memory_that_holds_flags_and_dq_of_the_call_before(head_dim, heads):
    """Powers of two scale dQ exactly, but for the order of its sums; 100 rows have no keys."""
    problem = Problem(345, 245, head_dim, heads=heads, dtype="float16", causal=True)
    x = cupy_checks.on_gpu(make(problem))
    result = run(problem, x, HOPPER)
    exact = gradients(result, x["dout"], True).dq.astype("float32")
    factors = [2.0 ** (n % 6) for n in range(48)]
    found = [gradients(result, x["dout"] * f, cupy_checks.FIRST).dq for f in factors]
    for factor, dq in zip(factors, found, strict=True):
        error = abs(dq.astype("float32") / factor - exact).max()
        assert float(error) < 2**-7 * float(abs(exact).max())


@BOTH
def test_launches_side_by_side_count_their_own_items(family):
    p = Problem(700, 700, 64, heads=64, batch=4, dtype="float16", causal=True)
    x = cupy_checks.on_gpu(make(p))

    def arrays():
        result = run(p, x, family)
        return [result.out, *(gradients(result, x["dout"], form).dv for form in family.forms)]

    expected = arrays()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    cupy.cuda.Device().synchronize()
    for _ in range(30):
        found = []
        for stream in streams:
            with stream:
                found += arrays()
        cupy.cuda.Device().synchronize()
        assert all((a == b).all() for a, b in zip(found, 3 * expected, strict=True))


#: Of each backend, the kernels of any GPU, and those in float32.
OTHERS = {"cupy": ("portable", "portable"), "numba_cuda": ("tensor", "teaching")}


@BOTH
def test_auto_takes_what_runs(family):
    p = Problem(256, 256, 64, dtype="bfloat16")
    x, (other, wide) = make(p), OTHERS[family.backend]
    result = run(p, x, family, kernel="auto")
    assert result.kernel == result.backward(x["dout"]).kernel == "hopper"
    assert result.backward(x["dout"], tiling=Tiling(64, 64)).kernel == other
    assert run(p, x, family, kernel="auto", tiling=Tiling(64, 64)).kernel == other
    assert run(p, x, family, kernel=other).kernel == other
    q = x["q"].astype(np.float32)
    assert flashsim.run(q, q, q, backend=family.backend).kernel == wide
    with pytest.raises(UnsupportedError, match="they have no 64 x 64 tiles"):
        run(p, x, family, tiling=Tiling(64, 64))
    large = Problem(256, 256, 192, dtype="bfloat16")
    result = run(large, make(large), family, kernel="auto")
    assert result.kernel == result.backward(make(large)["dout"]).kernel == "hopper"


@BOTH
def test_views_are_read_where_they_lie(family):
    p = Problem(300, 300, 64, heads=4, dtype="float16", causal=True)
    x = make(p)
    expected = run(p, x, family).out
    moved = {k: cupy.asarray(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for k, a in x.items()}
    assert not moved["q"].flags.c_contiguous
    assert (run(p, moved, family).out.get() == expected).all()


def test_the_bandwidth_of_the_memory_is_the_data_sheets():
    """Of which `Hopper.fuses` takes a part."""
    gpu = engine.gpu_of(0)
    name = gpu.name.split()[1]  # NVIDIA H200, NVIDIA H100 80GB HBM3
    assert gpu.hbm_bandwidth == pytest.approx(Device.get(name).hbm_bandwidth, rel=0.1)
