"""Traces a score or mask function by calling it once with symbols that record its operations.

The traced function may use Python's operators, and the NumPy, torch and JAX functions that the
module `names` lists. The function may index arrays of its closure or globals. Real arrays do not
accept symbols as indices, so flashsim calls a copy of the function in which `Captured` objects
replace the arrays.
"""

import builtins
import functools
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from flashsim.errors import FlashSimError, FunctionError, shown
from flashsim.functions.builder import Builder
from flashsim.functions.graph import ArraySpec, Graph, needed
from flashsim.functions.operations import (
    BOOL,
    ELEMENTS,
    FLOAT,
    INDICES,
    INT,
    OPERATIONS,
    SCORE,
    narrow_type,
)
from flashsim.functions.symbols import LIBRARIES, Captured, Symbol, TracedLibrary, either, is_array


class Traced(NamedTuple):
    """The result of tracing: a graph, and the captured arrays in the order of `graph.arrays`."""

    graph: Graph
    arrays: tuple[Any, ...]


def trace_score(function: Any) -> Traced:
    """Return the graph of ``score_mod(score, b, h, q, k)``; a `Traced` is returned unchanged."""
    if isinstance(function, Traced):
        return function
    return _trace(function, (SCORE, *INDICES), FLOAT, "score_mod(score, b, h, q, k)")


def score_or_softcap(
    function: Any, dtype: str, *, alone: bool
) -> tuple[Graph | None, float | None]:
    """Return the graph of a score function, or the cap of one that only caps the scores.

    Kernels compute a softcap faster, and more of them support it. `alone` says that nothing else
    changes the scores before the function. `dtype` is the type in which scores are computed.
    """
    graph = function if isinstance(function, Graph) else trace_score(function).graph
    limits, cap = np.finfo(dtype), graph.softcap if alone else None
    if cap is not None and float(limits.tiny) <= cap <= float(limits.max):
        return None, cap
    return graph, None


def trace_mask(function: Any) -> Traced:
    """Return the graph of ``mask_mod(b, h, q, k)``; a `Traced` is returned unchanged."""
    if isinstance(function, Traced):
        return function
    return _trace(function, INDICES, BOOL, "mask_mod(b, h, q, k)")


def _trace(function: Callable[..., Any], arguments: Iterable[str], kind: str, form: str) -> Traced:
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise FunctionError(f"expected a function of the form {form}, got {shown(function)}")
    recorder = _Tracing()
    try:
        called = recorder.wrap(function)
        result = called(*(Symbol(recorder, recorder.builder.arg(a)) for a in arguments))
        if result is None or isinstance(result, (str, tuple, list, dict)):
            raise FunctionError(
                f"the function must return one value per score, got {shown(result)}"
            )
        root = recorder.node(result)
    except FlashSimError as error:
        raise FunctionError(
            f"the function {name} cannot be traced{_line(error)}: {error}"
        ) from error
    except Exception as error:
        raise FunctionError(
            f"the function {name} cannot be traced{_line(error)} ({type(error).__name__}: "
            f"{error}); it is called as {form}, and may use operators, where, minimum, maximum, "
            "abs, exp, tanh and indexed arrays (assign an array that is an attribute of an object "
            "to a variable first: table = model.table)"
        ) from error
    found = recorder.builder.nodes[root].kind
    if (kind == BOOL) != (found == BOOL):
        names = {BOOL: "a boolean", INT: "an integer", FLOAT: "a number"}
        raise FunctionError(
            f"{name} must return {names[kind]} per score, because it is used as {form}, got "
            f"{names[found]}"
        )
    graph = recorder.builder.graph(recorder.builder.cast(root, kind), name)
    for n in graph.loads:
        if any(SCORE in graph.depends[a] for a in graph.nodes[n].args):
            raise FunctionError(
                f"{name} reads {graph.arrays[graph.nodes[n].value].name} at an index that depends "
                "on the score; let the index depend only on b, h, q, k and captured integers"
            )
    # `graph` keeps only the arrays that are read, in their order.
    nodes = recorder.builder.nodes
    read = sorted({nodes[n].value for n in needed(nodes, [root]) if nodes[n].op == "load"})
    return Traced(graph, tuple(recorder.arrays[a] for a in read))


