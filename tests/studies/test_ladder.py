"""The ladder: every rung executed, equal to float64, moving exactly what its closed form says."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim import Device, SramOverflow, Tiling
from flashsim.studies import ladder

pytestmark = pytest.mark.promise("three counts equal")

SIZES = st.integers(1, 70)


@settings(max_examples=25, deadline=None)
@given(SIZES, SIZES, st.integers(1, 20), SIZES, SIZES, st.sampled_from(["float32", "float16"]))
def test_every_rung_moves_what_is_predicted(n_q, n_kv, d, block_q, block_k, dtype):
    climb = ladder.climb(n_q, n_kv, d, dtype=dtype, tiling=Tiling(block_q, block_k))
    for name, step in climb.steps.items():
        assert step.moved == step.predicted, name
        assert step.bytes() == sum(step.moved.values()) > 0


@pytest.mark.parametrize("magnify", [1.0, 30.0])
@pytest.mark.parametrize("name", ladder.RUNGS)
def test_every_rung_agrees_with_float64(name, magnify):
    climb = ladder.climb(
        57, 83, 16, dtype="float64", tiling=Tiling(16, 24), magnify=magnify, rungs=[name]
    )
    # n_kv roundings of a weighted mean of values below 6, 64-bit: far from float32's 1e-7.
    assert climb.steps[name].error <= 1e-12 * (magnify if name == "without-softmax" else 1)


def test_naive_softmax_overflows_where_the_others_do_not():
    steps = ladder.climb(32, 32, magnify=400.0, rungs=["naive", "stable", "online"]).steps
    assert math.isnan(steps["naive"].error)
    assert steps["stable"].error < 1e-6
    assert steps["online"].error < 1e-6


def test_accesses_per_score_are_those_of_milakov_and_gimelshein():
    climb = ladder.climb(40, 50, 8, tiling=Tiling(16, 16))
    accesses = {name: sum(step.accesses(40 * 50, 4)) for name, step in climb.steps.items()}
    # Section 3 of arXiv:1805.02867: 3 for naive, 4 for safe, 3 for online softmax.
    assert [accesses[name] for name in ("naive", "stable", "online")] == [3, 4, 3]
    assert accesses["softmax-product"] == 1
    assert accesses["flash2"] == accesses["whole-row-attention"] == 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["whole-row", "whole-row-attention"])
def test_whole_rows_fit_up_to_the_length_the_error_names(name, dtype):
    device = Device("toy", sram_bytes=4096, sram_per_sm=4096)

    def run(n_kv):
        options = {"dtype": dtype, "tiling": Tiling(4, 8), "device": device, "rungs": [name]}
        return ladder.climb(8, n_kv, 8, **options).steps[name]

    with pytest.raises(SramOverflow, match="online softmax") as caught:
        run(5000)
    words = str(caught.value).replace(",", "").split()
    longest = int(words[words.index("most") + 1])
    assert run(longest).peak_sram <= device.sram_bytes
    with pytest.raises(SramOverflow, match=f"{longest + 1} scores"):
        run(longest + 1)


def test_the_table_has_a_row_for_every_rung():
    table = ladder.climb(16, 16, 8).table()
    assert [row["rung"] for row in table.records()] == list(ladder.RUNGS)
    assert {row["predicted"] for row in table.records()} == {"=="}


def test_the_note_says_why_one_flash_moves_less_than_the_other():
    for tiling, less in ((Tiling(32, 64), "flash1"), (Tiling(64, 32), "flash2")):
        climbed = ladder.climb(512, 512, 64, tiling=tiling, rungs=["flash1", "flash2"])
        assert min(climbed.steps, key=lambda name: climbed.steps[name].bytes()) == less
        note = climbed.table().note
        p, moved = climbed.problem, {name: step.moved for name, step in climbed.steps.items()}
        keys = moved["flash2"]["load", "K"] // (p.n_kv * p.head_dim * p.itemsize)
        assert f"flash2 loads K and V for each of {keys} row tiles" in note
        outputs = moved["flash1"]["load", "O"] // (p.n_q * p.head_dim * p.itemsize)
        assert f"for each of {outputs} column tiles" in note
    assert "column tiles" not in ladder.climb(64, 64, 16, rungs=["flash2"]).table().note
