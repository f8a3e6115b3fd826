"""The oracle against differences, a second formula and a mask decided one score at a time."""

import numpy as np
import pytest
from helpers import brute_force_mask, plain, tensors
from hypothesis import given, settings
from test_engines import OPTION_CASES
from test_traffic import problems

from flashsim import BlockMask, Problem
from flashsim.problem import oracle

pytestmark = pytest.mark.promise("twice plain attention's error")

LEAN = {name: case for name, case in OPTION_CASES.items() if "of-tiles" not in name}


def posed(case, dtype="float64"):
    """Tensors and problem of one of `OPTION_CASES`."""
    shape, options = LEAN[case]
    x = tensors(113, 203, 16, dtype=dtype, **shape)
    options = {name: value for name, value in options.items() if name != "key_order"}
    p = Problem(
        113,
        203,
        16,
        x.v.shape[3],
        batch=x.q.shape[0],
        heads=x.q.shape[1],
        kv_heads=x.k.shape[1],
        dtype=dtype,
        bias=shape.get("bias"),
        **options,
    )
    return x, p


@settings(max_examples=60, deadline=None)
@given(p=problems())
def test_mask_is_what_the_conventions_say(p):
    np.testing.assert_array_equal(oracle.keep_matrix(p), brute_force_mask(p))


@pytest.mark.parametrize("case", LEAN)
def test_agrees_with_a_second_formula(case):
    x, p = posed(case)
    x.dlse = np.random.default_rng(1).standard_normal(x.q.shape[:3])
    second = plain(x, p, np.float64)
    out, lse = oracle.attention(x.q, x.k, x.v, p, bias=x.bias)
    gradients = oracle.gradients(x.q, x.k, x.v, x.dout, p, dlse=x.dlse, bias=x.bias)
    first = {"out": out, "lse": lse, **gradients}
    for name, value in first.items():
        np.testing.assert_allclose(value, second[name], rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("case", LEAN)
@pytest.mark.parametrize("of_lse", [False, True])
@pytest.mark.promise("gradients equal differences")
def test_gradients_agree_with_differences(case, of_lse):
    x, p = posed(case)
    dlse = np.random.default_rng(1).standard_normal(x.q.shape[:3]) if of_lse else None
    pairs = oracle.finite_difference(x.q, x.k, x.v, x.dout, p, dlse=dlse, bias=x.bias)
    assert set(pairs) == {"dq", "dk", "dv"} | ({"dbias"} if x.bias is not None else set())
    for name, (by_differences, by_gradient) in pairs.items():
        assert by_gradient == pytest.approx(by_differences, rel=1e-6, abs=1e-6), name


@pytest.mark.promise("gradients equal differences")
def test_differences_notice_a_wrong_gradient(monkeypatch):
    """The check above can fail: a gradient one part in a thousand too large is told apart."""
    x, p = posed("bias-softcap")
    right = oracle.gradients
    wrong = lambda *a, **k: {name: g * 1.001 for name, g in right(*a, **k).items()}  # noqa: E731
    monkeypatch.setattr(oracle, "gradients", wrong)
    pairs = oracle.finite_difference(x.q, x.k, x.v, x.dout, p, bias=x.bias)
    for by_differences, by_gradient in pairs.values():
        assert by_gradient != pytest.approx(by_differences, rel=1e-6, abs=1e-6)


def test_two_keys_by_hand():
    """Scores 0 and log 3: weights 1/4 and 3/4, LSE = log 4; dS = P (dP - delta)."""
    p = Problem(1, 2, 1, scale=1.0, dtype="float64")
    q, v, dout = (np.array(a, float).reshape(1, 1, -1, 1) for a in ([1], [4, 8], [1]))
    k = np.array([0, np.log(3)]).reshape(1, 1, 2, 1)
    out, lse = oracle.attention(q, k, v, p)
    assert out.item() == pytest.approx(7)
    assert lse.item() == pytest.approx(np.log(4))
    g = oracle.gradients(q, k, v, dout, p)
    assert g["dv"].ravel() == pytest.approx([1 / 4, 3 / 4])
    assert g["dk"].ravel() == pytest.approx([(4 - 7) / 4, 3 * (8 - 7) / 4])
    assert g["dq"].item() == pytest.approx(0.75 * np.log(3))
    g = oracle.gradients(q, k, v, 0 * dout, p, dlse=np.full((1, 1, 1), 2.0))  # dS = 2 P
    assert g["dv"].ravel() == pytest.approx([0, 0])
    assert g["dk"].ravel() == pytest.approx([2 / 4, 2 * 3 / 4])
    assert g["dq"].item() == pytest.approx(2 * 0.75 * np.log(3))


def test_a_row_without_keys():
    p = Problem(3, 3, 2, dtype="float64", block_mask=BlockMask([[False], [True], [True]], 1, 3))
    x = tensors(3, 3, 2, dtype="float64", heads=1)
    out, lse = oracle.attention(x.q, x.k, x.v, p)
    assert (out[0, 0, 0] == 0).all()
    assert lse[0, 0, 0] == -np.inf
    g = oracle.gradients(x.q, x.k, x.v, x.dout, p)
    assert (g["dq"][0, 0, 0] == 0).all()
    assert all(np.isfinite(value).all() for value in g.values())


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 10), ("bfloat16", 7), ("float32", 23)])
def test_the_yardstick_rounds_to_its_type(dtype, bits):
    """Rounded results hold no more bits than the type has; the error is a few roundings."""
    x, p = posed("causal", dtype)
    exact, _ = oracle.attention(x.q, x.k, x.v, p)
    rough, _ = oracle.attention(x.q, x.k, x.v, p, dtype=dtype)
    mantissa = np.frexp(rough)[0] * 2 ** (bits + 1)
    normal = np.abs(rough) > 2**-14  # float16's subnormals have fewer bits, and a coarser step
    assert (mantissa[normal] == np.round(mantissa[normal])).all()
    error = np.abs(rough - exact).max()
    assert 2**-bits / 8 < error / np.abs(exact).max() < 2**-bits * 8
