"""FlashDecoding: executed, judged by the oracle, and counted in closed form, for every option."""

import numpy as np
import pytest
from helpers import DTYPES, KINDS, Judge, brute_force_mask, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses
from test_traffic import agree, arrays_for, keywords_of, problems, tilings

import flashsim
from flashsim import Device, Problem, Tiling
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import Split, fa3, fill_once, longest_part

pytestmark = pytest.mark.promise("three counts equal", "twice plain attention's error")

DECODE = "flash-decode"


def run(p: Problem, tiling, x=None, **options):
    q, k, v, _, bias = arrays_for(p) if x is None else (x.q, x.k, x.v, None, x.bias)
    how = {"algorithm": DECODE, "tiling": tiling, "trace": True, **keywords_of(p), **options}
    return flashsim.run(q, k, v, bias=bias, **how)


@pytest.mark.parametrize("pack_gqa", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kinds_and_types(dtype, kind, pack_gqa):
    x = tensors(3, 157, 16, kind=kind, dtype=dtype, batch=2, heads=6, kv_heads=2)
    p = Problem(3, 157, 16, batch=2, heads=6, kv_heads=2, dtype=dtype, causal=True)
    judge = Judge.of(x, p)
    for splits in (1, 4, 1000):
        r = run(p, Tiling(4, 16), x, splits=splits, pack_gqa=pack_gqa)
        judge.check({"out": r.out, "lse": r.lse})
        assert (r.out.dtype, r.lse.dtype) == (x.q.dtype, np.dtype(p.compute_dtype))


@pytest.mark.parametrize("pack_gqa", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (40, 3)},
        {"softcap": 2.0},
        {"bias": (1, 4)},
        {"bias": (2, 1), "causal": True},
        {"mask": lambda q, k: (q + k // 9) % 3 == 0},
    ],
    ids=lambda options: " ".join(options),
)
def test_options(options, pack_gqa):
    x = tensors(5, 90, 8, dtype="bfloat16", batch=2, heads=4, kv_heads=2, bias=options.get("bias"))
    p = Problem(5, 90, 8, batch=2, heads=4, kv_heads=2, dtype="bfloat16", **options)
    r = run(p, Tiling(4, 8), x, splits=5, pack_gqa=pack_gqa)
    Judge.of(x, p).check({"out": r.out, "lse": r.lse})


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    p=problems(),
    tiling=tilings,
    splits=st.one_of(st.integers(1, 12), st.sampled_from(["auto", "fa3"])),
    pack_gqa=st.booleans(),
    key_order=st.sampled_from(["ascending", "descending"]),
)
def test_count_equals_measurement(p, tiling, splits, pack_gqa, key_order):
    how = {"splits": splits, "pack_gqa": pack_gqa, "key_order": key_order}
    trace = run(p, tiling, **how).trace
    closed = flashsim.count(p, algorithm=DECODE, tiling=tiling, **how)
    agree(trace, closed)
    assert closed.transfers == trace.predicted().transfers


@settings(max_examples=60, deadline=None)
@given(p=problems(), tiling=tilings, splits=st.integers(1, 9), pack_gqa=st.booleans())
def test_parts_cover_the_walk_once_and_evenly(p, tiling, splits, pack_gqa):
    schedule = Schedule(p, tiling, split=Split(splits, pack_gqa))
    kept = np.zeros((schedule.n_rows, p.n_kv), bool)
    for i in range(schedule.t_r):
        parts = [list(schedule.visits(i, s)) for s in range(schedule.part_counts[i])]
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert len(parts) <= splits
        assert [v.index for part in parts for v in part] == [v.index for v in schedule.visits(i)]
        for visit in schedule.visits(i):
            kept[visit.rows, visit.cols] = True if visit.keep is None else visit.keep
    members = p.group if pack_gqa else 1
    np.testing.assert_array_equal(kept, np.repeat(brute_force_mask(p), members, axis=0))


def test_one_query_by_hand():
    """8 heads on 2, 64 keys in 4 parts of one tile: packing loads K once a key head, not four."""
    p = Problem(1, 64, 16, heads=8, kv_heads=2, dtype="bfloat16")
    how = {"algorithm": DECODE, "tiling": Tiling(4, 16), "splits": 4}
    packed = flashsim.count(p, **how)
    assert packed.transfers == {
        ("split", "load", "Q"): 8 * 4 * 16 * 2,
        ("split", "load", "K"): 2 * 64 * 16 * 2,
        ("split", "load", "V"): 2 * 64 * 16 * 2,
        ("split", "store", "O_part"): 8 * 4 * 16 * 4,
        ("split", "store", "L_part"): 8 * 4 * 4,
        ("combine", "load", "O_part"): 8 * 4 * 16 * 4,
        ("combine", "load", "L_part"): 8 * 4 * 4,
        ("combine", "store", "O"): 8 * 16 * 2,
        ("combine", "store", "L"): 8 * 4,
    }
    assert packed.workspace() == 8 * 4 * (16 * 4 + 4)
    alone = flashsim.count(p, **how, pack_gqa=False)
    assert alone.bytes("load", "K") == 4 * packed.bytes("load", "K")
    whole = flashsim.count(p, **{**how, "splits": 1})
    assert {stage for stage, _, _ in whole.transfers} == {"split"}
    assert whole.workspace() == 0


