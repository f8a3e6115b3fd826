"""Symbols, which record the operations applied to them, and arrays that symbols can index."""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import numpy as np

from flashsim.errors import FunctionError
from flashsim.functions.names import FUNCTIONS, Traceable, by_name
from flashsim.functions.operations import BOOL, FLOAT, INT, kind_of, narrow_type


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy, torch, JAX, CuPy or a similar library."""
    if isinstance(value, (np.generic, Symbol, Captured, type)):
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


#: Device types of torch: the part of a device name before its number, as in "cuda:0".
_DEVICES = {"cpu", "cuda", "hip", "hpu", "ipu", "meta", "mps", "mtia", "vulkan", "xla", "xpu"}


def _operator(name: str, turned: bool = False) -> Any:
    original = getattr(operator, {"div": "truediv", "and": "and_", "or": "or_"}.get(name, name))

    def apply(self: Any, other: Any) -> Any:
        if isinstance(other, (str, bytes, type(None))):
            return NotImplemented
        return _called(name, (other, self) if turned else (self, other), {}, original)

    return apply


def _unary_operator(name: str) -> Any:
    return lambda self: _called(name, (self,), {}, getattr(operator, name))


_NO_IF = (
    "the value of a symbol is unknown when the function is traced, so Python's if, and, or, not, "
    "min, max and chained comparisons cannot use it; write where(condition, a, b), & | ~, "
    "minimum, maximum and (a <= b) & (b < c)"
)


class _Arithmetic(Traceable):
    """The operators and methods that symbols and scalars of captured arrays share."""

    __array_priority__ = 1000.0

    __lt__, __le__ = _operator("lt"), _operator("le")
    __gt__, __ge__ = _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __add__, __radd__ = _operator("add"), _operator("add", True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", True)
    __floordiv__, __rfloordiv__ = _operator("floordiv"), _operator("floordiv", True)
    __mod__, __rmod__ = _operator("mod"), _operator("mod", True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", True)
    __and__, __rand__ = _operator("and"), _operator("and", True)
    __or__, __ror__ = _operator("or"), _operator("or", True)
    __xor__, __rxor__ = _operator("xor"), _operator("xor", True)
    __lshift__, __rlshift__ = _operator("lshift"), _operator("lshift", True)
    __rshift__, __rrshift__ = _operator("rshift"), _operator("rshift", True)
    __neg__, __abs__, __invert__ = map(_unary_operator, ("neg", "abs", "invert"))

    def __hash__(self) -> int:
        raise FunctionError(
            "a traced value cannot be looked up in a set or a dict, because the value is unknown "
            "when the function is traced; index an array instead, for example is_global[k]"
        )

    def __pos__(self) -> Any:
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        return _called(ufunc.__name__, inputs, keywords, ufunc if method == "__call__" else None)

    def __array_function__(self, function: Any, _types: Any, args: Any, keywords: Any) -> Any:
        return _called(function.__name__, args, keywords, function)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), keywords: Any = None
    ) -> Any:
        return _called(function.__name__, args, keywords or {}, function)


class Symbol(_Arithmetic):
    """Stands for a number that is unknown while a function is traced."""

    def __init__(self, recorder: Any, node: int, narrow: Any = None) -> None:
        #: An integer's type if it has fewer than 32 bits, so that arithmetic wraps around.
        self._recorder, self._node, self._narrow = recorder, node, narrow

    def __repr__(self) -> str:
        node = self._recorder.builder.nodes[self._node]
        return f"<symbol {node.value if node.op == 'arg' else node.op}>"

    def _refuse(self) -> Any:
        raise FunctionError(_NO_IF)

    __bool__ = _refuse
    __len__ = None
    __iter__ = None

    def __index__(self) -> int:
        raise FunctionError(
            "a traced value is not a Python integer, so range and list indices cannot use it; "
            "use operations on the value instead of the loop, or an array instead of the list"
        )

    __int__ = __index__

    def __float__(self) -> float:
        raise FunctionError(
            "a traced value is not a Python float, so float() cannot convert it; apply "
            "functions of numpy, torch or math to it"
        )

    #: A symbol is a single number, so it looks like an array without axes.
    shape, ndim, device = (), 0, None

    @property
    def dtype(self) -> Any:
        """The element type's name in NumPy."""
        kind = self._recorder.builder.nodes[self._node].kind
        return self._narrow or np.dtype({BOOL: bool, INT: np.int32, FLOAT: np.float32}[kind])

    def __getitem__(self, key: Any) -> Symbol:
        if key is Ellipsis or (isinstance(key, tuple) and not key):
            return self
        raise FunctionError(
            "a traced value is a single number, so it cannot be indexed; leave out the index"
        )

    def to(self, *args: Any, **keywords: Any) -> Any:
        """Return the symbol converted to another type; a device argument is ignored.

        Raises
        ------
        FunctionError
            If a symbol cannot have the type, such as complex64, or the device is unknown.
        """
        for x in (*args, *(keywords[n] for n in ("dtype",) if n in keywords)):
            if isinstance(x, Symbol):
                return self._recorder.cast(self, self._recorder.kind(x), x._narrow)
            device = isinstance(x, str) and x.partition(":")[0] in _DEVICES
            if not (device or isinstance(x, bool)) and type(x).__name__ != "device":
                return self._recorder.cast(self, *kind_of(x))
        return self

    type = astype = type_as = to

    def where(self, condition: Any, other: Any) -> Any:
        """Return the symbol where the condition is True, and `other` elsewhere, as in torch."""
        return FUNCTIONS["where"](condition, self, other)

    def item(self) -> Any:
        """Raise `FunctionError`, because a symbol has no value while a function is traced."""
        raise FunctionError(_NO_IF)

    def new_ones(self, size: Any = (), dtype: Any = None, **_: Any) -> Any:
        """Return the number 1, converted to `dtype`."""
        return self.new_full(size, 1, dtype)

    def new_zeros(self, size: Any = (), dtype: Any = None, **_: Any) -> Any:
        """Return the number 0, converted to `dtype`."""
        return self.new_full(size, 0, dtype)

    def new_tensor(self, value: Any, dtype: Any = None, **_: Any) -> Any:
        """Return a number, converted to `dtype`."""
        return self.new_full((), value, dtype)

    def new_full(self, size: Any, value: Any, dtype: Any = None, **_: Any) -> Any:
        """Return a number, converted to `dtype`."""
        if tuple(size) != ():
            raise FunctionError(
                "a function works on one score at a time, so it cannot make an array of shape "
                f"{size}; compute with single numbers"
            )
        kind = (self._recorder.kind(value),) if dtype is None else kind_of(dtype)
        return self._recorder.cast(value, *kind)

    def __getattr__(self, name: str) -> Any:
        in_place = name.endswith("_") and name[:-1] in FUNCTIONS  # x.clamp_(max=1)
        if name.startswith("__") or not (in_place or name in FUNCTIONS):
            raise AttributeError(
                f"a traced value has no attribute {name!r}; use operators, or functions of numpy, "
                "torch or math"
            )
        if in_place and name not in FUNCTIONS:
            return lambda *args, **keywords: _called(name, (self, *args), keywords, None)
        return functools.partial(FUNCTIONS[name], self)


