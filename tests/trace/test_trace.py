"""Every question a trace answers, against the events themselves or against a count by hand."""

import numpy as np
import pytest
from helpers import tensors
from refusals import refuses

import flashsim
from flashsim import Tiling, Trace
from flashsim.schedule.names import OPS, TENSORS
from flashsim.schedule.plans import GENERAL as ALGORITHMS
from flashsim.trace.events import EVENT

pytestmark = pytest.mark.promise("three counts equal")

TRANSFERS = ("load", "store", "reduce")


def traced(
    algorithm="flash2",
    direction="forward",
    *,
    tiling=Tiling(32, 48),  # noqa: B008
    backward_tiling=None,
    **options,
):
    shape = {name: options.pop(name) for name in ("batch", "heads", "bias") if name in options}
    shape = {"heads": 4, "kv_heads": 2, "batch": 2, **shape}
    x = tensors(100, 120, 8, dtype=options.pop("dtype", "bfloat16"), **shape)
    options = {"causal": True, "trace": True, **options}
    result = flashsim.run(
        *(x.q, x.k, x.v), bias=x.bias, algorithm=algorithm, tiling=tiling, **options
    )
    if direction == "forward":
        return result.trace
    return result.backward(x.dout, tiling=backward_tiling or tiling).trace


ALL = [(name, way) for name in ALGORITHMS for way in ("forward", "backward")]


def spelled_out(trace):
    """All events of all heads as dicts of plain values: the slow, obvious reading."""
    for event in trace.events:
        row = {name: int(event[name]) for name in EVENT.names}
        row["op"], row["tensor"] = OPS[row["op"]], TENSORS[row["tensor"]]
        yield row


@pytest.mark.parametrize(("algorithm", "direction"), ALL)
def test_totals_are_sums_of_events(algorithm, direction):
    trace = traced(algorithm, direction)
    rows = [row for row in spelled_out(trace) if row["op"] in TRANSFERS]
    by_op = {op: sum(r["bytes"] for r in rows if r["op"] == op) for op in TRANSFERS}
    assert {op: trace.bytes(op) for op in TRANSFERS} == by_op
    assert trace.bytes() == sum(by_op.values()) > 0
    for tensor, ops in trace.by_tensor().items():
        for op, nbytes in ops.items():
            mine = sum(r["bytes"] for r in rows if (r["op"], r["tensor"]) == (op, tensor))
            assert nbytes == trace.bytes(op, tensor) == mine
        assert trace.bytes(tensor=tensor) == sum(ops.values())
    heads = np.zeros(8, np.int64)
    for row in rows:
        heads[row["head"]] += row["bytes"]
    np.testing.assert_array_equal(trace.by_head(), heads)
    assert heads.sum() == trace.bytes()


@pytest.mark.parametrize(("algorithm", "direction"), ALL)
def test_by_tile_adds_up_the_visits(algorithm, direction):
    trace = traced(algorithm, direction)
    for op, tensor in ((None, None), ("load", None), ("load", "K"), (None, "Q")):
        grid = np.zeros((trace.schedule.t_r, trace.schedule.t_c), np.int64)
        for row in spelled_out(trace):
            chosen = row["op"] in TRANSFERS and op in (None, row["op"])
            if chosen and tensor in (None, row["tensor"]) and min(row["i"], row["j"]) >= 0:
                grid[row["i"], row["j"]] += row["bytes"]
        np.testing.assert_array_equal(trace.by_tile(op, tensor), grid)
        assert trace.by_outer(op, tensor) == trace.bytes(op, tensor) - grid.sum()
    assert trace.by_tile().sum() > 0


def test_dq_alone_may_have_taller_tiles():
    """32 x 48 in the other stages: 7 of 12 visits; 64 x 48: 2 and 3 of 6, of 64 and 36 rows."""
    tiling = Tiling(32, 48, dq_rows=64)
    trace = traced("flash2", "backward", backward_tiling=tiling)
    assert trace.tiling == tiling
    assert [(s.name, s.schedule.tiling) for s in trace.stages] == [
        *((name, Tiling(32, 48)) for name in ("delta", "dkdv")),
        ("dq", Tiling(64, 48)),
    ]
    assert trace.diff(trace.predicted()) == {}
    visits = {s.name: s.schedule.n_visits for s in trace.stages}
    assert visits == {"delta": 10, "dkdv": 10, "dq": 5}
    of_dq = {key: n for key, n in trace.transfers.items() if key[0] == "dq"}
    keys = 8 * (2 * 48 + 2 * 48 + 24) * 8 * 2  # of K; as many of V
    assert (of_dq["dq", "load", "K"], of_dq["dq", "load", "V"]) == (keys, keys)
    # other stages have another grid
    in_dq = sum(of_dq["dq", "load", name] for name in "KV")
    assert trace.by_outer() == trace.bytes() - trace.by_tile().sum() - in_dq


