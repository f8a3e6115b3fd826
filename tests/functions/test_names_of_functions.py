"""Every function of symbols, by every name that libraries give it, beside NumPy."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import special
from test_expressions import evaluated

from flashsim.errors import FunctionError
from flashsim.functions.names import FUNCTIONS

SCORE = np.linspace(0.3, 2.5, 9)
#: What NumPy or SciPy computes, where its name is another one.
OTHERS = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": special.expit,
    "expit": special.expit,
    "erf": special.erf,
    "relu": lambda x: np.maximum(x, 0),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "silu": lambda x: x * special.expit(x),
    "swish": lambda x: x * special.expit(x),
    "gelu": lambda x: x * special.ndtr(x),
    "leaky_relu": lambda x: np.where(x < 0, 0.01 * x, x),
    "neg": np.negative,
    "fabs": np.abs,
}
ONE = (
    *("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "expit"),
    *("sin", "cos", "erf", "floor", "ceil", "trunc", "relu", "sign", "square", "softplus"),
    *("neg", "negative", "abs", "absolute", "fabs", "silu", "swish", "gelu"),
    *("leaky_relu", "zeros_like", "ones_like", "reciprocal", "round", "rint"),
)
TWO = (
    *("add", "subtract", "multiply", "divide", "true_divide", "floor_divide", "mod", "remainder"),
    "fmod",
    *("power", "float_power", "minimum", "fmin", "maximum", "fmax", "logaddexp"),
)
COMPARED = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")
LOGIC = ("logical_and", "logical_or", "logical_xor")


def close(function, expected):
    got = evaluated(function, SCORE)
    assert np.allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ONE)
def test_a_function_of_one_number(name):
    shifted = (
        SCORE - 1.2
        if name in ("relu", "leaky_relu", "sign", "trunc", "floor", "abs", "neg")
        else SCORE
    )
    offset = shifted[0] - SCORE[0]
    expected = OTHERS.get(name) or getattr(np, name)
    close(lambda s, b, h, q, k: FUNCTIONS[name](s + offset), expected(shifted))
    if name not in OTHERS:  # NumPy's own function of the symbol
        close(lambda s, b, h, q, k: getattr(np, name)(s + offset), expected(shifted))


@pytest.mark.parametrize("name", TWO)
def test_a_function_of_two_numbers(name):
    function = getattr(np, name)
    close(lambda s, b, h, q, k: function(s, 1.5), function(SCORE, 1.5))
    close(lambda s, b, h, q, k: function(1.5, s), function(1.5, SCORE))


AT = np.arange(9)


def on_keys(function):
    """What a traced function of the keys 0 .. 8 gives."""
    return evaluated(lambda b, h, q, k: function(k))[0, 0, 0]


@pytest.mark.parametrize(
    ("names", "apply"),
    [
        (COMPARED, lambda function, x: function(x, 4)),
        (COMPARED, lambda function, x: function(4, x)),
        (BITS, lambda function, x: function(x, 2) == 4),
        (LOGIC, lambda function, x: function(x > 3, x % 2 == 0)),
    ],
    ids=["compared", "compared, turned", "bits", "logic"],
)
def test_functions_of_integers(names, apply):
    for name in names:
        function = getattr(np, name)
        got = on_keys(lambda x, f=function: apply(f, x))
        np.testing.assert_array_equal(got, apply(function, AT), err_msg=name)


def test_operators_with_the_symbol_on_the_right():
    for function in (
        lambda x: 20 - x,
        lambda x: 2.0 / (x + 1),
        lambda x: 20 // (x + 1),
        lambda x: 20 % (x + 1),
        lambda x: 2.0**x,
        lambda x: 1 << x,
        lambda x: 256 >> x,
        lambda x: 3 & x,
        lambda x: 3 | x,
        lambda x: 3 ^ x,
        lambda x: +x,
        lambda x: -x,
        lambda x: ~x,
        lambda x: abs(x - 4) ** 3,
    ):
        got = evaluated(lambda s, b, h, q, k, f=function: s * 0 + f(k), SCORE)
        assert np.allclose(got[0, 0, 0], function(AT))


def test_booleans_have_the_operators_of_logic():
    for function in (
        lambda x: (x > 3) ^ (x < 6),
        lambda x: ~(x > 3) | (x == 8),
        lambda x: np.logical_not(x > 2),
        lambda x: np.bitwise_not(x > 2),
        lambda x: (x > 3) + (x > 1),  # or, as for NumPy's booleans
        lambda x: (x > 3) * (x < 6),
    ):
        assert np.array_equal(on_keys(function), function(AT))


def test_arguments_by_name_and_methods():
    close(lambda s, b, h, q, k: np.clip(s, a_min=0.5, a_max=2.0), np.clip(SCORE, 0.5, 2.0))
    close(lambda s, b, h, q, k: s.clamp(min=1.0), np.maximum(SCORE, 1.0))
    close(lambda s, b, h, q, k: s.clamp(max=1.0), np.minimum(SCORE, 1.0))
    close(lambda s, b, h, q, k: s.clamp_min(1.0), np.maximum(SCORE, 1.0))
    close(lambda s, b, h, q, k: s.clamp_max(1.0), np.minimum(SCORE, 1.0))
    close(lambda s, b, h, q, k: FUNCTIONS["sub"](s, 1.0, alpha=2.0), SCORE - 2.0)
    close(lambda s, b, h, q, k: FUNCTIONS["add"](s, 1.0, alpha=2.0), SCORE + 2.0)
    floor = lambda s, b, h, q, k: FUNCTIONS["div"](s, 0.7, rounding_mode="floor")  # noqa: E731
    close(floor, SCORE // 0.7)
    filled = lambda s, b, h, q, k: s.masked_fill(s > 1, -2.0)  # noqa: E731
    close(filled, np.where(SCORE > 1, -2.0, SCORE))
    assert (on_keys(lambda k: k.masked_fill(k > 3, 2.7) == 2) == ((AT == 2) | (AT > 3))).all()
    close(lambda s, b, h, q, k: s.where(s > 1, -2.0), np.where(SCORE > 1, SCORE, -2.0))
    close(lambda s, b, h, q, k: np.full_like(s, fill_value=3) + k.float() * 0, 0 * SCORE + 3)
    close(lambda s, b, h, q, k: FUNCTIONS["relu"](s, inplace=False), np.maximum(SCORE, 0))
    trunc = lambda s, b, h, q, k: FUNCTIONS["div"](-s, 0.7, rounding_mode="trunc")  # noqa: E731
    close(trunc, np.trunc(-SCORE / 0.7))
    large = 2**60 - 3 * AT - 1  # an integer that a float cannot hold
    for by in (3, -3):
        trunc = functools.partial(FUNCTIONS["div"], b=by, rounding_mode="trunc")
        assert on_keys(lambda k: trunc(large[k]) == (large // 3 * (by // 3))[k]).all()  # noqa: B023
        assert on_keys(lambda k: trunc(k - 4) == np.trunc((AT - 4) / by)[k]).all()  # noqa: B023
    close(lambda s, b, h, q, k: np.where(s > 1, s, 0.0), np.where(SCORE > 1, SCORE, 0.0))
    near = SCORE * special.ndtr(SCORE)  # what the approximation by tanh is close to
    got = evaluated(lambda s, b, h, q, k: FUNCTIONS["gelu"](s, approximate="tanh"), SCORE)
    assert 1e-5 < np.abs(got - near).max() < 1e-3


def test_halves_infinities_and_signs():
    """A half is rounded to the even integer; the remainder of `fmod` has the dividend's sign."""
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 0.49999997, -np.inf, np.inf, np.nan])
    for function in (np.round, np.isnan, np.isinf, np.isfinite, lambda x: np.fmod(x, 0.75)):
        got = evaluated(lambda s, b, h, q, k, f=function: f(s) * 1.0, x)
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(got[0, 0, 0], function(x), rtol=1e-6)
    assert np.array_equal(on_keys(lambda k: np.fmod(k - 4, 3) < 0), np.fmod(AT - 4, 3) < 0)
    assert np.array_equal(on_keys(lambda k: np.isnan(k) | (k.round() == 2)), AT == 2)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_arithmetic_of_narrow_integers_wraps_around(dtype):
    limits, rng = np.iinfo(dtype), np.random.default_rng(0)
    values = rng.integers(limits.min, limits.max + 1, 9).astype(dtype)
    bytes_ = rng.integers(-128, 128, 9).astype(np.int8)
    for function in (
        lambda x, y, k: x - 3 * x,
        lambda x, y, k: -x + y,
        lambda x, y, k: abs(x) - 1,
        lambda x, y, k: (x << 2) + (x > 0),
        lambda x, y, k: (~x * x).astype(np.int32) - k,
        lambda x, y, k: (x + k).astype(np.int8) + y,
        lambda x, y, k: np.where(k > 3, x, x.astype(dtype)) * 2,
        lambda x, y, k: (x ^ -1) + (x | -1) if dtype != "uint8" else x ^ 255,
        lambda x, y, k: x // np.where(k > 3, y | 1, -1).astype(dtype),
        lambda x, y, k: np.fmod(x, 7),
    ):
        expected = function(values, bytes_, AT.astype(np.int32))
        traced = lambda k, f=function, of=expected: f(values[k], bytes_[k], k) == of[k]  # noqa: E731
        assert on_keys(traced).all()


