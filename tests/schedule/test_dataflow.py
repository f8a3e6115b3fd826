"""The dataflow against its witnesses: what the algorithms' pages do, and what is saved by hand."""

import numpy as np
import pytest
from helpers import tensors

import flashsim
from flashsim import Device, Problem, Tiling
from flashsim.algorithms import PASSES
from flashsim.errors import OptionError, UnsupportedError
from flashsim.schedule import dataflow, plans
from flashsim.schedule.names import ALLOC, CODES, TENSORS, TRANSFERS
from flashsim.schedule.plans import GENERAL as ALGORITHMS
from flashsim.schedule.tensors import AXES
from flashsim.trace.counted import counted, stage_trace

pytestmark = pytest.mark.promise("three counts equal")

SMALL = Device.get("H100").with_sram(16_000)  # whole rows come in several strips
TILING = Tiling(32, 24)
PROBLEMS = {
    "plain": ({}, {}),
    "causal GQA, float16": ({"heads": 4, "kv_heads": 2, "dtype": "float16"}, {"causal": True}),
    "bias and softcap": ({"dtype": "float16", "bias": (1, 2)}, {"softcap": 4.0}),
    "FP8, a scale a head": (
        {"heads": 4, "kv_heads": 2, "dtype": "float8_e4m3fn"},
        {"causal": True, "scales": [np.ones((1, heads), np.float32) for heads in (4, 2, 2)]},
    ),
    "packed, descending": (
        {},
        {
            **{"cu_seqlens_q": (0, 30, 70), "cu_seqlens_k": (0, 50, 90), "causal": True},
            "key_order": "descending",
        },
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "flash2-once"])
def test_the_pages_move_what_the_dataflow_says_in_its_order(algorithm, case):
    shape, options = PROBLEMS[case]
    once = algorithm == "flash2-once"
    tiling, device = (Tiling(32, 90), Device.get("H100")) if once else (TILING, SMALL)
    x = tensors(70, 90, 8, **shape)
    result = flashsim.run(
        x.q, x.k, x.v, bias=x.bias,
        algorithm=algorithm, tiling=tiling, device=device, trace=True, **options,
    )  # fmt: skip
    dlse = np.ones_like(result.lse)
    for trace in (
        result.trace,
        result.backward(x.dout, tiling=tiling).trace,
        result.backward(x.dout, dlse=dlse, tiling=tiling).trace,
    ):
        assert [s.stage for s in trace.stages] == list(
            plans.stages(trace.problem, algorithm, trace.direction)
        )
        for ran in trace.stages:
            expected = stage_trace(ran.stage, ran.schedule, device)
            assert (ran.repeat, ran.stride) == (expected.repeat, expected.stride)
            np.testing.assert_array_equal(ran.events, expected.events, err_msg=ran.name)


def test_what_cannot_be_counted_event_by_event_says_why():
    problem = Problem(1 << 20, head_dim=64)
    with pytest.raises(OptionError, match=r"one head has about .* events, but the limit"):
        counted(flashsim.count(problem, tiling=Tiling(64, 64)))
    with pytest.raises(UnsupportedError, match="splits keys into parts"):
        counted(flashsim.count(Problem(1, 4096, 64), algorithm="flash-decode"))


@pytest.mark.parametrize("pack_gqa", [False, True])
def test_decoding_moves_what_its_dataflow_says_in_its_order(pack_gqa):
    """A step for each part: before, visits, and of what is stored what the number of parts asks."""
    x = tensors(3, 90, 8, heads=4, kv_heads=2, dtype="float16", bias=(1, 4))
    trace = flashsim.run(
        x.q, x.k, x.v, bias=x.bias, causal=True, window=(40, -1), algorithm="flash-decode",
        splits=3, pack_gqa=pack_gqa, tiling=Tiling(2, 16), trace=True,
    ).trace  # fmt: skip
    split, combine = trace.stages

    def moves(listed, *left_out):
        return [(m.code, CODES[m.tensor]) for m in listed if m.tensor not in left_out]

    def made(stage):
        e = stage.events[np.isin(stage.events["op"], (*TRANSFERS, ALLOC))]
        return list(zip(e["op"].tolist(), e["tensor"].tolist(), strict=True))

    parts, expected, merged = split.schedule.part_counts, [], []
    for i, count in enumerate(parts.tolist()):
        results = ("O_part", "L_part") if count == 1 else ("O", "L")
        for part in range(count):
            expected += moves(split.stage.before)
            expected += moves(split.stage.visit) * len(list(split.schedule.visits(i, part)))
            expected += moves(split.stage.after, *results)
        if count > 1:
            merged += moves(combine.stage.before) + moves(combine.stage.visit) * count
            merged += moves(combine.stage.after)
    assert parts.max() == 3
    assert made(split) == expected
    assert made(combine) == merged


def test_every_algorithm_has_its_page_and_every_tensor_lies_somewhere():
    assert set(PASSES) == set(dataflow.ALGORITHMS)
    assert set(AXES) == set(TENSORS) - {"-"}


def test_what_a_problem_lacks_is_left_out():
    narrow, wide = Problem(64, dtype="float16"), Problem(64)
    names = {
        p.dtype: [s.name for s in plans.stages(p, "flash2-fused", "backward")]
        for p in (narrow, wide)
    }
    assert names == {"float16": ["delta", "fused", "convert"], "float32": ["delta", "fused"]}
    (delta, _) = plans.stages(wide, "flash2-fused", "backward")
    assert [m.tensor for m in delta.after] == ["delta", "dQ"]  # the accumulator is dQ itself
    with pytest.raises(OptionError, match="did you mean 'flash2'"):
        plans.stages(wide, "flahs2")
