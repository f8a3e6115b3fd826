"""The Hopper kernels without a GPU: they compile without spilling much and without serialised
products, the launch arithmetic is theirs, and what they do not take they refuse with a reason.
"""

import ctypes
import re
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise, product

import numpy as np
import pytest
from compiled import (
    between_scores_and_output,
    compiled,
    costs_nothing_when_off,
    errors,
    kernels_only,
    loads_under_the_last_products,
    some,
    source,
    usage,
)
from gpus import A100, H200, ODD, passes_of

from flashsim import Problem, Tiling
from flashsim.backends.cupy_gpu import tensor_maps
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.kernel import Box, Variant
from flashsim.backends.launch_policy import cost_model
from flashsim.backends.launch_policy.clusters import fastest_cluster, shared_launches
from flashsim.backends.launch_policy.cost_model import ROLES, Queue
from flashsim.backends.launch_policy.hopper import HOPPER, Hopper
from flashsim.backends.launch_policy.hopper_kernels import Rings
from flashsim.backends.launch_policy.portable import PORTABLE
from flashsim.engines.protocol import Job
from flashsim.errors import TilingError, UnsupportedError
from flashsim.problem.masks import BlockMask

pytestmark = pytest.mark.promise("kernels compile")

#: Bytes a thread may spill to local memory: a few values used once an item.
SPILL_BYTES = {False: 64, True: 320}  # without and with a softcap
#: Where they report: counters, and the addresses they go to, are live throughout.
REPORT_SPILL_BYTES = {"counts": 160, "timeline": 320}
PROBLEMS = {
    "128": Problem(4096, 4096, 128, heads=64, dtype="bfloat16"),
    "128 causal": Problem(4096, 4096, 128, heads=64, dtype="bfloat16", causal=True),
    "64": Problem(4096, 4096, 64, heads=64, dtype="float16"),
    "64 causal": Problem(1024, 1024, 64, heads=64, dtype="bfloat16", causal=True),
    "96 window": Problem(4096, 4096, 96, heads=2, dtype="bfloat16", window=(100, 20)),
    "24": Problem(4096, 4096, 24, heads=2, dtype="bfloat16", causal=True),
    "80": Problem(4096, 4096, 80, heads=2, dtype="bfloat16"),
    "40": Problem(333, 517, 40, heads=2, dtype="float16"),
    "40, values 8": Problem(333, 517, 40, 8, heads=2, dtype="float16"),
    "192": Problem(4096, 4096, 192, heads=64, dtype="bfloat16", causal=True),
    "256": Problem(4096, 4096, 256, heads=2, dtype="bfloat16", causal=True),
    "128 odd": Problem(500, 500, 128, 64, **ODD),
    "128 blocks": Problem(
        *(512, 512, 128), dtype="bfloat16", block_mask=BlockMask(np.eye(4, dtype=bool), 128, 128)
    ),
}

#: More query heads than L2 holds Q, dO and dQ of at a time.
GROUPED = Problem(4096, 4096, 128, heads=64, kv_heads=8, dtype="bfloat16", causal=True)


def every_kernel(problem, report=""):
    """Those of the forward and of both backwards."""
    every = (passes_of(HOPPER, problem, x, report=report) for x in ("", "flash2", "flash2-fused"))
    return [x.kernel for made in every for one in made for x in (*one.before, one)]


def kernels(problem, report=""):
    """Of these, the ones with Hopper's own instructions."""
    return [kernel for kernel in every_kernel(problem, report) if kernel.boxes]


def compile_log(kernel, **changed):
    """NVRTC's log, beginning with "failed" if the kernel does not compile."""
    options = [o for o in kernel.options if not any(f"-DFS_{name}=" in o for name in changed)]
    options += [f"-DFS_{name}={value}" for name, value in changed.items()]
    log, cubin = compiled(kernel, tuple(options))
    return log if cubin else "failed: " + log


def check(kernel, limit):
    log = compile_log(kernel)
    assert "failed" not in log, log
    assert "serialized" not in log, "ptxas could not keep wgmma asynchronous"
    assert "wait is injected" not in log, "ptxas waits between products where we do not"
    assert "warning" not in log
    registers, stack, spilled = usage(log)
    assert spilled <= limit, kernel
    assert stack <= limit, "an array lives in local memory"
    assert registers * kernel.threads <= 65_536


# Compiling takes a second a kernel: one of each kind is in `make test`, more are in `make kernels`.


@pytest.mark.parametrize(
    "name", ["128 causal", *(kernels_only(name) for name in ("128", "64", "64 causal", "80"))]
)
def test_output_is_waited_for_between_the_maxima_and_the_exponentials(name):
    """Of a visit: ptxas likes to move this wait in front of the maxima, or all exponentials."""
    (kernel,) = (k for k in kernels(PROBLEMS[name]) if k.name == "hopper_forward")
    _, cubin = compiled(kernel, kernel.options)
    maxima, exponentials = between_scores_and_output(cubin)
    scores_a_thread = dict(kernel.constants)["FS_BLOCK_K"] // 2
    assert maxima > 0.9 * scores_a_thread / 2  # each takes in two more
    assert 0 < exponentials < scores_a_thread / 2


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_are_sound_to_the_compilers_front_end(name):
    every = kernels(PROBLEMS[name], "counts")
    assert len(every) == 4
    for kernel in every:
        assert not errors(kernel, kernel.options)


@pytest.mark.parametrize("name", some(("128 causal",), ("40, values 8",), PROBLEMS))
def test_kernels_compile_without_serialised_products(name):
    problem = PROBLEMS[name]
    for kernel in kernels(problem):
        check(kernel, SPILL_BYTES[bool(problem.softcap)])


def in_order(problem, tiling=None, report=""):
    """The fused backward that adds to dQ in a fixed order."""
    made = passes_of(HOPPER, problem, "flash2-fused", tiling=tiling, report=report, ordered=True)
    (kernel,) = (x.kernel for x in made if x.kernel.boxes)
    return kernel


def forward(problem, pack_gqa=None, tiling=None, report=""):
    """The forward pass, with or without packed heads, or as the time model decides."""
    (one,) = passes_of(HOPPER, problem, tiling=tiling, report=report, pack_gqa=pack_gqa)
    return one


#: Groups of query heads, for the kernels that pack them into row tiles.
PACKED = {
    "64": Problem(300, 300, 64, heads=32, kv_heads=8, dtype="bfloat16", causal=True),
    "128": Problem(300, 700, 128, heads=64, kv_heads=8, dtype="bfloat16", causal=True),
    "96 window": Problem(300, 300, 96, heads=8, kv_heads=4, dtype="float16", window=(100, 20)),
    "32 softcap": Problem(300, 300, 32, heads=64, kv_heads=1, dtype="bfloat16", softcap=5.0),
    "256": Problem(300, 300, 256, heads=16, kv_heads=1, dtype="bfloat16", causal=True),
}


@pytest.mark.parametrize("name", some(("128",), ("64",), PACKED))
def test_forwards_of_packed_heads_compile(name):
    problem = PACKED[name]
    for tiling in HOPPER.tilings(problem, H200, "forward"):
        one = forward(problem, True, tiling)
        assert dict(one.kernel.constants)["FS_PACK"] == problem.group
        check(one.kernel, SPILL_BYTES[bool(problem.softcap)])
    one = forward(problem, True, report="counts")
    check(one.kernel, REPORT_SPILL_BYTES["counts"])


