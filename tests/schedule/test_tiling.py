"""`Tiling`: what it takes on chip, the largest that fits, and published kernels' tiles."""

import itertools

import numpy as np
import pytest

import flashsim
from flashsim import Device, Problem, SramOverflow, Tiling, TilingError
from flashsim.problem.masks import BlockMask
from flashsim.schedule import plans
from flashsim.schedule.split_kv import fill
from flashsim.schedule.tiling import SIDES

pytestmark = pytest.mark.promise("no byte is free")

ALL = [(a, d) for a in plans.GENERAL for d in plans.DIRECTIONS]


def test_buffers_take_the_element_type_or_the_accumulators():
    p = Problem(4096, head_dim=64, head_dim_v=32, dtype="bfloat16")

    assert Tiling(16, 8).buffers(p) == {
        "forward": {
            "Q": 16 * 64 * 2,
            "O": 16 * 32 * 4,
            "m": 16 * 4,
            "l": 16 * 4,
            "K": 8 * 64 * 2,
            "V": 8 * 32 * 2,
            "S": 16 * 8 * 4,
        }
    }


def test_a_tile_larger_than_the_matrix_takes_what_the_matrix_fills():
    p = Problem(17, 33, head_dim=8)

    assert Tiling(512, 512).clip(p) == Tiling(17, 33)
    assert Tiling(512, 512).footprint(p) == Tiling(17, 33).footprint(p)


