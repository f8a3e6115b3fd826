"""Lists the functions that can be traced, by their names in Python, NumPy, torch and JAX."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

from flashsim.errors import FunctionError
from flashsim.functions.operations import BOOL, FLOAT, INT, OPERATIONS


class Traceable:
    """Base class of the values that tracing creates: symbols and captured arrays."""

    _recorder: Any


def _recorder_of(args: Iterable[Any]) -> Any:
    for x in args:
        if isinstance(x, Traceable):
            return x._recorder
        if isinstance(x, (tuple, list)):
            try:
                return _recorder_of(x)
            except FunctionError:
                continue
    raise FunctionError(
        "none of the call's arguments is computed from score, b, h, q or k, so the call cannot "
        "be traced; pass at least one value that is computed from them"
    )


def _applies(name: str) -> Callable[..., Any]:
    """Return a function that applies one of OPERATIONS to symbols."""

    def apply(*args: Any) -> Any:
        arity = OPERATIONS[name].arity
        if len(args) != arity:
            values = f"{arity} value{'s' * (arity > 1)}"
            raise FunctionError(
                f"{name} takes {values} here, got {len(args)}; the function computes one score at "
                "a time, so there are no axes and no output arrays"
            )
        return _recorder_of(args).symbol(name, *args)

    return apply


def _or_bits(logic: str, bits: str) -> Callable[..., Any]:
    """Return a function that applies operation `logic` to booleans, and `bits` to other values."""

    def apply(a: Any, b: Any) -> Any:
        r = _recorder_of((a, b))
        return r.symbol(logic if r.kind(a) == r.kind(b) == BOOL else bits, a, b)

    return apply


def _logical_xor(a: Any, b: Any) -> Any:
    r = _recorder_of((a, b))
    return r.symbol("ne", r.cast(a, BOOL), r.cast(b, BOOL))


def _add(a: Any, b: Any, alpha: Any = 1) -> Any:
    """Add `alpha` times b, as in torch; True + True is True, as in NumPy, torch and JAX."""
    r = _recorder_of((a, b))
    if r.kind(a) == r.kind(b) == BOOL and alpha == 1:
        return r.symbol("or", a, b)
    return r.symbol("add", a, b if alpha == 1 else r.symbol("mul", alpha, b))


def _sub(a: Any, b: Any, alpha: Any = 1) -> Any:
    r = _recorder_of((a, b))
    return r.symbol("sub", a, b if alpha == 1 else r.symbol("mul", alpha, b))


def _div(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    r = _recorder_of((a, b))
    if rounding_mode == "floor":
        return r.symbol("floordiv", a, b)
    if rounding_mode is None:
        return r.symbol("div", a, b)
    if FLOAT in (r.kind(a), r.kind(b)):
        return _trunc(r.symbol("div", a, b))
    return r.symbol("floordiv", a, b) + ((a % b != 0) & ((a < 0) ^ (b < 0)))


def _lax_div(a: Any, b: Any) -> Any:
    r = _recorder_of((a, b))
    return _div(a, b, None if FLOAT in (r.kind(a), r.kind(b)) else "trunc")


def _no_remainder(*_: Any) -> NoReturn:
    raise FunctionError("math.remainder cannot be traced; use the operator %, or numpy.remainder")


def _pow(a: Any, b: Any) -> Any:
    r = _recorder_of((a, b))
    if isinstance(b, (int, np.integer)) and not isinstance(b, bool) and 0 <= b <= 8:
        result: Any = 1 if r.kind(a) != FLOAT else 1.0
        for _ in range(int(b)):
            result = r.symbol("mul", result, a)
        return result
    return r.symbol("pow", a, b)


_exp, _log1p, _tanh, _erf, _sigmoid, _min, _max, _floor, _ceil = map(
    _applies, ("exp", "log1p", "tanh", "erf", "sigmoid", "min", "max", "floor", "ceil")
)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return _recorder_of((condition, a, b)).symbol("where", condition, a, b)


def _clamp_min(x: Any, min: Any) -> Any:
    """Return max(x, min), but for floats with torch's gradient: x gets all of it where both agree.

    Integers have no gradient, and a maximum has tighter bounds over a tile.
    """
    r = _recorder_of((x, min))
    return _where(x < min, min, x) if FLOAT in (r.kind(x), r.kind(min)) else _max(x, min)


def _clamp_max(x: Any, max: Any) -> Any:
    r = _recorder_of((x, max))
    return _where(max < x, max, x) if FLOAT in (r.kind(x), r.kind(max)) else _min(x, max)


def _clip(x: Any, min: Any = None, max: Any = None, **names: Any) -> Any:
    _recorder_of((x, min, max))  # or raise
    low, high = names.pop("a_min", min), names.pop("a_max", max)
    if names:
        raise FunctionError(
            f"clip has no argument {next(iter(names))!r}; pass the limits as min= and max=, or "
            "as a_min= and a_max="
        )
    x = x if low is None else _clamp_min(x, low)
    return x if high is None else _clamp_max(x, high)


def _relu(x: Any, inplace: bool = False) -> Any:
    r = _recorder_of((x,))
    return _where(x <= 0, 0.0, x) if r.kind(x) == FLOAT else _max(x, 0)


def _leaky_relu(x: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Any:
    _recorder_of((x,))  # or raise
    return _where(0 < x, x, x * negative_slope)  # noqa: SIM300  (as nodes are numbered)


def _jax_leaky_relu(x: Any, negative_slope: Any = 0.01) -> Any:
    _recorder_of((x,))  # or raise
    return _where(x < 0, x * negative_slope, x)


def _jax_clip(x: Any, min: Any = None, max: Any = None) -> Any:
    """Return x between the limits; where x equals a limit, each gets half of the gradient."""
    x = x if min is None else _max(x, min)
    return x if max is None else _min(x, max)


def _sign(x: Any) -> Any:
    one = 1 if _recorder_of((x,)).kind(x) != FLOAT else 1.0
    return _where(0 < x, one, _where(x < 0, -one, 0 * one))  # noqa: SIM300  (as nodes are numbered)


def _softplus(x: Any) -> Any:
    tail = _log1p(_exp(-abs(x)))
    return _max(x, 0.0) + tail


def _invert(x: Any) -> Any:
    r = _recorder_of((x,))
    if r.kind(x) == BOOL:
        return r.symbol("not", x)
    # For integers, -1 - x is -1 ^ x, but has tight bounds. The symbol of -1 ^ x refuses floats.
    return r.symbol("sub" if r.kind(x) == INT else "bitxor", -1, x)


def _gelu(x: Any, approximate: Any = "none") -> Any:
    _recorder_of((x,))  # or raise
    if approximate in ("tanh", True):
        part = _tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))
    else:
        part = _erf(x * 0.5**0.5)
    return 0.5 * x * (1.0 + part)


def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    """Return x with `value`, converted to x's type, where the mask is True."""
    r = _recorder_of((x, mask, value))
    return _where(mask, r.cast(value, r.kind(x)), x)


