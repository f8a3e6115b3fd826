"""The simulated memory: only what was loaded can be used, what moves is counted, what ends goes.

The algorithms under test here are a few lines each, right and wrong, on the memory itself.
"""

import numpy as np
import pytest

from flashsim import Device, MemoryModelError, Problem, SramOverflow, Tiling
from flashsim.algorithms.hbm import Hbm
from flashsim.algorithms.machine import Machine
from flashsim.problem.problem import numpy_dtype
from flashsim.schedule.names import CODES, OPS, TENSORS
from flashsim.trace.events import gain

pytestmark = pytest.mark.promise("no byte is free")

RNG = np.random.default_rng(7)
ALL = slice(None)


def arrays(problem):
    p = problem
    dtype = numpy_dtype(p.dtype)
    shapes = {
        "Q": (p.batch, p.heads, p.n_q, p.head_dim),
        "K": (p.batch, p.kv_heads, p.n_kv, p.head_dim),
        "V": (p.batch, p.kv_heads, p.n_kv, p.head_dim_v),
    }
    return {name: RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


SMALL = Tiling(4, 4)


def machine_for(problem, tiling=SMALL, device="H100", algorithm="flash2", direction="forward"):
    machine = Machine(problem, tiling, Device.get(device), algorithm, direction, record=True)
    for name, array in arrays(problem).items():
        machine.hbm.put(name, array)
    return machine


@pytest.fixture
def machine():
    return machine_for(Problem(10, 6, head_dim=3, batch=2, heads=4, kv_heads=2))


def moved(stage):
    """[(op, tensor, bytes), ...] of the transfers of a stage."""
    return [
        (OPS[e["op"]], TENSORS[e["tensor"]], int(e["bytes"]))
        for e in stage.events
        if e["level"] == 0
    ]


# -- nothing is used that was not loaded --------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda t, x: t + x,
        lambda t, x: x + t,
        lambda t, x: t - x,
        lambda t, x: t * 2.0,
        lambda t, x: 2.0 * t,
        lambda t, x: t @ x,
        lambda t, x: x @ t,
        lambda t, x: t[0],
        lambda t, x: len(t),
        lambda t, x: np.asarray(t),
        lambda t, x: np.array([t, t]),
        lambda t, x: np.exp(t),
        lambda t, x: np.sum(t),
        lambda t, x: np.matmul(x, t),
        lambda t, x: np.add(t, 1, out=x),
    ],
)
def test_a_tensor_in_hbm_refuses_to_be_computed_with(machine, use):
    with pytest.raises(MemoryModelError, match="Q lies in HBM: load a tile of it into SRAM"):
        use(machine.hbm.Q, np.ones((3, 3), np.float32))


@pytest.mark.parametrize("use", [lambda t: -t, lambda t: t / 2, lambda t: list(t), float])
def test_other_ways_in_are_errors_as_well(machine, use):
    with pytest.raises((MemoryModelError, TypeError)):
        use(machine.hbm.Q)


def test_tensors_that_are_not_there_are_named(machine):
    with pytest.raises(MemoryModelError, match="HBM holds no tensor 'dQ'; choose from Q, K, V"):
        _ = machine.hbm.dQ


def matrix_product(machine, *, load_v=True, keep_v=False, store=True):
    """O = (Q K^T) V by tiles, with a load, a lifetime or a store left out on request."""
    hbm, p = machine.hbm, machine.problem
    out = hbm.new("O", p.n_q, p.head_dim_v, p.dtype)
    stale = None
    with machine.stage("forward") as sram:
        for i in range(sram.schedule.t_r):
            rows = sram.schedule.row_slice(i)
            with sram.step(i):
                q = sram.load(hbm.Q, rows)
                total = sram.alloc("O", (q.shape[-2], p.head_dim_v), fill=0.0)
                for visit in sram.schedule.visits(i):
                    with sram.visit(visit):
                        k = sram.load(hbm.K, visit.cols)
                        v = sram.load(hbm.V, visit.cols) if load_v else hbm.V
                        if keep_v:
                            v = stale = v if stale is None else stale
                        total += q @ k.mT @ v
                if store:
                    sram.store(hbm.O, rows, total)
    return out


