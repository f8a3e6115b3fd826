"""`flashsim.distributed`: every rank's rows, blocks, bytes and results, executed and counted."""

from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses

import flashsim
from flashsim import Problem, Tiling
from flashsim.distributed import SCHEMES, Group, count, run
from flashsim.errors import ShapeError
from flashsim.problem.oracle import attention

pytestmark = pytest.mark.promise("three counts equal", "twice plain attention's error")

SMALL = Tiling(4, 4)


def arrays(n=24, heads=4, kv_heads=4, d=8, dv=4, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(1, heads, n, d), (1, kv_heads, n, d), (1, kv_heads, n, dv), (1, heads, n, dv)]
    kind = flashsim.problem.problem.numpy_dtype(dtype)
    return [rng.standard_normal(shape).astype(kind) for shape in shapes]


def check(scheme, ranks, causal, *, dtype="float32", kv_heads=4, ulysses=None):
    """Results against one process, and everything counted against the closed form."""
    q, k, v, dout = arrays(kv_heads=kv_heads, dtype=dtype)
    how = {"ranks": ranks, "scheme": scheme, "ulysses": ulysses, "tiling": SMALL}
    spread = run(q, k, v, causal=causal, **how)
    whole = flashsim.run(q, k, v, causal=causal, tiling=SMALL)
    gradients, expected = spread.backward(dout), whole.backward(dout)
    near = {"rtol": 0, "atol": 4e-6 if dtype == "float32" else 0.04}
    for name, x, y in (
        *((name, getattr(spread, name), getattr(whole, name)) for name in ("out", "lse")),
        *((name, getattr(gradients, name), getattr(expected, name)) for name in ("dq", "dk", "dv")),
    ):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x.astype("f8"), y.astype("f8"), **near, err_msg=name)
    problem = spread.group.problem
    assert problem == whole.problem
    assert spread.account == count(problem, **how)
    assert gradients.account == count(problem, direction="backward", **how)
    return spread, gradients


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("scheme", "ranks"), [*((s, 4) for s in SCHEMES), ("striped", 3)])
def test_ranks_together_compute_what_one_does_and_move_what_is_counted(scheme, ranks, causal):
    check(scheme, ranks, causal)


def test_results_have_as_many_axes_as_the_inputs():
    q, k, v, dout = (x[0] for x in arrays())
    for at in ((), (0,)):  # three axes, two axes
        spread = run(q[at], k[at], v[at], ranks=2)
        gradients = spread.backward(dout[at])
        assert spread.out.shape == dout[at].shape
        assert spread.lse.shape == dout[at].shape[:-1]
        assert gradients.dq.shape == q[at].shape
        assert gradients.dv.shape == v[at].shape


def test_fewer_key_heads_and_teams_in_a_ring():
    spread, _ = check("usp", 6, True, kv_heads=2)
    assert (spread.group.ulysses, spread.group.ring) == (2, 3)


def test_narrow_types_are_merged_in_float32():
    check("zigzag", 3, True, dtype="bfloat16")


def test_two_members_merge_without_an_accumulator():
    _, gradients = check("zigzag", 2, True, dtype="bfloat16")
    # As they were computed: of all of the later member's rows, of half of the earlier one's.
    assert gradients.account.link_bytes("dK") == 3 * gradients.account.link_bytes("K") // 4


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_at_every_size(scheme, ranks, causal, dtype):
    if scheme == "ulysses" and 4 % ranks:
        pytest.skip("four heads")
    check(scheme, ranks, causal, dtype=dtype)


def test_against_the_oracle_and_not_only_ourselves():
    q, k, v, _ = arrays()
    spread = run(q, k, v, ranks=4, scheme="zigzag", causal=True)
    out, lse = attention(q, k, v, spread.group.problem)
    np.testing.assert_allclose(spread.out, out, rtol=0, atol=2e-6)
    np.testing.assert_allclose(spread.lse, lse, rtol=0, atol=2e-6)


# -- who holds what -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_hold_every_row_once(scheme):
    group = Group(Problem(48, heads=8), 4, scheme)
    held = np.concatenate([group.rows(rank) for rank in range(4)])
    assert sorted(held) == list(range(48))


def test_the_rows_of_each_order():
    rows = lambda scheme: [Group(Problem(8), 2, scheme).rows(r).tolist() for r in (0, 1)]  # noqa: E731
    assert rows("ring") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows("zigzag") == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows("striped") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    usp = Group(Problem(16, heads=2), 4, "usp")
    assert usp.rows(1).tolist() == [12, 13, 14, 15]
    assert (list(usp.team(1)), usp.successor(1), usp.predecessor(1)) == ([0, 1], 3, 3)


