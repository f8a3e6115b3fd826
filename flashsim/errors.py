"""The errors that flashsim raises on purpose; all of them derive from `FlashSimError`.

Each error class also derives from the built-in class that a caller would expect (`ValueError`,
`TypeError`, ...), so code that does not know flashsim's classes can catch it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from types import SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints


class FlashSimError(Exception):
    """Base class of every error that flashsim raises on purpose."""


class ShapeError(FlashSimError, ValueError):
    """The shape of an array, or a length, is invalid for the problem."""


class DTypeError(FlashSimError, TypeError):
    """An array or an argument has the wrong type."""


class OptionError(FlashSimError, ValueError):
    """An option has a value outside its range, or a name that does not exist."""


class UnknownArgumentError(FlashSimError, TypeError):
    """A call has an unknown argument, or too many or too few arguments."""


class MaskError(FlashSimError, ValueError):
    """A mask is malformed, or its values cannot be computed."""


class FunctionError(FlashSimError, ValueError):
    """A score or mask function cannot be traced; the message names its source line."""


class TilingError(FlashSimError, ValueError):
    """The problem cannot be computed with this tiling."""


class SramOverflow(TilingError):
    """The tiles of an algorithm do not fit in on-chip memory."""


class MemoryModelError(FlashSimError, RuntimeError):
    """An algorithm broke a rule of the simulated memory, so it has a bug.

    Attributes
    ----------
    kind : str
        The broken rule. "freed": a tile was used after its step or visit (tile pair) had ended.
        "outside": numbers came from outside the simulated machine. "off chip": numbers were read
        out of SRAM without a store to HBM. "unloaded": HBM data was used without a load into SRAM.
        "unstored": HBM data was read that was never written. "scope": a step or visit was opened or
        used where that is not allowed. "operation": the simulated machine does not have the
        operation. "machine": any other rule was broken.
    """

    def __init__(self, text: str, kind: str = "machine") -> None:
        super().__init__(text)
        self.kind = kind


class TraceError(FlashSimError, ValueError):
    """A trace or a trace file is damaged, or lacks the requested data."""


class BackendUnavailable(FlashSimError, RuntimeError):
    """The requested backend cannot run here; the message says what to install or change."""


def require_numba(what: str, instead: str = "") -> None:
    """Raise `BackendUnavailable` unless Numba can be imported and its compiler is switched on."""
    hint = f"; {instead}" if instead else ""
    try:
        import numba
    except ImportError as error:
        raise BackendUnavailable(
            f"{what} needs Numba, which cannot be imported ({error}): pip install numba{hint}"
        ) from None
    if numba.config.DISABLE_JIT:
        raise BackendUnavailable(
            f"{what} needs Numba's compiler, which NUMBA_DISABLE_JIT=1 switches off: unset "
            f"that variable{hint}"
        )


class RankError(FlashSimError, RuntimeError):
    """Ranks of a process group were called with different arguments, or a rank does not answer."""


class UnsupportedError(FlashSimError, NotImplementedError):
    """The problem is valid, but this backend or algorithm does not support it."""


def shown(value: object) -> str:
    """Return the `repr` of any value, shortened to one line, to quote the value in an error."""
    try:
        text = " ".join(repr(value).split())
        if len(text) > 100 and hasattr(value, "dtype") and hasattr(value, "shape"):
            # The numbers of an array would not explain the error.
            text = f"<{type(value).__name__} {value.dtype} {tuple(value.shape)}>"
    except Exception:  # an integer of more than 4,300 digits, or an object whose repr fails
        return f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:97]}..."


#: Characters that a terminal obeys instead of showing: control characters and text directions.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Escape each character that controls a terminal, as in ``\x1b``, except \n and \t."""
    return _OBEYED.sub(lambda match: ascii(match[0])[1:-1], text)


def choices(value: object, possible: Iterable[object]) -> str:
    """Return a text that lists the `possible` names, and suggests one that resembles `value`."""
    names = [str(name) for name in possible]
    if not names:
        return "none, because there are none"
    close = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else ()
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{', '.join(names)}{hint}"


_Callable = TypeVar("_Callable", bound=Callable[..., Any])

#: Argument names of other libraries, and the flashsim arguments that replace them.
SYNONYMS = {
    "is_causal": "causal",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "window_size": "window",
    "sliding_window": "window",
    "logits_soft_cap": "softcap",
    "soft_cap": "softcap",
    "attn_mask": "mask (a function), block_mask (a tile grid) or bias (added to the scores)",
    "attn_bias": "bias",
    "alibi_slopes": "bias",
    "block_size": "tiling=flashsim.Tiling(block_q, block_k)",
    "block_m": "tiling=flashsim.Tiling(block_q, block_k)",
    "block_n": "tiling=flashsim.Tiling(block_q, block_k)",
    "cu_seqlens_kv": "cu_seqlens_k",
    "n": "n_q",
    "seq_len": "n_q",
    "d": "head_dim",
    "algo": "algorithm",
    "gpu": "device",
    **dict.fromkeys(("engine", "implementation"), "backend"),
    "return_lse": "nothing: the result always has .lse",
    "enable_gqa": "nothing: grouped-query heads follow from the shapes",
    "dropout_p": None,
}


