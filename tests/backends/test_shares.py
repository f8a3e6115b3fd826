"""The visits of each warpgroup of a Hopper forward, beside the scores that the mask keeps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim import Problem, Tiling, functions
from flashsim.backends.launch.device_tables import in_shares, lower
from flashsim.backends.launch_policy.cost_model import effective_visits
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import Split
from flashsim.studies.verify.cases import predict
from flashsim.studies.verify.crossing import StageKernel

pytestmark = pytest.mark.promise("right tiles")
ROWS = 64


def keeps(problem, members):
    """Which of one head's scores exist and are kept: bool (n_q * members, n_kv)."""
    q, k = np.arange(problem.n_q)[:, None], np.arange(problem.n_kv)[None]
    kept = np.zeros((problem.n_q, problem.n_kv), bool)
    for s in problem.sequences:
        inside = (q >= s.q_start) & (q < s.q_stop) & (k >= s.k_start) & (k < s.k_stop)
        distance = k - q - s.offset
        kept |= inside & (distance <= problem.right) & (distance >= -problem.left)
    return np.repeat(kept, members, axis=0)


def check(problem, tiling, key_order="ascending", split=None):
    """Compare every share with the scores; return how many visits the shares save."""
    schedule = Schedule(problem, tiling, key_order=key_order, split=split or Split())
    tables = lower(schedule, "row")
    found = in_shares(tables, ROWS)
    if found.shares is None:
        return 0
    kept, saved = keeps(problem, schedule.members), 0
    for i, (start, stop, *_) in enumerate(schedule.rows.tolist()):
        lo, _, _, hi = tables.spans[i].tolist()
        visited = range(hi - 1, lo - 1, -1) if key_order == "descending" else range(lo, hi)
        for part in range(4):
            first, full_first, full_stop, end = found.shares[i, part].tolist()
            rows = slice(start + ROWS * part, min(start + ROWS * (part + 1), stop))
            if part >= tiling.block_q // ROWS or rows.start >= stop:
                assert (first, end) == (0, 0)
                continue
            for v, j in enumerate(visited):
                tile = kept[rows, slice(*schedule.cols[j, :2].tolist())]
                assert (first <= v < end) == tile.any(), (i, part, v)
                if full_first <= v < full_stop:  # whole: no key past the end is in it
                    assert tile.all()
                    assert tile.shape[1] == tiling.block_k
                elif first <= v < end:
                    assert not tile.all() or tile.shape[1] < tiling.block_k
            saved += hi - lo - (end - first)
    return saved


@given(
    n_q=st.integers(1, 700),
    n_kv=st.integers(1, 700),
    left=st.none() | st.integers(0, 400),
    causal=st.booleans(),
    block_q=st.sampled_from((128, 192)),
    block_k=st.sampled_from((64, 80, 128, 176)),
    order=st.sampled_from(("ascending", "descending")),
    packed=st.booleans(),
)
def test_shares_are_what_the_rows_need(n_q, n_kv, left, causal, block_q, block_k, order, packed):
    window = None if left is None else (left, 0 if causal else 50)
    problem = Problem(n_q, n_kv, 64, heads=4, kv_heads=1, causal=causal, window=window)
    check(problem, Tiling(block_q, block_k), order, Split(pack_gqa=packed))


def test_shares_save_visits():
    """A row tile's 192 rows see up to two key tiles more than its first 64 rows."""
    causal = Problem(4 * 192, head_dim=64, causal=True)
    # Row tiles end with keys 191, 383, 575 and 767: 2, 3, 5 and 6 key tiles. In the first and
    # third, two warpgroups end one tile earlier; in the others, one.
    assert check(causal, Tiling(192, 128)) == 2 + 1 + 2 + 1
    ends = (0, 70, 400, 500)
    packed = Problem(500, 500, 64, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert check(packed, Tiling(192, 128)) > 0
    assert check(packed, Tiling(192, 128), "descending") > 0


def test_without_a_saving_there_are_none():
    long = Problem(64 * 192, head_dim=64)
    assert in_shares(lower(Schedule(long, Tiling(192, 128)), "row"), ROWS).shares is None
    ragged = replace(long, n_q=64 * 192 + 1)  # two of 195 warpgroups have no row
    assert in_shares(lower(Schedule(ragged, Tiling(192, 128)), "row"), ROWS).shares is not None


def test_mask_functions_have_shares_where_their_tiles_are_contiguous():
    prefix = Problem(600, 600, 64, mask_mod=functions.prefix_lm(100))
    found = in_shares(lower(Schedule(prefix, Tiling(192, 128)), "row"), ROWS).shares
    # rows 0 to 63 see keys 0 to 99; rows 64 to 127 see up to 127; the others up to 191
    first, full_first, full_stop, stop = found[0, :3].T.astype(int).tolist()
    assert (first, stop) == ([0, 0, 0], [1, 1, 2])
    assert (full_first[2], full_stop[2]) == (0, 1)
    assert full_first[:2] == full_stop[:2]
    holes = Problem(600, 600, 64, mask_mod=lambda b, h, q, k: (k // 128) % 2 == 0)
    assert in_shares(lower(Schedule(holes, Tiling(192, 128)), "row"), ROWS).shares is None


def test_flops_and_bytes_of_a_forward_with_shares():
    """Under a causal mask, 64 rows multiply the key tiles up to their last row."""
    problem = Problem(1000, head_dim=64, heads=6, dtype="bfloat16", causal=True)
    traffic = predict(problem, "flash2", "forward", Tiling(192, 128), "H100")
    kernel = StageKernel(traffic, traffic.stages[0], hopper=True)
    python = replace(kernel, python=True)
    visits = sum(-(-min(row + 64, 1000) // 128) for row in range(0, 1000, 64))
    flops = 6 * visits * 2 * (2 * 64 * 128 * 64)
    assert kernel.tensor_flops() == flops
    whole = sum(-(-min(row + 192, 1000) // 128) for row in range(0, 1000, 192))
    flops = 6 * whole * 2 * (2 * 192 * 128 * 64)
    assert python.tensor_flops() == flops
    assert (kernel.table_reads() - python.table_reads()) // 32 == 6 * 6


def test_the_model_takes_the_mean_of_the_mean_and_the_last():
    tables = in_shares(
        lower(Schedule(Problem(192, head_dim=64, causal=True), Tiling(192, 128)), "row"), ROWS
    )
    # visits of the warpgroups: 1, 1, 2
    assert effective_visits(tables).tolist() == [(4 / 3 + 2) / 2]
