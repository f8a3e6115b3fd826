"""What kernels do with pairs of bfloat16, run as Python: definitions alone, no compiler.

Compiled, they are in test_bf16_dot.py. Products here are NumPy's.
"""

import numpy as np
import pytest
from test_bf16_dot import bits, left, right

from flashsim.engines.cpu.bf16_dot import packing, steps
from flashsim.engines.cpu.bf16_dot.packing import Left
from flashsim.engines.cpu.micro_kernels.registers import Plain
from flashsim.engines.cpu.tables import ODD
from flashsim.problem.problem import numpy_dtype

pytestmark = pytest.mark.promise("twice plain attention's error")

CPU = Plain(16)
W, D = CPU.width, 16


def halves(pairs):
    return pairs.view(numpy_dtype("bfloat16")).astype(np.float64).reshape(*pairs.shape, 2)


def product(cpu, C, c0, ldc, A, a0, row, step, B, b0, ldb, rows, n):
    """C = A B of n pairs along the sum."""
    r, t, x = np.arange(rows)[:, None], np.arange(n), np.arange(cpu.width)
    sums = np.einsum(
        "rts,txs->rx", *(halves(A[a0 + r * row + t * step]), halves(B[b0 + t[:, None] * ldb + x]))
    )
    C[c0 + r * ldc + x] = sums


def product_added(cpu, C, c0, ldc, *more):
    rows = more[-2]
    before = C.copy()
    product(cpu, C, c0, ldc, *more)
    at = (c0 + np.arange(rows)[:, None] * ldc + np.arange(cpu.width)).reshape(-1)
    C[at] += before[at]


@pytest.fixture(autouse=True)
def _as_python(monkeypatch):
    """What only a compiler can do: slices without a copy, and products."""
    for module in (packing, steps):
        monkeypatch.setattr(module, "rest", lambda X, start: X[start:])
    monkeypatch.setattr(steps, "product_set", product)
    monkeypatch.setattr(steps, "product_add", product_added)