def test_heads_are_packed_where_the_time_model_says_so():
    """Where fewer rows do not exist, or work tiles have fewer visits; not where nothing changes."""
    full = Problem(384, 384, 64, heads=32, kv_heads=8, batch=8, dtype="bfloat16")
    ragged = replace(full, n_q=414, n_kv=414, batch=4, heads=28, kv_heads=7)
    causal = replace(full, n_q=1789, n_kv=1789, causal=True)
    for p, packed in ((full, False), (ragged, True), (causal, True)):
        one = forward(p)
        walks = p.batch * (p.kv_heads if packed else p.heads)
        assert one.tables.schedule.split.pack_gqa is packed
        assert (one.walks, one.visit_records[0]) == (walks, walks)
        assert one.kernel.boxes[0].heads == (p.group if packed else 1)
        assert ("FS_PACK" in dict(one.kernel.constants)) is packed
        for forced in (False, True):
            assert forward(p, forced).tables.schedule.split.pack_gqa is forced
    tiles = forward(ragged, True).tables.tiles, forward(ragged, False).tables.tiles
    assert tiles[0] < 4 * tiles[1]


CELLS = BlockMask(np.eye(4, dtype=bool), 128, 128)


@pytest.mark.parametrize(
    "changed",
    [
        {"heads": 24},
        {"dtype": "float32"},
        {"cu_seqlens_q": (0, 512), "cu_seqlens_k": (0, 512), "batch": 1},
        {"block_mask": CELLS},
        {"sinks": True},
    ],
    ids=lambda changed: " ".join(changed),
)
def test_heads_that_cannot_be_packed(changed):
    p = replace(Problem(512, 512, 64, heads=32, kv_heads=8, batch=8, dtype="bfloat16"), **changed)
    family = PORTABLE if p.dtype == "float32" else HOPPER
    for unforced in (None, False):
        (one,) = passes_of(family, p, pack_gqa=unforced)
        assert not one.tables.schedule.split.pack_gqa
    with pytest.raises(UnsupportedError, match="cannot pack the query heads"):
        passes_of(family, p, pack_gqa=True)


@pytest.mark.parametrize("name", some((), ("128",), ("128", "64", "128 odd")))
def test_the_backward_in_a_fixed_order_compiles(name):
    problem = PROBLEMS[name]
    for tiling in HOPPER.tilings(problem, H200, "backward", "flash2-fused"):
        check(in_order(problem, tiling), SPILL_BYTES[bool(problem.softcap)])


#: Row tiles that have one visit, and 64 columns: S, dP, P, dK and dV are 224 registers.
ONE_VISIT = Problem(200, 128, 64, heads=2, batch=99, dtype="bfloat16")
ONCE_SPILLS = 96


@pytest.mark.parametrize(
    "case", some(((64, False),), (), product((32, 64, 96, 128), (False, True)))
)
def test_the_backward_in_one_visit_compiles(case):
    d, causal = case
    problem = replace(ONE_VISIT, head_dim=d, head_dim_v=d, causal=causal, n_kv=128 - 28 * causal)
    problem = replace(problem, n_q=problem.n_kv) if causal else problem
    (one,) = passes_of(HOPPER, problem, "flash2-once")
    check(one.kernel, ONCE_SPILLS)


