"""The Hopper forward and the backwards with keys outside, their own sources run on a CPU: results
are attention's, and bytes the simulator's. What is late on a GPU (copies, products of matrices) is
never late here; the GPU tests have that.
"""

from dataclasses import replace

import numpy as np
import pytest

import flashsim
from flashsim import Problem
from flashsim.backends.launch_policy import family, hopper_kernels
from flashsim.backends.launch_policy.cost_model import ROLES
from flashsim.backends.launch_policy.hopper import HOPPER, Hopper
from flashsim.backends.launch_policy.portable import PORTABLE
from flashsim.problem import oracle
from flashsim.schedule.plans import FUSED
from flashsim.schedule.tiling import Tiling

pytest.importorskip("cupy")  # as test_emulated
import emulator
import test_emulated
from compiled import thorough
from cupy_checks import ROOMY, budget, check_lse, hardware_tanh, make, options
from test_cuda_kernels import H200

pytestmark = pytest.mark.promise("three counts equal", "twice plain attention's error")
#: Blocks get several items.
GPU = replace(H200, multiprocessors=2)
GROUP = {"heads": 2, "kv_heads": 1, "dtype": "bfloat16", "causal": True}
VARLEN = {"cu_seqlens_q": (0, 70, 71, 170), "cu_seqlens_k": (0, 100, 103, 200)}
VARLEN_LONG = {"cu_seqlens_q": (0, 70, 71, 330), "cu_seqlens_k": (0, 100, 103, 330)}
PROBLEMS = {
    "groups": Problem(150, 110, 160, **GROUP),
    "window": Problem(130, 230, 136, 176, batch=2, dtype="float16", window=(60, 10)),
    "softcap": Problem(100, 100, 192, heads=2, dtype="bfloat16", causal=True, softcap=5.0),
    "padded": Problem(70, 200, 155, 91, dtype="bfloat16"),
    "varlen": Problem(170, 200, 192, dtype="float16", causal=True, **VARLEN),
}


#: Up to 128 columns both warpgroups do the same; which tile each has.
ALIKE = {
    "groups 64": (Tiling(128, 128), Problem(300, 200, 64, **GROUP)),
    "upright 32": (
        Tiling(128, 128),
        Problem(150, 140, 32, 20, batch=2, dtype="float16", window=(60, 10)),
    ),
    "rows without keys": (  # whose log-sum-exp is -inf; the first row tile has no visit
        Tiling(128, 128),
        Problem(300, 140, 32, 20, batch=2, dtype="bfloat16", causal=True),
    ),
    "carried 128": (Tiling(64, 128), Problem(150, 200, 128, **GROUP)),
    "80 rows": (Tiling(80, 128), Problem(210, 150, 80, **GROUP)),
    "softcap": (Tiling(64, 128), Problem(100, 100, 96, dtype="bfloat16", softcap=5.0)),
    "varlen": (Tiling(128, 128), Problem(170, 200, 64, dtype="float16", causal=True, **VARLEN)),
}


#: Three warpgroups and two, O rescaled where it is there or late, masks, an item of one visit.
FORWARD = {
    "64": Problem(200, 300, 64, **GROUP),
    "128": Problem(150, 420, 128, dtype="float16", window=(100, 30)),
    "192": Problem(150, 300, 192, 136, heads=2, dtype="bfloat16", causal=True),
    "softcap": Problem(100, 150, 96, dtype="bfloat16", softcap=5.0),
}


#: Row tiles with the query heads of a group: the last one ends inside a query's heads, or inside
#: a box; other numbers of keys than of queries; rows without keys; three warpgroups and two.
PACKED = {
    "2 causal 64": Problem(150, 150, 64, heads=4, kv_heads=2, dtype="bfloat16", causal=True),
    "4 window 128": Problem(
        *(51, 420, 128), batch=2, heads=8, kv_heads=2, dtype="float16", window=(100, 30)
    ),
    "8 causal 128": Problem(41, 33, 128, heads=16, kv_heads=2, dtype="bfloat16", causal=True),
    "8 softcap 96": Problem(33, 150, 91, heads=8, kv_heads=1, dtype="bfloat16", softcap=5.0),
    "4 full 192": Problem(40, 150, 192, 136, heads=4, kv_heads=1, dtype="bfloat16"),
    "64 causal 32": Problem(5, 140, 32, heads=64, kv_heads=1, dtype="bfloat16", causal=True),
}