def _trunc(x: Any) -> Any:
    _recorder_of((x,))  # or raise
    return _where(x < 0, _ceil(x), _floor(x))


def _fmod(a: Any, b: Any) -> Any:
    """Return the remainder that has the sign of a."""
    r = _recorder_of((a, b))
    whole = r.cast(a, r.kind(a))  # of 32 bits or more, so that abs(-128) is 128
    rest = r.symbol("mod", abs(whole), abs(b))
    return _where(whole < 0, -rest, rest)


def _round(x: Any, decimals: Any = 0) -> Any:
    """Round to the nearest integer, and a half to the nearest even one, as NumPy, torch and JAX."""
    r = _recorder_of((x,))
    if decimals:
        raise FunctionError(f"round takes no decimals here, got {decimals!r}; scale the value")
    if r.kind(x) != FLOAT:
        return x
    low = r.symbol("floor", x)
    odd = low * 0.5 != r.symbol("floor", low * 0.5)
    return _where((x - low > 0.5) | ((x - low == 0.5) & odd), low + 1, low)


def _turned(name: str) -> Callable[..., Any]:
    """Return a function that swaps arguments, to record a > b as b < a."""
    return lambda a, b: _recorder_of((a, b)).symbol(name, b, a)


def _full_like(x: Any, fill_value: Any) -> Any:
    r = _recorder_of((x,))
    return r.cast(fill_value, r.kind(x))


def _to(kind: str) -> Callable[..., Any]:
    return lambda x, *_args, **_keywords: _recorder_of((x,)).cast(x, kind)