@pytest.mark.parametrize("d", some((64,), (128,), (32, 96)))
@pytest.mark.parametrize("report", ["", "counts"])
def test_one_visit_with_a_gradient_of_the_lse_compiles(d, report):
    """It is one more statistic of each row, in shared memory, for the kernel that makes delta."""
    problem = replace(ONE_VISIT, head_dim=d, head_dim_v=d)
    more = replace(problem, dlse=True)
    without, one = (
        passes_of(HOPPER, p, "flash2-once", report=report)[0].kernel for p in (problem, more)
    )
    rows = dict(one.constants)["FS_BLOCK_Q"]
    assert 0 <= one.shared_bytes - without.shared_bytes <= -(-2 * rows * 4 // 1024) * 1024
    check(one, ONCE_SPILLS)
    for algorithm in ("flash2", "flash2-fused"):
        _, *without = passes_of(HOPPER, problem, algorithm, report=report)
        _, *others = passes_of(HOPPER, more, algorithm, report=report)
        assert [x.kernel for x in others] == [x.kernel for x in without]


@pytest.mark.parametrize(
    "name", some((), ("24",), ("24", "128", "64 causal", "96 window", "192", "256"))
)
def test_tilings_that_are_no_default_compile(name):
    problem = PROBLEMS[name]
    plain = kernels(problem)
    for tiling in HOPPER.tilings(problem, H200, "forward")[1:]:
        (one,) = passes_of(HOPPER, problem, tiling=tiling)
        assert one.kernel not in plain
        check(one.kernel, SPILL_BYTES[False])
    for tiling in HOPPER.tilings(problem, H200, "backward", "flash2-fused")[1:]:
        _, fused, _ = passes_of(HOPPER, problem, "flash2-fused", tiling=tiling)
        assert fused.kernel not in plain
        check(fused.kernel, SPILL_BYTES[False])


@pytest.mark.parametrize("name", some(("128 causal",), ("80",), ("96 window", "128 odd")))
@pytest.mark.parametrize("dq_rows", [64, 128])
def test_both_tiles_of_dq_compile(name, dq_rows):
    problem = PROBLEMS[name]
    for report, limit in (("", SPILL_BYTES[False]), ("counts", REPORT_SPILL_BYTES["counts"])):
        *_, dq = passes_of(
            HOPPER, problem, "flash2", tiling=Tiling(64, 128, dq_rows), report=report
        )
        assert dict(dq.kernel.constants)["FS_BLOCK_Q"] == dq_rows
        check(dq.kernel, limit)


@pytest.mark.parametrize(
    "case",
    some(
        (("64", 8),),
        (("64", 1), ("128 causal", 2)),
        product(("64", "128 causal", "128 odd"), (1, 2, 4, 8)),
    ),
    ids=str,
)
def test_the_backward_compiles_in_every_cluster(case):
    name, blocks = case
    problem = PROBLEMS[name]
    for stage, fused in (("fused", True), ("dkdv", False)):
        tiling = HOPPER.choose(problem, None, H200, "backward", "flash2-fused")
        variant = Variant(spans=True, descending=False, cluster=blocks, fused=fused)
        kernel = HOPPER.kernel(stage, problem, tiling, variant, H200)
        assert kernel.cluster == blocks
        check(kernel, SPILL_BYTES[bool(problem.softcap)])
        assert "have one block" in compile_log(kernel, TIMELINE=1) or blocks == 1


@pytest.mark.parametrize(
    "case", some(((192, 4),), ((256, 2),), product((160, 192, 256), (2, 4, 8))), ids=str
)
def test_the_backward_that_divides_columns_compiles_in_every_cluster(case):
    head_dim, blocks = case
    problem = Problem(512, 512, head_dim, heads=2, dtype="bfloat16", causal=True)
    for stage, fused in (("fused", True), ("dkdv", False)):
        variant = Variant(spans=True, descending=False, cluster=blocks, fused=fused)
        kernel = HOPPER.kernel(stage, problem, Tiling(64, 64), variant, H200)
        assert (kernel.name, kernel.cluster) == ("hopper_backward_wide", blocks)
        check(kernel, SPILL_BYTES[False])


@pytest.mark.parametrize("head_dim", some((128,), (64,), (64, 128, 192)))
def test_the_backward_of_grouped_heads_in_step_compiles(head_dim):
    p = replace(GROUPED, head_dim=head_dim, head_dim_v=head_dim)
    _, fused, _ = passes_of(HOPPER, p, "flash2-fused")
    assert dict(fused.kernel.constants)["FS_IN_STEP"] == 1
    check(fused.kernel, SPILL_BYTES[False])


def test_key_tiles_that_leave_multiprocessors_idle_are_shared_by_clusters():
    p = Problem(1024, 1024, 128, heads=32, kv_heads=8, dtype="bfloat16", causal=True)

    def keys_outside(problem, gpu=H200, **more):
        return passes_of(HOPPER, problem, "flash2-fused", gpu=gpu, **more)[1]

    one = keys_outside(p)  # 64 items, the longest of 16 row tiles of four heads
    assert one.kernel.cluster == 2
    assert one.grid == (128,)
    more = keys_outside(replace(p, heads=64))  # of eight heads
    assert (more.kernel.cluster, more.grid) == (4, (256,))
    assert keys_outside(replace(p, batch=4)).kernel.cluster == 1
    assert keys_outside(p, replace(H200, multiprocessors=16)).kernel.cluster == 1
    assert keys_outside(p, report="timeline").kernel.cluster == 1
    assert keys_outside(p, ordered=True).kernel.cluster == 1
    wide = replace(p, head_dim=256, head_dim_v=256, heads=4, kv_heads=1)  # 16 items
    assert keys_outside(wide).kernel.cluster == 8
    wide = replace(wide, head_dim=192, head_dim_v=192)
    for tiling, blocks in ((Tiling(64, 64), 8), (ROLES, 1)):  # roles have no clusters
        assert keys_outside(wide, tiling=tiling).kernel.cluster == blocks
    wide = Problem(2048, 2048, 256, 256, heads=4, dtype="bfloat16", causal=True)  # 128 items
    half = replace(wide, heads=2, kv_heads=2)  # in clusters of two 128 blocks, which run at once
    for problem, blocks in ((wide, 1), (half, 2)):
        dkdv = passes_of(HOPPER, problem, "flash2")[1]
        assert dkdv.kernel.cluster == blocks
    dkdv, dq = passes_of(HOPPER, p, "flash2")[1:]
    assert (dkdv.kernel.cluster, dq.kernel.cluster) == (2, 1)
    assert dq.grid == (132,)


def test_a_launch_begins_while_the_one_before_it_ends():
    """And waits before it touches what that one may have written; before others begin, too."""
    for p in (PROBLEMS["128"], PROBLEMS["256"]):
        for kernel in every_kernel(p):
            assert kernel.overlaps
            assert dict(kernel.constants)["FS_OVERLAP"] == 1
            text = source(kernel)
            waits = re.search(r"^ +(if \(!FS_AFTER\) )?wait_for_what_ran_before\(\);", text, re.M)
            lets = re.search(r"^ +(if \(.*\) )?let_what_runs_next_start\(\);", text, re.M)
            assert waits
            assert not lets or lets.start() > waits.start()
    for algorithm in ("flash2", "flash2-fused"):
        for one in passes_of(PORTABLE, p, algorithm, gpu=A100):
            assert not one.kernel.overlaps
            assert dict(one.kernel.constants)["FS_OVERLAP"] == 0


def test_dq_runs_beside_the_pass_that_lets_it_start():
    """Which does so when delta is complete; and dQ's ends when that one has."""
    _, dkdv, dq = passes_of(HOPPER, PROBLEMS["128"], "flash2")
    before, text = source(dkdv.kernel), source(dq.kernel)
    assert dict(dkdv.kernel.constants)["FS_FUSED"] == 0
    assert "if (!FS_FUSED || FS_MORE) let_what_runs_next_start();" in before
    waits = text.index("    wait_for_what_ran_before();")
    assert waits > text.index("store_row<KeyRow>(a.dq")  # and reads delta past the L1, in between
    assert "__ldcg(&a.lse[at])" in text
    assert "__ldcg(&a.delta[at])" in text


def launches(problem, **more):
    """Of the fused backward's pass with keys outside."""
    one = passes_of(HOPPER, problem, "flash2-fused", **more)[1]
    return (*one.before, one)


@pytest.mark.parametrize("steps", [1, 7, 64, 256])
@pytest.mark.parametrize("items", [1, 75, 95, 131, 132, 133, 152, 200, 264, 300, 2048, 4096])
def test_equal_work_tiles_are_shared_only_where_all_end_sooner(items, steps):
    """By launches simulated block by block, clusters first."""
    known = cost_model.HOPPER_BACKWARD[128].fused, cost_model.ADDING_UP[128]
    launches = shared_launches(items, steps, *known, H200)
    assert sum(n for _, n in launches) == items
    sizes = [cluster for cluster, _ in launches]
    assert sizes == sorted(set(sizes), reverse=True)
    free, each = [0.0] * H200.multiprocessors, np.array([steps])

    def ends(launches):
        now = free
        for cluster, n in launches:
            at_once = cost_model.together(cluster, H200)
            now = cost_model.shared_out(n, each, *known, cluster, now, at_once, in_waves=True)
        return max(now)

    # spread evenly from twelve waves on
    assert ends(launches) <= ends([(1, items)]) or items > 12 * H200.multiprocessors


@pytest.mark.parametrize(
    ("items", "launches"),
    [
        (75, ((8, 15), (2, 60))),  # 1 / 8 and 1 / 2 of a single block's time
        (95, ((4, 30), (2, 65))),
        (125, ((1, 125),)),  # no waves of clusters end sooner
        (132, ((1, 132),)),
        (152, ((4, 30), (1, 122))),
    ],
)
def test_launches_of_long_equal_work_tiles(items, launches):
    """An H100 runs 66 clusters of two, 30 of four or 15 of eight at once, by its driver."""
    gpu = replace(H200, clusters=((2, 66), (4, 30), (8, 15)))
    known = cost_model.HOPPER_BACKWARD[64].fused, cost_model.ADDING_UP[64]
    assert shared_launches(items, 352, *known, gpu) == launches
    assert shared_launches(items, 352, *known, H200) == launches  # known by fractions
    few = shared_launches(items, 4, *known, gpu)
    assert len(few) == 1  # the time saved is less than a launch takes


@pytest.mark.parametrize(
    ("changed", "deferred"),
    [
        ({}, True),
        ({"n_q": 1024, "n_kv": 1024}, True),  # eight query heads of 576 rows on average
        ({"n_q": 1024, "n_kv": 1024, "heads": 8}, False),
        ({"n_q": 1024, "n_kv": 1024, "heads": 8, "causal": False}, True),
        ({"head_dim": 192, "head_dim_v": 192}, False),
    ],
)
def test_dq_is_deferred_where_walks_are_long(changed, deferred):
    p = replace(GROUPED, batch=8, **changed)
    (one,) = launches(p)
    assert dict(one.kernel.constants)["FS_DEFERRED"] == deferred
    (ordered,) = launches(p, ordered=True) if HOPPER.orders_dq(p) else [None]
    assert ordered is None or dict(ordered.kernel.constants)["FS_DEFERRED"] == 0
    _, dkdv, _ = passes_of(HOPPER, p, "flash2")
    assert dict(dkdv.kernel.constants)["FS_DEFERRED"] == 0


@dataclass(frozen=True)
class Deferring(Hopper):
    """Would defer every dQ."""

    def defers(self, stage, tables, cluster):
        return True


@pytest.mark.parametrize("family", [HOPPER, Deferring(**vars(HOPPER))], ids=["rule", "always"])
def test_dq_that_is_stored_at_once_is_not_deferred_and_has_one_launch(family):
    p = Problem(5000, 128, 64, heads=32, kv_heads=2, batch=70, dtype="bfloat16")  # 140 items
    (one,) = passes_of(family, p, "flash2-once")
    assert dict(one.kernel.constants)["FS_DEFERRED"] == 0
    assert not one.before


def test_statistics_of_the_next_visit_are_loaded_under_the_last_products():
    """At 128 rows those of the scores: a pair a load, between the waits for dQ and for dK."""
    (*_, one) = launches(PROBLEMS["64"])
    _, cubin = compiled(one.kernel, one.kernel.options)
    assert loads_under_the_last_products(cubin) == 128 // 8


def test_passes_that_have_room_at_once_are_not_made_to_fill_the_gpu():
    p = Problem(512, 512, 64, heads=12, dtype="bfloat16")  # 48 items each

    def clusters(algorithm, gpu=H200, **more):
        return passes_of(HOPPER, replace(p, **more), algorithm, gpu=gpu)[1].kernel.cluster

    assert clusters("flash2-fused") == 2
    assert clusters("flash2") == 1
    long = {"n_q": 1024, "n_kv": 1024, "heads": 4, "kv_heads": 4}  # 32 items each, of eight visits
    assert clusters("flash2", **long) == 2
    assert clusters("flash2", replace(H200, multiprocessors=63), **long) == 1  # two need 64


@pytest.mark.parametrize(
    ("changed", "in_step"),
    [
        ({}, True),  # 134 MB of Q, dO and dQ in use at a time
        ({"head_dim": 192, "head_dim_v": 192}, True),
        ({"causal": False}, False),  # all items are equally long
        ({"window": (1000, 0)}, False),
        ({"heads": 8}, False),  # no group
        ({"heads": 24}, False),  # 50 MB
        ({"n_q": 512, "n_kv": 512}, False),  # clusters share items
        ({"n_q": 18_000, "n_kv": 18_000, "heads": 32}, False),  # 74 MB of a head, equally long
        ({"n_q": 32_768, "n_kv": 32_768, "heads": 32}, True),
    ],
)
def test_grouped_heads_are_in_step_where_l2_does_not_hold_them(changed, in_step):
    p = replace(GROUPED, **changed)

    def steps(algorithm, **more):
        made = passes_of(HOPPER, p, algorithm, **more)
        (one,) = (x.kernel for x in made if x.stage.outer == "keys")
        assert "it.way" in source(one)
        return dict(one.constants)["FS_IN_STEP"]

    assert steps("flash2-fused") == in_step
    assert steps("flash2") == 0
    if HOPPER.orders_dq(p):
        assert steps("flash2-fused", ordered=True) == 0


@pytest.mark.parametrize(
    ("n", "clump"), [(32_768, 1), (24_576, 2), (20_480, 4), (16_384, 1), (12_800, 4), (8192, 2)]
)
def test_grouped_heads_in_step_come_in_whole_rounds(n, clump):
    """Else the items that clumps share rounds of would go against the others."""
    (one,) = launches(replace(GROUPED, n_q=n, n_kv=n))
    assert dict(one.kernel.constants)["FS_IN_STEP"]
    assert one.clump == clump
    beside = clump * one.tables.tiles % H200.multiprocessors
    assert min(beside, H200.multiprocessors - beside) <= H200.multiprocessors / 6


def test_more_grouped_heads_come_together_where_that_ends_sooner():
    """Items that are twice as long as they are on average, or so."""

    def clump(p):
        return passes_of(HOPPER, p, "flash2-fused")[1].clump

    assert clump(GROUPED) == 4  # 128 items, and as many again, end together
    uneven = replace(GROUPED, n_q=6000, n_kv=6000)  # 94 items of two heads, four times
    assert clump(uneven) == 8  # four would end as soon, but have 1.4 waves
    assert clump(replace(uneven, heads=8)) < 8  # of no group: as many as L2 holds
    assert clump(replace(uneven, batch=9)) == 2  # many rounds


def test_head_groups_that_end_sooner():
    """Each head has an item of 3 and one of 1; the longest items of a group come first."""
    items, together = np.array([3.0, 1.0]), cost_model.heads_together
    # On four SMs, four heads have 16 of work. Two pairs of heads end after 4, as do all four; one
    # head after the other: 3 1 3 1, then 3 and 1 where 1 is done, and the last 1 after 4.
    assert [cost_model.makespan(items, 4, 4, clump) for clump in (1, 2, 4)] == [5, 4, 4]
    assert together(4, items, 4, 1, share=0.0, drift=1) == 2
    assert together(4, items, 4, 2, share=0.0, drift=1) == 2  # no sooner with four
    assert together(40, items, 2, 1, share=0.0, drift=1) == 1  # many waves
    # On two SMs, three heads end after 6 together, and otherwise after 7.
    assert [cost_model.makespan(items, 3, 2, clump) for clump in (1, 2, 3)] == [7, 7, 6]
    assert together(3, items, 2, 1, share=0.06, drift=1) == 3
    assert together(3, items, 2, 1, share=0.07, drift=1) == 1  # more than a fifth of L2
    assert together(3, items, 2, 1, share=0.06, drift=2) == 1  # 0.18 of L2, three waves, twice


def test_heads_whose_work_tiles_clusters_share_run_together():
    """If that ends sooner: three heads of 55 work tiles, which 66 pairs of blocks share."""
    p = Problem(6983, 6983, 128, heads=24, kv_heads=3, dtype="bfloat16", causal=True)
    one = passes_of(HOPPER, p, "flash2-fused", tiling=Tiling(64, 128))[1]
    assert (one.kernel.cluster, one.grid) == (2, (330,))
    visits = sorted(one.tables.visits, reverse=True)

    def end(clump):
        """Return when the last pair ends, in visits; the first free pair takes the next tile."""
        free = [0] * 66
        for first in range(0, 3, clump):
            for n in visits:
                for _ in range(min(clump, 3 - first)):
                    free[0] += n
                    free.sort()
        return max(free)

    assert end(1) > 1.2 * end(3)
    assert one.clump == 3


def test_blocks_that_are_busy_at_once():
    """By hand: of four row tiles each; causal, with 1 to 4 visits."""
    p = Problem(512, 512, 64, batch=3, heads=4, kv_heads=2, dtype="float16")
    assert cost_model.busy_at_once(p, Tiling(128, 128)) == (48, 24)
    assert cost_model.busy_at_once(replace(p, causal=True), Tiling(128, 128)) == (30, 15)
    assert cost_model.busy_at_once(p, Tiling(64, 128)) == (96, 24)


@pytest.mark.parametrize(
    ("head_dim", "algorithm", "ordered", "softcap", "rows"),
    [
        (80, "flash2-fused", False, 0.0, 80),
        (81, "flash2-fused", False, 0.0, 64),
        (65, "flash2-fused", False, 0.0, 80),
        (64, "flash2-fused", False, 0.0, 128),
        (80, "flash2-fused", False, 9.0, 64),
        (80, "flash2", False, 0.0, 64),
        (80, "flash2-fused", True, 0.0, 80),
        (128, "flash2-fused", True, 0.0, 80),
    ],
)
def test_rows_of_a_backwards_tile(head_dim, algorithm, ordered, softcap, rows):
    p = Problem(999, 999, head_dim, dtype="bfloat16", softcap=softcap)
    chosen = HOPPER.choose(p, None, H200, "backward", algorithm, ordered)
    assert chosen == Tiling(rows, 128)


def test_dq_of_up_to_192_columns_leaves_from_shared_memory():
    def fused(head_dim):
        p = Problem(999, 999, head_dim, dtype="bfloat16")
        dkdv, made = (
            passes_of(HOPPER, p, a, tiling=Tiling(64, 64))[1].kernel
            for a in ("flash2", "flash2-fused")
        )
        assert made.shared_bytes <= H200.shared_bytes
        return made.shared_bytes - dkdv.shared_bytes, made.boxes[4].tensor

    assert fused(192) == fused(136) == (4 * 64 * 192, "dq_acc")
    assert fused(256) == (0, "q")


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "tile"),
    [
        (4096, 10, 10, ROLES),  # more items than places: fewer, longer visits
        (1024, 32, 8, Tiling(64, 64)),  # a round: the last item of either has as many visits
        (128, 32, 32, Tiling(64, 64)),
    ],
)
def test_the_fused_backward_of_wide_rows_takes_the_faster_tile(n, heads, kv_heads, tile):
    p = Problem(n, n, 192, heads=heads, kv_heads=kv_heads, dtype="bfloat16", causal=True)
    fused = passes_of(HOPPER, p, "flash2-fused")[1].kernel
    assert fused.name == "hopper_backward_" + ("roles" if tile == ROLES else "wide")
    assert HOPPER.tilings(p, H200, "backward", "flash2-fused")[0] == tile
    cells = BlockMask(np.eye(n // 128, dtype=bool), 128, 128)
    p = replace(p, causal=False, block_mask=cells)  # 96 keys do not divide them
    assert HOPPER.choose(p, None, H200, "backward", "flash2-fused") == Tiling(64, 64)


def test_a_cluster_takes_what_its_blocks_have_left_each():
    """By hand, in µs: items of 4 + 2 a visit, and 2 for adding up."""
    times = cost_model.Times(item=4.0, visit=2.0), 2.0

    def fastest(steps, processors, clusters=()):
        return fastest_cluster(1, np.array(steps), *times, processors, clusters)

    assert fastest([16, 16], 2) == 1  # nobody is idle
    assert fastest([16, 16], 4) == 2  # 4 + 32; 4 + 16 + 2; one place for four blocks
    assert fastest([16, 16], 24) == 8  # 4 + 4 + 2
    assert fastest([16, 16], 20) == 4  # two places for four blocks, one for eight
    assert fastest([1, 1], 24) == 1  # 6, not 8
    assert fastest([16, 16], 20, ((8, 2),)) == 8  # the driver says that both run at once
    assert fastest([16, 16, 16], 28, ((8, 2),)) == 4  # not all three: 4 + 4 + 2, or twice 4 + 2 + 2


def test_clusters_that_all_run_at_once_by_the_drivers_number():
    """14 items for 132 SMs; of eight blocks each, if no cluster has to wait for others."""
    p = Problem(3499, 787, 64, heads=16, kv_heads=2, dtype="bfloat16")

    def blocks(clusters, problem=p):
        gpu = replace(H200, clusters=clusters)
        return passes_of(HOPPER, problem, "flash2", gpu=gpu)[1].kernel.cluster

    assert blocks(()) == 4
    assert blocks(((4, 30), (8, 15))) == 8
    assert blocks(((4, 30), (8, 13))) == 4
    assert blocks(((4, 30), (8, 15)), replace(p, n_kv=1100)) == 4  # 18 items


def test_head_groups_under_a_window_stay_in_l2():
    """There work tiles loop over different rows, so L2 must hold all rows of a group."""
    p = Problem(
        2569, head_dim=128, batch=4, heads=44, kv_heads=11, dtype="bfloat16", window=(854, 0)
    )
    fused = passes_of(HOPPER, p, "flash2-fused")[1]
    rows = 4 * 2569 * 128 * (2 + 2 + 4)  # Q, dO and float32 dQ of a group's four query heads
    assert fused.clump * rows <= H200.l2_bytes
    short = replace(p, n_q=300, n_kv=300, window=(100, 0))  # all heads fit, and end sooner together
    fused = passes_of(HOPPER, short, "flash2-fused")[1]
    assert fused.clump == 44


@pytest.mark.parametrize(
    ("head_dim", "n", "batch", "kv_heads", "group", "heads_in_group", "in_step"),
    [
        (192, 749, 16, 8, 8, 16, False),  # 8 key tiles per head, 7.8 waves
        (144, 749, 16, 4, 8, 16, True),  # 3.9 waves
        (192, 1500, 8, 8, 8, 8, True),  # 16 key tiles per head, 7.8 waves
        (128, 749, 16, 8, 8, 22, True),  # no warpgroup roles
        (192, 2048, 4, 8, 8, 6, True),  # 6 x 22 work tiles are a wave; L2 alone would say 4
    ],
)
def test_head_groups_of_kernels_with_roles(
    head_dim, n, batch, kv_heads, group, heads_in_group, in_step
):
    """Their blocks drift apart: short loops of many waves are not co-scheduled."""
    sizes = {"batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads}
    p = Problem(n, n, head_dim, **sizes, dtype="bfloat16", causal=True)
    gpu = replace(H200, l2_bytes=50 << 20)  # an H100's
    fused = passes_of(HOPPER, p, "flash2-fused", gpu=gpu)[1]
    assert fused.clump == heads_in_group
    assert bool(dict(fused.kernel.constants).get("FS_IN_STEP")) == in_step


@pytest.mark.parametrize(
    "case",
    some(
        (),
        (("128 odd", "counts"),),
        [
            *((name, "counts") for name in ("128 causal", "64", "128 odd")),
            *((name, "timeline") for name in ("128 causal", "64 causal", "128 odd", "192")),
        ],
    ),
    ids="-".join,
)
def test_kernels_that_report_compile(case):
    name, report = case
    problem = PROBLEMS[name]
    for kernel in kernels(problem, report):
        check(kernel, REPORT_SPILL_BYTES[report])
    if HOPPER.orders_dq(problem):
        check(in_order(problem, report=report), REPORT_SPILL_BYTES[report])


@pytest.mark.parametrize(
    ("name", "number"),
    [("128 causal", 0), *(kernels_only("128 causal", n) for n in (2, 3)), kernels_only("192", 3)],
)
def test_reporting_costs_nothing_when_it_is_off(name, number):
    """Forward, dQ, and both sources of the pass with keys outside."""
    kernel = kernels(PROBLEMS[name])[number]
    assert costs_nothing_when_off(kernel)


def test_a_wrong_size_does_not_compile():
    for kernel in kernels(PROBLEMS["64"]):
        log = compile_log(kernel, SMEM_BYTES=kernel.shared_bytes + 1024)
        assert "must agree" in log


def test_two_stages_and_all_tiles_lie_in_shared_memory():
    forward, *_ = kernels(PROBLEMS["256"])
    tiles = 2 * (128 * 256 + 2 * 2 * 80 * 256)
    assert tiles < forward.shared_bytes <= min(tiles + 2048, H200.shared_bytes)
    assert all(k.shared_bytes <= H200.shared_bytes for p in PROBLEMS.values() for k in kernels(p))


def test_a_producer_and_each_consumer_warpgroup_stamp_the_time():
    assert [k.roles for k in kernels(PROBLEMS["64"])] == [4, 3, 3, 3]
    assert {k.roles for k in kernels(PROBLEMS["128"])} == {3}
    passes = passes_of(PORTABLE, PROBLEMS["64"], report="timeline")
    assert passes[0].kernel.roles == 1


def test_blocks_are_persistent():
    p = Problem(4096, 4096, 128, heads=16, dtype="bfloat16")
    (one,) = passes_of(HOPPER, p)
    assert one.grid == (132,)
    (small,) = passes_of(HOPPER, Problem(200, 200, 128, dtype="bfloat16"))
    assert small.grid == (2,)


@pytest.mark.parametrize(
    ("change", "direction", "why"),
    [
        (dict(dtype="float32"), "forward", "float16 and bfloat16, not float32"),
        (dict(head_dim=512), "forward", "head_dim up to 256"),
        (dict(head_dim=264), "backward", "head_dim up to 256"),
        (
            dict(block_mask=BlockMask(np.ones((8, 8), bool), 64, 64)),
            *("forward", "do not divide the block mask"),
        ),
    ],
)
def test_refusals_say_why(change, direction, why):
    p = Problem(**{**dict(n_q=512, n_kv=512, head_dim=128, dtype="bfloat16"), **change})
    assert why in HOPPER.refusal(p, None, H200, direction)


def test_other_gpus_and_tilings_are_refused():
    p = PROBLEMS["128"]
    assert HOPPER.refusal(p, None, H200, "forward") is None
    assert "compute capability 9.0, and A100 has 8.0" in HOPPER.refusal(p, None, A100, "forward")
    assert "64 x 64" in HOPPER.refusal(p, Tiling(64, 64), H200, "forward")
    with pytest.raises(UnsupportedError, match=r"do not run this: .*try kernel='portable'"):
        passes_of(HOPPER, p, tiling=Tiling(64, 64))


@pytest.mark.parametrize(
    ("n", "head_dim", "heads", "gpu", "tiling"),
    [
        (512, 64, 96, H200, Tiling(128, 128)),  # 384 items, three rounds; of 192 rows 288, also
        (512, 64, 96, replace(H200, multiprocessors=144), Tiling(192, 128)),  # two, not three
        (197, 64, 768, H200, Tiling(128, 208)),  # one visit, not two
        (4096, 64, 64, H200, Tiling(192, 128)),
        (4096, 80, 64, H200, Tiling(192, 112)),
        (197, 96, 768, H200, Tiling(128, 128)),
        (4096, 128, 64, H200, Tiling(128, 176)),
        (4096, 128, 64, replace(H200, shared_bytes=180 << 10), Tiling(128, 128)),  # what fits
    ],
)
def test_the_tile_goes_by_rounds_visits_and_what_fits(n, head_dim, heads, gpu, tiling):
    p = Problem(n, n, head_dim, heads=heads, dtype="bfloat16")
    assert HOPPER.choose(p, None, gpu, "forward") == tiling


def test_rings_have_as_many_stages_as_fit():
    p, tiling = PROBLEMS["128"], Tiling(128, 128)
    assert HOPPER.rings(p, tiling, H200) == Rings(3)
    assert HOPPER.rings(p, tiling, replace(H200, shared_bytes=200 << 10)) == Rings(2)
    assert HOPPER.rings(p, Tiling(128, 176), H200) == Rings(2)
    (one,) = passes_of(HOPPER, p, tiling=tiling)
    assert dict(one.kernel.constants)["FS_STAGES"] == 3
    assert one.kernel.shared_bytes == HOPPER.forward_bytes(p, tiling, Rings(3))


def test_a_launch_takes_as_long_as_its_fullest_block():
    """By hand: items of one block each; then two rounds; then longest first."""
    times, gpu = cost_model.Times(item=2.0, visit=1.0), 4
    full = Problem(256, 512, 64, heads=2, dtype="float16")
    assert cost_model.microseconds(full, Tiling(128, 128), times, gpu) == 2 + 4
    assert cost_model.microseconds(full, Tiling(64, 128), times, gpu) == 2 * (2 + 4)
    causal = Problem(512, 512, 64, heads=2, dtype="float16", causal=True)  # 3 to 6 µs, twice
    assert cost_model.microseconds(causal, Tiling(128, 128), times, gpu) == 6 + 3
    many = replace(causal, heads=200, kv_heads=200)
    assert cost_model.microseconds(many, Tiling(128, 128), times, gpu) == 200 * 18 / 4


def test_blocks_begin_where_others_have_ended():
    assert sorted(cost_model.ends(Queue([3.0, 1.0], 2, 2), [0.0, 0.0])) == [4.0, 4.0]
    # Two blocks for two SMs, one of them free a second earlier: the last still ends at 2.
    assert sorted(cost_model.ends(Queue([2.0], 2, 2), [-1.0, 0.0])) == [1.0, 2.0]
    assert sorted(cost_model.ends(Queue([2.0], 3, 3), [-2.0, 0.0])) == [
        2.0,
        2.0,
    ]  # a third one's time is saved
    assert max(cost_model.ends(Queue([2.0], 3, 3), [0.0, 0.0])) == 4.0


def test_a_further_wave_of_clusters_begins_late():
    """By hand, for 12 SMs: each of the work tiles takes 2 + 4 / (blocks per cluster) + 1 µs."""

    def took(count, cluster, at_once):
        given = np.array([4]), cost_model.Times(2, 1), 1, cluster, [0.0] * 12, at_once
        return max(cost_model.shared_out(count, *given))

    assert took(3, 4, 3) == 4
    assert took(4, 4, 3) == 4 + cost_model.NEXT_WAVE + 4  # two at a time, as CLUSTERS says
    assert took(4, 4, 0) == 4 + 4  # not known how many run at once
    assert took(7, 2, 6) == 5 + 5  # pairs


def test_sixteen_work_tiles_have_clusters_that_all_run_at_once():
    """An H100 ran clusters of four in 42.6 µs, and clusters of eight in 45.2: 15 at once."""
    p = Problem(464, 464, 128, batch=2, heads=16, kv_heads=2, causal=True, dtype="bfloat16")
    for eight, blocks in ((15, 4), (16, 8)):
        gpu = replace(H200, clusters=((2, 66), (4, 30), (8, eight)))
        assert passes_of(HOPPER, p, "flash2", gpu=gpu)[1].kernel.cluster == blocks


def test_dq_has_taller_tiles_where_that_is_faster():
    """An H100 took 19.7 µs instead of 23.5, and 23.1 instead of 21.6."""
    h100 = replace(H200, hbm_bandwidth=3352e9, clusters=((2, 66), (4, 30), (8, 15)))

    def tiling(problem, family=HOPPER, **how):
        made = passes_of(family, problem, "flash2", gpu=h100, **how)
        return Tiling.joined({one.stage.name: one.tables.schedule.tiling for one in made})

    p = Problem(512, 512, 128, heads=16, dtype="bfloat16", causal=True)
    assert tiling(p) == tiling(p, report="counts") == Tiling(64, 128, dq_rows=128)
    assert tiling(p, tiling=Tiling(64, 128)) == Tiling(64, 128)
    long = Problem(464, 464, 128, batch=2, heads=16, kv_heads=2, causal=True, dtype="bfloat16")
    assert tiling(long).dq_rows == 128  # as long as with 64: dK and dV end later
    beside = Problem(326, 326, 96, batch=2, heads=12, dtype="bfloat16")
    assert tiling(beside) == Tiling(64, 128)
    assert tiling(replace(p, head_dim=64, head_dim_v=64)) == Tiling(128, 128)
    cells = BlockMask(np.ones((8, 4), bool), 64, 128)
    assert tiling(replace(p, causal=False, block_mask=cells)) == Tiling(64, 128)


def test_clusters_leave_room_for_the_tiles_of_dq():
    """With taller tiles, dQ has half as many blocks beside the eight work tiles of dK and dV."""
    p = Problem(256, 256, 128, heads=16, kv_heads=4, dtype="bfloat16", causal=True)
    for dq_rows, blocks in ((64, 4), (128, 8)):
        _, dkdv, dq = passes_of(HOPPER, p, "flash2", tiling=Tiling(64, 128, dq_rows))
        assert (dkdv.kernel.cluster, len(dq.items)) == (blocks, 16 * 256 // dq_rows)


@pytest.fixture
def plain_times(monkeypatch):
    """Round times: dK and dV 2 + 2 per visit, dQ 1 + 1, fused 2 + 3, then 5; waiting dQ 7."""
    takes = (cost_model.Times(2, 2), cost_model.Times(1, 1), cost_model.Times(2, 3))
    monkeypatch.setattr(cost_model, "HOPPER_BACKWARD", {128: cost_model.BackwardTimes(*takes)})
    monkeypatch.setattr(cost_model, "DQ_OF_128_ROWS", {})
    monkeypatch.setattr(cost_model, "ADDING_UP", {64: 100.0, 128: 100.0})
    monkeypatch.setattr(cost_model, "CONVERTING", 5)
    monkeypatch.setattr(cost_model, "WAITING", 7)
    monkeypatch.setattr(cost_model, "CONVERTED", 1e9 * 1e6 / H200.hbm_bandwidth)


def forms(problem, multiprocessors):
    """µs of three passes and of the fused one."""
    gpu = replace(H200, multiprocessors=multiprocessors)
    return [
        cost_model.backward_microseconds.__wrapped__(
            passes_of(HOPPER, problem, algorithm, gpu=gpu), gpu
        )
        for algorithm in ("flash2", "flash2-fused")
    ]


@pytest.mark.usefixtures("plain_times")
def test_a_backward_takes_what_its_items_take_beside_each_other():
    """By hand: 256 tokens of 64 columns are two items of either pass, of two visits each."""
    p = Problem(256, 256, 64, dtype="bfloat16")
    converted = 256 * 64 * 10 / 1e9
    assert forms(p, 2) == [6 + 3 + 7, pytest.approx(8 + 5 + converted)]  # one of each on either
    assert forms(p, 3) == [3 + 3 + 7, pytest.approx(8 + 5 + converted)]  # both of dQ's on the third
    assert forms(p, 4) == [6, pytest.approx(8 + 5 + converted)]  # an SM for each
    assert forms(p, 1) == [12 + 6 + 7, pytest.approx(16 + 5 + converted)]
    many = replace(p, heads=100, kv_heads=100)
    assert forms(many, 4) == [100 * 18 / 4 + 7, pytest.approx(100 * 16 / 4 + 5 + 100 * converted)]
    shared = replace(p, heads=2)  # of two heads' visits; dQ's four items beside them
    assert forms(shared, 2) == [10 + 6 + 7, pytest.approx(14 + 5 + 2 * converted)]
    causal = replace(p, causal=True)  # 6 and 4; behind them 2 and 3
    assert forms(causal, 2) == [8 + 7, pytest.approx(8 + 5 + converted)]


@pytest.mark.usefixtures("plain_times")
def test_the_form_that_takes_less_is_the_one():
    few = Problem(256, 256, 64, dtype="bfloat16")
    many = replace(few, heads=100, kv_heads=100)
    for p, gpu in ((few, H200), (many, H200), (many, replace(H200, multiprocessors=4))):
        three, fused = forms(p, gpu.multiprocessors)
        assert HOPPER.fuses(p, gpu) is (fused < three)


def test_the_backward_is_fused_where_that_is_faster():
    """Rounds decide, and whether there is a kernel at all."""
    few = Problem(256, 256, 128, heads=16, dtype="bfloat16", causal=True)
    assert not HOPPER.fuses(few, H200)
    many = replace(few, heads=999, kv_heads=999)  # as many visits as work tiles
    assert not HOPPER.fuses(many, H200)
    assert HOPPER.fuses(replace(many, n_q=1024, n_kv=1024), H200)
    assert HOPPER.fuses(few, replace(H200, multiprocessors=8))
    long = Problem(4096, 4096, 192, heads=16, dtype="bfloat16", causal=True)
    assert HOPPER.fuses(long, H200)
    assert not HOPPER.fuses(replace(long, head_dim=193), H200)  # no room to send dQ off
    assert PORTABLE.fuses(few, H200)


def test_the_backward_is_fused_where_dq_would_wait_for_the_other_pass():
    """An H100 took 13.9 µs in three passes and 12.6 fused; with 24 heads nothing waits."""
    p = Problem(136, 136, 32, heads=56, causal=True, window=(64, 0), dtype="bfloat16")
    h100 = replace(H200, hbm_bandwidth=3352e9)
    assert HOPPER.fuses(p, h100)
    assert not HOPPER.fuses(replace(p, heads=24, kv_heads=24), h100)


@pytest.mark.parametrize("n", [160, 1600])
def test_the_backward_is_fused_where_three_passes_have_no_tile(n):
    """Rows of 80, which these lack, divide the block mask's cells."""
    cells = BlockMask(np.ones((n // 80, -(-n // 128)), bool), 80, 128)
    p = Problem(n, n, 128, dtype="bfloat16", block_mask=cells)
    assert HOPPER.refusal(p, None, H200, "backward", "flash2")
    assert HOPPER.refusal(p, None, H200, "backward", "flash2-fused") is None
    assert HOPPER.fuses(p, H200)


def test_every_tiling_offered_is_runnable():
    for p in PROBLEMS.values():
        if p.cu_seqlens_q is None and p.block_mask is None:
            for tiling in HOPPER.tilings(p, H200, "forward"):
                (one,) = passes_of(HOPPER, p, tiling=tiling)
                assert one.tables.schedule.tiling == tiling


class FakeDriver:
    """Stands in for libcuda: keeps what it was asked for."""

    def cuTensorMapEncodeTiled(self, to, dtype, rank, address, dims, strides, box, *_):
        self.asked = dtype, address.value, list(dims), list(strides), list(box)
        assert len(dims) == len(box) == rank == 1 + len(strides)
        # What the driver asks of these (cuTensorMapEncodeTiled).
        assert all(0 < size <= 1 << 32 for size in dims)
        assert all(step % 16 == 0 and 0 < step < 1 << 40 for step in strides)
        ctypes.memset(to, 7, 128)
        return 0


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(tensor_maps, "driver", lambda: fake)
    return fake


def test_tensor_maps_say_shape_strides_and_box(driver):
    p = Problem(300, 500, 72, 40, batch=3, heads=8, kv_heads=2, dtype="bfloat16")
    made = tensor_maps.encode(p, Box("v", 176, 64), 4096, (80_000, 40_000, 40))
    assert made.tobytes() == b"\x07" * 128
    bfloat16, float32 = 9, 7
    asked = (bfloat16, 4096, [40, 500, 2, 3], [80, 80_000, 160_000], [64, 176, 1, 1])
    assert driver.asked == asked
    tensor_maps.encode(p, Box("dq_acc", 64, 32), 512, (8 * 300 * 72, 300 * 72, 72))
    strides = [288, 86_400, 691_200]
    assert driver.asked == (float32, 512, [72, 300, 8, 3], strides, [32, 64, 1, 1])


def test_the_tensor_map_of_packed_heads_has_one_axis_more(driver):
    """A box has all heads of a group, for as many queries as make 64 rows."""
    p = Problem(300, 500, 72, 40, batch=3, heads=8, kv_heads=2, dtype="bfloat16")
    tensor_maps.encode(p, Box("q", 64, 64, heads=4), 4096, (200_000, 24_000, 80))
    strides = [48_000, 160, 192_000, 400_000]
    assert driver.asked == (9, 4096, [72, 4, 300, 2, 3], strides, [64, 4, 16, 1, 1])


@pytest.mark.parametrize("ends", [(0, 5, 5, 40, 47), (0, 3)])
@pytest.mark.parametrize("box_rows", [16, 64])
def test_the_copy_engine_stops_where_a_sequence_ends(driver, ends, box_rows):
    """Nor does a map begin before the tensor, where there may be no memory."""
    n, heads = ends[-1], 2
    p = Problem(n, n, 64, heads=heads, dtype="float16", cu_seqlens_q=ends, cu_seqlens_k=ends)
    base = 1 << 20
    tensor_maps.encode(p, Box("k", box_rows, 64), base, (heads * n * 64, n * 64, 64))
    _, address, sizes, steps, (_, box, *_) = driver.asked
    assert address == base
    assert sizes == [64, launch.ROUND, heads, launch.ROUND + 1, n + 1]
    assert box == box_rows
    for start, stop in pairwise(ends):
        for row in range(start, stop, box):
            # `place` of hopper/tile_scheduler.cuh: the box's first row, and which view
            first, head, view = launch.ROUND - stop + row, 1, stop
            at = (head, launch.ROUND, view)
            assert all(place < size for place, size in zip(at, sizes[2:], strict=True))
            moved = [
                (address + sum(x * step for x, step in zip((r, *at), steps, strict=True))) % 2**64
                for r in range(first, first + box)
                if r < sizes[1]
            ]
            asked = range(row, min(row + box, stop))
            assert moved == [base + 2 * 64 * (n * head + r) for r in asked]


def test_the_kernels_and_the_maps_agree_on_where_a_view_ends():
    text = (resources.files("flashsim.backends") / "kernels" / "hopper" / "ptx.cuh").read_text()
    assert 1 << int(re.search(r"ROUND = 1 << (\d+);", text)[1]) == launch.ROUND


def test_a_refused_tensor_map_says_what_to_do(driver, monkeypatch):
    monkeypatch.setattr(FakeDriver, "cuTensorMapEncodeTiled", lambda self, *args: 1)
    with pytest.raises(UnsupportedError, match=r"cannot address k.*kernel='portable'"):
        tensor_maps.encode(PROBLEMS["128"], Box("k", 128, 64), 4096, (1, 1, 1))


def test_kernels_say_that_they_need_hoppers_instructions():
    assert all("-arch=sm_90a" in k.options for k in kernels(PROBLEMS["128"]))
    (rows, _, _) = passes_of(HOPPER, PROBLEMS["128"], "flash2-fused")
    assert rows.kernel.name == "flash_delta"
    assert not any("-arch" in o for o in rows.kernel.options)
    assert isinstance(rows.kernel, launch.Kernel)


def engine():
    pytest.importorskip("cupy")
    from flashsim.backends.cupy_gpu import engine as cupy_engine

    return cupy_engine


def test_auto_takes_hoppers_kernels_where_they_run():
    chosen = engine()._family
    job = Job(PROBLEMS["192"], None, None, None)
    assert chosen(job, H200, "forward") is chosen(job, H200, "backward") is HOPPER
    assert chosen(job, A100, "forward") is PORTABLE
    assert chosen(replace(job, tiling=Tiling(64, 64)), H200, "forward") is PORTABLE
    assert chosen(replace(job, options={"kernel": "portable"}), H200, "forward") is PORTABLE
    assert chosen(replace(job, options={"kernel": "hopper"}), A100, "forward") is HOPPER


@pytest.mark.parametrize(
    ("d", "d_v", "keys", "turns"),
    [
        (128, 128, 16384, False),
        (128, 128, 1024, True),
        (64, 64, 16384, True),
        (128, 120, 16384, True),
    ],
)
def test_warpgroups_take_turns_but_at_128_columns_and_many_keys(d, d_v, keys, turns):
    problem = Problem(256, keys, d, head_dim_v=d_v, dtype="bfloat16")
    (one,) = passes_of(HOPPER, problem)
    assert dict(one.kernel.constants)["FS_TURNS"] == int(turns)


def test_the_first_visit_stores_dq_where_that_is_faster():
    """Few blocks may reach a row tile at once, and zeros must take a part of the time."""
    window = Problem(
        *(4096, 4096, 128), batch=4, heads=16, dtype="bfloat16", causal=True, window=(1023, 0)
    )
    assert HOPPER.stores_first(window, H200)
    delta, fused, convert = passes_of(HOPPER, window, "flash2-fused-first")
    assert all(dict(x.kernel.constants)["FS_FIRST"] == 1 for x in (delta, fused, convert))
    together = replace(window, causal=False, window=None)  # every work tile begins at row tile 0
    many_keys = replace(window, n_q=512, n_kv=8192, window=None)  # most work tiles do
    long = replace(window, n_q=32768, n_kv=32768, window=None)  # zeros take 1 % of the time
    for other in (together, many_keys, long, replace(window, head_dim=256)):
        assert not HOPPER.stores_first(other, H200)
    alternating = replace(window, batch=8, heads=32, kv_heads=4, window=None)
    (one,) = (x for x in passes_of(HOPPER, alternating, "flash2-fused") if x.kernel.boxes)
    assert dict(one.kernel.constants)["FS_IN_STEP"] == 1
    assert not HOPPER.stores_first(alternating, H200)
    cells = np.tri(16, dtype=bool)
    cells[:, -1] = False  # the last key tile has no visit
    for filled, stores in ((cells, True), (cells & False, False)):
        listed = replace(window, n_q=2048, n_kv=2048, causal=False, window=None)
        listed = replace(listed, block_mask=BlockMask(filled, 128, 128))
        assert HOPPER.stores_first(listed, H200) == stores
    with pytest.raises(UnsupportedError, match="needs a head_dim up to 192"):
        passes_of(HOPPER, replace(window, head_dim=256), "flash2-fused-first")
    with pytest.raises(TilingError, match="algorithm='flash2-fused-first'"):
        passes_of(PORTABLE, window, "flash2-fused-first")


def test_dq_is_stored_after_one_visit_where_that_is_faster():
    """By the time model; in order of its additions it never is."""
    few = Problem(128, 128, 64, heads=12, dtype="bfloat16")
    assert [HOPPER.stores_dq(few, H200, ordered=x) for x in (False, True)] == [False, True]
    many = replace(few, batch=8)
    assert HOPPER.stores_dq(many, H200, ordered=False)
    (only,) = passes_of(HOPPER, many, "flash2-once")
    assert only.kernel.boxes[-1].tensor == "dq"
    visits, options = "a row tile visits several or none", "needs a head_dim up to 128, and no"
    for other, why in (
        (replace(many, n_kv=129), visits),  # two visits
        (replace(many, n_kv=100, causal=True, n_q=300), visits),  # the first row tile has none
        (replace(many, head_dim=136), options),
        (replace(many, softcap=2.0), options),
    ):
        assert HOPPER.refusal(other, None, H200, "backward", "flash2-once")
        assert not HOPPER.stores_dq(other, H200, ordered=True)
        with pytest.raises(UnsupportedError, match=why):
            passes_of(HOPPER, other, "flash2-once")
    assert not PORTABLE.stores_dq(many, H200, ordered=True)
    with pytest.raises(TilingError, match="flash2-fused"):
        passes_of(PORTABLE, many, "flash2-once")