def compare_forward(problem, kind="normal", machine=test_emulated.HOPPER, **how):
    """O and LSE within the budget of their type, events the simulator's."""
    p, x = problem, make(problem, kind=kind)
    passes = HOPPER.forward_passes(p, None, GPU, "ascending", "counts", **how)
    arrays, stages = emulator.run_forward(machine, passes, p, x)
    inputs = [x[name] for name in "qkv"]
    exact, plain = (oracle.attention(*inputs, p, dtype=t) for t in ("float64", p.dtype))
    (true, lse), (rough, rough_lse) = exact, plain
    got = arrays["o"][..., : p.head_dim_v].astype(np.float64)
    assert np.abs(got - true).max() <= budget(true, rough, p)
    check_lse(arrays["lse"], lse, rough_lse if hardware_tanh(p) else lse)
    schedule = passes[0].tables.schedule
    packed = {"pack_gqa": schedule.split.pack_gqa}
    given = {"device": ROOMY, "trace": True, "tiling": schedule.tiling, **packed, **options(p)}
    (simulated,) = flashsim.run(*inputs, **given).trace.stages
    np.testing.assert_array_equal(stages[0].events, simulated.events)


@pytest.mark.parametrize("name", [n if n == "64" else thorough(n) for n in FORWARD])
def test_forward_and_counts(name):
    compare_forward(FORWARD[name], pack_gqa=False)


@pytest.mark.parametrize(
    "name", [n if n in ("2 causal 64", "8 causal 128") else thorough(n) for n in PACKED]
)
def test_forward_and_counts_of_packed_heads(name):
    compare_forward(PACKED[name], pack_gqa=True)


#: Each in the place where a row becomes a query and a head, and a small problem that shows it.
FAULTS_OF_PACKED = {
    "another head": (
        "head = walk_head * FS_PACK + member_of(row)",
        "head = walk_head * FS_PACK + (FAULT ? 0 : member_of(row))",
    ),
    "lse of another head": (
        "i64(walk * FS_PACK + member_of(row)) * a.n_q",
        "i64(walk * FS_PACK + (FAULT ? 0 : member_of(row))) * a.n_q",
    ),
    "rows as queries": (
        "map, bar, 64 * c, query_of(row), head, batch);",
        "map, bar, 64 * c, FAULT ? row : query_of(row), head, batch);",
    ),
    "masked by row": (
        "Keep keep(a, query_of(row + 8 * r), it.own",
        "Keep keep(a, FAULT ? row + 8 * r : query_of(row + 8 * r), it.own",
    ),
}


def check_faults(file, faults, check, *given, **how):
    """Check a kernel without a fault, and that each of its faults shows."""
    machine = emulator.Faulty(900, faults, file)
    check(*given, machine=machine, **how)
    for machine.seeded in faults:
        with pytest.raises(AssertionError):
            check(*given, machine=machine, **how)


def test_a_wrong_head_or_query_of_a_packed_row_shows():
    given = FAULTS_OF_PACKED, compare_forward, PACKED["2 causal 64"]
    check_faults("hopper/forward.cu", *given, pack_gqa=True)