#: The traceable functions, by their names in Python, NumPy, torch and JAX. A name that begins with
#: "jax." or "math." is for a function that differs from torch's function of the same name.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _add,
    **dict.fromkeys(("sub", "subtract"), _sub),
    **dict.fromkeys(("mul", "multiply"), _or_bits("and", "mul")),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), _div),
    **dict.fromkeys(("floor_divide", "floordiv"), _applies("floordiv")),
    **dict.fromkeys(("mod", "remainder"), _applies("mod")),
    **dict.fromkeys(("pow", "power", "float_power"), _pow),
    **dict.fromkeys(("neg", "negative"), _applies("neg")),
    **dict.fromkeys(("abs", "absolute", "fabs"), _applies("abs")),
    **dict.fromkeys(("min", "minimum", "fmin"), _min),
    **dict.fromkeys(("max", "maximum", "fmax"), _max),
    **{
        name: _applies(name)
        for name in (
            *("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid"),
            *("sin", "cos", "erf", "floor", "ceil"),
        )
    },
    **{"expit": _sigmoid, "relu": _relu, "sign": _sign},
    **{"clamp_min": _clamp_min, "clamp_max": _clamp_max},
    **{"trunc": _trunc, "fmod": _fmod, "rem": _fmod},
    **dict.fromkeys(("round", "rint", "around"), _round),
    "isnan": lambda x: _recorder_of((x,)).symbol("ne", x, x),
    "isinf": lambda x: _recorder_of((x,)).symbol("eq", abs(x), math.inf),
    "isfinite": lambda x: _recorder_of((x,)).symbol("lt", abs(x), math.inf),
    **{"leaky_relu": _leaky_relu, "masked_fill": _masked_fill},
    **{"square": lambda x: _pow(x, 2), "softplus": _softplus, "gelu": _gelu},
    "logaddexp": lambda a, b: _max(a, b) + _softplus(-abs(a - b)),
    **dict.fromkeys(("silu", "swish"), lambda x, inplace=False: x * _sigmoid(x)),
    **dict.fromkeys(("lt", "less"), _applies("lt")),
    **dict.fromkeys(("le", "less_equal"), _applies("le")),
    **dict.fromkeys(("gt", "greater"), _turned("lt")),
    **dict.fromkeys(("ge", "greater_equal"), _turned("le")),
    **dict.fromkeys(("eq", "equal"), _applies("eq")),
    **dict.fromkeys(("ne", "not_equal"), _applies("ne")),
    **dict.fromkeys(("and", "bitwise_and"), _or_bits("and", "bitand")),
    **dict.fromkeys(("or", "bitwise_or"), _or_bits("or", "bitor")),
    **dict.fromkeys(("xor", "bitwise_xor"), _or_bits("ne", "bitxor")),
    **dict.fromkeys(("invert", "bitwise_not"), _invert),
    "logical_and": _applies("and"),
    "logical_or": _applies("or"),
    "logical_not": _applies("not"),
    "logical_xor": _logical_xor,
    **dict.fromkeys(("lshift", "left_shift", "bitwise_left_shift"), _applies("shl")),
    **dict.fromkeys(("rshift", "right_shift", "bitwise_right_shift"), _applies("shr")),
    **dict.fromkeys(("where", "select"), _where),
    **{"full_like": _full_like, "zeros_like": lambda x: _full_like(x, 0)},
    **{"ones_like": lambda x: _full_like(x, 1), "reciprocal": lambda x: _div(1.0, x)},
    **dict.fromkeys(("clip", "clamp"), _clip),
    **dict.fromkeys(("float", "double", "half", "bfloat16", "float32"), _to(FLOAT)),
    **dict.fromkeys(("int", "long", "int32"), _to(INT)),
    **dict.fromkeys(("bool", "bool_"), _to(BOOL)),
    **{"jax.div": _lax_div, "jax.gelu": lambda x, approximate=True: _gelu(x, approximate)},
    **{"jax.leaky_relu": _jax_leaky_relu, "jax.clip": _jax_clip},
    "math.remainder": _no_remainder,
}


def by_name(name: str) -> Callable[..., Any] | None:
    """Return the traceable function named, for example, "__rsub__" or "add_"; None if unknown."""
    plain = name.strip("_")
    if plain in FUNCTIONS:
        return FUNCTIONS[plain]
    if plain[:1] in ("r", "i") and name.startswith("__") and plain[1:] in FUNCTIONS:
        function = FUNCTIONS[plain[1:]]
        return (lambda a, b: function(b, a)) if plain[0] == "r" else function
    return None