def test_tiles_by_hand():
    """100 x 120 causal, tiles 32 x 48: row tile i ends at key 20 + 32 (i + 1); 8 heads."""
    trace = traced()
    keys = 8 * np.array([48, 48, 24]) * 8 * 2 * 2  # K and V, bfloat16, all 8 heads
    visited = np.array([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]])
    np.testing.assert_array_equal(trace.by_tile(), visited * keys)
    assert trace.by_outer("load") == 8 * 100 * 8 * 2  # Q
    assert trace.by_outer("store") == 8 * 100 * (8 * 2 + 4)  # O and L
    assert trace.n_visits == visited.sum() == trace.schedule.n_visits
    assert [stage.name for stage in trace.stages] == ["forward"]
    assert trace.tiling == Tiling(32, 48)
    assert trace.stage("forward").repeat == 8


def test_events_come_in_order_and_name_their_tile():
    trace = traced(batch=1, heads=2, causal=False)
    one_head = trace.events[trace.events["head"] == 0]
    done = one_head[(one_head["op"] == OPS.index("compute")) & (one_head["visit"] >= 0)]
    np.testing.assert_array_equal(done["visit"], np.arange(trace.n_visits))
    np.testing.assert_array_equal(done["i"], np.repeat(np.arange(4), 3))
    np.testing.assert_array_equal(done["j"], np.tile(np.arange(3), 4))
    first = [(OPS[e["op"]], TENSORS[e["tensor"]]) for e in one_head[:8]]
    assert (
        first
        == [
            *(("load", "Q"), ("alloc", "O"), ("alloc", "l"), ("alloc", "m")),
            *(("load", "K"), ("load", "V"), ("alloc", "S"), ("compute", "-")),
        ][:8]
    )
    np.testing.assert_array_equal(
        one_head["level"] == 0, np.isin(one_head["op"], [OPS.index(op) for op in TRANSFERS])
    )


def test_descending_key_order_turns_each_row_round():
    up, down = traced(), traced(key_order="descending")
    kind = lambda t: t.events[t.events["op"] == OPS.index("compute")]  # noqa: E731
    rows = [[e["j"] for e in kind(t) if e["head"] == 0 and e["i"] == 3] for t in (up, down)]
    assert rows == [[0, 1, 2, -1], [2, 1, 0, -1]]
    assert up.diff(down) == {}
    assert not up.same_events(down)


def test_group_walks_name_the_query_head():
    trace = traced("flash2", "backward")
    dkdv = trace.events[trace.events["stage"] == 1]
    stored = dkdv[dkdv["op"] == OPS.index("store")]
    assert sorted(set(stored["head"].tolist())) == [0, 2, 4, 6]
    loaded = dkdv[(dkdv["op"] == OPS.index("load")) & (dkdv["tensor"] == TENSORS.index("Q"))]
    assert sorted(set(loaded["head"].tolist())) == list(range(8))


@pytest.mark.parametrize(("algorithm", "direction"), ALL)
def test_an_event_takes_at_most_64_bytes(algorithm, direction):
    trace = traced(algorithm, direction)
    assert EVENT.itemsize <= 64
    assert trace.events.dtype == EVENT
    assert len(trace) == trace.n_events == len(trace.events) == len(list(trace))
    held = sum(stage.events.nbytes for stage in trace.stages)  # one walk, however many heads
    assert held <= 64 * trace.n_events / 4


@pytest.mark.parametrize(("algorithm", "direction"), ALL)
def test_sram_timeline_rises_to_the_peak_and_empties(algorithm, direction):
    trace = traced(algorithm, direction, bias=(1, 1), softcap=2.0)
    peaks = []
    for stage in trace.stages:
        names, held = trace.sram_timeline(stage.name)
        assert held.shape == (len(stage.events), len(names))
        assert (held >= 0).all()
        assert not len(held) or (held[-1] == 0).all()
        peaks.append(held.sum(axis=1).max(initial=0))
    assert max(peaks) == trace.peak_sram()
    assert trace.peak_sram() == trace.predicted().peak_sram()
    assert trace.peak_sram() <= trace.device.sram_bytes


def test_sram_timeline_by_hand():
    names, held = traced(causal=False).sram_timeline()
    assert set(names) == {"Q", "O", "l", "m", "K", "V", "S"}
    most = dict(zip(names, held.max(axis=0).tolist(), strict=True))
    assert most == {
        **{"Q": 32 * 8 * 2, "O": 32 * 8 * 4, "l": 32 * 4, "m": 32 * 4},
        **{"K": 48 * 8 * 2, "V": 48 * 8 * 2, "S": 32 * 48 * 4},
    }


