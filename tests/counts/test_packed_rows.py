"""FlashAttention-2's forward with the query heads of a group in the same row tiles, on the
simulator: results are attention's, K and V are loaded once per group, and closed forms count the
same bytes and FLOPs.
"""

import numpy as np
import pytest
from refusals import refuses
from test_traffic import agree, arrays_for, keywords_of

import flashsim
from flashsim import Problem, Tiling
from flashsim.problem import oracle

pytestmark = pytest.mark.promise("three counts equal")

SHAPES = {
    "causal": dict(n_q=50, n_kv=50, heads=8, kv_heads=2, batch=2, causal=True),
    "ragged": dict(n_q=33, n_kv=70, heads=6, kv_heads=2),
    "window": dict(n_q=37, n_kv=20, heads=8, kv_heads=1, window=(5, 3)),
    "packed sequences": dict(
        **dict(n_q=40, n_kv=50, heads=4, kv_heads=2, causal=True),
        **dict(cu_seqlens_q=(0, 11, 40), cu_seqlens_k=(0, 30, 50)),
    ),
    "a head per group": dict(n_q=33, n_kv=33, heads=2, causal=True),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tiling", [Tiling(32, 16), Tiling(12, 8)])
def test_results_and_counts(name, tiling):
    p = Problem(head_dim=16, **SHAPES[name])
    x, how = arrays_for(p)[:3], {"tiling": tiling, "trace": True, **keywords_of(p)}
    packed = flashsim.run(*x, pack_gqa=True, **how)
    apart = flashsim.run(*x, pack_gqa=False, **how)
    out, lse = oracle.attention(*x, p)
    np.testing.assert_allclose(packed.out, out, atol=1e-5)
    np.testing.assert_allclose(packed.lse, lse, atol=1e-5)
    assert packed.split.pack_gqa == packed.trace.schedule.split.pack_gqa == (p.group > 1)
    assert not apart.split.pack_gqa
    counted = flashsim.count(p, tiling=tiling, pack_gqa=True)
    trace = packed.trace
    agree(trace, counted)
    assert counted.transfers == trace.predicted().transfers
    assert trace.bytes("load", "Q") == apart.trace.bytes("load", "Q")
    assert trace.bytes("store") == apart.trace.bytes("store")
    if p.group > 1 and tiling.block_q > 12:  # tiles of few rows exist in full in both
        assert trace.bytes("load", "K") < apart.trace.bytes("load", "K")
    dout = np.ones_like(packed.out)
    one, other = (result.backward(dout, dlse=result.lse) for result in (packed, apart))
    for gradient in ("dq", "dk", "dv"):  # the backward pass is the same
        same = getattr(one, gradient), getattr(other, gradient)
        np.testing.assert_allclose(*same, atol=1e-4)
    assert one.trace.transfers == other.trace.transfers


CAUSAL = Problem(head_dim=16, **SHAPES["causal"])
X = arrays_for(CAUSAL)[:3]
test_what_is_refused_says_why = refuses(r"""
run(*X, pack_gqa=3) -> DTypeError: pack_gqa must be True or False, got 3
run(*X, pack_gqa=True, sinks=np.zeros(8, np.float32))
    -> UnsupportedError: pack_gqa=True does not support sinks ... leave out
run(*X, pack_gqa=True, algorithm="standard")
    -> OptionError: 'standard' does not take pack_gqa ... algorithm='flash2'
run(*X, backend="numba", pack_gqa=True)
    -> UnknownArgumentError: 'pack_gqa' only with backend='simulator'
run(*X, backend="numba", pack_gqa=1) -> DTypeError: pack_gqa must be True or False, got 1
run(X[0][:, :, :0], *X[1:], pack_gqa=1) -> DTypeError: pack_gqa must be True or False, got 1
""")


def test_none_leaves_packing_to_the_backend():
    assert flashsim.run(*X, pack_gqa=None).split == flashsim.run(*X).split
    flashsim.run(*X, pack_gqa=None, algorithm="standard")


@pytest.mark.parametrize("n_q", [0, 5])
@pytest.mark.parametrize("packs", [False, None])
def test_engines_that_never_pack_take_false_and_none(n_q, packs):
    q, kv = np.ones((4, n_q, 8), np.float32), np.ones((2, 5, 8), np.float32)
    result = flashsim.run(q, kv, kv, backend="numba", pack_gqa=packs)
    np.testing.assert_allclose(result.out, np.ones((4, n_q, 8)), rtol=1e-6)