#: Each in the place where a warpgroup learns which visits it computes.
FAULTS_OF_SHARES = {
    "another warpgroup's": (
        "a.shares[it.outer * 4 + g]",
        "a.shares[it.outer * 4 + (FAULT ? 0 : g)]",
    ),
    "no mask at the end": ("|| v >= share.full_stop;", "|| (!FAULT && v >= share.full_stop);"),
    "no mask at the start": (
        "found.masked = v < share.full_first ||",
        "found.masked = (!FAULT && v < share.full_first) ||",
    ),
    "no turn for a visit that is left out": (
        "if (TURNS && (computes || v > 0))",
        "if (TURNS && !FAULT && (computes || v > 0))",
    ),
    "its key tile is kept": (
        "if (speaks) arrive(&s.k_empty[ring_k.stage]);\n        ring_k.next(STAGES);"
        "\n        stamp",
        "if (!FAULT && speaks) arrive(&s.k_empty[ring_k.stage]);\n        ring_k.next(STAGES);"
        "\n        stamp",
    ),
}


def has_shares(problem):
    (one,) = HOPPER.forward_passes(problem, None, GPU, "ascending", "")
    return bool(dict(one.kernel.constants)["FS_SHARES"])


def test_a_wrong_share_of_the_visits_shows():
    problem = Problem(300, 300, 64, heads=2, causal=True, dtype="bfloat16")
    assert has_shares(problem)
    check_faults("hopper/forward.cu", FAULTS_OF_SHARES, compare_forward, problem)


def test_shares_that_leave_out_visits_at_both_ends():
    """And in the last row tile, warpgroups without rows."""
    problem = Problem(720, 720, 64, window=(150, 40), dtype="bfloat16")
    assert has_shares(problem)
    compare_forward(problem)


def test_forward_of_scores_that_are_all_below_0():
    compare_forward(FORWARD["64"], "below")


@pytest.mark.parametrize("softcap", [15.0, 30.0, 50.0])  # of 50: scores between -10 and 10
@pytest.mark.parametrize("causal", [False, True], ids=["one key", "causal"])
def test_a_rows_only_key_has_probability_1(causal, softcap):
    """A softcap bounds the scores; the output is still that key's value, bit for bit."""
    n = 150 if causal else 1
    p = Problem(150, n, 64, heads=2, dtype="bfloat16", causal=causal, softcap=softcap)
    x = make(p)
    passes = HOPPER.forward_passes(p, None, GPU, "ascending", "")
    arrays, _ = emulator.run_forward(test_emulated.HOPPER, passes, p, x)
    rows = slice(0, 1) if causal else slice(None)
    out = arrays["o"][..., : p.head_dim_v].astype(np.float32)[0, :, rows]
    expected = np.broadcast_to(x["v"][0, :, :1].astype(np.float32), out.shape)
    np.testing.assert_array_equal(out, expected)


@pytest.fixture
def choose(monkeypatch):
    """Sets what a method of `Hopper` answers; `_passes` has none of it after."""

    def of(method, answer):
        monkeypatch.setattr(Hopper, method, lambda self, *given: answer(*given))
        family._passes.cache_clear()

    yield of
    family._passes.cache_clear()


#: Row tiles that have one visit, of all keys that they see.
ONCE = {
    "groups 64": Problem(300, 120, 64, heads=2, kv_heads=1, dtype="bfloat16"),
    "causal 64": Problem(100, 100, 40, 60, batch=2, heads=2, dtype="float16", causal=True),
    "upright 32": Problem(150, 128, 32, 20, batch=2, dtype="float16", window=(60, 10)),
    "128": Problem(150, 120, 128, **GROUP),
    "values 128": Problem(70, 128, 50, 128, heads=2, dtype="bfloat16", scale=-0.1),
    "96": Problem(90, 90, 91, dtype="float16", causal=True),
    "varlen": Problem(170, 200, 64, dtype="float16", causal=True, **VARLEN),
    "varlen 128": Problem(170, 200, 120, dtype="bfloat16", **VARLEN),
}


#: One block gets all items: with few, on more multiprocessors, a cluster would share them.
ALONE = replace(H200, multiprocessors=1)


def compare_once(name, machine=test_emulated.HOPPER, *, dlse=False):
    """The same of `ONCE`."""
    compare(replace(ONCE[name], dlse=dlse), None, "flash2-once", ALONE, machine)


