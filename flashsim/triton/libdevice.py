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
from unittest import mock

import numpy as np

from flashsim.errors import DTypeError, UnsupportedError

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
    **{
        name: np.vectorize(getattr(math, name), otypes=[float])
        for name in ("erf", "erfc", "lgamma")
    },
    **{f"fast_{name}": getattr(np, name) for name in ("cos", "exp", "log", "log2", "log10", "sin")},
    "fast_fdividef": np.divide,
    "fast_pow": np.power,
    "fast_tan": np.tan,
    "fma": lambda x, y, z: x.astype(np.float64) * y + z,
    "nearbyint": np.rint,
    "pow": np.power,
    "powi": np.power,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
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
def replaced(scope: dict[str, Any], semantic: Any) -> Iterator[None]:
    """Replace libdevice's stubs, in their modules and in a kernel's globals `scope`."""
    from triton.language.extra import libdevice as stubs
    from triton.language.extra.cuda import libdevice

    ours = {
        name: partial(_called, function, semantic)
        for name, function in vars(libdevice).items()
        if hasattr(stubs, name) and getattr(function, "__module__", "") == libdevice.__name__
    }
    homes = stubs.__name__, libdevice.__name__
    bound = {
        key: ours[value.__name__]
        for key, value in scope.items()
        if getattr(value, "__module__", "") in homes and getattr(value, "__name__", "") in ours
    }
    with ExitStack() as stack:
        for names, new in ((vars(stubs), ours), (vars(libdevice), ours), (scope, bound)):
            stack.enter_context(mock.patch.dict(names, new))
        yield


def _called(function: Callable[..., Any], semantic: Any, *operands: Any) -> Any:
    try:
        return function(*operands, _semantic=semantic)
    except KeyError as error:
        raise DTypeError(
            f"libdevice.{function.__name__} is not defined for operands of the types "
            f"{error.args[0]}; convert them first: x.to(tl.float32)"
        ) from None
