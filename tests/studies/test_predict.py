"""The time model: its parts by hand, its behaviour, and how far it is from measured kernels."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flashsim
from flashsim import Device, OptionError, Problem, Tiling, UnsupportedError
from flashsim.studies.predict import Constants, crossover, predict
from flashsim.studies.predict.calibration import DECODING, HBM_SHARE, LAUNCH, MATRIX_SHARE
from flashsim.studies.predict.finish import finish
from flashsim.studies.predict.units import clock, once_bytes, visit_seconds

PROBLEM = Problem(4096, head_dim=128, batch=4, heads=16, dtype="bfloat16")
DECODE_CSV = Path(__file__).parents[2] / "docs" / "data" / "decode-h200.csv"
PLAIN = {"forward": Constants(1.0, 0.0, 0.0)}


def test_units_of_a_visit_by_hand():
    """Forward, 128 x 64, d = 128, on an H200: 1.98 GHz, 132 SMs."""
    traffic = flashsim.count(PROBLEM, tiling=Tiling(128, 64), device="H200")
    units = visit_seconds(traffic, traffic.stages[0], 32)
    device = Device.get("H200")
    hertz = 66.9e12 / (2 * 128 * 132)
    assert clock(device) == pytest.approx(hertz)
    scores, tile = 128 * 64, 64 * 128 * 2  # a tile of K or V, bytes
    assert units["tensor cores"] == pytest.approx(4 * scores * 128 / (989.4e12 / 132))
    assert units["exponentials"] == pytest.approx((scores + 128) / (16 * hertz))
    assert units["shared memory"] == pytest.approx(2 * tile * 4 / (128 * hertz))
    assert units["L2"] == pytest.approx(2 * tile / (9.8e12 / 132))


def test_blocks_take_the_places_that_become_free():
    assert finish([3.0, 1.0], walks=2, clump=2, slots=2) == (4.0, 4.0)  # 3 1 | 3 1
    assert finish([3.0, 1.0], walks=1, clump=1, slots=4) == (3.0, 1.0)
    assert finish([2.0], walks=5, clump=2, slots=2) == (6.0, 5.0)  # the third wave is half full


def test_perfect_overlap_is_bound_by_the_tensor_cores():
    found = predict(PROBLEM, constants=PLAIN).stages[0]
    assert found.bound == "tensor cores"
    assert found.seconds > found.units["tensor cores"]
    assert found.seconds < 1.1 * found.units["tensor cores"]  # a tail, and a ragged last tile


def test_every_unmodelled_second_of_a_tile_counts():
    without, with_it = (
        predict(PROBLEM, constants={"forward": Constants(1.0, 0.0, item)}).stages[0]
        for item in (0.0, 1e-6)
    )
    assert with_it.seconds - without.seconds == pytest.approx(1e-6 * np.ceil(without.waves))


def test_heads_worked_on_one_by_one_leave_a_longer_tail():
    causal = Problem(2048, head_dim=128, heads=16, dtype="bfloat16", causal=True)
    together, alone = (
        predict(causal, heads_in_group={"forward": size}).stages[0] for size in (16, 1)
    )
    assert alone.seconds > together.seconds
    assert alone.units == together.units  # the same work


def test_a_device_with_little_bandwidth_is_bound_by_it():
    slow = Device(**{**Device.get("H200").to_dict(), "hbm_bandwidth": 1e9})
    found = predict(PROBLEM, device=slow).stages[0]
    assert found.bound == "HBM"
    traffic = flashsim.count(PROBLEM, tiling=Tiling(128, 128))
    assert once_bytes(traffic, "forward") == traffic.compulsory()
    assert found.seconds >= traffic.compulsory() / 1e9


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernels": "hoper"}, OptionError, "did you mean 'hopper'"),
        ({"algorithm": "flash1"}, OptionError, "not of 'flash1'"),
        ({"algorithm": "standard", "kernels": "hopper"}, OptionError, "kernels is FlashAtt"),
        ({"direction": "sideways"}, OptionError, "unknown direction"),
        ({"device": "A100", "kernels": "hopper"}, UnsupportedError, "compute capability 9.0"),
        ({"heads_in_group": {"forward": 0}}, OptionError, "at least 1, got 0 for 'forward'"),
    ],
)
def test_what_cannot_be_predicted_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        predict(PROBLEM, **options)


def test_the_printed_table_names_its_bound():
    found = predict(PROBLEM, direction="backward", algorithm="flash2-fused")
    assert [row[0] for row in found.table().rows] == ["delta", "fused", "convert"]
    assert found.seconds == sum(stage.seconds for stage in found.stages)
    assert "tensor cores" in str(found)


def test_standard_attention_by_hand():
    """64 heads of 4,096 x 4,096 scores: 2 GiB of S, far past L2, written once and read once."""
    found = {s.name: s for s in predict(PROBLEM, algorithm="standard").stages}
    matrix, rows, speed = 64 * 4096**2 * 2, 64 * 4096 * 128 * 2, HBM_SHARE * 4.8e12
    assert found["scores"].seconds == pytest.approx(LAUNCH + (2 * rows + matrix) / speed)
    assert found["softmax"].seconds == pytest.approx(LAUNCH + 2 * matrix / speed)
    assert found["output"].bound == "HBM"
    product = 64 * 4096**2 * 2 * 128 / (MATRIX_SHARE * 989.4e12)
    assert found["output"].units["tensor cores"] == pytest.approx(product)
    assert found["scores"].waves == 64 * 32 * 32 / 132
    assert found["output"].waves == 64 * 32 / 132


def test_standard_attention_that_stays_in_l2():
    """One head: 8 MiB of S; 16 tiles of the output leave most SMs idle."""
    small = Problem(2048, head_dim=64, dtype="bfloat16")
    _, softmax, output = predict(small, algorithm="standard").stages
    assert softmax.bound == "L2"
    assert softmax.seconds == pytest.approx(LAUNCH + 2 * 2048**2 * 2 / 9.8e12)
    assert output.waves == 16 / 132
    assert output.tail > 0
    packed = Problem(8, cu_seqlens_q=(0, 8), cu_seqlens_k=(0, 8), dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="are packed; give batch"):
        predict(packed, algorithm="standard")


def test_flash_wins_by_more_where_sequences_are_longer():
    table = crossover(Problem(1, head_dim=64, heads=12, dtype="bfloat16"), (512, 4096))
    (short, *_, little, s, _), (_, plain, flash, much, _, keeps) = table.rows
    assert short == 512
    assert s == 12 * 512**2 * 2
    assert much == plain / flash > little
    assert keeps > 12 * 4096**2 * 2


CACHE = Problem(1, 131_072, 128, heads=32, kv_heads=8, dtype="bfloat16")


def decoded(problem=CACHE, **how):
    return predict(problem, algorithm="flash-decode", **how)


def test_one_part_a_key_head_streams_as_fast_as_eight_sms_do():
    """Eight blocks of 67 MB each: an SM's rate is the bound, and nothing is merged."""
    (walk,) = decoded(splits=1).stages
    nbytes = 131_072 * 2 * 128 * 2
    own = DECODING.launch + DECODING.item + DECODING.row * 4 * 128
    assert walk.seconds == pytest.approx(own + nbytes / DECODING.rate)
    assert walk.waves == 8 / 132
    assert walk.units["HBM"] == pytest.approx(8 * nbytes / (4800e9 * DECODING.hbm_share))