class PartlyIndexed(Symbol):
    """A captured array with fewer indices than axes, such as bias[b]; it takes further indices."""

    def __init__(self, array: Captured, indices: tuple[Any, ...]) -> None:
        self._recorder, self._array, self._indices = array._recorder, array, indices
        self._narrow = None

    def __repr__(self) -> str:
        return f"<{self._array._name} with {len(self._indices)} indices>"

    def __getitem__(self, key: Any) -> Symbol:
        return self._array[(*self._indices, *(key if isinstance(key, tuple) else (key,)))]

    def __len__(self) -> int:  # type: ignore[override]
        return self.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The lengths of the axes that have no index yet."""
        return tuple(self._array._array.shape[len(self._indices) :])

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of axes that have no index yet."""
        return len(self.shape)

    @property
    def _node(self) -> int:  # type: ignore[override]
        raise FunctionError(
            f"array {self._array._name} of shape {tuple(self._array._array.shape)} needs one "
            f"index per axis, but has {len(self._indices)}; the function computes one score at a "
            "time, so it cannot use a row: write one integer index per axis"
        )


class Captured(_Arithmetic):
    """Stands for an array that a traced function captured, which symbols can index."""

    def __init__(self, recorder: Any, array: Any, name: str) -> None:
        self._recorder, self._array, self._name = recorder, array, name

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        scalar = [k for k in keys if isinstance(k, Captured) and tuple(k._array.shape) == ()]
        if not scalar and not any(isinstance(k, Symbol) for k in keys):
            return Captured(self._recorder, self._array[_plain(key)], self._name)
        array, recorder = self._array, self._recorder
        if any(k is Ellipsis or k is None or isinstance(k, slice) for k in keys):
            keys, array = _without_slices(keys, array, self._name)
        if len(keys) > len(array.shape):
            raise FunctionError(
                f"array {self._name} of shape {tuple(array.shape)} needs one index per axis, but "
                f"has {len(keys)}; write one integer index per axis"
            )
        for k in keys:
            if recorder.kind(k) == FLOAT:
                raise FunctionError(
                    f"an index of array {self._name} is a float; convert the index by "
                    ".to(torch.int32), or by .astype(int)"
                )
        if len(keys) < len(array.shape):
            return PartlyIndexed(self, keys)
        spec = recorder.array(array, self._name)
        builder = recorder.builder
        indices = tuple(builder.cast(recorder.node(k), INT) for k in keys)
        return Symbol(recorder, builder.load(spec, indices), narrow_type(array.dtype))

    def __bool__(self) -> bool:
        return bool(self._array)

    def __len__(self) -> int:
        return len(self._array)

    def __index__(self) -> int:
        return operator.index(self._array)

    def __int__(self) -> int:
        return int(self._array)

    def __float__(self) -> float:
        return float(self._array)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._array, name)
        if is_array(found):
            return Captured(self._recorder, found, self._name)
        if not callable(found):
            return found

        def call(*args: Any, **keywords: Any) -> Any:
            symbols = any(isinstance(x, Symbol) for x in args)
            if (symbols or tuple(self._array.shape) == ()) and name in FUNCTIONS and symbols:
                return FUNCTIONS[name](self, *args, **keywords)
            return _arrays(self._recorder, found, args, keywords, self._name)

        return call


