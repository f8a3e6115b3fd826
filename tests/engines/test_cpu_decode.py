"""One query a head on the CPU engine: results, traces, parts, threads, and its sums."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Judge, tensors
from numba import njit
from test_panels import LOWERED

import flashsim
from flashsim import Tiling
from flashsim.engines.cpu import walks_decode
from flashsim.engines.cpu.micro_kernels import registers
from flashsim.engines.cpu.micro_kernels.registers import BLOCKING, Avx512, Plain

WAYS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "descending": {"key_order": "descending"},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.4},
    "mask": {"mask": lambda q, k: (q + k) % 3 == 0},
    "no key": {"mask": lambda q, k: (q + k) < 0},
    "block mask": {"block_mask": np.arange(27)[None] % 3 == 0},
}
HEADS = {
    "one": {"heads": 1},
    "gqa": {"heads": 10, "kv_heads": 2, "batch": 2},
    "many on one": {"heads": 37, "kv_heads": 1},
    "narrow values": {"heads": 4, "kv_heads": 2, "dv": 5},
}


def agree(x, *, own=None, **options):
    """Results within the judge's budget; the simulator's events. `own` are the engine's options."""
    given = {"bias": x.bias, "tiling": Tiling(16, 16), "trace": True, **options}
    ours = flashsim.run(x.q, x.k, x.v, backend="numba", **given, **(own or {}))
    theirs = flashsim.run(x.q, x.k, x.v, **given)
    Judge.of(x, ours.problem).check({"out": ours.out, "lse": ours.lse})
    assert ours.trace.same_events(theirs.trace)
    return ours


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("way", WAYS)
def test_results_and_traces(way, heads):
    agree(tensors(1, 420, 40, **HEADS[heads]), **WAYS[way])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["normal", "rising", "falling", "heavy"])
@pytest.mark.parametrize("n_kv", [1, 15, 16, 130, 600])
def test_kinds_types_and_lengths(n_kv, kind, dtype):
    agree(tensors(1, n_kv, 64, kind=kind, dtype=dtype, heads=4, kv_heads=2))


def test_a_packed_query():
    agree(tensors(1, 420, 16), cu_seqlens_q=(0, 0, 1), cu_seqlens_k=(0, 200, 420))


@pytest.mark.parametrize("bias", [(1, 1), (1, 6), (2, 1), (2, 6)])
def test_bias_of_each_head(bias):
    agree(tensors(1, 300, 16, heads=6, kv_heads=2, batch=2, bias=bias))


def test_one_query_needs_no_pairs(monkeypatch):
    """Where the CPU has them: decoding's own walk, both its kinds of panel."""
    monkeypatch.setattr(registers, "pays", lambda name: True)
    monkeypatch.setattr(registers, "without", lambda name: None)
    monkeypatch.setattr(registers, "paired", pytest.fail)
    x = tensors(1, 83, 16, dtype="bfloat16")
    result = flashsim.run(x.q, x.k, x.v, backend="numba")
    kind = type(registers.best("float32")).__name__.lower()
    assert result.kernel.startswith(f"numba {kind},")
    expected = flashsim.run(x.q, x.k, x.v, backend="numba", micro_kernel="vector")
    np.testing.assert_array_equal(result.out, expected.out)


@pytest.mark.thorough  # walks of plain definitions take long to compile
def test_plain_numba_does_the_same():
    agree(tensors(1, 300, 40, heads=6, kv_heads=2), own={"micro_kernel": "plain"})


@pytest.mark.parametrize("n_kv", [100, 20_000])
def test_bits_do_not_depend_on_the_number_of_threads(n_kv):
    x = tensors(1, n_kv, 16, heads=3, kv_heads=1)
    results = [flashsim.run(x.q, x.k, x.v, backend="numba", threads=n) for n in (1, 2, 3, 5)]
    for result in results[1:]:
        np.testing.assert_array_equal(result.out, results[0].out)
        np.testing.assert_array_equal(result.lse, results[0].lse)


@pytest.mark.parametrize(
    ("walks", "visits", "parts"), [(1, 0, 1), (1, 7, 1), (1, 64, 8), (1, 4096, 32), (32, 4096, 1)]
)
def test_parts_keep_threads_busy_and_stay_long(walks, visits, parts):
    assert walks_decode.parts_of(walks, visits) == parts


def test_parts_without_a_key_count_for_nothing():
    out = np.float32([[[1, 2]], [[np.nan, 0]], [[3, 5]]])
    out[1] = 0
    m, l = np.float32([[[0], [-np.inf], [1]], [[2], [0], [1]]])
    got, lse = walks_decode.merged(out, m, l)
    total = 2 / np.e + 1
    np.testing.assert_allclose(got, [[(1 / np.e + 3) / total, (2 / np.e + 5) / total]], rtol=1e-6)
    np.testing.assert_allclose(lse, [1 + np.log(total)], rtol=1e-6)
    got, lse = walks_decode.merged(out[1:2], m[1:2], l[1:2])
    assert (got == 0).all()
    assert (lse == -np.inf).all()


@njit
def scores(cpu, *args):
    walks_decode.scores(cpu, *args)


@pytest.mark.parametrize(("kind", "dtype"), LOWERED)
@pytest.mark.parametrize(("rows", "heads", "d"), [(1, 1, 1), (8, 4, 32), (7, 5, 40), (64, 16, 64)])
def test_scores(kind, dtype, rows, heads, d):
    """Every sum in its place, and nothing beyond a multiple of four heads."""
    block = BLOCKING[Avx512 if kind is Plain else kind]
    cpu = kind(block.lanes(np.dtype(dtype).itemsize) * block.vecs)
    rng = np.random.default_rng(d)
    K, Q = (rng.standard_normal(n).astype(dtype) for n in (3 + rows * d, 16 * d))
    ld, padded = 16, -(-heads // 4) * 4
    S = np.full(2 + rows * ld, 7, dtype)
    scores(cpu, S, 2, ld, K, 3, Q, K, 0, rows, heads, d)
    exact = K[3:].reshape(rows, d).astype(np.longdouble) @ Q.reshape(16, d).T
    got = S[2:].reshape(rows, ld)
    size = d * np.finfo(dtype).eps * np.abs(K).max() * np.abs(Q).max()
    np.testing.assert_allclose(got[:, :heads], exact[:, :heads].astype(dtype), rtol=0, atol=size)
    assert (got[:, padded:] == 7).all()
    assert (S[:2] == 7).all()
