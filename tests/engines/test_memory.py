"""The simulated memory: only what was loaded can be used, what moves is counted, what ends goes.

The algorithms under test here are a few lines each, right and wrong, on the memory itself.
"""

import numpy as np
import pytest

from flashsim import Device, MemoryModelError, Problem, SramOverflow, Tiling
from flashsim.algorithms.machine import Machine
from flashsim.problem.problem import numpy_dtype

pytestmark = pytest.mark.promise("no byte is free")

RNG = np.random.default_rng(7)


def arrays(problem):
    p = problem
    dtype = numpy_dtype(p.dtype)
    shapes = {
        "Q": (p.batch, p.heads, p.n_q, p.head_dim),
        "K": (p.batch, p.kv_heads, p.n_kv, p.head_dim),
        "V": (p.batch, p.kv_heads, p.n_kv, p.head_dim_v),
    }
    return {name: RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def machine_for(problem, tiling=(4, 4), device="H100"):
    machine = Machine(problem, Tiling(*tiling), Device.get(device), "flash2", "forward")
    for name, array in arrays(problem).items():
        machine.hbm.put(name, array)
    return machine


@pytest.fixture
def machine():
    return machine_for(Problem(10, 6, head_dim=3, batch=2, heads=4, kv_heads=2))


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


def test_only_rows_that_exist_count_and_nothing_is_recorded_unless_asked(machine):
    with machine.stage("forward") as sram, sram.step(2):
        sram.load(machine.hbm.Q, slice(8, 12))  # rows 8 and 9 are all there is
        assert sram.used == 2 * 3 * 4
        assert sram.alloc("O", (2, 3)).dtype == np.float32
    assert len(machine.stages[0].events) == 0


def test_a_forgotten_load_is_an_error(machine):
    with pytest.raises(MemoryModelError, match="V lies in HBM"):
        matrix_product(machine, load_v=False)


def test_a_tile_used_after_its_visit_is_nan():
    out = matrix_product(machine_for(Problem(10, 8, head_dim=3)), keep_v=True)

    assert np.isnan(out).all()  # each row tile has a second visit, which sees the stale tile


def test_a_forgotten_store_leaves_nan(machine):
    assert np.isnan(matrix_product(machine, store=False)).all()


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
    machine = machine_for(p, (1, 1), Device.get("H100").with_sram(256))
    with machine.stage("forward") as sram, sram.step(0):
        sram.alloc("S", (8, 8))
        assert sram.peak == 256
        with pytest.raises(SramOverflow):
            sram.alloc("m", (1,))


def test_a_plan_that_cannot_fit_is_refused_before_it_runs():
    with pytest.raises(SramOverflow, match="in stage 'forward' of flash2 forward, a 64 x 64 tile"):
        machine_for(Problem(64), (64, 64), Device.get("H100").with_sram(1000))
