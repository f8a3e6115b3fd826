"""The decode kernel without a GPU: it compiles for every architecture, in registers, and its launch
arithmetic splits as it says.
"""

from dataclasses import replace

import numpy as np
import pytest
from compiled import costs_nothing_when_off, kernels_only, thorough
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim import Problem
from flashsim.backends.launch_policy import decode_plan

pytest.importorskip("cupy")
from test_cuda_kernels import GPUS, H200, REPORT_SPILL_BYTES, SPILL_BYTES, compile_kernel

pytestmark = pytest.mark.promise("kernels compile")

GROUPED = {"heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
#: Problem, page, sequences.
VARIANTS = {
    "128": (Problem(1, 32768, 128, batch=8, **GROUPED), 0),
    "128 full": (Problem(1, 4096, 128, batch=64, **GROUPED), 0),
    "64, pages of 16": (Problem(1, 32768, 64, batch=8, **GROUPED), 16),
    "128, pages of 3": (Problem(1, 32768, 128, batch=8, **GROUPED), 3),
    "two row blocks": (Problem(8, 4096, 128, causal=True, **GROUPED), 0),
    "four row blocks": (
        Problem(17, 4096, 64, causal=True, window=(100, 3), softcap=3.0, **GROUPED),
        1,
    ),
    "256": (Problem(1, 4096, 256, heads=8, kv_heads=1, dtype="float16"), 0),
    "odd": (Problem(2, 4096, 80, 40, heads=4, dtype="float16", scale=-1.0), 0),
}


def plan(name, gpu, **more):
    problem, page = VARIANTS[name]
    return decode_plan.plan(problem, (problem.n_kv,) * problem.batch, gpu, page=page, **more)


#: Each on a GPU in turn, the first in `make test`, all in `make kernels`; every pair is thorough.
TARGETS = [
    ((name, arch) if n == 0 else kernels_only(name, arch))
    if list(GPUS)[n % len(GPUS)] == arch
    else thorough(name, arch)
    for n, name in enumerate(VARIANTS)
    for arch in GPUS
]


@pytest.mark.parametrize(("name", "arch"), TARGETS)
def test_it_compiles_and_stays_in_registers(name, arch):
    made = plan(name, GPUS[arch])
    assert made.kernel.shared_bytes <= GPUS[arch].shared_bytes
    ((_, spilled, registers),) = compile_kernel(made.kernel, arch).values()
    assert spilled <= SPILL_BYTES
    assert registers * made.kernel.threads <= 65536
    if made.kernel.threads == 128 and name == "128 full":
        assert 2 * registers * made.kernel.threads <= 65536, "two blocks a multiprocessor"
        assert 2 * (made.kernel.shared_bytes + 1024) <= GPUS[arch].shared_bytes + 1024


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["128", "four row blocks"])
def test_counting_compiles_and_costs_nothing_when_off(name):
    made = plan(name, H200, counts=True)
    ((_, spilled, _),) = compile_kernel(made.kernel, "sm_90").values()
    assert spilled <= REPORT_SPILL_BYTES
    assert costs_nothing_when_off(plan(name, H200).kernel, "-arch=sm_90")


@pytest.mark.parametrize(
    ("batch", "keys", "page", "splits", "cluster", "threads", "stages", "overlaps"),
    [
        (8, 4096, 0, 2, 2, 256, 3, True),
        (8, 32768, 0, 1, 1, 256, 3, True),
        (1, 131072, 0, 16, 1, 256, 3, True),
        (32, 4096, 0, 1, 1, 128, 2, True),
        (128, 4096, 0, 1, 1, 128, 2, True),
        # short sequences merge in the largest cluster: 8 parts of four key tiles rather than 16 of
        # two, whose parts would go through HBM
        (1, 100, 0, 1, 1, 256, 2, True),
        (1, 300, 0, 2, 2, 256, 2, True),
        (1, 700, 0, 4, 4, 256, 2, True),
        (1, 1024, 0, 8, 8, 256, 2, True),
        (1, 4096, 0, 8, 8, 256, 2, True),
        (1, 8192, 0, 16, 1, 256, 2, True),
        # 192 KB are under way a multiprocessor; in pages, of few tiles, of two blocks 128 KB
        (8, 32768, 16, 2, 2, 256, 2, True),
        (8, 1024, 0, 2, 2, 256, 2, True),
        # two blocks do not begin early, if all have their places and much to read
        (32, 32768, 0, 1, 1, 128, 2, False),
        (128, 32768, 0, 1, 1, 128, 2, True),
    ],
)
def test_the_measured_choices(batch, keys, page, splits, cluster, threads, stages, overlaps):
    given = Problem(1, max(keys, 8192), 128, batch=batch, **GROUPED), (keys,) * batch
    made = decode_plan.plan(*given, H200, page=page)
    assert (made.splits, made.cluster) == ((splits,) * batch, cluster)
    assert (made.kernel.threads, made.overlaps) == (threads, overlaps)
    assert dict(made.kernel.constants)["FS_STAGES"] == stages
    assert decode_plan.plan(*given, replace(H200, compute_capability=(8, 0))).cluster == 1


