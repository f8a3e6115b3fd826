"""The decode kernel that reads live lengths as it runs, on a CPU (emulator.py): one launch serves
every length, caches may begin later (left padding), and sequences may name their cache entry.
"""

from dataclasses import replace

import numpy as np
import pytest

from flashsim import Problem, UnsupportedError
from flashsim.backends.launch_policy import decode_plan

pytest.importorskip("cupy")  # test_cuda_kernels wants it; nothing here does
import emulator
from decode_cases import Case
from test_cuda_kernels import H200 as HOPPER
from test_emulated_decode import AMPERE, GROUPED, H200, held_by, point

pytestmark = pytest.mark.promise("twice plain attention's error")

ONE = Problem(1, 400, 64, batch=3, **GROUPED)
PAGED = Problem(4, 300, 64, batch=2, causal=True, **GROUPED)
WINDOW = Problem(4, 500, 64, batch=2, window=(270, 0), **GROUPED)
#: The problem, page, splits, and several batches of lengths for the same launch.
CASES = {
    "one query": (ONE, 0, 3, [(400, 131, 5), (1, 0, 400), (200, 200, 200)]),
    "whole": (ONE, 0, 1, [(400, 131, 5)]),
    "pages": (PAGED, 16, 2, [(300, 7), (33, 290)]),
    "pages of 3": (PAGED, 3, 2, [(299, 8)]),
    "window": (WINDOW, 0, 3, [(500, 77), (71, 74)]),
}
HOPPERS = emulator.Emulator(900)


def launched(machine, gpu, case, x, splits, starts=None, entries=None, **given):
    """out and the LSE of a launch whose plan does not know the lengths."""
    p = case.problem
    made = decode_plan.dynamic(p, gpu, splits, case.page)
    held = held_by(made, p, x)
    for name, values in (("lengths", case.lengths), ("starts", starts), ("entries", entries)):
        if values is not None and given.get(name, True):
            held[name] = np.array(values, np.int32)
    record = decode_plan.record(made, held["table"].shape[1], len(held["k"]))
    point(record, held)
    machine.run(made.kernel, record, made.grid)
    assert not held["arrived"].any(), "counters are back at 0"
    return held["o"][..., : p.head_dim_v], held["lse"], made


@pytest.mark.parametrize("name", CASES)
def test_one_launch_serves_every_length(name):
    p, page, splits, several = CASES[name]
    for lengths in several:
        case = Case(p, lengths, page)
        x = case.make()
        out, lse, made = launched(AMPERE, H200, case, x, splits)
        assert made.splits == (splits,) * p.batch
        case.check(x, out, lse)


def test_a_cluster_merges_parts_that_may_be_empty():
    case = Case(ONE, (400, 20, 0))
    x = case.make()
    out, lse, made = launched(HOPPERS, HOPPER, case, x, 4)
    assert made.cluster == 4
    case.check(x, out, lse)


def test_without_lengths_all_rows_of_the_cache_are_live():
    case = Case(ONE, (400,) * 3)
    x = case.make()
    case.check(x, *launched(AMPERE, H200, case, x, 2, lengths=False)[:2])


@pytest.mark.parametrize("p", [ONE, replace(WINDOW, batch=3, n_kv=400)], ids=["plain", "window"])
def test_caches_that_begin_later_in_entries_of_their_own(p):
    """What lies before a start, after a length and in other entries is NaN."""
    stops, starts, entries = (390, 131, 60), (0, 100, 60), (4, 0, 2)
    case = Case(p, tuple(b - a for a, b in zip(starts, stops, strict=True)))
    x = case.make()
    pool = {}
    for name in "kv":
        pool[name] = np.full((5, *x[name].shape[1:]), np.nan, x[name].dtype)
        for b, (start, stop, entry) in enumerate(zip(starts, stops, entries, strict=True)):
            pool[name][entry, :, start:stop] = x[name][b, :, : stop - start]
    shown = replace(case, lengths=stops)
    out, lse, _ = launched(AMPERE, H200, shown, x | pool, 3, starts, entries)
    case.check(x, out, lse)


FAULTS = {
    "lengths not read": ("a.lengths ? min(", "a.lengths && !FAULT ? min("),
    "a part too far": ("* item.y / splits", "* (item.y + FAULT) / splits"),
    "a lost last part": ("* (item.y + 1) / splits", "* (item.y + !FAULT) / splits"),
    "a start forgotten": ("&& a.starts)", "&& a.starts && !FAULT)"),
    "another's entry": ("&& a.entries)", "&& a.entries && !FAULT)"),
    "a window from too far on": ("- a.n_q - a.left, 0)", "- a.n_q - a.left * !FAULT, 0)"),
}
FAULTY = emulator.Faulty(800, FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, monkeypatch):
    problem = replace(WINDOW, batch=3, n_kv=400) if "window" in fault else ONE
    monkeypatch.setattr(FAULTY, "seeded", "")
    monkeypatch.setitem(globals(), "AMPERE", FAULTY)
    test_caches_that_begin_later_in_entries_of_their_own(problem)
    FAULTY.seeded = fault
    with pytest.raises(AssertionError):
        test_caches_that_begin_later_in_entries_of_their_own(problem)


def test_latent_attention_takes_no_lengths_of_the_gpu():
    p = Problem(1, 400, 576, 512, heads=16, kv_heads=1, dtype="bfloat16", latent=True)
    with pytest.raises(UnsupportedError, match="pass a list of integers"):
        decode_plan.dynamic(p, HOPPER)
