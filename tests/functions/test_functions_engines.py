"""Score and mask functions, and sinks, on the CPU's engines: results, gradients and counts."""

from itertools import pairwise

import numpy as np
import pytest
from function_fuzz import COMPILED, check_on_cpu, expected, found, same_counts
from helpers import tensors

from flashsim import BlockMask, Problem, Tiling, count, functions, run
from flashsim.errors import OptionError, ShapeError, UnsupportedError
from flashsim.problem import oracle

pytestmark = pytest.mark.promise("three counts equal", "twice plain attention's error")

B, H, KV, N, M, D = 2, 4, 2, 37, 45, 8
RNG = np.random.default_rng(0)
SLOPES, KEYS, TEMPERATURE = RNG.standard_normal(H), RNG.standard_normal(M), np.array(0.7)
TABLE, BIAS = RNG.standard_normal((H, N + M)), RNG.standard_normal((B, N, M))
OF_Q, OF_K = (np.sort(RNG.integers(0, 3, (B, n))) for n in (N, M))
SINKS = RNG.standard_normal(H)
TILING = Tiling(16, 16)


def score(s, b, h, q, k):
    s = s * TEMPERATURE + SLOPES[h] * (k - q) + TABLE[h, k - q] + KEYS[k]
    return 5 * np.tanh(s / 5) + 0.3 * BIAS[b, q, k]


def mask(b, h, q, k):
    return (OF_Q[b, q] == OF_K[b, k]) & ((k - q <= h) | (k % 5 == 0))


def arrays(dtype="float64", batch=B, kv_heads=KV):
    return drawn(N, M, D, dtype=dtype, batch=batch, heads=H, kv_heads=kv_heads)


def drawn(*sizes, **how):
    """q, k, v and dout."""
    x = tensors(*sizes, **how)
    return x.q, x.k, x.v, x.dout


def judge(got, exact):
    """Equal but for rounding in float64."""
    for name, x in got.items():
        near = 1e-12 if name in ("out", "lse") else 1e-10
        assert np.allclose(x, exact[name], rtol=near, atol=near), name


ALGORITHMS = {
    "simulator": ("flash2", "flash2-fused", "flash1", "standard"),
    "numba": ("flash2", "flash2-fused"),
}
CASES = {
    "score": {"score_mod": score},
    "mask": {"mask_mod": mask},
    "both": {"score_mod": score, "mask_mod": mask, "softcap": 2.0},
    "sinks": {"score_mod": score, "mask_mod": mask, "sinks": SINKS},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("backend", "algorithm"), [(b, a) for b, names in ALGORITHMS.items() for a in names]
)
def test_results_gradients_and_counts(backend, algorithm, case):
    how = CASES[case]
    if algorithm not in ("flash2", "flash2-fused") and "sinks" in how:
        return
    q, k, v, dout = arrays()
    how = {**how, "algorithm": algorithm, "tiling": TILING, "trace": True}
    result = run(q, k, v, backend=backend, **how)
    dlse = np.where(np.isinf(result.lse), 0, RNG.standard_normal(result.lse.shape))
    names = ("SLOPES", "KEYS", "TEMPERATURE", "TABLE", "BIAS") if "score_mod" in how else ()
    given = {"sinks": how["sinks"]} if "sinks" in how else {}
    exact = expected(result, dout, dlse, names, **given)
    same_counts(result.trace, count(result.problem, algorithm=algorithm, tiling=TILING))
    if algorithm == "standard" and "score_mod" in how:
        judge({"out": result.out, "lse": result.lse}, exact)
        with pytest.raises(UnsupportedError, match="does not support score functions"):
            result.backward(dout)
        return
    gradients = result.backward(dout, dlse=dlse, captured=names, tiling=TILING)
    got = found(result, gradients)
    assert set(got) == set(exact)
    judge(got, exact)
    backward = {"algorithm": algorithm, "tiling": TILING, "direction": "backward"}
    same_counts(gradients.trace, count(gradients.trace.problem, **backward))
    if backend == "numba":  # transfer by transfer
        simulated = run(q, k, v, **how)
        again = simulated.backward(dout, dlse=dlse, captured=names, tiling=TILING)
        for mine, its in ((result, simulated), (gradients, again)):
            for a, b in zip(mine.trace.stages, its.trace.stages, strict=True):
                assert np.array_equal(a.events, b.events), a.stage.name


