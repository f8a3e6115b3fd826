"""The decode kernel's own source, run on a CPU (emulator.py): results are attention's of the live
keys, whatever lies beside them, and the bytes that it counts are those of its splits and tiles.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import flashsim
from flashsim import Problem, TraceError, UnsupportedError
from flashsim.backends.launch_policy import decode_kernels, decode_plan
from flashsim.backends.reports import decode_report as traces
from flashsim.trace.trace import Trace

pytest.importorskip("cupy")  # test_cuda_kernels wants it; nothing here does
import emulator
from barriers import barriers, left_out
from decode_cases import Case, moved, named, planned, simulated
from test_cuda_kernels import H200 as HOPPER

pytestmark = pytest.mark.promise("three counts equal", "twice plain attention's error")

GROUPED = {"heads": 8, "kv_heads": 2, "dtype": "bfloat16"}
CASES = {
    "one query": (Case(Problem(1, 400, 64, batch=2, **GROUPED), (400, 131)), 3),
    "empty and full": (Case(Problem(1, 300, 64, batch=3, **GROUPED), (0, 300, 1)), 2),
    "causal, row tiles": (
        Case(Problem(17, 300, 64, batch=2, causal=True, heads=2, dtype="float16"), (300, 9)),
        2,
    ),
    "window": (Case(Problem(4, 500, 64, batch=2, window=(70, 0), **GROUPED), (500, 77)), 2),
    "softcap, one key head": (
        Case(Problem(4, 200, 64, 40, heads=8, kv_heads=1, dtype="float16", softcap=2.0), (190,)),
        1,
    ),
    "padded rows": (Case(Problem(1, 200, 72, 80, batch=1, **GROUPED), (177,)), 2),
    "negative scale": (Case(Problem(1, 200, 64, scale=-0.2, **GROUPED), (177,)), 2),
    "pages of 1": (Case(Problem(1, 300, 64, batch=2, **GROUPED), (280, 3), page=1), 3),
    "pages of 3": (Case(Problem(1, 300, 64, batch=2, **GROUPED), (300, 140), page=3), 2),
    "pages of 16": (Case(Problem(4, 300, 64, 128, causal=True, **GROUPED), (263,), page=16), 2),
    "pages of 64": (Case(Problem(1, 400, 64, window=(100, 0), **GROUPED), (390,), page=64), 2),
}
AMPERE = emulator.Emulator(800)
#: As many multiprocessors and as much shared memory, but no clusters of blocks.
H200 = replace(HOPPER, compute_capability=(8, 0))


def held_by(made, p, x):
    """The arrays of a launch, but for its counts: results unwritten, and NaN beyond the parts."""
    held = {name: emulator.padded(x[name]) for name in "qkv"}
    held["o"] = emulator.unwritten(p, p.heads, p.n_q, p.head_dim_v)
    held["lse"] = emulator.unwritten(p, p.heads, p.n_q, 0)
    for name, n in zip(("o_part", "l_part"), made.partial_elements, strict=True):
        held[name] = np.full(n + 4, np.nan, np.float32)
    held["arrived"], held["items"] = np.zeros(made.counters, np.uint32), made.items
    held["table"] = np.ascontiguousarray(x.get("table", np.zeros((1, 1), np.int32)))
    return held


def point(record, held):
    """Write the arrays' addresses, and the tensors' strides, into a launch's record."""
    for name, array in held.items():
        if name in decode_kernels.TENSORS:
            strides = (s // array.itemsize for s in array.strides[:3])
            record[name] = (array.ctypes.data, *strides)
        else:
            record[name] = array.ctypes.data


def launch(machine, case, x, splits=None, gpu=H200, runs=1, reports=None):
    """out, LSE, the plan and what it counted, in bytes by tensor."""
    p = case.problem
    made = planned(case, gpu, splits, counts=True)
    held = held_by(made, p, x)
    held["visit_counts"] = np.zeros((made.walks, made.n_visits, decode_plan.SLOTS), np.uint32)
    blocks = len(made.items) * p.kv_heads * made.row_tiles
    held["item_counts"] = np.zeros((blocks, decode_plan.SLOTS), np.uint32)
    record = decode_plan.record(made, held["table"].shape[1], len(held["k"]))
    functions = emulator.read_by_functions(p, x)
    emulator.fill_in(record, made.kernel, p, functions)
    point(record, held)
    for _ in range(runs):
        record["items"] = made.items.ctypes.data
        machine.run(made.kernel, record, made.grid, held.values())
        if made.merge and len(merges := made.merges):
            record["items"] = merges.ctypes.data
            machine.run(made.merge, record, made.merge_grid, held.values())
        assert not held["arrived"].any(), "counters are back at 0"
    if reports is not None:
        items = held["item_counts"].reshape(-1, made.row_tiles, decode_plan.SLOTS)
        reports |= {"visit_counts": held["visit_counts"], "item_counts": items}
    totals = dict(zip(decode_plan.VISIT_SLOTS, held["visit_counts"].sum((0, 1)), strict=False))
    totals |= dict(zip(decode_plan.ITEM_SLOTS, held["item_counts"].sum(0), strict=False))
    out = held["o"][..., : p.head_dim_v]
    assert not held["o"][..., p.head_dim_v :].astype(bool).any(), "padding"
    return out, held["lse"], made, {name: int(n) for name, n in totals.items()}


@pytest.mark.parametrize("name", CASES)
def test_values_and_counted_bytes(name):
    case, splits = CASES[name]
    x = case.make()
    out, lse, made, counted = launch(AMPERE, case, x, splits)
    case.check(x, out, lse)
    assert counted == moved(made, case)
    if made.row_tiles == 1:
        assert counted == simulated(made, case, x) == simulated(made, case)


#: Shared prefixes, which test_decode_launch.py launches.
CASCADES = {
    "one query": (Case(Problem(1, 400, 64, batch=3, **GROUPED), (400, 131, 128), prefix=128), 3),
    "four, causal, pages": (
        Case(Problem(4, 300, 64, batch=5, causal=True, **GROUPED), (300, 67, *(99,) * 3), 16, 64),
        2,
    ),
    "several row tiles": (
        Case(Problem(3, 300, 128, batch=6, heads=16, kv_heads=1, dtype="float16"), (290,) * 6,
             prefix=200),
        1,
    ),
    "chosen": (Case(Problem(1, 900, 64, 40, batch=2, **GROUPED), (900, 840), 3, 801), None),
}  # fmt: skip


CLUSTERS = {
    "two": (Case(Problem(1, 400, 64, batch=2, **GROUPED), (400, 280)), 2),
    "four, pages": (Case(Problem(4, 600, 64, batch=2, causal=True, **GROUPED), (600, 590), 3), 4),
    "eight, padded": (Case(Problem(1, 1100, 72, 40, **GROUPED), (1090,)), 8),
    "two, row tiles": (Case(Problem(20, 300, 128, heads=2, dtype="float16"), (290,)), 2),
}
HOPPERS = emulator.Emulator(900)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_merges_its_splits(name):
    case, splits = CLUSTERS[name]
    x, gpu = case.make(), HOPPER
    out, lse, made, counted = launch(HOPPERS, case, x, splits, gpu)
    assert made.cluster == splits
    assert made.slots == 0, "no part goes to HBM"
    case.check(x, out, lse)
    assert counted == moved(made, case)


CLUSTER_FAULTS = {
    "a part for another rank": ("t.share[own.rank][place]", "t.share[own.rank ^ FAULT][place]"),
    "LSE to one block": ("to < CLUSTER; ++to)", "to < (FAULT ? 1 : CLUSTER); ++to)"),
    "a lost split": ("s < CLUSTER; ++s) {", "s < CLUSTER - FAULT; ++s) {"),
    "C0": ("cluster_wait();  // C0", "if (!FAULT) cluster_wait();  // C0"),
    "C1": (
        "cluster_arrive(), cluster_wait();  // C1",
        "if (!FAULT) cluster_arrive(), cluster_wait();  // C1",
    ),
}
FAULTY_CLUSTERS = emulator.Faulty(900, CLUSTER_FAULTS)


@pytest.mark.parametrize("fault", CLUSTER_FAULTS)
def test_faults_of_a_cluster_are_found(fault):
    notices(FAULTY_CLUSTERS, fault, *CLUSTERS["four, pages"], HOPPER)


TRACED = {
    "one query": (Problem(1, 400, 64, batch=2, **GROUPED), (400, 280), 0, 2),
    "whole": (Problem(1, 300, 64, batch=3, **GROUPED), (0, 300, 1), 0, 1),
    "pages, causal": (Problem(4, 400, 64, batch=2, causal=True, **GROUPED), (390, 263), 3, 2),
    "window": (Problem(4, 500, 64, window=(170, 0), **GROUPED), (500,), 16, 2),
    "row tiles": (Problem(20, 200, 64, heads=8, kv_heads=1, dtype="bfloat16"), (190,), 0, 2),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_is_the_simulators_event_by_event(name):
    p, lengths, page, splits = TRACED[name]
    case, reports = Case(p, lengths, page), {}
    x = case.make()
    made = launch(AMPERE, case, x, splits, reports=reports)[2]
    schedule = traces.walk_of(made, lengths, page)
    found = traces.stages(made, schedule, **reports)
    table = {"block_table": x["table"]} if page else {}
    trace = flashsim.run(
        x["q"], x["k"], x["v"], algorithm="flash-decode", cache_seqlens=lengths, splits=splits,
        causal=p.causal, window=p.window, tiling=schedule.tiling, trace=True, **table,
    ).trace  # fmt: skip
    assert schedule.problem == trace.problem
    for ours, theirs in zip(found, trace.stages, strict=True):
        assert (ours.repeat, ours.stride) == (theirs.repeat, theirs.stride)
        np.testing.assert_array_equal(ours.events, theirs.events, err_msg=ours.name)


def test_sequences_that_are_divided_differently_have_a_trace(tmp_path):
    case, reports = Case(Problem(1, 900, 64, batch=3, **GROUPED), (900, 400, 0)), {}
    made = launch(AMPERE, case, case.make(), reports=reports)[2]
    assert len({*made.splits}) == 3, made.splits
    schedule = traces.walk_of(made, case.lengths, 0)
    assert schedule.part_counts.tolist() == [*made.splits]
    found = traces.stages(made, schedule, **reports)
    device = flashsim.Device.get("H200")
    trace = Trace(schedule.problem, device, decode_plan.ALGORITHM, "forward", "cupy", found)
    assert named(trace.transfers) == moved(made, case)
    trace.save(tmp_path / "trace.npz")
    again = Trace.load(tmp_path / "trace.npz")
    assert again.schedule.split == made.split
    assert again.transfers == trace.transfers


def test_what_a_trace_cannot_say():
    def walk(p, lengths, splits=None):
        return traces.walk_of(decode_plan.plan(p, lengths, H200, splits), lengths, 0)

    with pytest.raises(UnsupportedError, match="row tiles, but the kernel computes"):
        walk(Problem(300, 600, 64, causal=True, **GROUPED), (600,), 1)
    with pytest.raises(UnsupportedError, match="no sequence has a key"):
        walk(Problem(1, 600, 64, **GROUPED), (0,))
    broken = {}
    case = Case(*TRACED["one query"][:2])
    made = launch(AMPERE, case, case.make(), 2, reports=broken)[2]
    broken["visit_counts"][1, 0, 0] += 2  # of the second key head
    with pytest.raises(TraceError, match=r"stage 'split', .* head 1 reported"):
        traces.stages(made, traces.walk_of(made, case.lengths, 0), **broken)


@pytest.mark.parametrize(("n_q", "length", "splits"), [(1, 300, 3), (5, 300, 2), (1, 1150, 17)])
def test_a_merge_takes_what_it_fetched_ahead_for_its_first_parts_only(n_q, length, splits):
    """A part a thread, several, more splits than it has under way at once."""
    case = Case(Problem(n_q, 1200, 64, heads=8, kv_heads=1, dtype="bfloat16"), (length,), page=3)
    x, small = case.make(), replace(H200, multiprocessors=0)  # of 4 warps, so of 64 keys
    out, lse, made, counted = launch(AMPERE, case, x, splits, small)
    assert made.splits == (splits,)
    case.check(x, out, lse)
    assert counted == moved(made, case)


def test_a_launch_again_finds_its_counters_at_0():
    case, splits = CASES["one query"]
    x = case.make()
    once, twice = (launch(AMPERE, case, x, splits, runs=n)[0] for n in (1, 2))
    np.testing.assert_array_equal(once.view(np.uint16), twice.view(np.uint16))


def test_small_blocks_of_a_busy_gpu():
    """Where the batch fills the multiprocessors: 4 warps, no split."""
    small = replace(H200, multiprocessors=3)
    case = Case(Problem(1, 200, 128, batch=3, **GROUPED), (200, 150, 90))
    x = case.make()
    out, lse, made, counted = launch(AMPERE, case, x, gpu=small)
    assert (made.kernel.threads, made.splits) == (128, (1, 1, 1))
    case.check(x, out, lse)
    assert counted == moved(made, case)


def test_a_page_that_the_pool_has_not_is_not_read_and_shows():
    case, splits = CASES["pages of 16"]
    x = case.make()
    x["table"][0, 2] = len(x["k"])
    out, lse, *_ = launch(AMPERE, case, x, splits)
    assert np.isnan(out.astype(np.float32)).all()
    assert np.isnan(lse).all()


FAULTS = {
    "a lost split": ("float w = s + u < splits", "float w = s + u < splits - FAULT"),
    "a wrong base of LSE": ("top / LOG2E + logf(sum)", "top / (FAULT ? 1 : LOG2E) + logf(sum)"),
    "a page off by one": (
        "= pages[0] * x.batch + within",
        "= (pages[0] ^ FAULT) * x.batch + within",
    ),
    "keys of the next page": ("% max(PAGE, 1);", "% max(PAGE, 1) / (1 + FAULT);"),
    "no waiting for a tile": (
        "cp_async_wait_group<STAGES - 2>();",
        "if (!FAULT) cp_async_wait_group<STAGES - 2>();",
    ),
    "a maximum not carried over": ("l[i][h] *= alpha[h];", "l[i][h] *= FAULT ? 1 : alpha[h];"),
    "length forgotten": ("int hi = own.length - 1;", "int hi = own.length - 1 + 8 * FAULT;"),
}
#: Where a page has all of a warp's keys.
ONE_PAGE_FAULTS = {
    "a page off by one": ("PAGE ? pages[0] * x.batch", "PAGE ? (pages[0] ^ FAULT) * x.batch"),
    "keys from the page's first": (
        "first % max(PAGE, 1) * x.row",
        "!FAULT * (first % max(PAGE, 1)) * x.row",
    ),
    "the page of the tile before": (
        "pages[AHEAD - 1] = next;",
        "if (!FAULT) pages[AHEAD - 1] = next;",
    ),
    "a table row too long": (
        "i64(own.batch) * a.table_row",
        "i64(own.batch) * (a.table_row + FAULT)",
    ),
}
SHARED_FAULTS = {
    "own keys from the first on": ("FS_CASCADE && !of_all ?", "FS_CASCADE && !of_all && !FAULT ?"),
    "a prefix of one sequence's queries": (
        "(of_all ? a.batch : 1)",
        "(of_all && !FAULT ? a.batch : 1)",
    ),
    "a diagonal of the prefix": ("offset = of_all ?", "offset = FAULT ? 0 : of_all ?"),
    "one slot for all": ("own.slot + several", "own.slot + !FAULT * several"),
    # of the merge
    "a prefix counted twice": ("? s * shared.y + batch", "? !FAULT * s * shared.y + batch"),
    "a lost part": ("splits = shared.x + of.z", "splits = shared.x + of.z - FAULT"),
    "another base of LSE": ("top + logf(sum)", "!FAULT * top + logf(sum)"),
    "weights not normalised": ("1.0f / sum", "1.0f / (FAULT ? 1 : sum)"),
}
DECODE = "portable/decode.cu"
FAULTY = emulator.Faulty(800, FAULTS | left_out(DECODE))
FAULTY_PAGES = emulator.Faulty(800, ONE_PAGE_FAULTS)
FAULTY_PREFIX = emulator.Faulty(800, SHARED_FAULTS)


@pytest.mark.parametrize("fault", SHARED_FAULTS)
def test_faults_with_a_shared_prefix_are_found(fault):
    p = Problem(4, 400, 64, batch=5, causal=True, **GROUPED)
    notices(FAULTY_PREFIX, fault, Case(p, (400, 390, 280, 270, 267), 16, 256))


def test_a_merge_waits_for_the_parts_that_it_merges():
    """On Hopper it may begin before the decode kernel ends."""
    p = Problem(1, 400, 64, batch=3, **GROUPED)
    case = Case(p, (400, 390, 280), 16, 256)
    x = case.make()
    out, lse, made, *_ = launch(emulator.Emulator(900), case, x, gpu=HOPPER)
    assert dict(made.merge.constants)["FS_OVERLAP"] == 1
    case.check(x, out, lse)


def test_the_barriers_are_these():
    assert sorted(barriers(DECODE)) == ["B0", "B1", "B2", "B3", "B4", "B5"]


#: B3 puts a block's parts before its arrival, for blocks that run at once: not on a CPU.
@pytest.mark.parametrize("fault", [*FAULTS, "B0", "B1", "B2", "B4", "B5"])
def test_faults_are_found_and_barriers_are_needed(fault):
    notices(FAULTY, fault, PAGED[3])


@pytest.mark.parametrize("fault", ONE_PAGE_FAULTS)
def test_faults_are_found_in_pages_of_whole_warps(fault):
    notices(FAULTY_PAGES, fault, PAGED[32])


#: Four tiles and more a split, so that stages are filled again.
PAGED = {n: Case(Problem(1, 900, 64, batch=2, **GROUPED), (840, 140), page=n) for n in (3, 32)}


def notices(machine, fault, *case):
    """The kernels are right without a fault, and with this one they are not."""
    right(machine, "", *case)
    with pytest.raises(AssertionError):
        right(machine, fault, *case)


@cache  # without a fault once for all of them
def right(machine, fault, case, splits=2, gpu=H200):
    machine.seeded, x = fault, case.make()
    out, lse, *_ = launch(machine, case, x, splits, gpu)
    case.check(x, out, lse)