def _line(error: BaseException) -> str:
    """Return the text of the line in the user's function that raised an error."""
    ours = __file__.rpartition("functions")[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        library = "site-packages" in frame.filename or frame.filename.startswith("<__array")
        if not library and not frame.filename.startswith(f"{ours}functions"):
            text = f": {frame.line}" if frame.line else ""
            return f" at {frame.filename}:{frame.lineno}{text}"
    return ""


class _Tracing:
    """The data collected while tracing a function: a graph, captured arrays and function copies."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.arrays: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._copies: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._names: list[str] = []

    # -- captured values ------------------------------------------------------------------------

    def wrap(self, value: Any, name: str = "") -> Any:
        """Return `value` with `Captured` in place of arrays, also inside items and functions."""
        if isinstance(value, (Symbol, Captured, type)) or value is None:
            return value
        if is_array(value):
            return Captured(self, value, name)
        if isinstance(value, types.ModuleType):
            return TracedLibrary(value) if value.__name__.split(".")[0] in LIBRARIES else value
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
        if callable(value) and root in LIBRARIES:
            return functools.partial(either, value, getattr(value, "__name__", ""))
        own = getattr(type(value), "__call__", None)  # noqa: B004  (the function is wanted)
        if isinstance(own, types.FunctionType) and not _foreign(own):
            return types.MethodType(self.wrap(own), _Holder(self, value))
        return value

    def _copy(self, function: types.FunctionType) -> Any:
        if id(function) in self._copies:
            return self._copies[id(function)]
        if _foreign(function):
            return functools.partial(either, function, function.__name__)
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
        """Return a captured array's number, which is the same each time."""
        if id(array) not in self._numbers:
            if isinstance(array, np.ma.MaskedArray):
                raise FunctionError(
                    f"captured array {name} is a masked array, whose mask would be lost; capture "
                    f"{name}.filled(value), a plain array"
                )
            dtype = str(array.dtype).rpartition(".")[2]
            if dtype not in ELEMENTS:
                raise FunctionError(
                    f"captured array {name or 'of the function'} has dtype {dtype}, which is not "
                    f"supported; convert it to one of {', '.join(ELEMENTS)}"
                )
            shape = tuple(int(n) for n in array.shape)
            if 0 in shape:
                raise FunctionError(
                    f"captured array {name} has no elements (shape {shape}), so it cannot be "
                    "indexed; pass an array with elements, or do not use this array in the "
                    "function"
                )
            self._numbers[id(array)] = len(self.arrays)
            self.arrays.append(array)
            self.builder.arrays.append(ArraySpec(self._unique(name), shape, dtype))
        return self._numbers[id(array)]

    def _unique(self, name: str) -> str:
        """Return a name for a captured array that is unique and valid in C++."""
        plain = "".join(c if c.isalnum() and c.isascii() else "_" for c in name).strip("_")
        plain = plain if plain and not plain[0].isdigit() else f"array_{plain}".rstrip("_")
        name, n = plain, 2
        while name in self._names:
            name, n = f"{plain}_{n}", n + 1
        self._names.append(name)
        return name

    # -- operations -----------------------------------------------------------------------------

    def node(self, value: Any) -> int:
        """Return the number of the node of a symbol, a constant or a captured scalar."""
        if isinstance(value, Symbol):
            if value._recorder is not self:
                raise FunctionError(
                    "the function returned or used a value of an earlier call of it; do not "
                    "store values outside of the function"
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
            value = value.item() if isinstance(value, np.generic) else value
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise FunctionError(
                    f"the integer {value} does not fit in 64 bits; use a smaller one, or a float"
                )
            return self.builder.const(value)
        if is_array(value) and tuple(value.shape) == ():
            return self.builder.load(self.array(value, "scalar"), ())
        raise FunctionError(
            f"the function used {shown(value)} as a number; use score, b, h, q, k, values "
            "computed from them, or numbers"
        )

    def symbol(self, name: str, *args: Any) -> Symbol:
        """Apply one of OPERATIONS to values, and return the result as a symbol."""
        if OPERATIONS[name].kind == INT and FLOAT in map(self.kind, args):
            raise FunctionError(
                "~, &, |, ^, << and >> take booleans and integers, got a float; convert it by "
                ".to(torch.int32), or by .astype(int)"
            )
        n, narrow = self.builder.op(name, *map(self.node, args)), self._narrow_type(args)
        if narrow is None or self.builder.nodes[n].kind != INT:
            return Symbol(self, n)
        return Symbol(self, self._wrapped(n, narrow) if name in _WRAPS else n, narrow)

    def cast(self, value: Any, kind: str, narrow: Any = None) -> Symbol:
        """Return a symbol for a value after conversion to a boolean, an integer or a float."""
        n = self.builder.cast(self.node(value), kind)
        if narrow is None or narrow == getattr(value, "_narrow", None):
            return Symbol(self, n, narrow)
        return Symbol(self, self._wrapped(n, narrow), narrow)

    def _narrow_type(self, values: Iterable[Any]) -> Any:
        """Return the common type of integers if it has fewer than 32 bits, as torch promotes."""
        found = None
        for x in values:
            if isinstance(x, (bool, int, np.bool_)) or self.kind(x) == BOOL:
                continue
            own = narrow_type(x.dtype) if hasattr(x, "dtype") else None
            if own is None:
                return None
            found = own if found is None else np.promote_types(own, found)
        return found

    def _wrapped(self, n: int, narrow: np.dtype) -> int:
        """Return the number of a node that keeps the low bits of integer node `n`."""
        build, limits = self.builder, np.iinfo(narrow)
        low, bits = build.const(limits.min), build.const(limits.max - limits.min)
        return build.op("add", build.op("bitand", build.op("sub", n, low), bits), low)

    def kind(self, value: Any) -> str:
        """Return the kind of a value: boolean, integer or float."""
        return self.builder.nodes[self.node(value)].kind


#: Operations whose results may not fit in the type of their integers.
_WRAPS = ("add", "sub", "mul", "neg", "abs", "shl", "bitor", "bitxor", "floordiv", "where")


def _names(code: types.CodeType) -> set[str]:
    """Return the names of all globals that a function and the inner functions can read."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return found


class _Holder:
    """Stands for a captured object; array attributes are `Captured` objects instead."""

    def __init__(self, recorder: _Tracing, value: Any) -> None:
        self._recorder, self._value = recorder, value

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._value, name)
        if isinstance(found, types.MethodType) and found.__self__ is self._value:
            return types.MethodType(self._recorder.wrap(found.__func__), self)
        return self._recorder.wrap(found, name)


#: Libraries whose functions are called, not copied and traced.
_FOREIGN = (*LIBRARIES, "numpy", "torch", "functools", "cupy")


def _foreign(function: Any) -> bool:
    """Return True if a function belongs to a library, except torch's flex_attention."""
    module = function.__module__ or ""
    return module.split(".")[0] in _FOREIGN and not module.startswith("torch.nn.attention")


def host_values(array: Any, spec: ArraySpec, *, copy: bool = True) -> np.ndarray:
    """Return a captured array's values as a NumPy array; bfloat16 becomes float32.

    With `copy`, the result is a read-only copy; otherwise, the result is a view if possible.
    """
    if hasattr(array, "detach"):  # torch
        plain = array.detach().cpu().resolve_neg()
        array = (plain.float() if spec.dtype == "bfloat16" else plain).numpy()
    elif hasattr(array, "get") and not isinstance(array, np.ndarray):  # CuPy
        array = array.get()
    values = np.array(array) if copy else np.asarray(array)
    if spec.dtype == "bfloat16":
        values = values.astype(np.float32)
    if copy:
        values.setflags(write=False)
    return values
