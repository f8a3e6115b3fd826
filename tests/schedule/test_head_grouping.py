"""How many heads a launch works on together: `clump_size`, and who obeys it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim import Device, Problem, l2
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.backends.launch_policy.portable import PORTABLE
from flashsim.counts.traffic import Traffic
from flashsim.l2.launch import L2Launch
from flashsim.schedule import plans
from flashsim.schedule.head_grouping import clump_size
from flashsim.studies.predict import predict

pytestmark = pytest.mark.promise("right tiles")

H200 = Gpu("H200", (9, 0), 232448, 60 << 20)  # 132 multiprocessors


def clump(problem, direction, stage, tiles, l2_mib=60, processors=132):
    (one,) = (x for x in plans.stages(problem, "flash2-fused", direction) if x.name == stage)
    return clump_size(one, problem, tiles, l2_bytes=l2_mib << 20, processors=processors)


def assigned(one):
    """How work tiles of a launch's stage would be assigned by the rule of the portable kernels."""
    return PORTABLE.hand_out(one.stage, one.tables, H200, one.tables.schedule.tiling)


def left_for_last(walks, size):
    return (walks - 1) % size + 1


def test_sizes_by_hand():
    """d = 128, bfloat16: a row of K and V is 512 B, of Q and dO with dQ 1 KiB."""
    p = Problem(4096, head_dim=128, batch=4, heads=16, dtype="bfloat16")
    # Of 60 MiB, 24: 12 heads of K and V, which would leave 4; 6 of Q, dO, dQ, which 4 divides.
    assert clump(p, "forward", "forward", 32) == 11  # the last clump: 9; with 10: 4
    assert clump(p, "backward", "fused", 32) == 4
    # 20 MiB hold 4 and 2 heads; 10 MiB 2 and 1, but SMs for four heads' tiles are a clump as well.
    assert clump(p, "forward", "forward", 32, l2_mib=20) == 4
    assert clump(p, "backward", "fused", 32, l2_mib=20, processors=40) == 2
    assert clump(p, "backward", "fused", 32, l2_mib=10) == 4
    assert clump(p, "backward", "fused", 32, l2_mib=10, processors=40) == 1
    # 4 of 16 heads fit.
    assert clump(replace(p, n_q=5000, n_kv=5000, batch=1), "backward", "fused", 40) == 4
    # Query heads that share K and V stay together; with keys outside all of them are in a walk.
    p = Problem(4096, head_dim=128, batch=3, heads=16, kv_heads=4, dtype="bfloat16")
    assert clump(p, "forward", "forward", 32) == 48  # 12 key heads, all there are
    assert clump(p, "forward", "forward", 32, l2_mib=35) == 24  # 7 would fit: 6 and 6
    assert clump(p, "backward", "fused", 32, l2_mib=35, processors=1) == 1  # 16 MiB a walk
    assert clump(p, "backward", "fused", 32, l2_mib=80, processors=1) == 2


