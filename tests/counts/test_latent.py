"""Latent attention: V is columns of K, and one load serves both."""

import numpy as np
import pytest
from helpers import Judge, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses
from test_flash_decode import DECODE, paged
from test_traffic import agree, tilings

import flashsim
from flashsim import Problem, Tiling

pytestmark = pytest.mark.promise("three counts equal")

MLA = Problem(
    1, 32_768, 576, 512, heads=128, kv_heads=1, dtype="bfloat16", latent=True, scale=192**-0.5
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    n_q=st.integers(1, 3),
    heads=st.integers(1, 5),
    width=st.integers(1, 12),
    tiling=tilings,
    splits=st.integers(1, 5),
    pack_gqa=st.booleans(),
    options=st.sampled_from([{}, {"causal": True}, {"cache_seqlens": [40, 7]}]),
)
def test_it_is_attention_with_v_in_k(n_q, heads, width, tiling, splits, pack_gqa, options):
    x = tensors(n_q, 40, 12, batch=2, heads=heads, kv_heads=1)
    v = np.ascontiguousarray(x.k[..., :width])
    how = {"algorithm": DECODE, "tiling": tiling, "splits": splits, "pack_gqa": pack_gqa}
    apart = flashsim.run(x.q, x.k, v, trace=True, **how, **options)
    r = flashsim.run(x.q, x.k, None, head_dim_v=width, trace=True, **how, **options)
    np.testing.assert_allclose(r.out, apart.out, atol=2e-6)
    np.testing.assert_array_equal(r.lse, apart.lse)
    assert set(r.trace.diff(apart.trace)) == {("split", "load", "V")}
    assert r.trace.bytes("load", "V") == 0
    closed = flashsim.count(r.problem, **how)
    agree(r.trace, closed)
    keys = sum(options.get("cache_seqlens", [40, 40]))
    assert apart.trace.compulsory() - closed.compulsory() == keys * width * 4


def test_it_is_exact_in_half_precision_and_through_pages():
    x = tensors(2, 60, 36, dv=32, batch=2, heads=8, kv_heads=1, dtype="bfloat16", kind="rising")
    v = np.ascontiguousarray(x.k[..., :32])
    k, _, table = paged(x, [60, 60], 7, 30, np.random.default_rng(0))
    r = flashsim.run(
        x.q, k, None, head_dim_v=32, algorithm=DECODE, block_table=table, splits=3,
        cache_seqlens=[60, 60],
    )  # fmt: skip
    p = Problem(2, 60, 36, 32, batch=2, heads=8, kv_heads=1, dtype="bfloat16")
    x.v = v
    Judge.of(x, p).check({"out": r.out, "lse": r.lse})


def test_bytes_a_token_by_hand():
    """DeepSeek-V3's row against grouped heads and against all heads with keys of their own."""
    gqa = Problem(1, 32_768, 128, heads=128, kv_heads=8, dtype="bfloat16")
    mha = Problem(1, 32_768, 128, heads=128, kv_heads=128, dtype="bfloat16")
    a_token = {}
    for name, p in (("latent", MLA), ("gqa", gqa), ("mha", mha)):
        t = flashsim.count(p, algorithm=DECODE, device="H200")
        own = p.head_dim + (0 if p.latent else p.head_dim_v)
        a_token[name] = p.kv_heads * own * 2
        queries = 128 * (p.head_dim + p.head_dim_v) * 2 + 128 * 4
        assert t.compulsory() == 32_768 * a_token[name] + queries
    assert a_token == {"latent": 1152, "gqa": 4096, "mha": 65_536}


X = tensors(1, 40, 12, heads=4, kv_heads=1)
test_what_it_is_not = refuses(r"""
run(X.q, X.k, X.v, head_dim_v=8, algorithm=DECODE)
    -> OptionError: head_dim_v=8 means that V is the first columns of k, but v
run(X.q, X.k, None, head_dim_v=13, algorithm=DECODE)
    -> ShapeError: must be at most 12, ... got 13
Problem(1, 40, 8, 9, latent=True) -> ShapeError: head_dim_v must be at most head_dim=8, ... , got 9
count(MLA) -> UnsupportedError: 'flash2' loads K and V separately
run(X.q, X.k, None, head_dim_v=8)
    -> OptionError: 'flash2' does not take head_dim_v, because only decoding does; use
""")


def test_a_tiling_of_its_own_is_counted():
    assert flashsim.count(MLA, algorithm=DECODE, device="H200", tiling=Tiling(16, 64)).bytes() > 0
