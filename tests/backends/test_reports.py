"""From what a kernel reports to a trace: heads that differ, and cycles as nanoseconds.

That the bytes become the simulator's events is for test_emulated.py, with reports of real kernels.
"""

import numpy as np
import pytest

from flashsim import Problem, Tiling
from flashsim.backends.launch import kernel as launch
from flashsim.backends.reports import counts, timeline
from flashsim.errors import TraceError
from flashsim.schedule import plans
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import Split

pytestmark = pytest.mark.promise("three counts equal")

TILING = Tiling(32, 16)


def test_heads_that_disagree_are_an_error():
    p = Problem(70, 90, 16, heads=2, causal=True)
    (stage,) = plans.stages(p, "flash2", "forward")
    schedule = Schedule(p, TILING)
    tiles = np.zeros((2, schedule.t_r, launch.SLOTS), np.uint32)
    visits = np.full((2, schedule.n_visits, launch.SLOTS), 1024, np.uint32)
    visits[1, 2, 0] += 16
    with pytest.raises(TraceError, match=r"head 1 reported 1,040 B and head 0 reported 1,024 B"):
        counts.stage_trace(stage, schedule, tiles, visits)


def stamped(schedule):
    """The spans of two loops over 2 row tiles x 3 visits."""
    blocks = np.zeros((2, 2, 1, launch.TILE_STAMPS), np.uint64)
    visits = np.zeros((2, schedule.n_visits, 1, launch.VISIT_STAMPS), np.uint64)
    for walk in range(2):
        for tile in range(2):
            sm = walk * 2 + tile
            zero, origin = 10_000 * sm, 1_000_000 + 100 * sm  # every SM's counter runs on its own
            blocks[walk, tile] = (sm, zero, origin, zero + 200_000, origin + 100_000)  # 2 GHz
            for n in range(3):
                start = zero + 1_000 + 20_000 * n
                visits[walk, 3 * tile + n] = start + np.arange(5) * 2_000
    return timeline.spans(0, schedule, "row", blocks, visits, clock_khz=1_000_000)


def test_spans_of_packed_heads_name_the_first_head_of_their_group():
    split = Split(pack_gqa=True)
    packed = stamped(Schedule(Problem(32, 48, 16, heads=4, kv_heads=2), TILING, split=split))
    apart = stamped(Schedule(Problem(64, 48, 16, heads=2), TILING))
    np.testing.assert_array_equal(packed["head"], 2 * apart["head"])
    for name in ("i", "j", "visit", "start_ns", "end_ns"):
        np.testing.assert_array_equal(packed[name], apart[name])


def test_timeline_turns_cycles_into_nanoseconds():
    spans = stamped(Schedule(Problem(64, 48, 16, heads=2), TILING))

    loads = spans[spans["phase"] == 1]
    assert len(spans) == 2 * 6 * 5 + 2 * 2
    assert set((loads["end_ns"] - loads["start_ns"]).tolist()) == {1_000}
    first = loads[(loads["head"] == 1) & (loads["visit"] == 0)][0]
    assert (first["sm"], first["i"], first["j"], first["start_ns"]) == (2, 0, 0, 1_000_200 + 500)
    store = spans[(spans["phase"] == 5) & (spans["head"] == 0) & (spans["i"] == 1)][0]
    assert store["end_ns"] == 1_000_100 + 100_000
    assert store["start_ns"] == 1_000_100 + (1_000 + 40_000 + 8_000) // 2