def test_types_of_symbols():
    close(lambda s, b, h, q, k: s.to("int32").to("float32"), np.trunc(SCORE))
    close(lambda s, b, h, q, k: s.astype(np.int32) + 0.0, np.trunc(SCORE))
    close(lambda s, b, h, q, k: s.to(k) + s.new_ones(), np.trunc(SCORE) + 1)
    close(
        lambda s, b, h, q, k: s.to("cuda:0").to("cpu") + s.new_zeros() + s.new_tensor(2.0),
        SCORE + 2,
    )
    close(lambda s, b, h, q, k: s[()] + s[...], 2 * SCORE)
    for kind in (np.int8, np.uint8, np.int16):
        narrow = (AT * 9999 - 30000).astype(kind)
        assert on_keys(lambda k: (k * 9999 - 30000).astype(kind) == narrow[k]).all()  # noqa: B023

    def score(s, b, h, q, k):
        assert (s.dtype, k.dtype, (q > k).dtype) == (np.float32, np.int32, np.bool_)
        assert (s.shape, s.ndim) == ((), 0)
        assert (repr(k), repr(s + 1)) == ("<symbol k>", "<symbol add>")
        return s + 1

    close(score, SCORE + 1)


def test_functions_that_overwrite_an_argument():
    """The names are NumPy's and torch's; a symbol may be overwritten, but no array."""

    def score(s, b, h, q, k):
        np.multiply(s, 2, out=s)
        s.relu_()
        for name, told in (("silu", {"inplace": True}), ("exp", {})):
            s.__torch_function__(SimpleNamespace(__name__=name), (), (s,), told)
        return s

    close(score, 2 * SCORE * special.expit(2 * SCORE))
    with pytest.raises(FunctionError, match="add would write a traced value to an array"):
        on_keys(lambda k: np.add(k, 1, out=np.zeros(9)) > 0)
    with pytest.raises(FunctionError, match="add would write a traced value to an array"):
        on_keys(lambda k: np.add(k, 1, out=TABLE[k]) > 0)


ROW, TABLE, ONE_NUMBER = np.arange(9.0), np.arange(18.0).reshape(2, 9), np.array(3)


def test_captured_arrays_act_as_arrays():
    for function, expected in (
        (lambda k: ROW[k] >= ROW.max() - ONE_NUMBER, ROW >= 5),
        (lambda k: TABLE[1][k] > TABLE[1, 4], TABLE[1] > TABLE[1, 4]),
        (lambda k: TABLE[k // 5][k] > len(TABLE[k // 5]), TABLE[AT // 5, AT] > 9),
        (lambda k: k < len(ROW) - int(ONE_NUMBER), AT < 6),
        (lambda k: ROW[..., k] > float(ONE_NUMBER), ROW > 3),
        (lambda k: (k > 2) if ONE_NUMBER else (k > 4), AT > 2),
        (lambda k: np.cumsum(ROW)[k] > 10, np.cumsum(ROW) > 10),
        (lambda k: (2 * ROW - ROW / ONE_NUMBER)[k] > 5, ROW > 3),
        (lambda k: (~(-ROW > -3) & (abs(ROW) < 6))[k], (ROW >= 3) & (ROW < 6)),
    ):
        assert np.array_equal(on_keys(function), expected)