@pytest.mark.parametrize("scheme", ["ring", "zigzag", "striped", "usp"])
def test_the_blocks_of_all_steps_cover_what_the_mask_keeps_once(scheme):
    n, ranks = 24, 4
    group = Group(Problem(n, heads=2, causal=True), ranks, scheme)
    seen = np.zeros((n, n), int)
    for rank in range(0, ranks, group.ulysses):
        for step in range(group.ring):
            block = group.block(rank, step)
            if block is None:
                continue
            q = group.member_rows(rank // group.ulysses)[block.q]
            k = group.member_rows(group.source(rank, step) // group.ulysses)[block.k]
            kept = np.tri(len(q), len(k), dtype=int) if block.problem.causal else 1
            seen[np.ix_(q, k)] += kept
    assert (seen == np.tri(n, dtype=int)).all()


# -- what it amounts to ---------------------------------------------------------------------------


def test_plain_ring_idles_almost_half_and_zigzag_not_at_all():
    problem = Problem(8192, head_dim=128, heads=2, dtype="bfloat16", causal=True)
    tile = Tiling(128, 128)
    idle = {s: count(problem, ranks=8, scheme=s, tiling=tile).idle_share for s in SCHEMES[:3]}
    # With whole tiles for halves on the diagonal: 1 - (8 * 36 + 28 * 64) / (8 * (36 + 7 * 64)).
    assert idle["ring"] == pytest.approx(1 - (8 * 36 + 28 * 64) / (8 * (36 + 7 * 64)))
    assert idle["zigzag"] == 0
    assert 0 <= idle["striped"] < 0.02


def test_bytes_on_the_link_are_those_of_the_papers():
    n, d, heads, ranks = 4096, 128, 8, 4
    problem = Problem(n, head_dim=d, heads=heads, dtype="bfloat16")
    whole = heads * n * d * 2
    for scheme in ("ring", "zigzag", "striped"):
        account = count(problem, ranks=ranks, scheme=scheme)
        assert account.link_bytes() == (ranks - 1) * 2 * whole  # K and V, to all others
        assert account.link_bytes("K", rank=2) == (ranks - 1) * whole // ranks
    # Ulysses: Q, K, V and out, three quarters of each.
    ulysses = count(problem, ranks=ranks, scheme="ulysses")
    assert ulysses.link_bytes() == 4 * whole * (ranks - 1) // ranks
    backward = count(problem, ranks=ranks, scheme="ring", direction="backward")
    assert backward.link_bytes("dK") == whole + (ranks - 2) * whole * 2  # one block's; float32
    assert backward.link_bytes("V") == (ranks - 1) * whole


def test_a_sequence_of_a_million_on_a_thousand_ranks_is_counted():
    problem = Problem(2**20, head_dim=128, heads=8, dtype="bfloat16", causal=True)
    account = count(problem, ranks=1024, scheme="zigzag")
    assert account.flops.shape == (1024, 1024)
    assert int(account.flops.sum()) > 2 * 8 * 128 * 2**40


def test_accounts_differ_by_any_integer():
    account = count(Problem(64, causal=True), ranks=4)
    for name in ("flops", "visits", "hbm", "merge", "peak"):
        assert account != replace(account, **{name: getattr(account, name) + 1})
    assert account != replace(account, sent={**account.sent, "K": account.sent["K"] + 1})
    assert account != count(Problem(64), ranks=4)
    assert account != "an account"


# -- tables ---------------------------------------------------------------------------------------


def test_tables_of_ranks_and_of_steps():
    account = ACCOUNT
    table = account.table()
    assert [row[1] for row in table.rows] == ["0:16", "16:32", "32:48", "48:64"]
    assert sum(row[2] for row in table.rows) == account.link_bytes()
    assert str(account) == table.text()
    assert max(map(len, table.text(80).split("\n"))) <= 80
    steps = account.rank_table(0)
    assert [row[0] for row in steps.rows] == ["ring 0", "ring 1", "ring 2", "ring 3", "home"]
    own = "16 x 16 causal"  # of half of the heads each
    assert [row[2] for row in steps.rows] == [own, "none", "none", "none", own]
    assert [row[6] for row in steps.rows] == ["K V", "K V", "K V", "dK dV", "dK dV"]
    assert {row[7] for row in steps.rows} == {"1"}
    usp = count(Problem(64, heads=2), ranks=4, scheme="usp").rank_table(0)
    assert [(row[6], row[7]) for row in usp.rows] == [
        ("Q K V", "1"),
        ("K V", "2"),
        ("", ""),
        ("out", "1"),
    ]
    assert STRIPED.table().rows[1][1] == "1::4"


# -- errors ---------------------------------------------------------------------------------------


USP = {"ranks": 4, "scheme": "usp"}
ACCOUNT = count(Problem(64, heads=2, causal=True), ranks=4, scheme="ring", direction="backward")
STRIPED = count(Problem(64), ranks=4, scheme="striped")
test_what_cannot_be_spread_says_why = refuses(r"""
count(Problem(30), ranks=4) -> ShapeError: divisible by 8, got 30 rows; ... 24
count(Problem(3, causal=True), ranks=4, scheme="ring")
    -> ShapeError: got 3 rows; to fix it, pad it at its end to 4$
count(Problem(9, causal=True), ranks=4, scheme="ring")
    -> ShapeError: got 9 rows; to fix it, pad it at its end to 12, or cut it to 8$
count(Problem(9), ranks=4, scheme="ring")
    -> ShapeError: got 9 rows; to fix it, cut it to 8; pad it ... to 12 only with a causal mask
count(Problem(3), ranks=4, scheme="ring") -> ShapeError: to fix it, use fewer ranks; pad
count(Problem(32, heads=6), ranks=4, scheme="ulysses") -> ShapeError: ulysses=2
count(Problem(32, heads=4, kv_heads=2), ranks=4, scheme="ulysses") -> ShapeError: usp
count(Problem(32), **USP, ulysses=3) -> OptionError: ulysses=3 and
count(Problem(32), ranks=4, ulysses=2) -> OptionError: ulysses=2 with scheme 'zigzag'
count(Problem(32), ranks=4, scheme="zag") -> OptionError: did you mean 'zigzag'
count(Problem(32), ranks=0) -> ShapeError: ranks must be at least 1
count(Problem(32, mask_mod=lambda b, h, q, k: k <= q, sinks=True), ranks=4)
    -> UnsupportedError: only a causal mask or no mask, got mask_mod, sinks; leave these out
count(Problem(32, score_mod=lambda s, b, h, q, k: s - k, latent=True), ranks=4)
    -> UnsupportedError: got score_mod, latent
count(Problem(32), ranks=2, direction="sideways") -> OptionError: choose from
count(Problem(32, 64), ranks=4) -> ShapeError: n_q=32, n_kv=64
count(Problem(32, window=(4, 0)), ranks=4) -> UnsupportedError: got window
count(Problem(32, bias=(1, 1)), ranks=4) -> UnsupportedError: got bias
count("problem", ranks=4) -> DTypeError: problem must be Problem, got 'problem'
count(Problem(2**40), ranks=2**20) -> UnsupportedError: at most 4,096
ACCOUNT.group.rows(-1) -> OptionError: rank must be from 0 to 3, got -1
ACCOUNT.group.rows("0") -> DTypeError: rank must be an integer, got '0'
ACCOUNT.rank_table(-1) -> OptionError: rank must be from 0 to 3, got -1
ACCOUNT.rank_table("0") -> DTypeError: rank must be an integer, got '0'
ACCOUNT.group.member_rows(4) -> OptionError: member must be from 0 to 3, got 4
ACCOUNT.rows_to_hide(1e12, 0) -> OptionError: must be positive, got 0
ACCOUNT.rows_to_hide(0, 1e9) -> OptionError: must be positive, got 0
ACCOUNT.rows_to_hide(1e12, "NVLink 4")
    -> DTypeError: bandwidth must be a number, got 'NVLink 4'
STRIPED.rank_table(4) -> OptionError: rank must be from 0 to 3, got 4
STRIPED.link_bytes("dK") -> OptionError: unknown tensor 'dK'; choose from K, V
run(*arrays(20)[:3], ranks=4) -> ShapeError: divisible by 8
run(*arrays()[:3], ranks=2).backward(arrays()[3][:, :, 1:]) -> ShapeError: dout
""")


def test_padding_at_the_end_is_what_the_error_says_it_is():
    """Right with a causal mask, forward and backward; without one, only the advice to cut is."""
    q, k, v, dout = arrays(48)
    n, padded = 45, 48
    pad = lambda x: np.concatenate([x[:, :, :n], 0 * x[:, :, : padded - n]], 2)  # noqa: E731
    whole = [pad(x) for x in (q, k, v)]
    want = flashsim.run(*(x[:, :, :n] for x in (q, k, v)), causal=True)
    with pytest.raises(ShapeError, match=f"pad it at its end to {padded}"):
        run(*(x[:, :, :n] for x in (q, k, v)), ranks=4, causal=True)
    spread = run(*whole, ranks=4, causal=True)
    np.testing.assert_allclose(spread.out[:, :, :n], want.out, atol=1e-5)
    grads, expected = spread.backward(pad(dout)), want.backward(dout[:, :, :n])
    for name in ("dq", "dk", "dv"):
        got = getattr(grads, name)[:, :, :n]
        np.testing.assert_allclose(got, getattr(expected, name), atol=2e-5)
    open_to_all = run(*whole, ranks=4).out[:, :, :n]
    assert np.abs(open_to_all - flashsim.run(*(x[:, :, :n] for x in (q, k, v))).out).max() > 1e-3
    with pytest.raises(ShapeError, match=r"cut it to 40; .* every row would attend to the padding"):
        run(*(x[:, :, :n] for x in (q, k, v)), ranks=4)


def test_a_spread_shows_its_arrays():
    assert "out" in repr(run(*arrays()[:3], ranks=2))