def _plain(value: Any) -> Any:
    """Return a value with the original arrays in place of `Captured` objects."""
    if isinstance(value, Captured):
        return value._array
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return value


def _arrays(recorder: Any, function: Any, args: Any, keywords: Any, name: str) -> Any:
    """Return the result of a library function that is called on complete captured arrays."""
    plain = {key: _plain(x) for key, x in keywords.items()}
    return recorder.wrap(function(*map(_plain, args), **plain), name)


def _without_slices(keys: tuple[Any, ...], array: Any, name: str) -> tuple[tuple[Any, ...], Any]:
    """Return indices without None and Ellipsis, and the indexed array; a slice raises an error."""
    if Ellipsis in [k for k in keys if k is Ellipsis]:
        at = next(n for n, k in enumerate(keys) if k is Ellipsis)
        used = sum(k is not None for k in keys) - 1
        keys = (*keys[:at], *(slice(None),) * (len(array.shape) - used), *keys[at + 1 :])
    if any(isinstance(k, slice) for k in keys):
        raise FunctionError(
            f"array {name} is indexed by a traced value and a slice, which selects a row, but "
            "the function computes one score at a time; write one integer index per axis"
        )
    return tuple(k for k in keys if k is not None), array


def _called(name: str, args: Any, keywords: dict[str, Any], original: Any) -> Any:
    """Return a library function's result: a symbol if an argument is a symbol, else an array."""
    flat = [y for x in args for y in (x if isinstance(x, (tuple, list)) else (x,))]
    flat += keywords.values()
    captured = [x for x in flat if isinstance(x, Captured)]
    scalars = all(tuple(x._array.shape) == () for x in captured)
    if not any(isinstance(x, Symbol) for x in flat) and not (scalars and by_name(name)):
        if original is None or not captured:
            raise FunctionError(
                f"the function {name} cannot be traced; use operators, where, minimum, maximum, "
                "abs, exp or tanh"
            )
        return _arrays(captured[0]._recorder, original, args, keywords, captured[0]._name)
    if name == "__getitem__":  # an array of an object, such as self.slopes, has no `Captured`
        recorder = next(x._recorder for x in flat if isinstance(x, Symbol))
        return Captured(recorder, args[0], "array")[args[1]]
    if name == "__get__" and args:  # torch asks for an attribute
        raise FunctionError(
            "this torch function cannot be traced, because it reads an attribute that traced "
            "values do not have; use operators, where, minimum, maximum, abs, exp or tanh"
        )
    if name == "round" and getattr(original, "__module__", "") == "jax.lax":
        raise FunctionError(
            "jax.lax.round cannot be traced, because it rounds 0.5 to 1; use jax.numpy.round, "
            "which rounds it to 0"
        )
    known = by_name(name)
    if known is None:
        raise FunctionError(
            f"the function {name} cannot be traced; use one of these functions, which can be: "
            f"{', '.join(sorted(n for n in FUNCTIONS if n.isidentifier()))}"
        )
    given = {
        ("min" if key == "a_min" else "max" if key == "a_max" else key): x
        for key, x in keywords.items()
        if key not in ("out", "dtype", "casting", "device") or x is None
    }
    refused = set(keywords) - set(given) - {"out", "a_min", "a_max"}
    if refused:
        raise FunctionError(
            f"the function {name} cannot be traced with the argument "
            f"{', '.join(sorted(refused))}; leave it out"
        )
    result = known(*args, **{key: x for key, x in given.items() if x is not None})
    return _in_place(name, args, keywords, result)


