"""The operations of score and mask functions, and the kinds of values that they work on.

A value's kind is "b" (boolean), "i" (integer) or "f" (float).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flashsim.errors import FunctionError

BOOL, INT, FLOAT = "b", "i", "f"
RANK = {BOOL: 0, INT: 1, FLOAT: 2}
#: The arguments of a score function. A mask function has all except the score.
SCORE, INDICES = "score", ("b", "h", "q", "k")
#: What the index of a captured element depends on, besides batch entry and head: neither q nor k,
#: q, k, or both.
SIDES = ("fixed", "row", "col", "score")
#: Element types of captured arrays, and the kind of value that a load returns.
ELEMENTS = {
    **{"bool": BOOL, "int8": INT, "uint8": INT, "int16": INT, "int32": INT, "int64": INT},
    **{"float16": FLOAT, "bfloat16": FLOAT, "float32": FLOAT, "float64": FLOAT},
}


def narrow_type(dtype: Any) -> Any:
    """Return the NumPy dtype of integers of fewer than 32 bits, and None for any other dtype."""
    name = str(dtype).rpartition(".")[2]
    return np.dtype(name) if name in ("int8", "uint8", "int16") else None


def kind_of(dtype: Any) -> tuple[str, Any]:
    """Return the kind (boolean, integer or float) and the narrow type of a dtype or its name."""
    name = str(np.dtype(dtype)) if isinstance(dtype, type) else str(dtype).rpartition(".")[2]
    if name not in ELEMENTS:
        raise FunctionError(
            f"a traced value cannot be converted to {name}; convert it to one of "
            f"{', '.join(ELEMENTS)}"
        )
    return ELEMENTS[name], narrow_type(name)


class Operation(NamedTuple):
    """One operation: the number of arguments, the result's kind, and the NumPy function.

    `kind` is the result's kind, or "same" if the result has the kind of the arguments. Arguments
    are first converted to a common kind, booleans to integers.
    """

    arity: int
    kind: str
    numpy: Callable[..., Any]


def _sigmoid(x: Any) -> Any:
    return 0.5 * np.tanh(0.5 * x) + 0.5


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.result_type(x)])(x)


def _floor_divide(a: Any, b: Any) -> Any:
    if np.result_type(a).kind == "f":
        return np.floor(a / b)
    return np.floor_divide(a, np.where(b == 0, 1, b))


def _remainder(a: Any, b: Any) -> Any:
    if np.result_type(a).kind == "f":
        return a - np.floor(a / b) * b
    return np.remainder(a, np.where(b == 0, 1, b))


OPERATIONS = {
    **{
        name: Operation(2, "same", f)
        for name, f in (
            *(("add", np.add), ("sub", np.subtract), ("mul", np.multiply)),
            *(("min", np.minimum), ("max", np.maximum)),
            *(("floordiv", _floor_divide), ("mod", _remainder)),
        )
    },
    "neg": Operation(1, "same", np.negative),
    "abs": Operation(1, "same", np.abs),
    "div": Operation(2, FLOAT, np.divide),
    "pow": Operation(2, FLOAT, np.power),
    **{
        name: Operation(1, FLOAT, f)
        for name, f in (
            *(("exp", np.exp), ("exp2", np.exp2), ("expm1", np.expm1), ("log", np.log)),
            *(("log2", np.log2), ("log1p", np.log1p), ("sqrt", np.sqrt), ("tanh", np.tanh)),
            *(("sin", np.sin), ("cos", np.cos), ("floor", np.floor), ("ceil", np.ceil)),
            *(("rsqrt", lambda x: 1 / np.sqrt(x)), ("sigmoid", _sigmoid), ("erf", _erf)),
        )
    },
    **{
        name: Operation(2, BOOL, f)
        for name, f in (
            *(("lt", np.less), ("le", np.less_equal)),
            *(("eq", np.equal), ("ne", np.not_equal)),
            *(("and", np.logical_and), ("or", np.logical_or)),
        )
    },
    "not": Operation(1, BOOL, np.logical_not),
    **{
        name: Operation(2, INT, f)
        for name, f in (
            *(("bitand", np.bitwise_and), ("bitor", np.bitwise_or), ("bitxor", np.bitwise_xor)),
            *(("shl", np.left_shift), ("shr", np.right_shift)),
        )
    },
    "where": Operation(3, "same", np.where),
}
#: Operations whose arguments are booleans.
LOGIC = ("and", "or", "not")