@given(
    st.integers(1, 64),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1000, 2048, 4096]),
    st.integers(1, 40),
    st.integers(1, 80),
    st.sampled_from([("forward", "forward"), ("backward", "fused"), ("backward", "delta")]),
)
def test_a_clump_fits_and_leaves_the_most_for_the_last(heads, group, n, tiles, l2_mib, stage):
    p = Problem(n, head_dim=64, heads=heads * group, kv_heads=heads, dtype="bfloat16")
    size = clump(p, *stage, tiles, l2_mib)
    step = 1 if stage[1] == "fused" else group
    walks = heads if stage[1] == "fused" else heads * group
    assert size % step == 0
    held = (2 * 64 * 2 + 4 * 64) * group * n if stage[1] == "fused" else 2 * 64 * 2 * n
    fits = [s for s in range(step, walks + 1, step) if s // step * held <= 0.4 * (l2_mib << 20)]
    at_once = [s for s in range(step, walks + 1, step) if s * tiles <= 132]
    possible = {step, *fits, *at_once}
    assert size in possible
    most = max(left_for_last(walks, s) for s in possible)
    assert left_for_last(walks, size) == most
    if walks // step % 8 == 0:
        assert 2 * most >= max(possible)


def test_the_last_clump_of_sixteen_short_heads_ends_evenly():
    """N = 2048: 12 heads, then 4, of 16 tiles left most SMs idle (docs/notebooks/hopper.md)."""
    p = Problem(2048, head_dim=128, heads=16, dtype="bfloat16", causal=True)
    how = {"direction": "backward", "algorithm": "flash2-fused"}
    twelve, all_heads = (predict(p, **how, heads_in_group=x).stages[1] for x in ({"fused": 12}, {}))
    assert twelve.tail > 0.3 > 0.05 > all_heads.tail
    assert twelve.seconds > 1.4 * all_heads.seconds


@pytest.mark.parametrize("family", [HOPPER, PORTABLE])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_and_the_l2_model_have_one_order(family, causal):
    """What `take_work` and `make_item` compute from `clump`, against `L2Model.order`."""
    p = Problem(700, head_dim=64, batch=7, heads=4, kv_heads=2, dtype="bfloat16", causal=causal)
    gpu = replace(H200, l2_bytes=2200 << 10, multiprocessors=1)
    device = replace(Device.get("H200"), l2_bytes=gpu.l2_bytes, sm_count=gpu.multiprocessors)
    passes = [
        *family.forward_passes(p, None, gpu, "ascending", ""),
        *family.backward_passes(p, None, gpu, "ascending", "", "flash2"),
    ]
    equal = family is HOPPER and not causal  # see Hopper.clump
    sizes = set()
    for one in passes:
        if one.stage.name == "delta":
            continue
        tables = one.tables
        visits = np.diff(tables.ptr)
        model = l2.L2Model(launch="grouped", heads_in_group=one.clump if equal else None)
        direction = "forward" if one.stage.name == "forward" else "backward"
        traffic = Traffic(p, tables.schedule.tiling, "flash2", direction, device)
        walks, tiles = L2Launch(model, traffic, one.stage).order(visits)
        items = one.walks * tables.tiles
        expected = [item(one, number) for number in range(items)]
        assert list(zip(walks.tolist(), tiles.tolist(), strict=True)) == expected
        assert len(set(expected)) == items  # all tiles of all heads, once
        assert one.clump < one.walks
        sizes.add(left_for_last(one.walks, one.clump) == one.clump)
        assert not equal or one.clump == (p.group if one.stage.per == "head" else 1)
    assert equal or False in sizes  # a last clump that is smaller was among them


@pytest.mark.parametrize(("n", "short"), [(256, True), (1024, True), (2048, False)])
def test_short_forwards_are_at_work_on_several_clumps(n, short):
    """An eighth as many heads as SMs, as long as that makes no more tiles than SMs; but only where
    there are many items.
    """
    p = Problem(n, head_dim=128, batch=64, heads=16, dtype="bfloat16", causal=True)
    (forward,) = HOPPER.forward_passes(p, None, H200, "ascending", "")
    rule = assigned(forward).clump  # what L2 holds
    assert rule > 16
    assert forward.clump == (16 if short else rule)
    (once,) = HOPPER.forward_passes(replace(p, batch=2), None, H200, "ascending", "")
    few = assigned(once)
    assert once.clump == few.clump  # few rounds of items
    (shared,) = HOPPER.forward_passes(replace(p, kv_heads=2), None, H200, "ascending", "")
    assert shared.clump % 8 == 0  # heads that share K and V stay together
    backward = HOPPER.backward_passes(p, None, H200, "ascending", "", "flash2-fused")[1]
    assert backward.clump == assigned(backward).clump


def item(one, number):
    """common.cuh's `take_work`."""
    whole = one.clump * one.tables.tiles
    first = number // whole * one.clump
    size, rest = min(one.clump, one.walks - first), number % whole
    return first + rest % size, int(one.tables.order[rest // size])


@pytest.mark.parametrize(
    ("n", "d", "heads"),
    [
        (391, 192, 5),
        (1059, 192, 2),
        (1865, 128, 1),
        (250, 192, 8),
        (979, 64, None),
        (9000, 96, None),
    ],
)
def test_packed_heads_run_in_head_groups_of_half_a_wave(n, d, heads):
    """From eight waves on, above a head_dim of 64, if a head is at most one wave."""
    sizes = {"head_dim": d, "heads": 32, "kv_heads": 8, "dtype": "bfloat16", "causal": True}
    (packed,) = HOPPER.forward_passes(
        Problem(n, batch=64, **sizes), None, H200, "ascending", "", True
    )
    tiles = packed.tables.tiles
    rule = assigned(packed).clump  # what L2 holds
    assert packed.clump == (heads or rule)
    assert not heads or heads < rule
    if heads:
        assert 0.4 < packed.clump * tiles / H200.multiprocessors < 0.6
        (few,) = HOPPER.forward_passes(
            Problem(n, batch=1, **sizes), None, H200, "ascending", "", True
        )
        held = assigned(few).clump
        assert few.clump == held