def compare(
    problem,
    tiling=ROLES,
    algorithm="flash2-fused",
    gpu=GPU,
    machine=test_emulated.HOPPER,
    report="counts",
):
    """Gradients within the budget of their type, events, if there are any, the simulator's."""
    p, x = problem, make(problem)
    forward = PORTABLE.forward_passes(p, None, gpu, "ascending", "counts")
    arrays, _ = emulator.run_forward(machine, forward, p, x)
    passes = HOPPER.backward_passes(p, tiling, gpu, "ascending", report, algorithm)
    adds = algorithm in FUSED
    arrays, stages = emulator.run_backward(machine, passes, p, arrays, x, fused=adds)
    inputs = [x[name] for name in "qkv"]
    true = oracle.gradients(*inputs, x["dout"], p, dlse=x.get("dlse"))
    rough = oracle.gradients(*inputs, x["dout"], p, dlse=x.get("dlse"), dtype=p.dtype)
    for name in ("dq", "dk", "dv"):
        got = arrays[name][..., : true[name].shape[-1]].astype(np.float64)
        assert np.abs(got - true[name]).max() <= budget(true[name], rough[name], p), name
    if not report:
        return passes
    how = {"device": ROOMY, "trace": True, "algorithm": algorithm, **options(p)}
    tiling = Tiling.joined({one.stage.name: one.tables.schedule.tiling for one in passes})
    result = flashsim.run(*inputs, **how)
    simulated = result.backward(x["dout"], dlse=x.get("dlse"), tiling=tiling).trace
    for stage, expected in zip(stages, simulated.stages, strict=True):
        np.testing.assert_array_equal(stage.events, expected.events, stage.name)
    return passes


@pytest.mark.parametrize(
    "name", [n if n in ("groups", "varlen") else thorough(n) for n in PROBLEMS]
)
def test_gradients_and_counts(name):
    compare(PROBLEMS[name])


@pytest.mark.parametrize(
    "name", [n if n in ("groups 64", "80 rows", "softcap") else thorough(n) for n in ALIKE]
)
def test_gradients_and_counts_where_warpgroups_are_alike(name):
    """One of each tile; with dQ a visit late, the next test has every problem."""
    tiling, problem = ALIKE[name]
    _, fused, _ = compare(problem, tiling)
    assert dict(fused.kernel.constants)["FS_DEFERRED"] == 0


@pytest.mark.parametrize(
    "name", [n if n in ("rows without keys", "carried 128") else thorough(n) for n in ALIKE]
)
def test_gradients_and_counts_if_the_first_visit_stores(name):
    tiling, problem = ALIKE[name]
    delta, fused, convert = compare(problem, tiling, "flash2-fused-first")
    assert all(dict(x.kernel.constants)["FS_FIRST"] == 1 for x in (delta, fused, convert))


def test_dq_of_rows_without_keys_that_is_whatever_memory_holds_shows():
    fault = {"every row tile was visited": ("* 2] != 2;", "* 2] != 2 && !FAULT;")}
    tiling, problem = ALIKE["rows without keys"]
    given = compare, problem, tiling, "flash2-fused-first"
    check_faults("portable/backward_rows.cu", fault, *given)


#: dQ's own pass: tiles of 128 rows beside tiles of 64, rows without keys, an odd number of tiles.
THREE_PASSES = {
    "groups 128": (128, Problem(330, 200, 128, **GROUP)),
    "window 96": (128, Problem(260, 140, 91, batch=2, dtype="float16", window=(60, 10))),
    "varlen 80": (128, Problem(330, 330, 80, dtype="bfloat16", **VARLEN_LONG)),
    "softcap": (128, Problem(150, 150, 96, dtype="bfloat16", softcap=5.0)),
    "64 rows": (64, Problem(150, 200, 128, **GROUP)),
}


@pytest.mark.parametrize(
    "name", [n if n in ("groups 128", "varlen 80") else thorough(n) for n in THREE_PASSES]
)
def test_gradients_and_counts_in_three_passes(name):
    dq_rows, problem = THREE_PASSES[name]
    _, dkdv, dq = compare(problem, Tiling(64, 128, dq_rows), "flash2")
    tiles = [one.tables.schedule.tiling for one in (dkdv, dq)]
    assert tiles == [Tiling(64, 128), Tiling(dq_rows, 128)]


