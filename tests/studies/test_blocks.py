"""Tile sizes, least times, when FlashAttention wins: figures by hand, and stages that run."""

import numpy as np
import pytest

import flashsim
from flashsim import Device, Problem, Tiling, blocks
from flashsim.studies import predict
from flashsim.studies.predict.calibration import HBM_SHARE, LAUNCH

pytestmark = pytest.mark.promise("predictions are judged")

LAYER = Problem(1024, head_dim=64, heads=8, dtype="bfloat16")
H200 = Device.get("H200")


def test_a_tile_in_figures_by_hand():
    found = blocks.sizes(LAYER, (64, 128), device="H200")
    assert [str(b.tiling) for b in found.found] == ["64 x 64", "64 x 128", "128 x 64", "128 x 128"]
    first = found.found[1]
    counted = flashsim.count(LAYER, tiling=Tiling(64, 128), device="H200")
    assert (first.stage, first.outer, first.visits) == ("forward", 16, 16 * 8)
    assert (first.sram, first.bytes) == (Tiling(64, 128).footprint(LAYER), counted.bytes())
    assert first.blocks == H200.sram_per_sm // (first.sram + 1024)
    assert (
        first.seconds == predict.predict(LAYER, kernels="portable", tiling=Tiling(64, 128)).seconds
    )


def test_the_best_tile_is_the_fastest_and_else_moves_least():
    found = blocks.sizes(LAYER, (64, 128))
    assert found.best("forward").seconds == min(b.seconds for b in found.found)
    tiles = [Tiling(64, 64), Tiling(64, 128)]
    untimed = blocks.sizes(LAYER, tilings=tiles, algorithm="flash1")
    assert [b.tiling for b in untimed.found] == tiles
    assert untimed.best("forward").bytes == min(b.bytes for b in untimed.found)
    assert "best: forward" in str(untimed).replace("\n", " ")


def test_what_fits_nowhere_has_no_blocks_and_no_best():
    huge = blocks.sizes(LAYER, (1024,))
    assert [b.blocks for b in huge.found] == [0]
    assert huge.found[0].seconds is None
    assert "no tile fits" in huge.table().note


def test_backward_stages_with_tiles_of_their_own_move_what_two_runs_move():
    """dK, dV and dQ exchange delta alone: a run with each tile, and each stage from its own."""
    problem = Problem(96, head_dim=16, heads=2)
    tiles = {"dkdv": Tiling(32, 64), "dq": Tiling(64, 16)}
    found = {b.stage: b for b in blocks.mixed(problem, tiles).found}
    q, k, v, dout = flashsim.random_inputs(problem)
    result = flashsim.run(q, k, v)
    gradients = {
        stage: result.backward(dout, tiling=tile, trace=True) for stage, tile in tiles.items()
    }
    for stage, one in gradients.items():
        moved = sum(n for (name, *_), n in one.trace.transfers.items() if name == stage)
        assert found[stage].bytes == moved
        assert found[stage].tiling == tiles[stage]
    for name in ("dq", "dk", "dv"):  # whichever run they come from
        ours = [getattr(one, name) for one in gradients.values()]
        np.testing.assert_allclose(*ours, atol=1e-5)


# -- least times -----------------------------------------------------------------------------------


def test_the_least_time_of_standard_attention_by_hand():
    p = Problem(8192, head_dim=64, dtype="bfloat16")
    counted = flashsim.count(p, algorithm="standard", tiling=Tiling(64, 64), device="H200")
    scores, softmax, output = predict.least(counted).stages
    size, matrix = 8192 * 64 * 2, 8192 * 8192 * 2
    assert matrix > H200.l2_bytes  # so S and P cross HBM
    share = H200.hbm_bandwidth * HBM_SHARE
    assert scores.units["HBM"] == pytest.approx((2 * size + matrix) / share)
    assert softmax.units["HBM"] == pytest.approx(2 * matrix / share)
    assert output.units["HBM"] == pytest.approx((matrix + 2 * size) / share)
    assert output.units["tensor cores"] == pytest.approx(2 * 8192**2 * 64 / 989.4e12)
    assert softmax.seconds == LAUNCH + max(softmax.units.values())
    assert softmax.bound == "HBM"


def test_scores_that_l2_holds_are_not_read_from_hbm():
    p = Problem(512, head_dim=64, dtype="bfloat16")
    counted = flashsim.count(p, algorithm="standard", tiling=Tiling(64, 64), device="H200")
    softmax = predict.least(counted).stages[1]
    assert softmax.units["HBM"] == pytest.approx(512 * 512 * 2 / (H200.hbm_bandwidth * HBM_SHARE))