def expected_product(machine):
    hbm = machine.hbm
    full = hbm.Q.data @ hbm.K.data.mT @ hbm.V.data
    p = machine.problem
    return full.reshape(p.batch, p.heads, p.n_q, p.head_dim_v)


def test_an_honest_algorithm_gets_the_answer(machine):
    np.testing.assert_allclose(
        matrix_product(machine), expected_product(machine), rtol=1e-5, atol=1e-5
    )


def test_a_forgotten_load_is_an_error(machine):
    with pytest.raises(MemoryModelError, match="V lies in HBM"):
        matrix_product(machine, load_v=False)


def test_a_tile_used_after_its_visit_is_nan():
    out = matrix_product(machine_for(Problem(10, 8, head_dim=3)), keep_v=True)

    assert np.isnan(out).all()  # each row tile has a second visit, which sees the stale tile


def test_a_forgotten_store_leaves_nan(machine):
    assert np.isnan(matrix_product(machine, store=False)).all()


def test_a_load_is_a_copy(machine):
    q = machine.hbm.Q
    before = q.data.copy()
    with machine.stage("forward") as sram, sram.step(0):
        tile = sram.load(q, slice(0, 4))
        tile[:] = 5
        np.testing.assert_array_equal(q.data, before)
        q.data[:] = 6
        assert (tile == 5).all()


# -- lifetimes ----------------------------------------------------------------------------------


def test_frames_free_what_was_made_inside_them(machine):
    hbm = machine.hbm
    with machine.stage("forward") as sram:
        with sram.step(0):
            q = sram.load(hbm.Q, slice(0, 4))
            held = sram.used
            (first, *_) = sram.schedule.visits(0)
            with sram.visit(first):
                k = sram.load(hbm.K, first.cols)
                s = sram.alloc("S", (4, 4), fill=1.0)
                assert sram.used == held + (4 * 3 + 4 * 4) * 4
            assert np.isnan(k).all()
            assert np.isnan(s).all()
            assert sram.used == held == 4 * 3 * 4
            assert not np.isnan(q).any()
        assert np.isnan(q).all()
        assert sram.used == 0
        assert sram.peak == (4 * 3 + 4 * 3 + 4 * 4) * 4


def test_frames_free_after_an_error_too(machine):
    with machine.stage("forward") as sram:
        tiles = []

        def fail():
            with sram.step(0):
                tiles.append(sram.load(machine.hbm.Q, slice(0, 4)))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert sram.used == 0
        assert np.isnan(tiles[0]).all()


def test_a_strip_frees_within_a_step(machine):
    with machine.stage("forward") as sram, sram.step(1):
        for start in range(3):
            with sram.strip():
                sram.load(machine.hbm.Q, slice(start, start + 1))
                assert sram.used == 3 * 4
        assert sram.used == 0
    loads = machine.stages[0].events[:-1]
    assert set(loads["i"]) == {1}
    assert set(loads["visit"]) == {-1}


def test_alloc_gives_every_head_its_tile(machine):
    with machine.stage("forward") as sram, sram.step(0):
        tile = sram.alloc("O", (4, 3), fill=2.0)

        assert tile.shape == (4, 2, 4, 3)  # batch * kv_heads, group, rows, columns
        assert tile.dtype == np.float32
        assert (tile == 2).all()
        assert sram.used == 4 * 3 * 4  # one head's thread block


# -- capacity -----------------------------------------------------------------------------------


def test_a_load_past_the_capacity_is_refused(machine):
    small = machine_for(machine.problem, device=Device.get("H100").with_sram(400))
    with small.stage("forward") as sram, sram.step(0):
        sram.alloc("O", (4, 3))
        sram.load(small.hbm.Q, slice(0, 10))
        with pytest.raises(SramOverflow) as caught:
            sram.alloc("S", (10, 10))

    text = str(caught.value)
    assert "stage 'forward' holds 568 B on chip" in text
    assert "a thread block of H100 (M = 400 B) has 400 B" in text
    for name, nbytes in (("O", 48), ("Q", 120), ("S", 400)):
        assert f"\n  {name:<6}{nbytes:>14,} B" in text