def test_tables_name_captured_arrays_by_the_readers_variables():
    p = Problem(40, heads=H, score_mod=functions.alibi(SLOPES), mask_mod=functions.padding([30]))
    forward = str(count(p, tiling=TILING))
    assert "slopes (F_own)" in forward
    assert "lengths (M_own)" in forward
    assert " F " not in forward
    q, k, v, dout = drawn(40, 40, D, dtype="float64", heads=H)
    result = run(q, k, v, score_mod=score_of_slopes, trace=True)
    backward = str(result.backward(dout, captured=["SLOPES"]).trace)
    assert "SLOPES (F)" in backward
    assert "dSLOPES (dF)" in backward


def score_of_slopes(s, b, h, q, k):
    return s + SLOPES[h] * (k - q)


def test_bytes_of_captured_arrays_by_hand():
    """Of one head, 40 x 40 scores in 16 x 16 tiles, causal: 6 visits, 3 of them MASKED."""
    slopes, rows = np.ones(1, np.float32), np.zeros(40, np.float64)
    bias, marks = np.zeros((40, 40), np.float16), np.ones(40, np.int32)
    p = Problem(
        40,
        score_mod=lambda s, b, h, q, k: s * slopes[h] + rows[q] + bias[q, k],
        mask_mod=lambda b, h, q, k: (q >= k) & (marks[k] == marks[q]),
    )
    bytes_of = count(p, tiling=TILING).bytes
    area = 3 * 16 * 16 + 2 * 8 * 16 + 8 * 8
    assert bytes_of("load", "F_own") == 3 * 4 + 40 * 8
    assert bytes_of("load", "F") == area * 2
    assert bytes_of("load", "M_own") == 40 * 4
    assert bytes_of("load", "M") == (16 + 16 + 8) * 4  # keys of the tiles on the diagonal


