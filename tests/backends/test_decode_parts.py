"""Decoding whose parts another kernel merges, without a GPU: latent attention and shared prefixes.
The kernels compile, in registers; launches move what the simulator moves.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals, refused

from flashsim import Problem
from flashsim.backends.launch_policy import decode_plan

pytest.importorskip("cupy")
from compiled import kernels_only
from decode_cases import Case, moved, simulated
from test_cuda_kernels import GPUS, H200, SPILL_BYTES, compile_kernel

MLA = Problem(
    1, 4096, 576, 512, heads=128, kv_heads=1, batch=64, dtype="bfloat16", latent=True, scale=0.07
)
GROUPED = {"heads": 8, "kv_heads": 2, "dtype": "bfloat16"}


@pytest.mark.promise("kernels compile")
@pytest.mark.parametrize(
    ("page", "more"),
    [
        (0, {}),
        kernels_only(16, {"n_q": 2, "causal": True}),
        pytest.param(1, {"softcap": 3.0, "window": (90, 1)}, marks=pytest.mark.thorough),
        pytest.param(64, {"head_dim": 200, "head_dim_v": 128}, marks=pytest.mark.thorough),
    ],
)
def test_latent_attention_stays_in_registers(page, more):
    p = replace(MLA, **more)
    made = decode_plan.plan(p, (4096,) * 64, H200, page=page)
    assert made.kernel.shared_bytes <= H200.shared_bytes
    ((_, spilled, _),) = compile_kernel(made.kernel, "sm_90a").values()
    assert spilled == 0
    ((_, spilled, _),) = compile_kernel(made.merge, "sm_90").values()
    assert spilled == 0


@pytest.mark.promise("kernels compile")
@pytest.mark.parametrize(("d", "page", "arch"), [(128, 16, "sm_90"), kernels_only(64, 0, "sm_80")])
def test_a_shared_prefix_stays_in_registers(d, page, arch):
    p = Problem(1, 8192, d, batch=32, heads=32, kv_heads=8, dtype="bfloat16")
    made = decode_plan.plan(p, (8192,) * 32, GPUS[arch], page=page, prefix=7168)
    assert made.kernel.shared_bytes <= GPUS[arch].shared_bytes
    for kernel in (made.kernel, made.merge):
        ((_, spilled, _),) = compile_kernel(kernel, arch).values()
        assert spilled <= SPILL_BYTES


def test_latent_blocks_fill_the_multiprocessors():
    for n_q, batch, keys, splits in ((1, 64, 4096, 1), (1, 8, 32768, 8), (2, 8, 32768, 4)):
        p = replace(MLA, n_q=n_q, n_kv=keys, batch=batch)
        made = decode_plan.plan(p, (keys,) * batch, H200)
        assert made.splits == (splits,) * batch
        assert made.grid == (batch * splits * 2 * n_q, 1)
        assert made.grid[0] <= H200.multiprocessors or splits == 1


@pytest.mark.promise("three counts equal")
@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=5).filter(any),
    st.none() | st.integers(1, 9),
    st.sampled_from([0, 1, 16]),
    st.integers(1, 3),
)
def test_a_latent_launch_moves_what_the_simulator_does(lengths, splits, page, n_q):
    p = replace(MLA, n_q=n_q, n_kv=700, batch=len(lengths), heads=20)
    case = Case(p, tuple(lengths), page)
    made = decode_plan.plan(p, case.lengths, H200, splits, page)
    assert moved(made, case) == simulated(made, case)
    slots = [made.items[made.items[:, 0] == b, 3] for b, n in enumerate(made.splits) if n > 1]
    assert sorted(np.concatenate([*slots, []]).tolist()) == [*range(made.slots)]
    for b, slot, n, item, shared, *_ in made.merges.tolist():
        assert (made.splits[b], shared) == (n, 0)
        assert made.items[item, [0, 4]].tolist() == [b, slot]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=6),
    st.integers(1, 20),
    st.none() | st.integers(1, 9),
    st.integers(1, 5),
)
def test_a_shared_prefix_is_cut_up_once(own, pages, splits, n_q):
    p = Problem(n_q, 1000, 64, batch=len(own), **GROUPED)
    prefix = 16 * pages
    lengths = tuple(prefix + n for n in own)
    made = decode_plan.plan(p, lengths, H200, splits, 16, prefix=prefix)
    tile = made.block_k
    walked = {}
    for b, lo, hi, slot, first, parts, keys, row_tile in made.items.tolist():
        walked.setdefault((b, row_tile), []).append((lo, hi, slot))
        assert keys == (prefix if b < 0 else own[b])
        assert parts == (made.prefix_splits if b < 0 else made.splits[b])
        assert b < 0 or first == made.merges[b, 1]
    assert {t for b, t in walked if b < 0} == {*range(made.prefix_tiles)}
    for (b, _), cuts in walked.items():
        cuts.sort()
        keys = prefix if b < 0 else own[b]
        assert cuts[0][0] == 0
        assert cuts[-1][1] == -(-keys // tile)
        assert all(x[1] == y[0] for x, y in pairwise(cuts))
    shared = {slot + b for _, _, slot in walked[-1, 0] for b in range(p.batch)}
    mine = {slot for (b, _), cuts in walked.items() if b >= 0 for _, _, slot in cuts}
    assert shared.isdisjoint(mine)
    assert shared | mine == {*range(made.slots)}


SHARED = Problem(4, 600, 64, batch=2, causal=True, **GROUPED)
REFUSED = refusals(r"""
plan(MLA, (4096,) * 64, GPUS["sm_80"]) -> UnsupportedError: decoded on Hopper ... not on A100
plan(replace(MLA, head_dim_v=64), (4096,) * 64, H200)
    -> UnsupportedError: head_dim_v that is a multiple of 128, got 64
