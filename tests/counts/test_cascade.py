"""A prefix that all entries of a batch share: walked once, merged, counted in closed form."""

import numpy as np
import pytest
from helpers import tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses
from test_flash_decode import DECODE, paged
from test_traffic import agree, tilings

import flashsim
from flashsim import Problem, Tiling
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import Split

pytestmark = pytest.mark.promise("three counts equal", "twice plain attention's error")


def shared(lengths, prefix, n_q=1, group=2, seed=0):
    """Arrays whose entries begin with the same `prefix` keys; what is not live is NaN."""
    x = tensors(n_q, max(lengths), 8, batch=len(lengths), heads=2 * group, kv_heads=2, seed=seed)
    for array in (x.k, x.v):
        array[1:, :, :prefix] = array[:1, :, :prefix]
        for b, n in enumerate(lengths):
            array[b, :, n:] = np.nan
    return x


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    own=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    prefix=st.integers(1, 40),
    n_q=st.integers(1, 3),
    group=st.integers(1, 3),
    tiling=tilings,
    splits=st.one_of(st.integers(1, 6), st.sampled_from(["auto", "fa3"])),
    pack_gqa=st.booleans(),
    options=st.sampled_from([{}, {"causal": True}, {"softcap": 2.0}]),
)
def test_it_is_attention_over_all_keys_and_counted(
    own, prefix, n_q, group, tiling, splits, pack_gqa, options
):
    if "causal" in options:
        own = [n + n_q - 1 for n in own]
    lengths = [prefix + n for n in own]
    x = shared(lengths, prefix, n_q, group)
    how = {"algorithm": DECODE, "tiling": tiling, "splits": splits, "pack_gqa": pack_gqa}
    given_lengths = {"cache_seqlens": lengths, **how}
    apart = flashsim.run(x.q, x.k, x.v, **given_lengths, **options)
    once = flashsim.run(
        *(x.q, x.k, x.v), shared_prefix=prefix, trace=True, **given_lengths, **options
    )
    np.testing.assert_allclose(once.out, apart.out, atol=2e-6)
    np.testing.assert_allclose(once.lse, apart.lse, atol=2e-6)
    closed = flashsim.count(once.problem, **how)
    agree(once.trace, closed)
    # The whole batch's prefix is a compulsory read once; so is everything else.
    again = (len(own) - 1) * prefix * 2 * (8 + 8) * 4
    assert apart.problem.shared_prefix == 0
    whole = flashsim.count(apart.problem, **how)
    assert whole.compulsory() - closed.compulsory() == again


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    own=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    pages=st.integers(1, 4),
    size=st.integers(1, 9),
    tiling=tilings,
    splits=st.integers(1, 5),
)
def test_pages_of_the_prefix_are_read_once(own, pages, size, tiling, splits):
    prefix = pages * size
    lengths = [prefix + n for n in own]
    x = shared(lengths, prefix)
    k, v, table = paged(x, lengths, size, 200, np.random.default_rng(0))
    table[:, :pages] = table[0, :pages]
    how = {"algorithm": DECODE, "tiling": tiling, "splits": splits, "shared_prefix": prefix}
    plain = flashsim.run(x.q, x.k, x.v, cache_seqlens=lengths, trace=True, **how)
    r = flashsim.run(x.q, k, v, cache_seqlens=lengths, block_table=table, trace=True, **how)
    np.testing.assert_allclose(r.out, plain.out, atol=2e-6)
    assert set(r.trace.diff(plain.trace)) == {("split", "load", "table")}
    assert r.problem.pages == pages + sum(-(-n // size) for n in own)
    del how["shared_prefix"]
    assert dict(r.trace.transfers) == flashsim.count(r.problem, **how).transfers


def test_bytes_saved_by_hand():
    """32 entries of 8,192 keys, 7,168 of them shared: 31 x 7,168 keys are not read again."""
    p = Problem(1, 8192, 128, batch=32, heads=32, kv_heads=8, dtype="bfloat16")
    how = {"algorithm": DECODE, "device": "H200"}
    apart = flashsim.count(p, **how)
    once = flashsim.count(p, shared_prefix=7168, **how)
    keys = 31 * 7168 * 8  # of 8 key heads
    for tensor in ("K", "V"):
        saved = apart.bytes("load", tensor) - once.bytes("load", tensor)
        assert saved == keys * 128 * 2
    # 2 parts of the prefix and 1 of an entry's own keys: Q is loaded for each of them.
    assert once.bytes("load", "Q") == 3 * apart.bytes("load", "Q")
    assert once.workspace() == 3 * 32 * 32 * (128 + 1) * 4


def test_parts_are_as_long_anywhere():
    """A prefix of 16 key tiles in 4 parts; own keys of 6, 4 and 0 tiles in parts of 3, 4 and 0."""
    q, k = (0, 1, 2, 3), (64, 64 + 24, 64 + 40, 64 + 40)
    p = Problem(3, 104, cu_seqlens_q=q, cu_seqlens_k=k, shared_prefix=64)
    s = Schedule(p, Tiling(4, 4), split=Split(4))
    assert s.visit_counts.tolist() == [16, 6, 4, 0]
    assert s.part_counts.tolist() == [4, 2, 1, 1]
    assert s.slots.tolist() == [[0, 4], [4, 6], [4, 5], [4, 5]]
    assert s.merged.tolist() == [False, True, True, True]


X, POOL = shared([20, 30, 24], 16), np.zeros((7, 2, 10, 8), np.float32)
OTHER = X.k.copy()
OTHER[2, 1, 15, 3] += 1
BIAS = np.zeros((1, 1, 1, 30), np.float32)
PACKED = {"cu_seqlens_q": (0, 3), "cu_seqlens_k": (16, 17), "shared_prefix": 16}


def run(k=X.k, **options):
    options = {"algorithm": DECODE, "cache_seqlens": [20, 30, 24], **options}
    return flashsim.run(X.q, k, X.v, **options)


def paged_run(prefix):
    table = [[0, 1, 2], [0, 3, 4], [0, 5, 6]]
    how = {"algorithm": DECODE, "block_table": table, "shared_prefix": prefix}
    return flashsim.run(X.q, POOL, POOL, **how)


test_what_cannot_be_shared_says_why = refuses(r"""
run(OTHER, shared_prefix=16)
    -> OptionError: same in all batch entries, but those of k[2] differ from those of k[0]
run(shared_prefix=22)
    -> OptionError: shared_prefix= must be ... , got 22, but entry 0 has only 20 keys
run(shared_prefix=-1) -> ShapeError: shared_prefix must be at least 0
run(shared_prefix=16, window=(9, -1)) -> UnsupportedError: cannot be combined with window
run(shared_prefix=16, mask=lambda q, k: q >= k)
    -> UnsupportedError: cannot be combined with mask
paged_run(20)
    -> OptionError: block_table[1, 1] must be page 1, ... first 20 keys, got page 3
paged_run(15) -> ShapeError: multiple of page_size=10, got 15; use 10
run(bias=BIAS, cache_seqlens=None, shared_prefix=16)
    -> UnsupportedError: shared_prefix cannot be combined with bias=
Problem(3, 17, causal=True, **PACKED)
    -> ShapeError: sequence 0 has 3 queries, but only 1 keys after the shared prefix
Problem(1, 17, shared_prefix=16) -> ShapeError: pass cu_seqlens_q=
count(Problem(3, 17, **PACKED), algorithm=DECODE, level="dram")
    -> UnsupportedError: does not support rows of several
count(Problem(3, 17, **PACKED)) -> UnsupportedError: 'flash2' cannot merge partial results
count(Problem(1, 17), shared_prefix=4) -> OptionError: 'flash2' does not take shared_prefix
""")