@pytest.mark.parametrize("backend", ["simulator", "numba"])
@pytest.mark.promise("gradients equal differences")
def test_captured_gradients_by_differences(backend):
    """Central differences of the engine's own loss, in float64, along a random direction."""
    q, k, v, dout = arrays()

    def loss(move=None, step=0.0):
        moved = {
            name: x + step * move.get(name, 0) if move else x
            for name, x in {"slopes": SLOPES, "table": TABLE, "sinks": SINKS}.items()
        }
        slopes, table = moved["slopes"], moved["table"]

        def f(s, b, h, q, k):
            return 4 * np.tanh((s + slopes[h] * (k - q) * 0.1 + table[h, k - q]) / 4)

        result = run(q, k, v, score_mod=f, mask_mod=mask, sinks=moved["sinks"], backend=backend)
        return result, float((result.out * dout).sum() + result.lse.sum())

    result, _ = loss()
    gradients = result.backward(dout, dlse=np.ones_like(result.lse), captured=True)
    exact = {**gradients.captured, "sinks": gradients.dsinks}
    for name, shape in (("slopes", (H,)), ("table", TABLE.shape), ("sinks", (H,))):
        move = {name: RNG.standard_normal(shape)}
        up, down = (loss(move, step)[1] for step in (1e-5, -1e-5))
        assert (exact[name] * move[name]).sum() == pytest.approx((up - down) / 2e-5, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_narrow_types_err_at_most_twice_as_much_as_plain_attention(backend, dtype):
    q, k, v, dout = arrays(dtype)
    result = run(q, k, v, score_mod=score, mask_mod=mask, backend=backend)
    dlse = np.zeros_like(result.lse)
    exact, plain = (expected(result, dout, dlse, dtype=kind) for kind in ("float64", dtype))
    unit = float(np.finfo(np.float32 if dtype == "float32" else np.float16).eps)
    unit = 2.0**-8 if dtype == "bfloat16" else unit
    got = found(result, result.backward(dout))
    for name in ("out", "dq", "dk", "dv"):
        right = exact[name]
        most = 2 * np.abs(plain[name] - right).max() + 4 * unit * np.abs(right).max()
        assert np.abs(got[name].astype(np.float64) - right).max() <= most


# -- together with other options -------------------------------------------------------------------

ALONE = np.array([0, 0, 1, 1])
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (9, 3)},
    "block mask": {"block_mask": BlockMask(np.tri(5, 6, 1, dtype=bool), 8, 8)},
    "mask": {"mask": lambda q, k: (q + k) % 7 != 0},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": RNG.standard_normal((1, H, N, M))},
    "descending": {"key_order": "descending"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_functions_combine_with_every_option(backend, option):
    q, k, v, dout = arrays()
    how = OPTIONS[option]
    result = run(q, k, v, score_mod=score, mask_mod=mask, tiling=TILING, backend=backend, **how)
    given = {"bias": how["bias"]} if "bias" in how else {}
    exact = expected(result, dout, np.zeros_like(result.lse), ("SLOPES",), **given)
    judge(found(result, result.backward(dout, captured="SLOPES", tiling=TILING)), exact)


@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_indices_count_from_the_start_of_a_packed_sequence(backend):
    q, k, v, dout = arrays(batch=1)
    cuts = {"cu_seqlens_q": (0, 5, 5, 30, N), "cu_seqlens_k": (0, 11, 20, 20, M)}
    functions_ = {"score_mod": functions.alibi(SLOPES), "mask_mod": functions.causal(3)}
    packed = run(q, k, v, tiling=TILING, backend=backend, **functions_, **cuts)
    gradients = packed.backward(dout, captured=True, tiling=TILING)
    slopes = np.zeros(H)
    bounds = zip(*map(pairwise, cuts.values()), strict=True)
    for (q0, q1), (k0, k1) in bounds:
        rows, keys = np.s_[:, :, q0:q1], np.s_[:, :, k0:k1]
        alone = run(q[rows], k[keys], v[keys], **functions_)
        assert np.allclose(packed.out[rows], alone.out)
        if q1 > q0 and k1 > k0:
            its = alone.backward(dout[rows], captured=True)
            assert np.allclose(gradients.dq[rows], its.dq)
            slopes += its.captured["slopes"]
    assert np.allclose(gradients.captured["slopes"], slopes)


AT = np.arange(50, dtype=np.float32)
TENTHS, CLOSE = np.full(50, 0.1, np.float32), np.where(np.arange(50) % 3, 1, 1 + 1e-12)
HASHES = 2**53 + np.arange(50) % 2
ODD = np.arange(400) % 2 == 1


@pytest.mark.parametrize("backend", ["simulator", "numba"])
@pytest.mark.parametrize(
    ("mask_mod", "kept"),
    [
        (lambda b, h, q, k: TENTHS[k] == 0.1, TENTHS > 0),  # True, as for NumPy's arrays
        (lambda b, h, q, k: CLOSE[k] > 1, CLOSE > 1),
        (lambda b, h, q, k: HASHES[k] > 2**53, HASHES > 2**53),
        (lambda b, h, q, k: ODD[(k * 0.7 * 10).int()], ODD[(AT * 0.7 * 10).astype(int)]),
    ],
    ids=["float32", "float64", "int64", "an index"],
)
def test_a_mask_computes_in_the_types_of_its_arrays(backend, mask_mod, kept):
    q, k, v = np.random.default_rng(3).standard_normal((3, 1, 1, 50, 16), dtype=np.float32)
    got = run(q, k, v, mask_mod=mask_mod, backend=backend, tiling=TILING).out
    exact, _ = oracle.attention(q, k[:, :, kept], v[:, :, kept], Problem(50, int(kept.sum()), 16))
    np.testing.assert_allclose(got, exact, atol=1e-5)


@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_rows_without_keys_are_zero_and_have_no_nan(backend):
    q, k, v, dout = arrays()
    result = run(q, k, v, mask_mod=lambda b, h, q, k: (q > 20) & (k < 9), backend=backend)
    assert (result.out[:, :, :21] == 0).all()
    assert np.isneginf(result.lse[:, :, :21]).all()
    gradients = result.backward(dout)
    assert (gradients.dq[:, :, :21] == 0).all()
    assert all(np.isfinite(getattr(gradients, name)).all() for name in ("dq", "dk", "dv"))
    with_sinks = run(q, k, v, mask_mod=lambda b, h, q, k: q > 20, sinks=SINKS, backend=backend)
    assert (with_sinks.out[:, :, :21] == 0).all()
    assert np.allclose(with_sinks.lse[:, :, :21], SINKS[:, None])


def test_empty_inputs_have_no_score():
    q, k, v, dout = (np.zeros((1, 2, n, 4)) for n in (3, 0, 0, 3))
    result = run(q, k, v, score_mod=functions.softcap(2.0), mask_mod=functions.causal())
    assert (result.out == 0).all()
    assert np.isneginf(result.lse).all()
    assert (result.backward(dout).dq == 0).all()


def test_a_named_option_and_its_function_are_the_same():
    q, k, v, dout = arrays("float32", kv_heads=H)
    for named, function in (
        ({"softcap": 3.0}, {"score_mod": functions.softcap(3.0)}),
        ({"causal": True}, {"mask_mod": functions.causal(M - N)}),
        ({"window": (5, 2)}, {"mask_mod": functions.window(5, 2, M - N)}),
    ):
        for backend in ("simulator", "numba"):
            one, other = (run(q, k, v, backend=backend, **how) for how in (named, function))
            assert np.allclose(one.out, other.out, atol=1e-6)
            assert np.allclose(one.backward(dout).dk, other.backward(dout).dk, atol=1e-5)


CAPS = {
    "by a division": (lambda s, b, h, q, k: 30 * np.tanh(s / 30), 30.0),
    "on the right": (lambda s, b, h, q, k: np.tanh(s / 0.3) * 0.3, 0.3),
    "by an exact reciprocal": (lambda s, b, h, q, k: 8 * np.tanh(0.125 * s), 8.0),
    "at 1": (lambda s, b, h, q, k: np.tanh(s), 1.0),
    "by another reciprocal": (lambda s, b, h, q, k: 30 * np.tanh(s * (1 / 30)), None),
    "by another cap": (lambda s, b, h, q, k: 30 * np.tanh(s / 20), None),
    "below 0": (lambda s, b, h, q, k: -30 * np.tanh(s / -30), None),
    "by infinity": (lambda s, b, h, q, k: np.inf * np.tanh(s / np.inf), None),
    "of a position": (lambda s, b, h, q, k: 30 * np.tanh(q / 30), None),
    "and a position": (lambda s, b, h, q, k: 30 * np.tanh(s / 30) + k, None),
    "of a quotient": (lambda s, b, h, q, k: 30 * np.tanh(30 / s), None),
    "below float32": (lambda s, b, h, q, k: 1e-44 * np.tanh(s / 1e-44), None),
}


@pytest.mark.parametrize("name", CAPS)
def test_a_function_that_only_caps_scores_is_the_softcap(name):
    function, cap = CAPS[name]
    p = Problem(32, score_mod=function)
    assert (p.softcap, p.score_mod is None) == (cap or 0.0, cap is not None)
    assert Problem(32, score_mod=function, softcap=5.0).score_mod is not None
    assert Problem(32, score_mod=function, bias=(1, 1)).score_mod is not None


def test_threads_change_no_bit():
    q, k, v, dout = arrays("float32")
    how = {"score_mod": score, "mask_mod": mask, "sinks": SINKS.astype(np.float32)}
    results = []
    for threads in (1, 3):
        result = run(q, k, v, backend="numba", threads=threads, tiling=TILING, **how)
        results.append(found(result, result.backward(dout, captured=True, tiling=TILING)))
    one, three = results
    assert all(np.array_equal(x, three[name]) for name, x in one.items())


def test_values_that_change_in_place_are_seen():
    q, k, v, _ = arrays()
    lengths = np.array([M, 5])
    keep = functions.padding(lengths)
    first = run(q, k, v, mask_mod=keep, backend="numba")
    lengths[0] = 7
    second = run(q, k, v, mask_mod=keep, backend="numba")
    assert not np.allclose(first.out, second.out)
    assert np.allclose(second.out, run(q, k, v, mask_mod=functions.padding([7, 5])).out)


def test_what_is_refused():
    q, k, v, dout = arrays()
    with pytest.raises(ShapeError, match=r"sinks must be floats of shape .*, one per query head"):
        run(q, k, v, sinks=np.zeros(3))
    with pytest.raises(ShapeError, match=r"one per query head, got object"):
        run(q, k, v, sinks=np.full(len(SINKS), None))
    p = Problem(*(q.shape[2], k.shape[2], q.shape[3]), score_mod=functions.alibi(1))
    with pytest.raises(ShapeError, match=r"captured= must be a sequence .*\(slopes\), got \(\)"):
        oracle.attention(q[:1, :1], k[:1, :1], v[:1, :1], p)
    with pytest.raises(UnsupportedError, match="'flash-decode' does not support score_mod"):
        run(q, k, v, score_mod=score, algorithm="flash-decode")
    with pytest.raises(UnsupportedError, match="'flash1' does not support sinks"):
        run(q, k, v, sinks=SINKS, algorithm="flash1")
    with pytest.raises(OptionError, match="captured"):
        run(q, k, v, score_mod=score).backward(dout, captured="slope")


# -- random functions against the oracle -----------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_random_functions_on_the_simulator(seed):
    check_on_cpu(seed, "simulator")


@pytest.mark.parametrize("seed", range(5))  # each is compiled; the next test has many more
def test_random_functions_on_the_cpu_engine(seed):
    check_on_cpu(1000 + seed, "numba")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100))
def test_many_random_functions(seed):
    for n in range(100):
        check_on_cpu(10_000 + 100 * seed + n, "simulator" if n % COMPILED else "numba")
