"""The time of several ranks: by hand where it can be, and what must hold elsewhere."""

import numpy as np
import pytest

from flashsim import Device, Problem, predict
from flashsim.distributed import run
from flashsim.problem.links import LINKS, Link
from flashsim.studies.predict.calibration import HBM_SHARE

pytestmark = pytest.mark.promise("predictions are judged")

SIZES = {"head_dim": 128, "heads": 8, "dtype": "bfloat16"}
CAUSAL = Problem(65536, **SIZES, causal=True)


def test_a_ring_of_equal_blocks_by_hand():
    """No mask: at each step a block's time, or the link's where that is longer; and the merging."""
    problem = Problem(8192, **SIZES)
    block = predict.predict(Problem(2048, **SIZES)).seconds
    kv = 2 * 8 * 2048 * 128 * 2
    for bandwidth in (1e12, 1e9):
        found = predict.spread(problem, ranks=4, scheme="ring", link=Link("mine", bandwidth))
        merging = found.account.merge[0] / (Device.get("H200").hbm_bandwidth * HBM_SHARE)
        steps = [max(block + merging[s], kv / bandwidth) for s in range(3)] + [block + merging[3]]
        assert found.seconds == pytest.approx(sum(steps))
        assert found.alone == pytest.approx(4 * block + merging.sum())
        assert found.exposed == pytest.approx(found.seconds - found.alone)
        one = predict.predict(problem).seconds
        assert found.efficiency == pytest.approx(one / found.seconds / 4)


def test_blocks_are_no_faster_than_one_long_kernel():
    """The whole runs for longer than a chip stays below its power limit, a block does not."""
    problem = Problem(131_072, head_dim=128, heads=32, dtype="bfloat16", causal=True)
    found = predict.spread(problem, ranks=16, host=16)
    assert 0.8 < found.efficiency < 1
    assert found.one < predict.predict(problem).seconds


def test_latency_is_paid_once_a_message():
    fast, slow = (Link("mine", 1e6, latency) for latency in (0.0, 1.0))
    times = [predict.spread(CAUSAL, ranks=4, link=link).seconds for link in (fast, slow)]
    assert times[1] - times[0] == pytest.approx(3.0)


def test_zigzag_is_balanced_and_plain_ring_is_not():
    ring, zigzag = (predict.spread(CAUSAL, ranks=8, scheme=s) for s in ("ring", "zigzag"))
    assert ring.efficiency < 0.6 * zigzag.efficiency
    assert ring.compute[0].sum() < 0.2 * ring.compute[7].sum()
    waits = zigzag.end - zigzag.start - zigzag.compute
    assert waits.max() < 0.1 * zigzag.seconds


def test_no_wait_is_none_nor_less():
    problem = Problem(65536, 65536, 128, heads=32, kv_heads=8, dtype="bfloat16", causal=True)
    rows = predict.spread(problem, ranks=8, scheme="zigzag").table().records()
    assert [str(row["waits ms"]) for row in rows] == ["0.0"] * 8


def test_gradients_on_their_way_home_have_something_to_hide_behind():
    found = predict.spread(CAUSAL, ranks=2, direction="backward", algorithm="flash2-fused")
    assert found.account.steps == ("ring 0", "ring 1", "home")
    assert found.transfer[0, 2] > 0
    assert found.compute[0, 2] > found.transfer[0, 2]
    assert found.exposed == 0


def test_between_hosts_the_network_counts():
    how = {"ranks": 16, "scheme": "usp", "ulysses": 8, "network": Link("slow", 1e9)}
    inside = predict.spread(CAUSAL, **how, host=16)
    across = predict.spread(CAUSAL, **how, host=8)
    np.testing.assert_array_equal(inside.transfer[:, [0, -1]], across.transfer[:, [0, -1]])
    np.testing.assert_allclose(across.transfer[:, 1], inside.transfer[:, 1] * 450)
    # A team of 8 over two hosts of 4: four of the seven others are away.
    split = predict.spread(CAUSAL, **how, host=4)
    out = split.account.out_bytes[0, 0]
    assert split.transfer[0, 0] == pytest.approx(out * 4 / 7 / 1e9)


def test_its_table_says_what_shows():
    table = predict.spread(CAUSAL, ranks=4, link=Link("slow", 1e9)).table()
    assert [row[0] for row in table.rows] == [f"ring {s}" for s in range(4)]
    assert "communication prolongs the pass by" in table.note
    assert max(map(len, str(predict.spread(CAUSAL, ranks=2)).split("\n"))) <= 100


def test_a_device_without_a_link_asks_for_one():
    mine = Device(**{**Device.get("H200").to_dict(), "link": ""})
    assert predict.spread(CAUSAL, ranks=2, device=mine, link="NVLink 4").link is LINKS["NVLink 4"]


# -- links ----------------------------------------------------------------------------------------


def test_links_are_what_their_lanes_make():
    assert LINKS["NVLink 4"].bandwidth == 450e9
    assert LINKS["PCIe 5 x16"].bandwidth == pytest.approx(63.0e9, rel=1e-3)
    assert {Device.get(name).link for name in ("A100", "H100", "B200")} <= set(LINKS)
    assert all(link.name == name and link.source for name, link in LINKS.items())


# -- the smallest block ---------------------------------------------------------------------------


def executed(scheme, causal, ranks=4, n=64):
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 1, n, 8), dtype=np.float32)
    spread = run(q, k, v, ranks=ranks, scheme=scheme, causal=causal)
    return spread.account, spread.backward(dout).account


def test_the_block_that_hides_its_transfer_is_flops_over_bandwidth():
    """Float32: K and V are 8 d bytes a row, a block 4 d n FLOPs a row: n = 2 F / B."""
    forward, backward = executed("ring", False)
    assert forward.rows_to_hide(1e12, 1e9) == pytest.approx(2000)
    # Backward, three passes of 14 d n FLOPs: 16 d bytes where dK and dV travel, too.
    assert backward.rows_to_hide(1e12, 1e9) == pytest.approx(2000 * 2 * 4 / 14)


def test_a_mask_that_halves_the_work_doubles_it():
    forward, _ = executed("zigzag", True)
    whole, _ = executed("zigzag", False)
    ratio = forward.rows_to_hide(1.0, 1.0) / whole.rows_to_hide(1.0, 1.0)
    assert ratio == pytest.approx(2, rel=0.3)  # tiles on the diagonal are computed whole