plan(SHARED, (600, 300), H200, prefix=400)
    -> OptionError: got 400, but entry 1 has only 300 keys
plan(SHARED, (600, 401), H200, prefix=400)
    -> ShapeError: sequence 1 has 4 queries, but only 1 keys after the shared prefix
plan(SHARED, (600, 600), H200, page=16, prefix=401)
    -> ShapeError: multiple of page_size=16, got 401
plan(replace(SHARED, window=(9, 0)), (600, 600), H200, prefix=400)
    -> UnsupportedError: shared_prefix cannot be combined with window
plan(replace(MLA, head_dim=192, head_dim_v=128), (4096,) * 64, H200, prefix=64)
    -> UnsupportedError: latent attention does not support shared_prefix
plan(replace(SHARED, dtype="float32"), (600, 600), H200)
    -> UnsupportedError: float16 and bfloat16, not float32
plan(replace(MLA, sinks=True), (4096,) * 64, H200)
    -> UnsupportedError: do not support sinks; use algorithm='flash2' with
plan(Problem(1, 64, 512, dtype="float16"), (64,), H200)
    -> UnsupportedError: head_dim of at most 256, got 512
plan(Problem(1, 64, 64, dtype="float16", bias=(1, 1)), (64,), H200)
    -> UnsupportedError: does not support bias
plan(Problem(1, 1 << 20, 64, **GROUPED), (1 << 20,), H200, 5000)
    -> OptionError: splits= must be at most 2048 here
plan(replace(MLA, n_kv=2**31, batch=1), (2**31,), H200)
    -> UnsupportedError: with 32-bit integers, so n_kv can be at most 2,147,483,647
plan(Problem(1, 2**31, 128, **GROUPED), (2**31,), H200)
    -> UnsupportedError: with 32-bit integers, so n_kv can be at most 2,147,483,647
plan(Problem(1, 2**31, 128, **GROUPED), (2**31,), H200, prefix=128)
    -> UnsupportedError: with 32-bit integers, so n_kv can be at most 2,147,483,647
""")


@pytest.mark.promise("refuses bad input")
@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_is_refused(call, said):
    refused(call, said, {**globals(), "plan": decode_plan.plan})


def split_and_cluster(gpu, batch, keys, head_dim, splits=None):
    p = Problem(1, keys, head_dim, batch=batch, heads=32, kv_heads=8, dtype="bfloat16")
    made = decode_plan.plan(p, (keys,) * batch, gpu, splits)
    return made.splits[0], made.cluster


def test_clusters_that_do_not_all_run_at_once_get_fewer_blocks():
    """32 clusters of 4 on a chip where 30 run at once: the last two would run alone."""
    gpu = replace(H200, clusters=((2, 66), (4, 30), (8, 15)))
    room = replace(H200, clusters=((2, 66), (4, 32), (8, 16)))
    assert split_and_cluster(room, 4, 4096, 128) == (4, 4)
    assert split_and_cluster(gpu, 4, 4096, 128) == (2, 2)
    assert split_and_cluster(gpu, 4, 4096, 128, splits=4) == (4, 1), (
        "as asked for, without clusters"
    )
    assert split_and_cluster(gpu, 4, 4096, 64) == (4, 1), "narrow rows stay in as many parts"
    assert split_and_cluster(gpu, 1, 4096, 128) == split_and_cluster(room, 1, 4096, 128) == (8, 8)


def test_sequences_stay_whole_only_where_memory_is_fast():
    """64 of 132 SMs draw nearly all that an H200's memory gives, and not all of an H100's."""
    slow = replace(H200, hbm_bandwidth=3.35e12)
    assert split_and_cluster(H200, 8, 32768, 128) == (1, 1)
    assert split_and_cluster(slow, 8, 32768, 128) == (2, 2)