def test_the_last_byte_may_be_used():
    p = Problem(10, 6, head_dim=3)
    machine = machine_for(p, Tiling(1, 1), Device.get("H100").with_sram(256))
    with machine.stage("forward") as sram, sram.step(0):
        sram.alloc("S", (8, 8))
        assert sram.peak == 256
        with pytest.raises(SramOverflow):
            sram.alloc("m", (1,))


def test_a_plan_that_cannot_fit_is_refused_before_it_runs():
    with pytest.raises(SramOverflow, match="in stage 'forward' of flash2 forward, a 64 x 64 tile"):
        machine_for(Problem(64), Tiling(64, 64), Device.get("H100").with_sram(1000))


# -- transfers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "size"), [("float64", 8), ("float32", 4), ("float16", 2), ("bfloat16", 2)]
)
def test_bytes_are_those_of_the_type_in_hbm_for_elements_that_exist(dtype, size):
    p = Problem(10, 6, head_dim=3, head_dim_v=5, dtype=dtype, heads=2)
    machine = machine_for(p)
    machine.hbm.new("O", 10, 5, dtype)
    machine.hbm.new("L", 10, None, p.compute_dtype)
    with machine.stage("forward") as sram, sram.step(2):
        q = sram.load(machine.hbm.Q, slice(8, 12))  # rows 8 and 9 are all there is
        v = sram.load(machine.hbm.V, slice(4, 8), slice(1, 3))
        sram.store(machine.hbm.O, slice(8, 12), 1.0)
        sram.store(machine.hbm.L, slice(8, 12), 0.0)
        assert q.shape[-2:] == (2, 3)
        assert v.shape[-2:] == (2, 2)
        assert q.dtype == p.compute_dtype
        assert sram.used == (2 * 3 + 2 * 2) * size  # on chip as in HBM: operands stay narrow

    assert moved(machine.stages[0]) == [
        ("load", "Q", 2 * 3 * size),
        ("load", "V", 2 * 2 * size),
        ("store", "O", 2 * 5 * size),
        ("store", "L", 2 * p.compute_itemsize),
    ]


def test_a_store_rounds_once():
    machine = machine_for(Problem(4, head_dim=1, dtype="float16"))
    out = machine.hbm.new("O", 4, 1, "float16")
    with machine.stage("forward") as sram, sram.step(0):
        tile = sram.alloc("O", (4, 1), fill=1 + 2.0**-12)
        sram.store(machine.hbm.O, slice(0, 4), tile)
        assert (tile == 1 + 2.0**-12).all()

    assert out.dtype == np.float16
    assert (out == 1).all()


def test_reduce_adds_and_counts():
    machine = machine_for(Problem(4, head_dim=2), algorithm="flash2-fused", direction="backward")
    total = machine.hbm.new("dQ", 4, 2, "float32")
    with machine.stage("fused") as sram, sram.step(0):
        sram.store(machine.hbm.dQ, slice(0, 4), 0.0)
        for _ in range(3):
            with sram.strip():
                tile = sram.alloc("dQ", (2, 2), fill=1.5)
                sram.reduce(machine.hbm.dQ, slice(2, 4), tile)

    np.testing.assert_array_equal(total[0, 0], [[0, 0], [0, 0], [4.5, 4.5], [4.5, 4.5]])
    assert moved(machine.stages[0]) == [("store", "dQ", 32)] + 3 * [("reduce", "dQ", 16)]


def test_a_member_is_one_query_head_of_each_group():
    p = Problem(4, head_dim=2, batch=2, heads=6, kv_heads=2)
    machine = machine_for(p, direction="backward")
    with machine.stage("dkdv") as sram, sram.step(0, member=1):
        tile = sram.load(machine.hbm.Q, slice(0, 4), member=1)

        full = machine.hbm.Q.data.reshape(2, 6, 4, 2)
        np.testing.assert_array_equal(tile[:, 0], full[:, 1::3].reshape(4, 4, 2))
    assert machine.stages[0].events["head"][0] == 1
    assert (machine.stages[0].repeat, machine.stages[0].stride) == (4, 3)