def _in_place(name: str, args: Any, keywords: dict[str, Any], result: Symbol) -> Symbol:
    """Return a call's result, which also replaces the symbol that the call overwrites, if any.

    Such calls are ``relu_(x)``, ``relu(x, inplace=True)`` and ``add(x, 1, out=x)``.
    """
    target = keywords.get("out")
    target = target[0] if isinstance(target, tuple) else target  # as NumPy passes it
    underscore = name.endswith("_") and not name.startswith("_") and name not in FUNCTIONS
    if underscore or keywords.get("inplace"):
        target = args[0]
    if target is None:
        return result
    if not isinstance(target, Symbol) or isinstance(target, PartlyIndexed):
        raise FunctionError(
            f"the function {name} would write a traced value to an array; use its result instead"
        )
    target._node, target._narrow = result._node, result._narrow
    return target


# -- libraries whose functions refuse symbols ------------------------------------------------------

LIBRARIES = ("math", "jax", "jaxlib")


class TracedLibrary:
    """Stands for a module such as `jax.numpy` or `math`, so that functions accept symbols."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, types.ModuleType):
            return TracedLibrary(found)
        if not callable(found) or isinstance(found, type):
            return found
        return functools.partial(either, found, name)


def either(original: Any, name: str, *args: Any, **keywords: Any) -> Any:
    """Trace a library function on symbols or captured arrays; call it directly on other values."""
    flat = [y for x in args for y in (x if isinstance(x, (tuple, list)) else (x,))]
    if any(isinstance(x, (Symbol, Captured)) for x in (*flat, *keywords.values())):
        own = f"{(getattr(original, '__module__', '') or '').partition('.')[0]}.{name}"
        return _called(own if own in FUNCTIONS else name, args, keywords, original)
    return original(*args, **keywords)
