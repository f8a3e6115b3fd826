"""Hopper's forward with the query heads of a group packed into row tiles, on a GPU.

Against the float64 oracle, the simulator's counts, and the kernels without packing.
"""

import cupy_checks
import pytest
from cupy_checks import (  # noqa: F401
    HOPPER,
    ON_HOPPER,
    check,
    check_counts,
    check_timelines,
    cupy,
    make,
    on_gpu,
    poisoned,
)

import flashsim
from flashsim import Problem
from flashsim.backends.cupy_gpu.engine import gpu_of
from flashsim.backends.launch_policy import hopper

pytestmark = [
    *ON_HOPPER,
    pytest.mark.promise("three counts equal", "twice plain attention's error"),
]
FEATURES = {
    "2": dict(n_q=333, n_kv=333, heads=4, kv_heads=2, causal=True),
    "4 ragged": dict(n_q=201, n_kv=517, batch=3, heads=8, kv_heads=2),
    "8": dict(n_q=700, n_kv=700, heads=16, kv_heads=2, causal=True),
    "8 more keys": dict(n_q=130, n_kv=1111, heads=8, kv_heads=1, causal=True),
    "4 more queries": dict(n_q=700, n_kv=300, heads=4, kv_heads=1, causal=True),
    "8 window": dict(n_q=900, n_kv=1000, heads=8, kv_heads=1, window=(100, 50)),
    "4 left window": dict(n_q=600, n_kv=500, heads=8, kv_heads=2, window=(77, -1), causal=True),
    "2 softcap": dict(n_q=300, n_kv=500, heads=4, kv_heads=2, softcap=3.0, causal=True),
    "16 negative scale": dict(n_q=75, n_kv=200, heads=16, kv_heads=1, scale=-0.2),
    "64": dict(n_q=9, n_kv=150, heads=64, kv_heads=1),
    "1 x 1": dict(n_q=1, n_kv=1, heads=8, kv_heads=2),
    "many items": dict(n_q=200, n_kv=200, batch=8, heads=40, kv_heads=10, causal=True),
}


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_results(name, head_dim):
    """And gradients, for which the forward stores its log-sum-exp."""
    p = Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name])
    check(p, HOPPER, pack_gqa=True)


@pytest.mark.parametrize("head_dims", [(64, 64), (91, 59), (128, 128), (256, 192)])
@pytest.mark.parametrize("name", FEATURES)
def test_counts(name, head_dims):
    d, dv = head_dims
    p = Problem(head_dim=d, head_dim_v=dv, dtype="float16", **FEATURES[name])
    check_counts(p, HOPPER, pack_gqa=True)


@pytest.mark.parametrize("name", ["2", "8 window"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_timelines(name, head_dim):
    check_timelines(
        Problem(head_dim=head_dim, dtype="bfloat16", **FEATURES[name]), HOPPER, pack_gqa=True
    )


LARGE = [
    Problem(2048, 2048, 128, heads=32, kv_heads=8, batch=2, dtype="bfloat16", causal=True),
    Problem(1111, 1500, 64, heads=64, kv_heads=8, batch=3, dtype="bfloat16"),
    Problem(3000, 3000, 96, heads=16, kv_heads=8, dtype="bfloat16", causal=True, window=(500, 0)),
    Problem(777, 777, 32, heads=48, kv_heads=12, batch=4, dtype="bfloat16", causal=True),
    Problem(1025, 1025, 192, heads=24, kv_heads=6, batch=2, dtype="bfloat16", causal=True),
    Problem(1025, 1025, 256, heads=8, kv_heads=1, batch=2, dtype="bfloat16", causal=True),
]


@pytest.mark.parametrize("p", LARGE, ids=lambda p: f"{p.head_dim}")
def test_results_are_those_without_packing(p):
    """For every tiling: the same bits in many runs, and without packing the same but for a sum.

    A row's products, maxima and exponentials are the same. A row's exponentials are added up in two
    chains or in one, by its place in the tile, which is another one if heads are packed.
    """
    x, gpu = on_gpu(make(p)), gpu_of(0)
    for tiling in hopper.HOPPER.tilings(p, gpu, "forward"):
        given = p, x, HOPPER
        apart, first, *more = (
            cupy_checks.run(*given, tiling=tiling, pack_gqa=packs)
            for packs in [False] + [True] * 20
        )
        off = cupy_checks.bits(first.out).int() - cupy_checks.bits(apart.out).int()
        assert int(off.abs().max()) <= 1, tiling  # the neighbouring number, at most
        assert bool((first.lse - apart.lse).abs().max() < 1e-5), tiling
        for packed in more:
            assert bool((cupy_checks.bits(packed.out) == cupy_checks.bits(first.out)).all()), tiling
            assert bool((packed.lse == first.lse).all()), tiling


def test_strides():
    """Heads beside each other in memory, as a model's projections have them."""
    torch = pytest.importorskip("torch")
    q = torch.randn(2, 150, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 200, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    x = [a.transpose(1, 2) for a in (q, k, v)]
    how = {"backend": "cupy", "kernel": "hopper", "causal": True}
    strided = flashsim.run(*x, **how, pack_gqa=True)
    dense = flashsim.run(*(a.contiguous() for a in x), **how, pack_gqa=True)
    assert torch.equal(strided.out, dense.out)
    assert torch.equal(strided.lse, dense.lse)


@pytest.mark.parametrize("forced", [None, False, True])
def test_the_result_says_whether_heads_are_packed(forced):
    """And unless the caller decides, heads are packed where fewer rows do not exist."""
    how = {"backend": "cupy", "trace": True, "pack_gqa": forced}
    for n, expected in ((384, False), (414, True)):
        p = Problem(n, n, 64, heads=28, kv_heads=7, batch=4, dtype="bfloat16")
        x = make(p)
        result = flashsim.run(x["q"], x["k"], x["v"], **how)
        packed = expected if forced is None else forced
        assert result.split.pack_gqa == result.trace.schedule.split.pack_gqa == packed