@pytest.mark.parametrize(("algorithm", "direction"), ALL)
def test_the_footprint_is_what_the_simulator_holds(algorithm, direction):
    """At most: buffers whose lifetimes do not overlap are never held together."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((40, 8), dtype=np.float32) for _ in range(4))
    tiling = Tiling(16, 16)
    result = flashsim.run(q, k, v, algorithm=algorithm, tiling=tiling, trace=True)
    trace = result.trace
    if direction == "backward":
        trace = result.backward(dout, tiling=tiling).trace

    footprint = tiling.footprint(trace.problem, algorithm, direction)

    assert trace.peak_sram() == trace.predicted().peak_sram()
    if algorithm == "standard":  # several rows of the softmax are held at a time, if they fit
        assert trace.peak_sram() >= footprint
    else:
        assert trace.peak_sram() == footprint


def test_what_does_not_fit_says_what_it_holds_and_what_would_fit():
    problem, device = Problem(4096, head_dim=128), Device.get("T4")

    with pytest.raises(SramOverflow) as caught:
        Tiling(128, 64).check(problem, device)

    text = str(caught.value)
    need = Tiling(128, 64).footprint(problem)
    assert (
        "in stage 'forward' of flash2 forward, a 128 x 64 tile with head_dim=128 and float32"
        in text
    )
    assert f"needs {need:,} B on chip, but a thread block of T4 has 65,536 B" in text
    for name, size in Tiling(128, 64).buffers(problem)["forward"].items():
        assert f"\n  {name:<6}{size:>14,} B" in text
    fits = Tiling.fit(problem, device)
    assert f"the largest tiling that fits is Tiling({fits.block_q}, {fits.block_k})" in text
    fits.check(problem, device)


def test_it_fits_to_the_last_byte():
    problem, tiling = Problem(4096, head_dim=64), Tiling(64, 64)
    exact = Device.get("H100").with_sram(tiling.footprint(problem))

    tiling.check(problem, exact)
    with pytest.raises(SramOverflow):
        tiling.check(problem, exact.with_sram(exact.sram_bytes - 1))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("d", [16, 64, 256])
@pytest.mark.parametrize("device", ["T4", "A100", "H100"])
@pytest.mark.parametrize(("algorithm", "direction"), ALL)
def test_fit_fits_and_moves_no_more_than_any_other_power_of_two(
    algorithm, direction, device, d, dtype
):
    problem, device = Problem(1024, head_dim=d, dtype=dtype), Device.get(device)

    best = Tiling.fit(problem, device, algorithm, direction)

    best.check(problem, device, algorithm, direction)
    if algorithm == "standard":
        return  # its matrices in HBM are moved whole, whatever the tile
    if {s.outer for s in plans.stages(problem, algorithm, direction) if s.visit} > {"queries"}:
        return  # two loop orders pull the two sides different ways
    count = lambda t: flashsim.count(  # noqa: E731
        problem, algorithm=algorithm, direction=direction, tiling=t, device=device
    ).bytes()
    least = count(best)
    for tiling in itertools.starmap(Tiling, itertools.product(SIDES, SIDES)):
        if tiling.footprint(problem, algorithm, direction) <= device.sram_bytes:
            assert least <= count(tiling), tiling


def test_fit_puts_the_outer_loop_first():
    problem = Problem(4096, head_dim=64)

    assert Tiling.fit(problem, "A100", "flash2").block_q > Tiling.fit(problem, "A100").block_k
    flash1 = Tiling.fit(problem, "A100", "flash1")
    assert flash1.block_k > flash1.block_q
    both = Tiling.fit(problem, "A100", "flash2", "backward")
    assert both.block_q == both.block_k


def test_fit_does_not_reach_far_past_the_matrix():
    assert Tiling.fit(Problem(17, 1000, head_dim=16)) == Tiling(32, 512)
    assert Tiling.fit(Problem(1, 1, head_dim=16)) == Tiling(1, 1)


def test_fit_goes_below_16_where_it_must():
    problem = Problem(4096, head_dim=512)
    tiny = Device.get("H100").with_sram(20_000)

    tiling = Tiling.fit(problem, tiny)

    assert max(tiling.block_q, tiling.block_k) < 16
    tiling.check(problem, tiny)


def test_nothing_fits():
    with pytest.raises(SramOverflow, match=r"needs 8,204 B on chip even with a 1 x 1 tile.*1,000"):
        Tiling.fit(Problem(64, head_dim=512), Device.get("H100").with_sram(1000))
    with pytest.raises(SramOverflow, match="no tiling fits"):
        Tiling(64, 64).check(Problem(64, head_dim=512), Device.get("H100").with_sram(1000))
    with pytest.raises(SramOverflow, match="or a flash algorithm"):
        Tiling.fit(Problem(10**6), "H100", "standard")


@pytest.mark.parametrize(
    ("name", "d", "dense", "causal"),
    [  # read off flash-attention's sources, see the comment on PRESETS
        ("fa2-forward", 64, (128, 128), (128, 128)),
        ("fa2-forward", 128, (128, 64), (128, 64)),
        ("fa2-backward", 128, (64, 128), (64, 128)),
        ("fa3-forward", 64, (192, 192), (192, 128)),
        ("fa3-forward", 128, (128, 176), (128, 128)),
        ("fa3-forward", 256, (128, 80), (128, 80)),
        ("fa3-backward", 128, (80, 128), (64, 128)),
    ],
)
def test_presets_of_common_kernels(name, d, dense, causal):
    assert Tiling.preset(name, d) == Tiling(*dense)
    assert Tiling.preset(name, d, causal=True) == Tiling(*causal)
    assert Tiling.preset(name, d - 1) == Tiling(*dense)  # as the next larger width


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(("name", "device"), [("fa2-forward", "A100"), ("fa3-forward", "H100")])
def test_operands_of_forward_presets_fit_in_shared_memory(name, device, d):
    """Those kernels keep S and O in registers; Q, K and V are what their block must hold."""
    problem = Problem(4096, head_dim=d, dtype="bfloat16")

    buffers = Tiling.preset(name, d).buffers(problem)["forward"]

    assert sum(buffers[x] for x in "QKV") <= Device.get(device).sram_bytes


def test_sides():
    tiling = Tiling(np.int64(16), 8)

    assert tiling == Tiling(16, 8)
    assert isinstance(tiling.block_q, int)
    assert str(tiling) == "16 x 8"
    with pytest.raises(TilingError, match="block_k must be at least 1, got -8"):
        Tiling(16, -8)


def test_rows_of_a_pass_that_computes_dq_alone():
    tiling = Tiling(16, 8, dq_rows=32)

    assert str(tiling) == "16 x 8 (dQ: 32 x 8)"
    assert (tiling.of("dkdv"), tiling.of("dq")) == (Tiling(16, 8), Tiling(32, 8))
    tiles = {name: tiling.of(name) for name in ("delta", "dkdv", "dq")}
    assert Tiling.joined(tiles) == tiling
    assert Tiling(16, 8, dq_rows=16) == Tiling(16, 8)
    with pytest.raises(TilingError, match="a multiple of block_q, got dq_rows=24 and block_q=16"):
        Tiling(16, 8, dq_rows=24)
    with pytest.raises(TilingError, match="dq_rows must be at least 1"):
        Tiling(16, 8, dq_rows=0)
    p = Problem(64, head_dim=8)
    of_tile, taller = (t.buffers(p, "flash2", "backward") for t in (Tiling(16, 8), tiling))
    assert taller["dkdv"] == of_tile["dkdv"]
    assert taller["dq"]["Q"] == 2 * of_tile["dq"]["Q"]
    assert taller["dq"]["K"] == of_tile["dq"]["K"]
    cells = BlockMask(np.ones((4, 8), bool), 16, 8)
    assert Tiling(16, 8).divides(cells)
    assert not tiling.divides(cells)


def test_a_backend_with_tiles_of_one_size_says_so():
    pytest.importorskip("numba")
    x, tall = np.ones((40, 8), np.float32), Tiling(16, 8, dq_rows=32)
    result = flashsim.run(x, x, x, backend="numba")
    with pytest.raises(TilingError, match=r"tiles of one size in all passes, not 16 x 8 \(dQ"):
        result.backward(x, tiling=tall)


def test_how_many_blocks_fill_a_device():
    """8 key heads make 8 row tiles; 16 parts each are 128 of 132 SMs; 3 such blocks fit on one."""
    p = Problem(1, 32_768, 128, heads=32, kv_heads=8, dtype="bfloat16")
    found = fill(p, Device.get("H200"))
    held = found.tiling.footprint(p, "flash-decode", split=found.split)
    assert 3 * (held + 1024) <= Device.get("H200").sram_per_sm < 4 * (held + 1024)
    assert found[2:] == (3, 3 * 132, 8, 128)
    assert fill(p, Device.get("H200"), splits=50).blocks == 400 > found.needed