def test_auto_occupies_every_sm_once():
    """8 key heads of one entry: 16 parts are 128 of an H200's 132 SMs, 17 would be 136."""
    for batch, splits in ((1, 16), (2, 8), (8, 2), (16, 1), (32, 1)):
        t = flashsim.count(
            Problem(1, 32_768, 128, batch=batch, heads=32, kv_heads=8, dtype="bfloat16"),
            algorithm=DECODE, device="H200",
        )  # fmt: skip
        assert t.split == Split(splits, True)


def test_rules_by_hand():
    assert [fill_once(8, 132, n) for n in (256, 3)] == [16, 3]
    assert fill_once(200, 132, 256) == 1
    assert [fa3(8, 132, 4), fa3(106, 132, 1000)] == [1, 1]
    # 66 blocks of 132: one part fills half a round, two fill it.
    assert fa3(66, 132, 256) == 2
    # 8 blocks: 14 parts fill 112 / 132 = 0.848 of the SMs; 33 fill two rounds to the last SM.
    assert fa3(8, 132, 256) == 15


def test_parts_of_bounded_length_by_hand():
    """Sequences of 70, 33 and 16 keys, tiles of 16: 5, 3 and 1 key tiles."""
    lengths = {"cu_seqlens_q": (0, 1, 2, 3), "cu_seqlens_k": (0, 70, 103, 119)}
    p = Problem(3, 119, 8, **lengths)
    schedule = Schedule(p, Tiling(1, 16), split=Split(part_tiles=2))
    assert schedule.part_counts.tolist() == [3, 2, 1]
    parts = [[v.j for v in schedule.visits(0, part)] for part in range(3)]
    assert parts == [[0], [1, 2], [3, 4]]
    # Two parts of at most 3 tiles and one of 1; 4 would be a part too many of at most 2.
    assert [longest_part((5, 3, 1), capacity) for capacity in (4, 6, 99)] == [3, 2, 2]
    assert longest_part((5, 3, 1), 2) == 5  # more sequences than blocks: their average load
    assert str(Split(1, True, 2)) == "parts of 2 key tiles, heads packed"
    assert str(Split(part_tiles=2)) == "parts of 2 key tiles"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=4).filter(any),
    n_q=st.integers(1, 4),
    group=st.integers(1, 3),
    tiling=tilings,
    splits=st.one_of(st.integers(1, 6), st.just("auto")),
    pack_gqa=st.booleans(),
    options=st.sampled_from([{}, {"causal": True}, {"window": (9, 2)}, {"softcap": 2.0}]),
)
def test_cache_lengths_are_entries_run_one_by_one(
    lengths, n_q, group, tiling, splits, pack_gqa, options
):
    x = tensors(n_q, 50, 8, batch=len(lengths), heads=2 * group, kv_heads=2)
    for b, n in enumerate(lengths):
        x.k[b, :, n:] = x.v[b, :, n:] = np.nan  # never read
    how = {"algorithm": DECODE, "tiling": tiling, "splits": splits, "pack_gqa": pack_gqa}
    r = flashsim.run(x.q, x.k, x.v, cache_seqlens=lengths, trace=True, **how, **options)
    assert r.out.shape == x.q.shape
    for b, n in enumerate(lengths):
        if n == 0:
            assert (r.out[b] == 0).all()
            assert np.isneginf(r.lse[b]).all()
            continue
        one = flashsim.run(x.q[b], x.k[b, :, :n], x.v[b, :, :n], tiling=tiling, **options)
        np.testing.assert_allclose(r.out[b], one.out, atol=2e-6)
        np.testing.assert_allclose(r.lse[b], one.lse, atol=2e-6)
    closed = flashsim.count(r.problem, **how)
    agree(r.trace, closed)