@pytest.mark.parametrize("lead", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_shared_bias_is_seen_by_every_head_and_summed_over_them(lead):
    p = Problem(3, 5, head_dim=2, batch=2, heads=4, kv_heads=2, bias=lead)
    hbm = Hbm(p)
    bias = RNG.standard_normal((*lead, 3, 5))
    hbm.put_shared("bias", bias, "float32")
    everywhere = np.broadcast_to(bias, (2, 4, 3, 5)).reshape(4, 2, 3, 5)

    np.testing.assert_array_equal(hbm.bias.view(ALL, ALL, None), everywhere)
    np.testing.assert_array_equal(
        hbm.bias.view(slice(1, 3), slice(0, 2), 1), everywhere[:, 1:, 1:3, :2]
    )

    tile = RNG.standard_normal((4, 2, 3, 5))
    whole, by_member = np.zeros((*lead, 3, 5)), np.zeros((*lead, 3, 5))
    hbm.put_shared("dBias", whole, "float32").add(ALL, ALL, None, tile)
    shared = tuple(axis for axis in (0, 1) if lead[axis] == 1)
    expected = tile.reshape(2, 4, 3, 5).sum(axis=shared, keepdims=True)
    np.testing.assert_allclose(whole, expected)
    target = hbm.put_shared("dBias", by_member, "float32")
    for g in range(2):
        target.add(ALL, ALL, g, tile[:, g : g + 1])
    np.testing.assert_allclose(by_member, expected)


# -- what is recorded ---------------------------------------------------------------------------


def test_events_say_where_they_happened(machine):
    matrix_product(machine)
    events = machine.stages[0].events
    schedule = machine.stages[0].schedule

    loads = events[(events["op"] == OPS.index("load")) & (events["tensor"] == CODES["V"])]
    assert [(e["i"], e["j"], e["visit"]) for e in loads] == [
        (visit.i, visit.j, visit.index) for visit in schedule
    ]
    outer = events[(events["op"] == OPS.index("load")) & (events["tensor"] == CODES["Q"])]
    assert [(e["i"], e["j"], e["visit"]) for e in outer] == [(i, -1, -1) for i in range(3)]
    computed = events[(events["op"] == OPS.index("compute")) & (events["visit"] >= 0)]
    assert computed["visit"].tolist() == list(range(schedule.n_visits))


def test_the_timeline_rises_to_the_peak_and_ends_empty(machine):
    matrix_product(machine)
    held = np.cumsum(gain(machine.stages[0].events))

    assert held.max() == (4 * 3 + 4 * 3 + 2 * 4 * 3) * 4  # Q, O, K and V of the largest tiles
    assert held.min() >= 0
    assert held[-1] == 0


def test_nothing_is_kept_unless_asked():
    p = Problem(10, 6, head_dim=3)
    machine = Machine(p, Tiling(4, 4), Device.get("H100"), "flash2", "forward")
    for name, array in arrays(p).items():
        machine.hbm.put(name, array)

    matrix_product(machine)

    assert len(machine.stages[0].events) == 0
    np.testing.assert_allclose(machine.hbm.O.data, expected_product(machine), rtol=1e-5, atol=1e-5)


def test_strips_take_as_many_whole_rows_as_fit():
    p = Problem(10, 60, head_dim=3)
    three_rows = Device.get("H100").with_sram(3 * 60 * 4)
    machine = machine_for(p, Tiling(8, 4), three_rows, "standard")
    with machine.stage("softmax") as sram:
        strips = [[(s.start, s.stop) for s in machine.strips(sram, i)] for i in range(2)]

    assert strips == [[(0, 3), (3, 6), (6, 8)], [(8, 10)]]


def test_stages_are_known_by_name(machine):
    assert machine.has("forward")
    assert not machine.has("dq")
    with pytest.raises(KeyError), machine.stage("dq"):
        pass