def reject_unknown(names: Iterable[str], known: Iterable[str], function: str) -> None:
    """Raise `UnknownArgumentError` for the first keyword that `function` does not take."""
    known = sorted(known)
    for name in names:
        ours = SYNONYMS.get(name, "")
        if ours is None:
            raise UnknownArgumentError(
                f"{function}() has no argument {name!r}; dropout is not simulated"
            )
        if ours.startswith("nothing") or re.split(r"\W", ours)[0] in known:
            raise UnknownArgumentError(
                f"{function}() has no argument {name!r}; here it is called {ours}"
            )
        raise UnknownArgumentError(
            f"{function}() has no argument {name!r}; choose from {choices(name, known)}"
        )


def own_errors(called: _Callable) -> _Callable:
    """Decorator for a function or class, so that wrong calls raise errors of flashsim.

    A missing or unknown argument raises an `UnknownArgumentError`, which lists the passed and the
    possible arguments. If a call raises a built-in error, the decorator compares the arguments with
    their annotations. A `DTypeError` then names the first argument that does not match; if all
    match, the built-in error is raised. Used on a class, the decorator covers the constructor and
    the public methods. For a correct call, the decorator costs only one `try` statement.
    """
    if isinstance(called, type):
        maker = "__new__" if called.__init__ is object.__init__ else "__init__"  # type: ignore[misc]
        setattr(called, maker, _guarded(getattr(called, maker), bound=1))
        bases = reversed(called.__mro__[:-1])  # also of bases that have no decorator of their own
        for name, method in {n: x for base in bases for n, x in vars(base).items()}.items():
            if name.startswith("_") or hasattr(getattr(method, "__func__", method), "guarded"):
                continue
            if inspect.isfunction(method):
                setattr(called, name, _guarded(method, bound=1))
            elif isinstance(method, (classmethod, staticmethod)):
                bound = int(isinstance(method, classmethod))
                setattr(called, name, type(method)(_guarded(method.__func__, bound)))
        return called
    return _guarded(called, bound=0)


def _guarded(function: Any, bound: int) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, FlashSimError):
                raise
            refusal = _refusal(function, bound, args, kwargs)
            if refusal is None:  # the arguments are fine: the error has another cause
                raise
            cause = error if isinstance(refusal, DTypeError) else None
        raise refusal from cause

    call.guarded = True  # type: ignore[attr-defined]
    # `functools.wraps` does not copy them.
    if defaults := getattr(function, "__kwdefaults__", None):
        call.__kwdefaults__ = defaults  # type: ignore[attr-defined]
    return call


def _refusal(function: Any, bound: int, args: Any, kwargs: Any) -> FlashSimError | None:
    """Return the error for arguments of wrong number, name or type, or None if all are right."""
    name = function.__qualname__.split("<locals>.")[-1]
    if bound:
        owner = args[0] if isinstance(args[0], type) else type(args[0])
        name = f"{owner.__name__}.{function.__name__}"
    if function.__name__ in ("__init__", "__new__"):  # `self` of __new__ is the class
        name = getattr(args[0], "__name__", type(args[0]).__name__)
    signature = inspect.signature(function)
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as misfit:
        known = list(signature.parameters)[bound:]
        takes = {parameter.kind for parameter in signature.parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in takes:
            try:
                reject_unknown((x for x in kwargs if x not in known), known, name)
            except UnknownArgumentError as unknown:
                return unknown
        quoted = [*map(shown, args[bound:]), *(f"{x}={shown(y)}" for x, y in kwargs.items())]
        return UnknownArgumentError(
            f"{name}(): {misfit}; got: {', '.join(quoted) or 'nothing'}; "
            f"its arguments are {', '.join(known)}"
        )
    for argument, value in list(arguments.items())[bound:]:
        parameter = signature.parameters[argument]
        text = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)
        plain = parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ) and isinstance(text, str)
        if plain and value is not parameter.default and not _fits(value, _type(text, function)):
            return DTypeError(
                f"{name}(): {argument} must be {text}, got {shown(value)} ({type(value).__name__})"
            )
    return None


def _type(annotation: str, function: Any) -> Any:
    """Return the type that an annotation names, or `Any` if only type checkers import the type."""
    holder = SimpleNamespace(__annotations__={"x": annotation})
    try:
        return get_type_hints(holder, vars(sys.modules[function.__module__]))["x"]
    except NameError:
        return Any


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value matches a type annotation, without consuming an iterator.

    NumPy's scalars count as numbers, but booleans do not. Arrays count as sequences, but strings do
    not.
    """
    origin, of = get_origin(hint), get_args(hint)
    kind = origin or hint
    if kind in (Union, UnionType):
        return any(_fits(value, option) for option in of)
    if kind is Literal:
        return value in of
    if kind is Any or not isinstance(kind, type):  # a type alias, which is not checked
        return True
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ == "bool"
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    if issubclass(kind, Iterable) and of and not issubclass(kind, Mapping):
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
            return False
        if not (isinstance(value, Sized) and hasattr(value, "__getitem__")):  # an iterator, a set
            return not issubclass(kind, (Sequence, tuple))
        if kind is not tuple or Ellipsis in of:
            return all(_fits(x, of[0]) for x in value)
        return len(value) == len(of) and all(map(_fits, value, of))
    if not isinstance(value, kind):
        return False
    if isinstance(value, Mapping) and of:
        return all(_fits(x, of[0]) and _fits(y, of[1]) for x, y in value.items())
    return True