def paged(x, lengths, size, pages, rng):
    """K and V of `x` in shuffled pages of `size`, NaN where no live key is, and the table."""
    most = -(-x.k.shape[2] // size)
    table = rng.permutation(pages)[: len(lengths) * most].reshape(len(lengths), most)
    pools = []
    for array in (x.k, x.v):
        pool = np.full((pages, array.shape[1], size, array.shape[3]), np.nan, array.dtype)
        for b, n in enumerate(lengths):
            for j in range(-(-n // size)):
                part = array[b, :, j * size : min((j + 1) * size, n)]
                pool[table[b, j], :, : part.shape[1]] = part
        pools.append(pool)
    for b, n in enumerate(lengths):
        table[b, -(-n // size) :] = 2**40  # unused entries are never followed
    return *pools, table


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    size=st.integers(1, 17),
    n_q=st.integers(1, 3),
    tiling=tilings,
    splits=st.integers(1, 5),
    pack_gqa=st.booleans(),
    options=st.sampled_from([{}, {"causal": True}, {"window": (9, 2)}]),
    seed=st.integers(0, 99),
)
def test_pages_hold_what_a_contiguous_cache_does(
    lengths, size, n_q, tiling, splits, pack_gqa, options, seed
):
    x = tensors(n_q, 40, 8, batch=len(lengths), heads=4, kv_heads=2, seed=seed)
    k, v, table = paged(x, lengths, size, 130, np.random.default_rng(seed))
    how = {"algorithm": DECODE, "tiling": tiling, "splits": splits, "pack_gqa": pack_gqa}
    plain = flashsim.run(x.q, x.k, x.v, cache_seqlens=lengths, trace=True, **how, **options)
    r = flashsim.run(
        *(x.q, k, v), cache_seqlens=lengths, block_table=table, trace=True, **how, **options
    )
    # A BLAS may sum a gathered tile in another order than a slice: equal to rounding only.
    np.testing.assert_allclose(r.out, plain.out, atol=2e-6)
    np.testing.assert_allclose(r.lse, plain.lse, atol=2e-6)
    assert (r.problem.page_size, plain.problem.page_size) == (size, None)
    table_key = ("split", "load", "table")
    assert set(r.trace.diff(plain.trace)) <= {table_key}
    by_hand = sum(
        len({key // size for key in range(*local(r.problem, visit.cols))}) * 4
        for visit in r.trace.schedule
    )
    assert r.trace.bytes("load", "table") == by_hand * 2 * (1 if pack_gqa else 2)
    closed = flashsim.count(r.problem, **how)
    agree(r.trace, closed)


def local(p: Problem, cols: slice) -> tuple[int, int]:
    """A tile's keys, counted from the start of their sequence."""
    (start,) = (s.k_start for s in p.sequences if s.k_start <= cols.start < s.k_stop)
    return cols.start - start, cols.stop - start


def test_entries_may_share_pages():
    x = tensors(1, 32, 8, batch=2)
    pools = (np.concatenate([a[0, :, :16], a[0, :, 16:], a[1, :, 16:]]) for a in (x.k, x.v))
    k, v = (pool.reshape(3, 2, 16, 8) for pool in pools)
    r = flashsim.run(x.q, k, v, algorithm=DECODE, block_table=[[0, 1], [0, 2]])
    x.k[1, :, :16], x.v[1, :, :16] = x.k[0, :, :16], x.v[0, :, :16]
    whole = flashsim.run(x.q, x.k, x.v, algorithm=DECODE)
    np.testing.assert_allclose(r.out, whole.out, atol=2e-6)


ONE, HOW = Problem(1, 64, heads=2), {"algorithm": DECODE}
SMALL, X, K = (
    np.zeros((4, 8), np.float32),
    tensors(1, 32, 8, batch=2),
    np.zeros((3, 2, 16, 8), "f4"),
)


def lengths(*values, **options):
    return flashsim.run(X.q, X.k, X.v, algorithm=DECODE, cache_seqlens=values, **options)


def pages(table, v=K, **options):
    return flashsim.run(X.q, K, v, algorithm=DECODE, block_table=table, **options)


test_what_is_refused_says_why = refuses(r"""
run(ONE, None, splits=0) -> OptionError: splits= must be an integer of at least 1, or one
run(ONE, None, splits=-3) -> OptionError: splits= must be an integer of at least 1, or one
run(ONE, None, splits=2.0) -> OptionError: splits= must be an integer of at least 1, or one
run(ONE, None, splits=True) -> OptionError: splits= must be an integer of at least 1, or one
run(ONE, None, splits=None) -> OptionError: splits= must be an integer of at least 1, or one
count(ONE, splits="atuo", **HOW) -> OptionError: unknown splits='atuo'; ... did you mean 'auto'
count(ONE, splits=2) -> OptionError: 'flash2' does not take splits
flashsim.run(SMALL, SMALL, SMALL, algorithm="flash1", pack_gqa=True)
    -> OptionError: 'flash1' does not take pack_gqa
count(ONE, direction="backward", pack_gqa=True)
    -> OptionError: a backward pass packs no query heads
run(ONE, None).backward(np.zeros((1, 2, 1, 64), np.float32))
    -> UnsupportedError: no backward pass ... algorithm='flash2'
count(ONE, direction="backward", **HOW) -> UnsupportedError: no backward pass
Schedule(ONE, Tiling(4, 4), "keys", split=Split(2))
    -> OptionError: a KV-outer loop ... cannot split keys ... , got 2 splits
Split(3, part_tiles=2)
    -> OptionError: either splits= or part_tiles=, not both; got splits=3 and part_tiles=2
Split(part_tiles=0) -> OptionError: part_tiles= must be an integer of at least 1, got
Split(part_tiles=2.0) -> OptionError: part_tiles= must be an integer of at least 1, got
lengths(1, 33) -> OptionError: cache_seqlens[1] must be from 0 to 32, ... , got 33
lengths(-1, 2) -> OptionError: cache_seqlens[0] must be from 0 to 32, ... , got -1
lengths(1) -> ShapeError: must be 2 integers, one per batch entry
lengths(1.0, 2) -> ShapeError: must be 2 integers, one per batch entry
lengths(1, 2, sinks=np.zeros(X.q.shape[1])) -> UnsupportedError: does not support sinks
lengths(1, 2, mask_mod=lambda b, h, q, k: q >= k)
    -> UnsupportedError: does not support mask_mod
pages([[0, 1], [0, 2]], score_mod=lambda s, b, h, q, k: s - k)
    -> UnsupportedError: does not support score_mod
flashsim.run(X.q, X.k, X.v, cache_seqlens=[1, 2])
    -> OptionError: 'flash2' does not take cache_seqlens
pages([[0, 1], [0, 3]], cache_seqlens=[32, 17])
    -> OptionError: block_table[1, 1] must be a page of the pool, from 0 to 2, got 3
pages([[0, -1], [0, 2]]) -> OptionError: block_table[0, 1] must be ... from 0 to 2, got -1
pages([[0, 1], [0, 2]], cache_seqlens=[32, 33])
    -> OptionError: cache_seqlens[1] must be from 0 to 32, ... keys in its row ... , got 33
pages([[0, 1]])
    -> ShapeError: must have shape (batch, max_pages) for q of ... , got shape (1, 2)
pages([[0.5, 1], [0, 2]]) -> DTypeError: integers of shape (batch, max_pages)
pages([[0, 1], [0, 2]], v=K[:2]) -> ShapeError: with the same number of pages
count(Problem(1, 32, page_size=4)) -> UnsupportedError: 'flash2' cannot read a paged cache
merge(X.q, X.q[..., 0].copy(), X.q[:, :1], X.q[..., 0].copy())
    -> ShapeError: out_b must have the same shape as out_a
merge(X.q, X.q, X.q, X.q) -> ShapeError: lse_a must have the shape of out_a without
""")


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_is_attention_over_the_keys_of_both(dtype):
    x = tensors(5, 60, 8, dtype=dtype, kind="rising", heads=4, kv_heads=2)
    a, b = (
        flashsim.run(x.q, x.k[:, :, part], x.v[:, :, part])
        for part in (slice(0, 23), slice(23, 60))
    )
    out, lse = flashsim.merge(a.out, a.lse, b.out, b.lse)
    assert (out.dtype, lse.dtype) == (a.out.dtype, a.lse.dtype)
    judge = Judge.of(x, Problem(5, 60, 8, heads=4, kv_heads=2, dtype=dtype))
    judge.check({"out": out, "lse": lse})
    nothing = np.zeros_like(a.out), np.full_like(a.lse, -np.inf)
    for merged in (flashsim.merge(*nothing, a.out, a.lse), flashsim.merge(a.out, a.lse, *nothing)):
        np.testing.assert_array_equal(merged[0], a.out)
        np.testing.assert_array_equal(merged[1], a.lse)
    assert np.isneginf(flashsim.merge(*nothing, *nothing)[1]).all()


def test_it_needs_what_fits():
    p = Problem(1, 64, 8, heads=64, kv_heads=1)
    tiling = Tiling(64, 64)
    need = tiling.footprint(p, DECODE, split=Split(1, True))
    assert need > tiling.footprint(p, DECODE)  # unpacked, a query is one row
    device = Device.get("H100").with_sram(need)
    assert run(p, tiling, device=device).trace.peak_sram() == need
    with pytest.raises(flashsim.SramOverflow):
        run(p, tiling, device=device.with_sram(need - 1))