@pytest.mark.parametrize("name", ALIKE)
def test_dq_of_a_visit_computed_in_the_next_one(name, choose):
    """Also where walks are so short that it would not be."""
    choose("defers", lambda walk, cluster: True)
    tiling, problem = ALIKE[name]
    _, fused, _ = compare(problem, tiling)
    assert dict(fused.kernel.constants)["FS_DEFERRED"] == 1


def test_statistics_that_a_product_adds_have_float32s_digits(monkeypatch):
    """They are sums of three bfloat16 numbers; sums of two would change dV by a thousandth."""
    # With this scale the log-sum-exp is large, and so is the error.
    p = Problem(130, 140, 32, dtype="bfloat16", scale=20.0)
    x, results = make(p), []
    forward = PORTABLE.forward_passes(p, None, GPU, "ascending", "counts")
    arrays, _ = emulator.run_forward(test_emulated.HOPPER, forward, p, x)
    for adds in (True, False):
        if not adds:
            monkeypatch.setattr(hopper_kernels, "adds_statistics", lambda *_, **__: False)
            family._passes.cache_clear()
        passes = HOPPER.backward_passes(p, None, GPU, "ascending", "counts", "flash2-fused")
        assert dict(passes[1].kernel.constants)["FS_STATISTICS"] == adds
        found, _ = emulator.run_backward(test_emulated.HOPPER, passes, p, arrays, x, fused=True)
        results.append(found["dv"].astype("f8"))
    family._passes.cache_clear()
    added, loaded = results
    assert np.linalg.norm(added - loaded) <= 1e-4 * np.linalg.norm(loaded)


@pytest.mark.parametrize("name", [thorough("carried 128"), "varlen"])
def test_a_pass_in_several_launches(name, choose):
    """Which take its items between them; of clusters, which there are none here, of one block."""

    def launches(walk):
        several = walk.stage.name == "fused"
        return ((1, 1), (1, 1), (1, walk.items - 2)) if several else ((1, walk.items),)

    choose("launches", launches)
    tiling, problem = ALIKE[name]
    problem = problem if name == "varlen" else replace(problem, batch=2)
    _, fused, _ = compare(problem, tiling, report="")
    launches = (*fused.before, fused)
    taken = [item for one in launches for item in one.items]
    assert taken == [*range(fused.walks * fused.tables.tiles)]
    found = [dict(one.kernel.constants) for one in launches]
    assert [(one["FS_AFTER"], one["FS_MORE"]) for one in found] == [(0, 1), (1, 1), (1, 0)]
    _, counted, _ = HOPPER.backward_passes(
        *(problem, tiling, GPU, "ascending", "counts", "flash2-fused")
    )
    assert not counted.before


@pytest.mark.parametrize("name", ONCE)
def test_gradients_and_counts_of_one_visit(name):
    compare_once(name)


@pytest.mark.parametrize(
    "name", [n if n in ("groups 64", "varlen 128") else thorough(n) for n in ONCE]
)
def test_a_gradient_of_the_lse_in_one_visit(name):
    compare_once(name, dlse=True)


def test_a_gradient_of_the_lse_is_taken_off_delta():
    """The kernel with keys outside does not know of it."""
    tiling, problem = ALIKE["groups 64"]
    delta, fused, _ = compare(replace(problem, dlse=True), tiling)
    assert dict(delta.kernel.constants)["FS_DLSE"] == 1
    assert dict(fused.kernel.constants)["FS_DLSE"] == 0


def test_sums_over_keys_that_nobody_waits_for_show():
    piece = "named_sync(SUMS_READY, 128 * WARPGROUPS);"
    faults = {"early": (piece, f"if (!FAULT) {piece}")}
    check_faults("hopper/backward.cu", faults, compare_once, "128")
