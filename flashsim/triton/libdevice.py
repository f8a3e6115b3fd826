"""Computes functions of CUDA's libdevice with NumPy, because Triton's interpreter runs none.

A kernel calls stubs, as ``libdevice.tanh``, which Triton's compiler replaces by calls of CUDA's
functions. In the interpreter, the stubs return None. `replaced` gives the names in a kernel's file
the compiler's functions, which choose CUDA's function by the operands' types, such as
``__nv_tanhf``, and `computed` computes this function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from flashsim.errors import DTypeError, UnsupportedError


def _lgamma(x: float) -> float:
    """Return the logarithm of |Gamma(x)|: infinity at 0, -1, -2, ..., as in CUDA."""
    return math.inf if math.isinf(x) or (x <= 0 and x == int(x)) else math.lgamma(x)


#: Functions that NumPy and libdevice call by the same name.
_SAME = (
    *("cbrt", "ceil", "copysign", "cos", "cosh", "exp", "exp2", "expm1", "fabs", "floor", "fmod"),
    *("hypot", "log", "log10", "log1p", "log2", "nextafter", "rint", "sin", "sinh", "sqrt", "tan"),
    *("tanh", "trunc"),
)
#: NumPy's functions by libdevice's names, without the ending f of float32.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _SAME},
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("cos", "sin", "tan", "tan2")},
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("cosh", "sinh", "tanh")},
    **{name: np.vectorize(getattr(math, name), otypes=[float]) for name in ("erf", "erfc")},
    **{f"fast_{name}": getattr(np, name) for name in ("cos", "exp", "log", "log2", "log10", "sin")},
    "fast_fdividef": np.divide,
    "fast_pow": np.power,
    "fast_tan": np.tan,
    "lgamma": np.vectorize(_lgamma, otypes=[float]),
    "fma": lambda x, y, z: x.astype(np.float64) * y + z,
    "nearbyint": np.rint,
    "pow": np.power,
    "powi": np.power,
    "round": lambda x: np.trunc(x) + np.where(np.abs(x - np.trunc(x)) >= 0.5, np.sign(x), 0),
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


def computed(symbol: str, operands: Sequence[np.ndarray]) -> np.ndarray:
    """Return the result of CUDA's function with this name, such as "__nv_tanhf"."""
    name = symbol.removeprefix("__nv_")
    function = FUNCTIONS.get(name) or FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        raise UnsupportedError(
            f"libdevice's function {name} is not supported; write it with the operations of tl"
        )
    return np.asarray(function(*operands))


@contextmanager
def replaced(semantic: Any) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Replace libdevice's stubs in their modules; yield a function that does so in globals."""
    from triton.language.extra import libdevice as stubs
    from triton.language.extra.cuda import libdevice

    ours = {
        name: partial(_called, function, semantic)
        for name, function in vars(libdevice).items()
        if hasattr(stubs, name) and getattr(function, "__module__", "") == libdevice.__name__
    }
    homes = stubs.__name__, libdevice.__name__

    def put(names: dict[str, Any], new: dict[str, Any]) -> None:
        stack.callback(names.update, {key: names[key] for key in new})
        names.update(new)

    def bind(scope: dict[str, Any]) -> None:
        found = {
            key: ours.get(getattr(value, "__name__", ""))
            for key, value in scope.items()
            if getattr(value, "__module__", "") in homes
        }
        put(scope, {key: new for key, new in found.items() if new is not None})

    with ExitStack() as stack:
        put(vars(stubs), ours)
        put(vars(libdevice), ours)
        yield bind


def _called(function: Callable[..., Any], semantic: Any, *operands: Any) -> Any:
    try:
        return function(*operands, _semantic=semantic)
    except KeyError as error:
        raise DTypeError(
            f"libdevice.{function.__name__} is not defined for operands of the types "
            f"{error.args[0]}; convert them first: x.to(tl.float32)"
        ) from None