def test_splits_reach_the_memorys_speed_and_cost_a_merge():
    walk, combine = decoded().stages
    assert walk.bound == "HBM"
    assert walk.units["HBM"] < walk.seconds < 1.1 * walk.units["HBM"]
    assert combine.seconds == DECODING.merge
    assert decoded(splits=1).seconds > 5 * decoded().seconds
    assert "FlashDecoding" not in str(decoded())
    assert "portable kernels" in str(decoded())


def test_pages_cost_the_more_the_shorter_they_are():
    took = [decoded(replace(CACHE, page_size=size)).seconds for size in (None, 64, 16, 1)]
    assert took == sorted(took)
    assert 1.02 < took[-1] / took[0] < 1.1


def test_packed_lengths_are_a_batchs():
    cu = tuple(range(0, 5 * 4096, 4096))
    packed = Problem(
        4, 4 * 4096, 128, heads=32, kv_heads=8, dtype="bfloat16",
        cu_seqlens_q=(0, 1, 2, 3, 4), cu_seqlens_k=cu,
    )  # fmt: skip
    batch = replace(CACHE, n_kv=4096, batch=4)
    assert decoded(packed).stages == decoded(batch).stages


def test_what_the_decode_kernel_does_not_do_is_refused():
    for said, problem, how in (
        ("leave tiling out", CACHE, {"tiling": Tiling(16, 16)}),
        ("leave kernels out", CACHE, {"kernels": "hopper"}),
        ("choose splits by their own rule", CACHE, {"splits": "fa3"}),
        ("has no shared_prefix", Problem(2, 9, dtype="bfloat16", cu_seqlens_q=(0, 1, 2),
                                     cu_seqlens_k=(4, 6, 9), shared_prefix=4), {}),
        ("as many queries of each", Problem(3, 9, dtype="bfloat16", cu_seqlens_q=(0, 1, 3),
                                            cu_seqlens_k=(0, 6, 9)), {}),
        ("takes float16 and bfloat16", Problem(1, 64), {}),
        ("no backward pass", CACHE, {"direction": "backward"}),
    ):  # fmt: skip
        with pytest.raises((OptionError, UnsupportedError), match=said):
            decoded(problem, **how)
    with pytest.raises(OptionError, match="'flash2' splits no keys"):
        predict(PROBLEM, splits=4)


def test_measured_decode_calls_are_predicted():
    """docs/data/decode-h200.csv, the contiguous ones of the table; docs/guides/truth.md has all."""
    with DECODE_CSV.open(newline="") as stream:
        rows = [r for r in csv.DictReader(stream) if r["implementation"] == "flashsim"]
    errors = []
    for r in rows:
        shape = (int(r[name]) for name in ("n_q", "keys", "head_dim"))
        p = Problem(*shape, batch=int(r["batch"]), heads=32, kv_heads=8, dtype="bfloat16")
        errors.append(1e6 * decoded(p).seconds / float(r["us"]) - 1)
    assert len(errors) == 60
    assert np.mean(np.abs(errors)) < 0.04
    assert np.max(np.abs(errors)) < 0.2