def test_the_flops_of_all_stages_are_those_of_the_pass():
    p = Problem(256, head_dim=32, heads=4, kv_heads=2, dtype="bfloat16", causal=True)
    for algorithm in ("standard", "flash2", "flash2-fused"):
        for direction in ("forward", "backward"):
            counted = flashsim.count(
                p, algorithm=algorithm, direction=direction, tiling=Tiling(32, 32), device="H200"
            )
            stages = predict.least(counted).stages
            products = sum(s.units["tensor cores"] for s in stages) * H200.peak("bfloat16")
            assert products == pytest.approx(counted.flops("matmul"))
            exps = sum(s.units["exponentials"] for s in stages)
            assert exps == pytest.approx(counted.flops("exp") / (16 * 132 * 66.9e12 / (256 * 132)))


def test_without_a_published_bandwidth_l2_is_no_unit():
    p = Problem(256, head_dim=64, dtype="float16")
    (stage,) = predict.least(flashsim.count(p, tiling=Tiling(64, 64), device="RTX 4090")).stages
    assert set(stage.units) == {"tensor cores", "exponentials", "CUDA cores", "HBM"}


# -- when, versions --------------------------------------------------------------------------------


def test_flash_wins_from_the_length_on_that_is_faster_and_stays_so():
    table = predict.when(LAYER, (2048, 256), device="H200")
    first, second = table.records()
    assert [first["N"], second["N"]] == [256, 2048]
    assert second["times faster"] == pytest.approx(second["standard ms"] / second["flash ms"])
    assert second["times faster"] > first["times faster"] > 1
    assert "from N = 256 on, the shortest length" in table.note
    p = Problem(2048, head_dim=64, heads=8, dtype="bfloat16")
    standard, flash = predict.predict(p, algorithm="standard"), predict.predict(p)
    assert second["standard ms"] == pytest.approx(1e3 * standard.seconds)
    assert second["flash ms"] == pytest.approx(1e3 * flash.seconds)
    assert second["flash, ideal ms"] == pytest.approx(1e3 * predict.least(flash.traffic).seconds)


def test_winning_at_short_lengths_alone_is_not_winning(monkeypatch):
    free = predict.predict(Problem(64, head_dim=64, dtype="bfloat16"))

    def slower(problem, *, algorithm, **how):
        easy = algorithm == "standard" and problem.n_q == 4096
        return free if easy else predict.predict(problem, algorithm=algorithm, **how)

    monkeypatch.setattr("flashsim.studies.predict.lengths.predict", slower)
    table = predict.when(LAYER, (256, 4096), device="H200")
    assert [row["times faster"] > 1 for row in table.records()] == [True, False]
    assert "not faster at the longest" in table.note


@pytest.mark.parametrize(("gib", "status"), [(4, "OOM"), (4.9, "OOM(backward)"), (1000, "ok")])
def test_versions_say_what_memory_does_not_hold(gib, status):
    """64 heads of 4,096: S and P of 2 GiB each, dP in the place of S."""
    p = Problem(4096, head_dim=64, batch=4, heads=16, dtype="bfloat16")
    device = Device(**{**H200.to_dict(), "hbm_bytes": int(gib * 2**30)})
    rows = {row["version"]: row for row in predict.versions(p, device=device).records()}
    forward, backward = rows["standard forward"], rows["standard backward"]
    assert backward["status"] == status
    assert forward["status"] == ("OOM" if status == "OOM" else "ok")
    assert (backward["requested B"] is None) == (status != "ok")
    assert {rows[f"{name} backward"]["status"] for name in ("FA1", "FA2", "FA3")} == {"ok"}
    assert rows["FA1 forward"]["predicted ms"] is None
    if status == "ok":
        plain = predict.predict(p, algorithm="standard", device=device)
        assert forward["predicted ms"] == pytest.approx(1e3 * plain.seconds)
    assert rows["FA3 forward"]["predicted ms"] < rows["FA2 forward"]["predicted ms"]


def test_versions_need_the_gpus_they_were_written_for():
    p = Problem(512, head_dim=64, dtype="float16")
    for device, lacking in (
        ("V100", {"FA2": "Ampere", "FA3": "Hopper"}),
        ("L40S", {"FA3": "Hopper"}),
    ):
        rows = predict.versions(p, device=device).records()
        found = {
            row["version"].split()[0]: row["status"].split()[-1]
            for row in rows
            if row["status"] != "ok"
        }
        assert found == lacking
    rows = {
        r["version"]: r
        for r in predict.versions(Problem(512, head_dim=512, dtype="float16")).records()
    }
    assert rows["FA3 forward"]["status"] == "ok"  # the algorithm; flashsim has no such kernel
    assert rows["FA3 forward"]["predicted ms"] is None