def test_a_cache_stays_in_l2_only_if_it_leaves_room():
    """8 x 1,024 keys of 8 heads are 34 MB, 8 x 1,200 are 39 MB; 0.7 of the L2 is 37 MB."""
    gpu = replace(H200, l2_bytes=50 << 20)
    for keys, stays in ((100, 1), (1024, 1), (1200, 0), (4096, 0)):
        given = Problem(1, 4096, 128, batch=8, **GROUPED), (keys,) * 8, gpu
        for page in (0, 16):
            made = decode_plan.plan(*given, page=page)
            assert dict(made.kernel.constants)["FS_IN_L2"] == stays
    # The lengths are read as it runs, so the whole cache counts.
    for keys, stays in ((1024, 1), (4096, 0)):
        made = decode_plan.dynamic(Problem(1, keys, 128, batch=8, **GROUPED), gpu)
        assert dict(made.kernel.constants)["FS_IN_L2"] == stays


def test_sequences_that_take_all_the_memory_gives_stay_whole():
    """64 blocks are 0.48 of 132 multiprocessors, 56 are 0.42; those in pages are split even so, and
    wide rows where a cluster merges."""
    p, a100 = Problem(1, 32768, 128, batch=8, **GROUPED), replace(H200, compute_capability=(8, 0))
    assert decode_plan.plan(p, (32768,) * 8, a100).splits == (1,) * 8
    assert decode_plan.plan(replace(p, batch=7), (32768,) * 7, a100).splits == (2,) * 7
    assert decode_plan.plan(p, (4096, *(400,) * 7), a100).splits[0] > 1, "longer than the others"
    made = decode_plan.plan(p, (1024,) * 8, H200)
    assert (made.splits, made.cluster) == ((2,) * 8, 2)
    narrow = replace(p, head_dim=64, head_dim_v=64)
    assert decode_plan.plan(narrow, (4096,) * 8, H200).splits == (1,) * 8
    assert decode_plan.plan(narrow, (32768,) * 8, H200).splits == (1,) * 8
    made = decode_plan.plan(narrow, (1024,) * 8, H200, page=16)
    assert (made.splits, made.cluster, made.slots) == ((2,) * 8, 2, 0)


def test_what_merges_in_a_cluster():
    p = Problem(1, 4096, 128, batch=2, **GROUPED)
    for splits in (1, 2, 3, 4, 6, 8, 16):
        made = decode_plan.plan(p, (4096,) * 2, H200, splits)
        assert made.cluster == (splits if splits in (2, 4, 8) else 1)
        assert made.grid[0] % made.cluster == 0
    assert decode_plan.plan(p, (4096, 200), H200, 4).cluster == 1, "they are split differently"
    many = replace(p, batch=32)
    assert decode_plan.plan(many, (4096,) * 32, H200, 4).cluster == 1, "two small blocks on each"


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    st.none() | st.integers(1, 40),
    st.sampled_from([None, (0, 0), (100, 0), (700, 5)]),
    st.integers(1, 20),
)
def test_splits_cover_every_tile_once(lengths, splits, window, n_q):
    p = Problem(n_q, 5000, 64, batch=len(lengths), window=window, **GROUPED)
    made = decode_plan.plan(p, tuple(lengths), H200, splits)
    slots = []
    for b, length in enumerate(lengths):
        mine = made.items[made.items[:, 0] == b]
        mine = mine[np.argsort(mine[:, 1], kind="stable")]
        assert len(mine) == made.splits[b]
        assert (mine[:, 5] == made.splits[b]).all()
        assert (mine[:, 6] == length).all()
        assert (mine[1:, 1] == mine[:-1, 2]).all(), "no gap"
        assert mine[-1, 2] == -(-length // made.block_k)
        first = max(0, length - n_q - p.left)
        assert mine[0, 1] * made.block_k <= first
        assert length == 0 or first < (mine[0, 1] + 1) * made.block_k
        if len(mine) > 1:
            assert (mine[:, 2] > mine[:, 1]).all(), "no split is empty"
            assert (mine[:, 3] == mine[:, 4] + np.arange(len(mine))).all()
            slots += mine[:, 3].tolist()
        if splits:
            assert made.splits[b] == max(1, min(splits, int(mine[-1, 2] - mine[0, 1])))
    assert sorted(slots) == list(range(sum(n for n in made.splits if n > 1)))
    assert made.slots == (0 if made.cluster > 1 else len(slots))
    if made.cluster > 1:  # its blocks are neighbours: of one sequence, in order
        assert {made.cluster} == {*made.splits}
        together = made.items.reshape(len(lengths), made.cluster, 8)
        assert (together[:, :, 0] == together[:, :1, 0]).all()
        assert (together[:, :, 3] == together[:, :, 4] + np.arange(made.cluster)).all()
        size = (together[:, -1, 2] - together[:, 0, 1]).ravel()
    else:
        size = made.items[:, 2] - made.items[:, 1]
    assert (np.diff(size) <= 0).all(), "the longest come first"


@pytest.mark.parametrize(
    ("name", "arch"),
    [("128", "sm_90"), kernels_only("128 full", "sm_90"), kernels_only("four row blocks", "sm_80")],
)
def test_reading_lengths_as_it_runs_costs_no_registers_that_spill(name, arch):
    problem, page = VARIANTS[name]
    made = decode_plan.dynamic(problem, GPUS[arch], page=page)
    assert ("FS_DYNAMIC", 1) in made.kernel.constants
    ((_, spilled, registers),) = compile_kernel(made.kernel, arch).values()
    assert spilled <= SPILL_BYTES
    assert registers * made.kernel.threads <= 65536
    if made.kernel.threads == 128:
        assert 2 * registers * made.kernel.threads <= 65536, "two blocks a multiprocessor"
