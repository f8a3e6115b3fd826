"""Call a score or mask function once, with symbols that record what it does.

The function is plain Python. It may use operators, NumPy, torch and JAX functions of `FUNCTIONS`,
and arrays from its closure or its globals, indexed by expressions. The arrays are replaced by
`Captured` objects in a copy of the function, because arrays do not take symbols as indices.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from flashsim.errors import FlashSimError, FunctionError, shown
from flashsim.functions.graph import (
    BOOL,
    ELEMENTS,
    FLOAT,
    INDICES,
    INT,
    SCORE,
    ArraySpec,
    Builder,
    Graph,
)


class Traced(NamedTuple):
    """A traced function: its graph, and the captured arrays in the order of `graph.arrays`."""

    graph: Graph
    arrays: tuple[Any, ...]


def trace_score(function: Any) -> Traced:
    """The graph of ``score_mod(score, b, h, q, k)``, which returns a number.

    What was traced before, a `Traced`, is returned as it is.
    """
    if isinstance(function, Traced):
        return function
    return _trace(function, (SCORE, *INDICES), FLOAT, "score_mod(score, b, h, q, k)")


def trace_mask(function: Any) -> Traced:
    """The graph of ``mask_mod(b, h, q, k)``, which returns a boolean: True keeps the score.

    What was traced before, a `Traced`, is returned as it is.
    """
    if isinstance(function, Traced):
        return function
    return _trace(function, INDICES, BOOL, "mask_mod(b, h, q, k)")


def _trace(function: Callable[..., Any], arguments: Iterable[str], kind: str, form: str) -> Traced:
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise FunctionError(f"expected a function {form}, got {shown(function)}")
    recorder = _Tracing()
    try:
        called = recorder.wrap(function)
        result = called(*(Symbol(recorder, recorder.builder.arg(a)) for a in arguments))
        root = recorder.node(result)
    except FlashSimError as error:
        raise FunctionError(f"{name} cannot be traced{_line(error)}: {error}") from error
    except Exception as error:
        raise FunctionError(
            f"{name} cannot be traced{_line(error)}: {type(error).__name__}: {error}; it is "
            f"called as {form} and may use operators, & | ~, where, minimum, maximum, abs, exp, "
            "tanh and indexed arrays"
        ) from error
    found = recorder.builder.nodes[root].kind
    if (kind == BOOL) != (found == BOOL):
        names = {BOOL: "a boolean", INT: "an integer", FLOAT: "a number"}
        raise FunctionError(
            f"{name} must return {names[kind]} per score, as {form} does; it returns {names[found]}"
        )
    graph = recorder.builder.graph(recorder.builder.cast(root, kind), name)
    for n in graph.loads:
        if any(SCORE in graph.depends[a] for a in graph.nodes[n].args):
            raise FunctionError(
                f"{name} reads {graph.arrays[graph.nodes[n].value].name} at an index that depends "
                "on the score; an index may depend on b, h, q, k and captured integers"
            )
    # `graph` keeps the arrays that are read, in their order
    read = sorted({n.value for n in _needed(recorder.builder, root) if n.op == "load"})
    return Traced(graph, tuple(recorder.arrays[a] for a in read))


def _needed(builder: Builder, root: int) -> list[Any]:
    seen, stack = set(), [root]
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack += builder.nodes[n].args
    return [builder.nodes[n] for n in seen]


def _line(error: BaseException) -> str:
    """The line of the user's function at which an error arose, as part of a message."""
    ours = __file__.rpartition("functions")[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        library = "site-packages" in frame.filename or frame.filename.startswith("<__array")
        if not library and not frame.filename.startswith(f"{ours}functions"):
            text = f": {frame.line}" if frame.line else ""
            return f" at {frame.filename}:{frame.lineno}{text}"
    return ""


class _Tracing:
    """One trace: its builder, the arrays captured so far, and the copies of functions."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.arrays: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._copies: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._names: list[str] = []

    # -- what the function captured -------------------------------------------------------------

    def wrap(self, value: Any, name: str = "") -> Any:
        """`value` with its arrays replaced, also in functions, methods, partials and containers."""
        if isinstance(value, (Symbol, Captured, type)) or value is None:
            return value
        if is_array(value):
            return Captured(self, value, name)
        if isinstance(value, types.ModuleType):
            return _Library(value) if value.__name__.split(".")[0] in _LIBRARIES else value
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(self.wrap(x, f"{name}_{n}") for n, x in enumerate(value))
        if type(value) is dict:
            return {key: self.wrap(x, f"{name}_{key}") for key, x in value.items()}
        if isinstance(value, functools.partial):
            keywords = {key: self.wrap(x, key) for key, x in value.keywords.items()}
            args = (self.wrap(x, f"{name}_{n}") for n, x in enumerate(value.args))
            return functools.partial(self.wrap(value.func), *args, **keywords)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.wrap(value.__func__), _Holder(self, value.__self__))
        if isinstance(value, types.FunctionType):
            return self._copy(value)
        root = str(getattr(value, "__module__", "")).split(".")[0]
        if callable(value) and root in _LIBRARIES:
            return functools.partial(_either, value, getattr(value, "__name__", ""))
        own = getattr(type(value), "__call__", None)  # noqa: B004  (the function is wanted)
        if isinstance(own, types.FunctionType) and not _foreign(own):
            return types.MethodType(self.wrap(own), _Holder(self, value))
        return value

    def _copy(self, function: types.FunctionType) -> Any:
        if id(function) in self._copies:
            return self._copies[id(function)]
        if _foreign(function):
            return functools.partial(_either, function, function.__name__)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        scope: dict[str, Any] = {"__builtins__": builtins, "__name__": function.__module__}
        copy = types.FunctionType(function.__code__, scope, function.__name__, None, cells)
        self._copies[id(function)] = copy
        self._alive.append(function)
        for name in _names(function.__code__):
            if name in function.__globals__:
                scope[name] = self.wrap(function.__globals__[name], name)
        for name, cell, old in zip(
            function.__code__.co_freevars, cells, function.__closure__ or (), strict=True
        ):
            try:
                cell.cell_contents = self.wrap(old.cell_contents, name)
            except ValueError:  # an empty cell: a name that is assigned later
                continue
        if function.__defaults__:
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            named = zip(names[-len(function.__defaults__) :], function.__defaults__, strict=True)
            copy.__defaults__ = tuple(self.wrap(x, name) for name, x in named)
        if function.__kwdefaults__:
            copy.__kwdefaults__ = {n: self.wrap(x, n) for n, x in function.__kwdefaults__.items()}
        return copy

    def array(self, array: Any, name: str) -> int:
        """The number of a captured array; the same one for the same array."""
        if id(array) not in self._numbers:
            dtype = str(array.dtype).rpartition(".")[2]
            if dtype not in ELEMENTS:
                raise FunctionError(
                    f"captured array {name or 'of the function'} has dtype {dtype}; possible: "
                    f"{', '.join(ELEMENTS)}"
                )
            shape = tuple(int(n) for n in array.shape)
            if 0 in shape:
                raise FunctionError(f"captured array {name} is empty: shape {shape}")
            self._numbers[id(array)] = len(self.arrays)
            self.arrays.append(array)
            self.builder.arrays.append(ArraySpec(self._unique(name), shape, dtype))
        return self._numbers[id(array)]

    def _unique(self, name: str) -> str:
        """A name for a captured array that no other one has and that C++ takes."""
        plain = "".join(c if c.isalnum() and c.isascii() else "_" for c in name).strip("_")
        plain = plain if plain and not plain[0].isdigit() else f"array_{plain}".rstrip("_")
        name, n = plain, 2
        while name in self._names:
            name, n = f"{plain}_{n}", n + 1
        self._names.append(name)
        return name

    # -- operations -----------------------------------------------------------------------------

    def node(self, value: Any) -> int:
        """The number of the node of a symbol, a constant or a captured scalar."""
        if isinstance(value, Symbol):
            if value._recorder is not self:
                raise FunctionError(
                    "a symbol of an earlier call is used; return new ones each call"
                )
            return value._node
        if isinstance(value, Captured):
            if value._array.shape != ():
                raise FunctionError(
                    f"array {value._name} of shape {tuple(value._array.shape)} is used without an "
                    f"index; write {value._name or 'array'}[...] with one index per axis"
                )
            return self.builder.load(self.array(value._array, value._name), ())
        if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
            return self.builder.const(value.item() if isinstance(value, np.generic) else value)
        if is_array(value) and tuple(value.shape) == ():
            return self.builder.load(self.array(value, "scalar"), ())
        raise FunctionError(f"a value that is no number was used as one: {shown(value)}")

    def symbol(self, name: str, *args: Any) -> Symbol:
        """The symbol of one of OPERATIONS."""
        return Symbol(self, self.builder.op(name, *map(self.node, args)))

    def cast(self, value: Any, kind: str) -> Symbol:
        """A value as a boolean, an integer or a float."""
        return Symbol(self, self.builder.cast(self.node(value), kind))

    def kind(self, value: Any) -> str:
        """The kind of a value."""
        return self.builder.nodes[self.node(value)].kind


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy, torch, JAX, CuPy or alike, not a scalar of NumPy."""
    if isinstance(value, (np.generic, Symbol, Captured, type)):
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def _names(code: types.CodeType) -> set[str]:
    """All names of globals that a function's code, and functions inside it, may read."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return found


class _Holder:
    """Stands for a captured object: its attributes with their arrays replaced."""

    def __init__(self, recorder: _Tracing, value: Any) -> None:
        self._recorder, self._value = recorder, value

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._value, name)
        if isinstance(found, types.MethodType) and found.__self__ is self._value:
            return types.MethodType(self._recorder.wrap(found.__func__), self)
        return self._recorder.wrap(found, name)


# -- symbols -------------------------------------------------------------------------------------


def _recorder_of(args: Iterable[Any]) -> _Tracing:
    for x in args:
        if isinstance(x, (Symbol, Captured)):
            return x._recorder
        if isinstance(x, (tuple, list)):
            try:
                return _recorder_of(x)
            except FunctionError:
                continue
    raise FunctionError("no symbol among the arguments")


def _applies(name: str) -> Callable[..., Any]:
    """A function of symbols that applies one of OPERATIONS."""

    def apply(*args: Any) -> Any:
        return _recorder_of(args).symbol(name, *args)

    return apply


def _or_bits(logic: str, bits: str) -> Callable[..., Any]:
    """Logic of booleans; of integers the operation on their bits."""

    def apply(a: Any, b: Any) -> Any:
        r = _recorder_of((a, b))
        return r.symbol(logic if r.kind(a) == r.kind(b) == BOOL else bits, a, b)

    return apply


def _xor(a: Any, b: Any) -> Any:
    r = _recorder_of((a, b))
    return r.symbol("ne" if r.kind(a) == r.kind(b) == BOOL else "bitxor", a, b)


def _invert(x: Any) -> Any:
    r = _recorder_of((x,))
    return r.symbol("not", x) if r.kind(x) == BOOL else r.symbol("sub", -1, x)


def _logical_xor(a: Any, b: Any) -> Any:
    r = _recorder_of((a, b))
    return r.symbol("ne", r.cast(a, BOOL), r.cast(b, BOOL))


def _sub(a: Any, b: Any, alpha: Any = 1) -> Any:
    r = _recorder_of((a, b))
    return r.symbol("sub", a, b if alpha == 1 else r.symbol("mul", alpha, b))


def _add(a: Any, b: Any, alpha: Any = 1) -> Any:
    r = _recorder_of((a, b))
    return r.symbol("add", a, b if alpha == 1 else r.symbol("mul", alpha, b))


def _div(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    r = _recorder_of((a, b))
    if rounding_mode == "floor":
        return r.symbol("floordiv", a, b)
    quotient = r.symbol("div", a, b)
    if rounding_mode is None:
        return quotient
    kind = FLOAT if FLOAT in (r.kind(a), r.kind(b)) else INT
    return r.cast(r.cast(quotient, INT), kind)


def _pow(a: Any, b: Any) -> Any:
    r = _recorder_of((a, b))
    if isinstance(b, (int, np.integer)) and not isinstance(b, bool) and 0 <= b <= 8:
        result: Any = 1 if r.kind(a) != FLOAT else 1.0
        for _ in range(int(b)):
            result = r.symbol("mul", result, a)
        return result
    return r.symbol("pow", a, b)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return _recorder_of((condition, a, b)).symbol("where", condition, a, b)


def _clip(x: Any, min: Any = None, max: Any = None, **names: Any) -> Any:
    r = _recorder_of((x, min, max))
    low, high = names.pop("a_min", min), names.pop("a_max", max)
    if names:
        raise FunctionError(f"clip has no argument {next(iter(names))!r}")
    x = x if low is None else r.symbol("max", x, low)
    return x if high is None else r.symbol("min", x, high)


def _relu(x: Any) -> Any:
    return _recorder_of((x,)).symbol("max", x, 0)


def _sign(x: Any) -> Any:
    r = _recorder_of((x,))
    one = 1 if r.kind(x) != FLOAT else 1.0
    return r.symbol(
        "where", r.symbol("lt", 0, x), one, r.symbol("where", r.symbol("lt", x, 0), -one, 0 * one)
    )


def _square(x: Any) -> Any:
    return _pow(x, 2)


def _softplus(x: Any) -> Any:
    r = _recorder_of((x,))
    tail = r.symbol("log1p", r.symbol("exp", r.symbol("neg", r.symbol("abs", x))))
    return r.symbol("add", r.symbol("max", x, 0.0), tail)


def _silu(x: Any, inplace: bool = False) -> Any:
    r = _recorder_of((x,))
    return r.symbol("mul", x, r.symbol("sigmoid", x))


def _gelu(x: Any, approximate: Any = "none") -> Any:
    r = _recorder_of((x,))
    if approximate in ("tanh", True):
        inner = r.symbol("add", x, r.symbol("mul", 0.044715, _pow(x, 3)))
        part = r.symbol("tanh", r.symbol("mul", (2 / math.pi) ** 0.5, inner))
    else:
        part = r.symbol("erf", r.symbol("mul", x, 0.5**0.5))
    return r.symbol("mul", r.symbol("mul", 0.5, x), r.symbol("add", 1.0, part))


def _logaddexp(a: Any, b: Any) -> Any:
    r = _recorder_of((a, b))
    return r.symbol(
        "add",
        r.symbol("max", a, b),
        _softplus(r.symbol("neg", r.symbol("abs", r.symbol("sub", a, b)))),
    )


def _trunc(x: Any) -> Any:
    r = _recorder_of((x,))
    return r.cast(r.cast(x, INT), FLOAT)


def _turned(name: str) -> Callable[..., Any]:
    """A comparison with its sides exchanged: a > b is b < a."""
    return lambda a, b: _recorder_of((a, b)).symbol(name, b, a)


def _to(kind: str) -> Callable[..., Any]:
    return lambda x, *_args, **_keywords: _recorder_of((x,)).cast(x, kind)


#: Functions by the names that Python, NumPy, torch and JAX give them.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add",), _add),
    **dict.fromkeys(("sub", "subtract"), _sub),
    **dict.fromkeys(("mul", "multiply"), _applies("mul")),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), _div),
    **dict.fromkeys(("floor_divide", "floordiv"), _applies("floordiv")),
    **dict.fromkeys(("mod", "remainder"), _applies("mod")),
    **dict.fromkeys(("pow", "power", "float_power"), _pow),
    **dict.fromkeys(("neg", "negative"), _applies("neg")),
    **dict.fromkeys(("abs", "absolute", "fabs"), _applies("abs")),
    **dict.fromkeys(("min", "minimum", "fmin"), _applies("min")),
    **dict.fromkeys(("max", "maximum", "fmax"), _applies("max")),
    **{
        name: _applies(name)
        for name in (
            *("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid"),
            *("sin", "cos", "erf", "floor", "ceil"),
        )
    },
    **{"expit": _applies("sigmoid"), "trunc": _trunc, "relu": _relu, "sign": _sign},
    **{"square": _square, "softplus": _softplus, "logaddexp": _logaddexp},
    **{"silu": _silu, "swish": _silu, "gelu": _gelu},
    **dict.fromkeys(("lt", "less"), _applies("lt")),
    **dict.fromkeys(("le", "less_equal"), _applies("le")),
    **dict.fromkeys(("gt", "greater"), _turned("lt")),
    **dict.fromkeys(("ge", "greater_equal"), _turned("le")),
    **dict.fromkeys(("eq", "equal"), _applies("eq")),
    **dict.fromkeys(("ne", "not_equal"), _applies("ne")),
    **dict.fromkeys(("and", "bitwise_and"), _or_bits("and", "bitand")),
    **dict.fromkeys(("or", "bitwise_or"), _or_bits("or", "bitor")),
    **dict.fromkeys(("xor", "bitwise_xor"), _xor),
    **dict.fromkeys(("invert", "bitwise_not"), _invert),
    "logical_and": _applies("and"),
    "logical_or": _applies("or"),
    "logical_not": _applies("not"),
    "logical_xor": _logical_xor,
    **dict.fromkeys(("lshift", "left_shift", "bitwise_left_shift"), _applies("shl")),
    **dict.fromkeys(("rshift", "right_shift", "bitwise_right_shift"), _applies("shr")),
    **dict.fromkeys(("where", "select"), _where),
    **dict.fromkeys(("clip", "clamp"), _clip),
    **dict.fromkeys(("float", "double", "half", "bfloat16", "float32"), _to(FLOAT)),
    **dict.fromkeys(("int", "long", "int32"), _to(INT)),
    **dict.fromkeys(("bool", "bool_"), _to(BOOL)),
}


def _by_name(name: str) -> Callable[..., Any] | None:
    """The function of symbols for a library's function, by its name ("__rsub__", "add_", ...)."""
    plain = name.strip("_")
    if plain in FUNCTIONS:
        return FUNCTIONS[plain]
    if plain[:1] in ("r", "i") and name.startswith("__") and plain[1:] in FUNCTIONS:
        function = FUNCTIONS[plain[1:]]
        return (lambda a, b: function(b, a)) if plain[0] == "r" else function
    return None


def _kind_of(dtype: Any) -> str:
    """The kind of an element type, given as a library's object, a Python type or a name."""
    name = str(np.dtype(dtype)) if isinstance(dtype, type) else str(dtype).rpartition(".")[2]
    if name not in ELEMENTS:
        raise FunctionError(f"a symbol cannot become {name}; possible: {', '.join(ELEMENTS)}")
    return ELEMENTS[name]


def _operator(name: str, turned: bool = False) -> Any:
    def apply(self: Any, other: Any) -> Any:
        if isinstance(other, (str, bytes, type(None))):
            return NotImplemented
        return FUNCTIONS[name](other, self) if turned else FUNCTIONS[name](self, other)

    return apply


_NO_IF = (
    "the value of a symbol is unknown when the function is traced, so Python's if, and, or, not, "
    "min, max and chained comparisons cannot use it; write where(condition, a, b), & | ~, "
    "minimum, maximum and (a <= b) & (b < c)"
)


class _Arithmetic:
    """The operators and methods that symbols and captured scalars share."""

    _recorder: _Tracing
    __array_priority__ = 1000.0

    __lt__, __le__ = _operator("lt"), _operator("le")
    __gt__, __ge__ = _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __hash__ = object.__hash__
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

    def __neg__(self) -> Any:
        return FUNCTIONS["neg"](self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return FUNCTIONS["abs"](self)

    def __invert__(self) -> Any:
        return FUNCTIONS["invert"](self)

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
    """A number that is unknown while a function is traced."""

    def __init__(self, recorder: _Tracing, node: int) -> None:
        self._recorder, self._node = recorder, node

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
            "a symbol is no Python integer: it cannot be an argument of range, or "
            "an index of a list; give an array"
        )

    __int__ = __index__

    def __float__(self) -> float:
        raise FunctionError(
            "a symbol is no Python float; use functions of numpy, torch or math on it"
        )

    #: A symbol is one number, in the way of an array without axes.
    shape, ndim, device = (), 0, None

    @property
    def dtype(self) -> Any:
        """The element type, as NumPy names it."""
        kind = self._recorder.builder.nodes[self._node].kind
        return np.dtype({BOOL: np.bool_, INT: np.int32, FLOAT: np.float32}[kind])

    def __getitem__(self, key: Any) -> Symbol:
        if key in ((), ...):
            return self
        raise FunctionError("a symbol is one number and takes no index")

    def to(self, *args: Any, **keywords: Any) -> Any:
        """The number in another type; a device is ignored."""
        for x in (*args, *(keywords[n] for n in ("dtype",) if n in keywords)):
            if isinstance(x, Symbol):
                return self._recorder.cast(self, self._recorder.kind(x))
            named = isinstance(x, str) and x not in ELEMENTS  # a device
            if not (named or isinstance(x, bool)) and type(x).__name__ != "device":
                return self._recorder.cast(self, _kind_of(x))
        return self

    type = astype = type_as = to

    def item(self) -> Any:
        """No number is known yet."""
        raise FunctionError(_NO_IF)

    def new_ones(self, size: Any = (), dtype: Any = None, **_: Any) -> Any:
        """The number 1 in another type."""
        return self.new_full(size, 1, dtype)

    def new_zeros(self, size: Any = (), dtype: Any = None, **_: Any) -> Any:
        """The number 0 in another type."""
        return self.new_full(size, 0, dtype)

    def new_tensor(self, value: Any, dtype: Any = None, **_: Any) -> Any:
        """A number in another type."""
        return self.new_full((), value, dtype)

    def new_full(self, size: Any, value: Any, dtype: Any = None, **_: Any) -> Any:
        """A number in another type."""
        if tuple(size) != ():
            raise FunctionError(f"a function works on one score, and makes no array of {size}")
        kind = self._recorder.kind(value if dtype is None else self)
        return self._recorder.cast(value, kind if dtype is None else _kind_of(dtype))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in FUNCTIONS:
            raise AttributeError(f"a symbol has no {name!r}")
        return functools.partial(FUNCTIONS[name], self)


class Captured(_Arithmetic):
    """An array that a function captured: indexed by symbols it is a symbol."""

    def __init__(self, recorder: _Tracing, array: Any, name: str) -> None:
        self._recorder, self._array, self._name = recorder, array, name

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        scalar = [k for k in keys if isinstance(k, Captured) and tuple(k._array.shape) == ()]
        if not scalar and not any(isinstance(k, Symbol) for k in keys):
            return Captured(self._recorder, self._array[_plain(key)], self._name)
        array, recorder = self._array, self._recorder
        if any(k is Ellipsis or k is None or isinstance(k, slice) for k in keys):
            keys, array = _without_slices(keys, array, self._name)
        if len(keys) != len(array.shape):
            raise FunctionError(
                f"array {self._name} of shape {tuple(array.shape)} needs one index per axis, got "
                f"{len(keys)}; a function works on one score, so it cannot use a row"
            )
        for k in keys:
            if recorder.kind(k) == FLOAT:
                raise FunctionError(f"an index of array {self._name} is a float; convert it to int")
        spec = recorder.array(array, self._name)
        builder = recorder.builder
        indices = tuple(builder.cast(recorder.node(k), INT) for k in keys)
        return Symbol(recorder, builder.load(spec, indices))

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
    """A value with captured arrays as themselves."""
    if isinstance(value, Captured):
        return value._array
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return value


def _arrays(recorder: _Tracing, function: Any, args: Any, keywords: Any, name: str) -> Any:
    """What a library's function makes of whole arrays."""
    plain = {key: _plain(x) for key, x in keywords.items()}
    return recorder.wrap(function(*map(_plain, args), **plain), name)


def _without_slices(keys: tuple[Any, ...], array: Any, name: str) -> tuple[tuple[Any, ...], Any]:
    """Indices without slices of whole axes and None, on an array with such axes of one element."""
    if Ellipsis in [k for k in keys if k is Ellipsis]:
        at = next(n for n, k in enumerate(keys) if k is Ellipsis)
        used = sum(k is not None for k in keys) - 1
        keys = (*keys[:at], *(slice(None),) * (len(array.shape) - used), *keys[at + 1 :])
    if any(isinstance(k, slice) for k in keys):
        raise FunctionError(
            f"array {name} is indexed by a symbol and a slice, which is a row; a function works on "
            "one score: give one index per axis"
        )
    return tuple(k for k in keys if k is not None), array


def _called(name: str, args: Any, keywords: dict[str, Any], original: Any) -> Any:
    """A library's function on symbols, by its name; on captured arrays alone, itself."""
    flat = [y for x in args for y in (x if isinstance(x, (tuple, list)) else (x,))]
    flat += keywords.values()
    captured = [x for x in flat if isinstance(x, Captured)]
    scalars = all(tuple(x._array.shape) == () for x in captured)
    if not any(isinstance(x, Symbol) for x in flat) and not (scalars and _by_name(name)):
        if original is None or not captured:
            raise FunctionError(f"{name} cannot be traced")
        return _arrays(captured[0]._recorder, original, args, keywords, captured[0]._name)
    if name == "__get__" and args:  # torch asks for an attribute
        raise FunctionError("torch asked a symbol for an attribute that it does not have")
    known = _by_name(name)
    if known is None:
        raise FunctionError(
            f"{name} of a symbol is not among the functions that can be traced: "
            f"{', '.join(sorted(n for n in FUNCTIONS if n.isidentifier()))}"
        )
    given = {
        ("min" if key == "a_min" else "max" if key == "a_max" else key): x
        for key, x in keywords.items()
        if key not in ("out", "dtype", "casting", "device") or x is None
    }
    refused = set(keywords) - set(given) - {"out", "a_min", "a_max"}
    if refused:
        raise FunctionError(f"{name} of a symbol takes no {', '.join(sorted(refused))}")
    return known(*args, **{key: x for key, x in given.items() if x is not None})


# -- libraries whose functions refuse symbols ------------------------------------------------------

_LIBRARIES = ("math", "jax", "jaxlib")
#: Libraries whose own functions are called as they are.
_FOREIGN = (*_LIBRARIES, "numpy", "torch", "functools", "cupy")


def _foreign(function: Any) -> bool:
    """Whether a function is a library's; those of torch's flex_attention are masks like others."""
    module = function.__module__ or ""
    return module.split(".")[0] in _FOREIGN and not module.startswith("torch.nn.attention")


class _Library:
    """Stands for a module such as `jax.numpy` or `math`: its functions also take symbols."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, types.ModuleType):
            return _Library(found)
        if not callable(found) or isinstance(found, type):
            return found
        return functools.partial(_either, found, name)


def _either(original: Any, name: str, *args: Any, **keywords: Any) -> Any:
    """A function on symbols or captured arrays, by its name; on anything else, itself."""
    flat = [y for x in args for y in (x if isinstance(x, (tuple, list)) else (x,))]
    if any(isinstance(x, (Symbol, Captured)) for x in (*flat, *keywords.values())):
        return _called(name, args, keywords, original)
    return original(*args, **keywords)


def host_values(array: Any, spec: ArraySpec, *, copy: bool = True) -> np.ndarray:
    """A captured array's values as a NumPy array; bfloat16, which NumPy lacks, as float32.

    With `copy` it is a read-only copy, and otherwise a view where possible.
    """
    if hasattr(array, "detach"):  # torch
        plain = array.detach().cpu()
        array = (plain.float() if spec.dtype == "bfloat16" else plain).numpy()
    elif hasattr(array, "get") and not isinstance(array, np.ndarray):  # CuPy
        array = array.get()
    values = np.array(array) if copy else np.asarray(array)
    if spec.dtype == "bfloat16":
        values = values.astype(np.float32)
    if copy:
        values.setflags(write=False)
    return values
