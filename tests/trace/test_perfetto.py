"""Chrome trace events: they load, nest within each thread, and add up."""

import gzip
import json
from collections import defaultdict

import numpy as np
import pytest
import viz_cases as cases

import flashsim
from flashsim.errors import OptionError
from flashsim.schedule.names import TRANSFERS
from flashsim.trace import perfetto, timeline

pytestmark = pytest.mark.promise("traces round-trip")


def load(trace, tmp_path, **options):
    path = trace.to_perfetto(tmp_path / "trace.json", **options)
    return json.loads(path.read_text())["traceEvents"]


def nanoseconds(microseconds):
    """What Perfetto makes of a time; anything finer is lost, start and duration apart."""
    ticks = round(1000 * microseconds)
    assert microseconds == ticks / 1000
    return ticks


def assert_nested(events):
    """Within a thread id, any two slices are disjoint or one holds the other, to the nanosecond."""
    threads = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0
            start = nanoseconds(e["ts"])
            threads[e["tid"]].append((start, start + nanoseconds(e["dur"])))
    for slices in threads.values():
        stack = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)
    return threads


@pytest.mark.parametrize(("algorithm", "direction"), cases.PASSES)
def test_simulated_slices_nest_and_counters_add_up(algorithm, direction, tmp_path):
    trace = cases.trace(algorithm, direction)
    events = load(trace, tmp_path)
    assert_nested(events)
    moved = [e["args"]["bytes"] for e in events if e["name"] == "HBM"]
    assert moved == sorted(moved)
    assert moved[-1] == trace.bytes()
    held = [e["args"]["bytes"] for e in events if e["name"] == "SRAM"]
    assert max(held, default=0) == trace.peak_sram()
    slices = [e for e in events if e["ph"] == "X"]
    assert sum("visit (" in e["name"] for e in slices) == trace.n_visits
    assert sum(e["args"]["bytes"] for e in slices if "HBM" in e["cat"]) == trace.bytes()


def test_blocks_spread_over_multiprocessors(tmp_path):
    events = load(cases.trace(), tmp_path)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {named[n] for n in range(6)} == {"SM"}  # six row tiles, each on an SM of its own
    places = {
        e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"
    }
    totals = next(pid for pid, name in named.items() if name == "totals")
    assert sorted(places, key=places.get) == [totals, *range(6)]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == set(perfetto.PIPES)


def test_heads(tmp_path):
    trace = cases.result(n=32, heads=3).trace
    for heads, shown in ((1, {0}), (2, {0, 1}), (9, {0, 1, 2})):
        events = load(trace, tmp_path, heads=heads)
        assert {e["args"]["head"] for e in events if e["ph"] == "X"} == shown
    with pytest.raises(OptionError, match="heads= must be a positive integer, got 0"):
        trace.to_perfetto(tmp_path / "x.json", heads=0)


@pytest.mark.parametrize("make", [cases.trace, cases.with_roles])
def test_no_thread_has_the_id_of_a_process(make, tmp_path):
    """Viewers take such a thread for the main one of that process, under whatever name."""
    events = [e for e in load(make(), tmp_path) if e["ph"] == "X"]
    assert not {e["tid"] for e in events} & {e["pid"] for e in events}


def counters(events, name):
    return [(e["pid"], e["ts"], e["args"]["bytes"]) for e in events if e["name"] == name]


def test_real_timelines_nest_although_blocks_share_a_multiprocessor(tmp_path):
    trace = cases.with_timeline(sm_count=2, shared=2)
    events = load(trace, tmp_path)
    threads = assert_nested(events)
    assert len(threads) == 4  # two SMs, two blocks each
    assert sum(len(slices) for slices in threads.values()) == len(trace.timeline)
    visits = [e for e in events if e["name"].startswith("visit (")]
    assert len(visits) == trace.n_visits
    assert min(e["ts"] for e in visits) == 0
    assert visits[0]["dur"] == pytest.approx(0.64)
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"block 0", "block 1"}


def test_a_block_keeps_its_place(tmp_path):
    trace = cases.with_timeline(sm_count=2, shared=2)
    places = defaultdict(set)
    for e in load(trace, tmp_path):
        if e["ph"] == "X":
            places[e["args"]["i"]].add(e["tid"])
    assert [len(found) for found in places.values()] == [1] * trace.schedule.t_r


def test_roles_and_overlapping_visits_nest(tmp_path):
    trace = cases.with_roles()
    events = load(trace, tmp_path)
    threads = assert_nested(events)
    assert len(threads) == 5 * trace.schedule.t_r  # a block an SM: producer, twice a consumer's two
    assert sum(len(slices) for slices in threads.values()) == len(trace.timeline)


@pytest.mark.parametrize("timed", [cases.with_roles, cases.with_timeline])
def test_real_counters(timed, tmp_path):
    trace = timed()
    events = load(trace, tmp_path)
    moved = [nbytes for _, _, nbytes in counters(events, "HBM")]
    assert moved == sorted(moved)
    stored = timed is cases.with_roles  # the other times no stores, so Q and O are not counted
    by_rows = sum(trace.bytes(None, tensor) for tensor in "QOL")
    assert moved[-1] == trace.bytes() - (0 if stored else by_rows)
    held = counters(events, "SRAM")
    together = 1 if stored else 2  # blocks on an SM
    assert max(nbytes for _, _, nbytes in held) == together * trace.peak_sram()
    assert {nbytes for sm, _, nbytes in held[-1:]} == {0}


def test_bundled_gpu_traces(tmp_path):
    for name, passes in (("h200-forward", 0), ("h200-backward", 1)):
        trace = flashsim.load_sample_trace(name)
        path = trace.to_perfetto(tmp_path / f"{name}.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        threads = assert_nested(events)
        assert sum(len(slices) for slices in threads.values()) == len(trace.timeline)
        stage = trace.stages[passes]
        moved = np.isin(stage.events["op"], TRANSFERS)
        total = int(stage.events["bytes"][moved].sum()) * stage.repeat
        assert counters(events, "HBM")[-1][2] == total


def test_a_producer_that_runs_ahead_takes_no_place():
    trace = flashsim.load_sample_trace("h200-backward")
    names = timeline.rows(trace, trace.timeline).names
    assert names == ("producer", "consumer 0", "consumer 1")  # one block an SM at a time


def test_the_nesting_check_can_fail():
    for second in ({"ts": 1, "dur": 2}, {"ts": 1, "dur": 1.0004}, {"ts": 1.999, "dur": 0.002}):
        overlap = [{"ts": 0, "dur": 2}, second]
        with pytest.raises(AssertionError):
            assert_nested([{"ph": "X", "tid": 1, **times} for times in overlap])


def test_needs_no_matplotlib():
    import subprocess
    import sys

    code = "import sys, flashsim.trace.perfetto; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