def padded(n, to):
    return -(-n // to) * to


@pytest.mark.parametrize(("n", "d"), [(32, 32), (64, 16), (37, 48), (70, 5), (1, 1)])
def test_operands_are_packed(n, d):
    """Whole tiles, and what is left of them; as `test_bf16_dot` has them of compiled code."""
    x = np.random.default_rng(n).standard_normal((n, d)).astype(np.float32)
    X = bits(np.concatenate([np.zeros(3), x.reshape(-1)]))  # from element 3 on
    whole = np.zeros((padded(n, 64), padded(d, 32)))
    whole[:n, :d] = x
    pairs = padded(n, 32) // 2
    room = lambda *size: np.full(np.prod(size), 7, np.uint32)  # noqa: E731
    expected = left(whole[: padded(n, 16)])
    got = packing.left_of_rows(CPU, room(*expected.shape), 0, X, 3, n, d, None)
    np.testing.assert_array_equal(got.array, expected.reshape(-1))
    expected = left(whole[: 2 * pairs, : padded(d, 16)].T)
    for operand in (
        packing.left_of_columns(CPU, room(*expected.shape), 0, pairs, pairs, X, 3, n, d, None),
        packing.turned(CPU, None, room(*expected.shape), pairs, X, 3, n, d),
    ):
        np.testing.assert_array_equal(operand.array, expected.reshape(-1))
    expected = right(whole[: 2 * pairs, : padded(d, 16)])
    out = room(*expected.shape)
    packing.right_of_columns(CPU, out, padded(d, 16), X, 3, n, d, 1, out, None)
    np.testing.assert_array_equal(out, expected.reshape(-1))
    lanes = right(whole.T)[:, : padded(n, W)]
    out = room(*lanes.shape)
    packing.right_of_rows(CPU, out, X, 3, n, d, out, out, None)
    np.testing.assert_array_equal(out, lanes.reshape(len(lanes), -1, W).swapaxes(0, 1).reshape(-1))


@pytest.mark.parametrize(("n", "d"), [(16, 16), (21, 16), (5, 7)])
@pytest.mark.parametrize("bad", [None, np.inf, np.nan])
def test_rows_are_written_and_what_is_not_finite_is_seen(n, d, bad):
    rng = np.random.default_rng(n)
    rows, factors = rng.standard_normal((n, d)).astype(np.float32), np.full(32, 2, np.float32)
    if bad is not None:
        rows[n // 2, d // 2] = bad
    panels = np.zeros((padded(n, W) // W, padded(d, 16), W), np.float32)
    for r, row in enumerate(rows):
        panels[r // W, :d, r % W] = row
    X, counter = np.zeros(3 + n * d, np.uint16), np.zeros(ODD + 1, np.int64)
    packing.write_rows(CPU, panels.reshape(-1), X, 3, n, d, factors, None, None, counter)
    written = X[3:].view(numpy_dtype("bfloat16"))
    expected = (2 * rows).astype(written.dtype).astype(np.float32)
    np.testing.assert_array_equal(written.astype(np.float32).reshape(n, d), expected)
    assert not X[:3].any()
    assert counter[ODD] == (bad is not None)


#: Scores of four column tiles of 32 keys for 16 queries; tiles that are visited.
SCORES = {
    "falls": ((4, 3, 2, 1), (0, 1, 2, 3)),
    "grows": ((0, 30, 31, 60), (0, 1, 2, 3)),
    "keys are left out": ((4, 3, 2, 1), (0, 2, 3)),
    "a gap and growth": ((0, 5, 20, 50), (0, 2, 3)),
}


@pytest.mark.parametrize("case", SCORES)
def test_p_waits_for_its_product_with_v(case):
    """P is multiplied once a largest score grows or keys are left out, and at the end."""
    level, visited = SCORES[case]
    rng = np.random.default_rng(1)
    n = 32 * len(level)
    scores = rng.standard_normal((n, W)) + np.repeat(level, 32)[:, None]
    values = rng.standard_normal((n, D)).astype(numpy_dtype("bfloat16"))
    V = Left(left(values.T).reshape(-1), 0, n // 2, 1)
    O, scale = np.zeros(D * W), np.ones(1, np.float32)
    m, l, alpha = np.full(W, -np.inf, np.float32), np.zeros(W, np.float32), np.ones(W, np.float32)
    P = np.full(n // 2 * W, 0x3F803F80, np.uint32)  # ones, where nothing else is written
    waiting, products = (0, 0), []
    for tile in visited:
        S = scores[32 * tile : 32 * (tile + 1)].astype(np.float32).reshape(-1)
        before = waiting
        waiting = steps.take_scores(
            *(CPU, (O, m, l, alpha), S, 32, scale, P, V, 32 * tile, 0, D, None, waiting)
        )
        products.append(waiting[0] != before[0])
    steps.weigh(CPU, O, P, V, 0, D, waiting)
    keys = np.concatenate([np.arange(32 * t, 32 * (t + 1)) for t in visited])
    weights = np.exp(scores[keys] - scores[keys].max(axis=0))
    exact = values[keys].astype(np.float64).T @ (weights / weights.sum(axis=0))
    np.testing.assert_allclose(O.reshape(D, W) / l, exact, atol=2**-7)
    assert products[0] is False or case == "keys are left out"
    assert any(products[1:]) == (case != "falls")


def test_an_odd_number_of_keys_is_followed_by_zeros():
    P = np.full(16 * W, 7, np.uint32)
    steps.clear_pairs(CPU, P, 0, 5)
    assert (P[: 3 * W] == 7).all()
    assert not P[3 * W :].any()


@pytest.mark.parametrize(("plain", "scale"), [(True, 0.5), (True, -0.5), (False, 0.5)])
def test_the_scale_is_left_to_the_softmax_where_it_can_be(plain, scale):
    S, scales = np.ones(3 * W, np.float32), np.array([scale, 1], np.float32)
    left_over = steps.scaled(CPU, S, 3, plain, scales)
    assert (S * left_over[0] == scale).all()
    assert (left_over[0] == scale) == (plain and scale > 0)


def test_dq_is_the_product_of_ds_and_k_times_the_scale():
    rng = np.random.default_rng(2)
    rows, keys, d = 5, W, 32
    dS = rng.standard_normal((rows, keys)).astype(np.float32)
    K = rng.standard_normal((32, d))
    K[keys:] = 0
    pairs, dq, part = np.zeros(16 * 16, np.uint32), np.ones(rows * d), np.zeros(16 * d)
    steps.left_of_lanes(CPU, dS.reshape(-1), 0, W, rows, pairs, 16)
    steps.prepare_dq(CPU, part, d, pairs, 16, right(K).reshape(-1), 0, rows, keys)
    steps.add_dq(*(CPU, dq, 0, d, None, 0, part, None, 0, rows, keys, np.array([0.5]), False, None))
    rounded = [x.astype(numpy_dtype("bfloat16")).astype(np.float64) for x in (dS, K[:keys])]
    np.testing.assert_allclose(dq.reshape(rows, d), 1 + 0.5 * rounded[0] @ rounded[1])


def test_rows_of_a_panel_become_an_operand():
    X, P = np.arange(3 * W, dtype=np.float32), np.full(16 * W, 7, np.uint32)
    operand, start, stride = steps.right_of_panel(CPU, X, 0, W, 3, P, None)
    expected = np.zeros((32, W))
    expected[:3] = X.reshape(3, W)
    np.testing.assert_array_equal(operand[start:].reshape(-1, stride), right(expected))