@pytest.mark.parametrize(("algorithm", "direction"), ALL)
def test_cumulative_ends_at_the_bytes_of_one_walk_of_each_stage(algorithm, direction):
    trace = traced(algorithm, direction)
    curve, repeats = trace.cumulative(), {stage.name: stage.repeat for stage in trace.stages}
    assert curve[0] == 0
    assert (np.diff(curve) >= 0).all()
    assert curve[-1] == sum(n // repeats[stage] for (stage, *_), n in trace.transfers.items())


def test_cumulative_by_hand():
    """Two visits: Q, K_0, V_0 by the first; K_1, V_1 and the stores by the last."""
    x = tensors(4, 6, 2, heads=1)
    trace = flashsim.run(x.q, x.k, x.v, tiling=Tiling(4, 3), trace=True).trace
    tile = 3 * 2 * 4
    assert trace.cumulative().tolist() == [0, 32 + 2 * tile, 32 + 4 * tile + 32 + 16]


def test_frames_by_hand():
    x = tensors(4, 6, 2, heads=2)
    trace = flashsim.run(x.q, x.k, x.v, tiling=Tiling(4, 3), trace=True).trace
    tile = 3 * 2 * 4
    first, last = trace.frame(0), trace.frame(1, head=1)
    assert (first.stage, first.i, first.j, first.head) == ("forward", 0, 0, 0)
    assert (last.i, last.j, last.head) == (0, 1, 1)
    assert first.moved == {"load Q": 32, "load K": tile, "load V": tile}
    assert last.hbm_bytes == 32 + 4 * tile
    np.testing.assert_array_equal(first.order, [[0, np.nan]])
    np.testing.assert_array_equal(last.order, [[0, 1]])
    assert first.on_chip == {"Q": 32, "O": 32, "l": 16, "m": 16, "K": tile, "V": tile, "S": 48}
    assert last.flops == 2 * first.flops


def test_diff_names_what_differs():
    trace, other = traced(), traced(causal=False)
    keys = 8 * 8 * 2
    assert trace.diff(trace) == {}
    assert trace.diff(other) == {
        ("forward", "load", name): (keys * (96 + 96 + 120 + 120), keys * 4 * 120) for name in "KV"
    }
    assert traced("flash1").diff(trace)["init", "store", "O_acc"] == (8 * 100 * 8 * 4, 0)
    assert trace.diff(trace.predicted()) == {}


def test_what_ran_is_predicted_whether_or_not_the_model_would_fit_it():
    """A GPU's kernel keeps accumulators in registers: its device may be too small for its tiles."""
    q = np.ones((1, 1, 32, 8), np.float32)
    ran = flashsim.run(q, q, q, tiling=flashsim.Tiling(16, 16), trace=True).trace
    small = flashsim.Device("small", sram_bytes=64, sram_per_sm=64)
    trace = flashsim.Trace(ran.problem, small, ran.algorithm, ran.direction, "gpu", ran.stages)

    assert trace.predicted().transfers == ran.transfers


def test_same_events():
    assert traced().same_events(traced())
    assert not traced().same_events(traced(tiling=Tiling(48, 32)))
    assert not traced().same_events(traced("standard"))


def test_main_stage_has_the_most_visits():
    assert traced("flash2-fused", "backward").main_stage.name == "fused"
    assert traced("flash2-fused", "backward").schedule.outer == "keys"


def small():
    x = tensors(4, 6, 2)
    return flashsim.run(x.q, x.k, x.v, tiling=Tiling(4, 3), trace=True).trace


test_questions_name_what_exists = refuses(r"""
traced().bytes("lode") -> OptionError: unknown operation 'lode'; choose from load, store, reduce
traced().by_tile(tensor="k") -> OptionError: unknown tensor 'k'
traced().stage("fwd") -> OptionError: unknown stage 'fwd'; choose from forward
traced().flops("mul") -> OptionError: unknown kind of FLOP 'mul'
small().frame(2) -> TraceError: step= must be from 0 to 1, or from -2 to -1 to count from ... got 2
small().frame(-3) -> TraceError: step= must be from 0 to 1, or from -2 to -1 ... got -3
""")


def test_prints_as_a_table():
    trace = traced()
    text = str(trace)
    assert text == trace.table().text()
    for tensor in "QKVOL":
        assert f"{trace.bytes(tensor=tensor):,}" in text
    assert f"{trace.bytes():,}" in text
    assert "2 x 4 / 2 heads" in text
    assert repr(trace) == (
        f"<Trace flash2 forward on simulator: {trace.n_events:,} events, "
        f"{trace.bytes():,} B requested>"
    )
    assert f"{trace.bytes():,}" in trace._repr_html_()


def test_provenance_names_versions():
    trace = traced()
    assert trace.provenance["flashsim"] == flashsim.__version__
    assert trace.provenance["numpy"] == np.__version__
    assert (trace.backend, trace.algorithm, trace.direction) == ("simulator", "flash2", "forward")


def test_a_trace_of_nothing():
    whole = traced()
    empty = Trace(whole.problem, whole.device, "flash2", "forward", "simulator", ())
    assert (len(empty), len(empty.events), empty.bytes(), empty.peak_sram()) == (0, 0, 0, 0)
