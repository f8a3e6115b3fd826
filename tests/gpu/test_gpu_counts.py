"""From what a kernel reports to a trace, on the CPU: an honest report gives the simulator's events.

The reports are made here by walking the schedule; that real kernels make the same ones is for
tests/gpu/test_cupy.py, on a GPU.
"""

import numpy as np
import pytest

import flashsim
from flashsim import Problem, Tiling
from flashsim.backends.launch import kernel as launch
from flashsim.backends.reports import counts, timeline
from flashsim.errors import TraceError
from flashsim.problem.masks import BlockMask
from flashsim.schedule import plans
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import Split

pytestmark = pytest.mark.promise("three counts equal")

PROBLEMS = {
    "plain": Problem(70, 90, 16, heads=2),
    "causal": Problem(70, 90, 16, heads=2, causal=True),
    "window": Problem(90, 70, 16, heads=2, window=(20, 3), dtype="float16"),
    "gqa": Problem(33, 65, 16, 24, batch=2, heads=4, kv_heads=2, causal=True, dtype="float16"),
    "softcap": Problem(33, 65, 16, heads=2, softcap=5.0),
    "varlen": Problem(
        70, 90, 16, heads=2, causal=True, cu_seqlens_q=(0, 30, 30, 70), cu_seqlens_k=(0, 40, 45, 90)
    ),
    "blocks": Problem(
        64, 96, 16, heads=2, block_mask=BlockMask(np.eye(2, 3, dtype=bool), 32, 32), causal=True
    ),
}
TILING = Tiling(32, 16)


def honest_report(problem, stage, schedule, fused):
    """What the threads of a correct kernel say: bytes of the parts of tiles that exist."""
    e, d, dv = problem.itemsize, problem.head_dim, problem.head_dim_v
    repeat, stride = plans.heads_of(stage, problem)
    outer = schedule.t_r if stage.outer == "queries" else schedule.t_c
    tiles = np.zeros((repeat, outer, launch.SLOTS), np.uint32)
    visits = np.zeros((repeat * stride, schedule.n_visits, launch.SLOTS), np.uint32)
    for t in range(outer):
        cut = schedule.row_slice(t) if stage.outer == "queries" else schedule.col_slice(t)
        n = cut.stop - cut.start
        steps = {
            "forward": (n * d * e, n * dv * e, n * 4),
            "delta": (n * dv * e, n * dv * e, *[n * 4] * (1 + problem.dlse), n * d * 4 * fused),
            "dkdv": (n * d * e, n * dv * e, n * d * e, n * dv * e),
            "fused": (n * d * e, n * dv * e, n * d * e, n * dv * e),
            "dq": (n * d * e, n * dv * e, n * 4, n * 4, n * d * e),
            "convert": (n * d * 4, n * d * e),
        }[stage.name]
        tiles[:, t, : len(steps)] = steps
        if stage.name in ("delta", "convert"):
            continue
        for v in schedule.visits(t):
            r, c = v.rows.stop - v.rows.start, v.cols.stop - v.cols.start
            moved = (c * d * e, c * dv * e)
            if stage.outer == "keys":
                moved = (r * d * e, r * dv * e, r * 4, r * 4, r * d * 4 if fused else 0)
            visits[:, v.index, : len(moved)] = moved
    return tiles, visits


@pytest.mark.parametrize("key_order", ["ascending", "descending"])
@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
@pytest.mark.parametrize("name", [*PROBLEMS, "dlse"])
def test_an_honest_report_gives_the_simulators_events(name, algorithm, key_order):
    p = PROBLEMS["gqa"] if name == "dlse" else PROBLEMS[name]
    arrays = [
        np.ones((p.batch, h, n, d), p.dtype)
        for h, n, d in (
            (p.heads, p.n_q, p.head_dim),
            (p.kv_heads, p.n_kv, p.head_dim),
            (p.kv_heads, p.n_kv, p.head_dim_v),
        )
    ]
    result = flashsim.run(
        *arrays,
        algorithm=algorithm,
        causal=p.causal,
        window=p.window,
        softcap=p.softcap,
        block_mask=p.block_mask,
        cu_seqlens_q=p.cu_seqlens_q,
        cu_seqlens_k=p.cu_seqlens_k,
        tiling=TILING,
        key_order=key_order,
        trace=True,
    )
    dlse = result.lse if name == "dlse" else None
    backward = result.backward(result.out, dlse=dlse, tiling=TILING)
    assert backward.trace.problem.dlse == (name == "dlse")
    fused = algorithm == "flash2-fused"
    for direction, simulated in (("forward", result.trace), ("backward", backward.trace)):
        p = simulated.problem
        for number, stage in enumerate(plans.stages(p, algorithm, direction)):
            schedule = Schedule(p, TILING, stage.outer, key_order)
            report = honest_report(p, stage, schedule, fused)
            made = counts.stage_trace(stage, schedule, *report)
            expected = simulated.stages[number]
            assert (made.name, made.repeat, made.stride) == (
                expected.name,
                expected.repeat,
                expected.stride,
            )
            np.testing.assert_array_equal(made.events, expected.events)


def test_a_kernel_that_moves_too_much_shows():
    p = PROBLEMS["causal"]
    (stage,) = plans.stages(p, "flash2", "forward")
    schedule = Schedule(p, TILING)
    tiles, visits = honest_report(p, stage, schedule, False)
    right = counts.stage_trace(stage, schedule, tiles, visits)
    visits[:, 2, 0] += 16
    wrong = counts.stage_trace(stage, schedule, tiles, visits)
    changed = wrong.events[wrong.events["bytes"] != right.events["bytes"]]
    assert {int(x) for x in changed["visit"]} == {2}


def test_heads_that_disagree_are_an_error():
    p = PROBLEMS["causal"]
    (stage,) = plans.stages(p, "flash2", "forward")
    schedule = Schedule(p, TILING)
    tiles, visits = honest_report(p, stage, schedule, False)
    visits[1, 2, 0] += 16
    with pytest.raises(TraceError, match=r"head 1 reported 1,040 B"):
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
