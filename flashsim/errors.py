"""Every error flashsim raises on purpose; all derive from `FlashSimError`.

Each kind is also the built-in that a caller would expect (`ValueError`, `TypeError`, ...), so code
that does not know flashsim still catches the right thing.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar


class FlashSimError(Exception):
    """Base of every error raised by flashsim."""


class ShapeError(FlashSimError, ValueError):
    """An array or a length has a shape that the problem cannot have."""


class DTypeError(FlashSimError, TypeError):
    """An array or an argument has the wrong type."""


class OptionError(FlashSimError, ValueError):
    """An option has a value outside its range, or a name that does not exist."""


class UnknownArgumentError(FlashSimError, TypeError):
    """A call with an argument that the function does not take, one too many or one too few."""


class MaskError(FlashSimError, ValueError):
    """A mask that is malformed or that cannot be evaluated."""


class TilingError(FlashSimError, ValueError):
    """A tiling that cannot be used."""


class SramOverflow(TilingError):
    """The tiles of an algorithm do not fit in on-chip memory."""


class MemoryModelError(FlashSimError, RuntimeError):
    """An algorithm broke the rules of the simulated memory (a bug in the algorithm)."""


class TraceError(FlashSimError, ValueError):
    """A trace, or a trace file, that cannot be used for what was asked."""


class BackendUnavailable(FlashSimError, RuntimeError):
    """The backend asked for cannot run here; the message says what to install or change."""


def require_numba(what: str, instead: str = "") -> None:
    """Raise `BackendUnavailable`, naming what was asked for, unless Numba imports.

    It comes along wherever pip installs flashsim, and there is none for a browser's Python.
    """
    try:
        import numba  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(
            f"{what} needs Numba, which cannot be imported ({error}): pip install numba"
            f"{'; ' if instead else ''}{instead}"
        ) from None


class RankError(FlashSimError, RuntimeError):
    """Ranks of a group do not agree, or one does not answer any more."""


class UnsupportedError(FlashSimError, NotImplementedError):
    """A valid problem that this backend or algorithm does not handle."""


def shown(value: object) -> str:
    """`value` as an error quotes it: its `repr`, short, on one line, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of more than 4,300 digits, or an object that cannot say
        return f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:97]}..."


def choices(given: object, possible: Iterable[object]) -> str:
    """Say what is possible and, where the name given looks like one of them, which was meant."""
    names = [str(name) for name in possible]
    close = difflib.get_close_matches(given, names, n=1) if isinstance(given, str) else ()
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"possible: {', '.join(names)}{hint}"


_Callable = TypeVar("_Callable", bound=Callable[..., Any])

#: What people type, and what it is called here.
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
    "engine": "backend",
    "return_lse": "nothing: the result always has .lse",
    "enable_gqa": "nothing: grouped-query heads follow from the shapes",
    "dropout_p": None,
}


def reject_unknown(given: Iterable[str], known: Iterable[str], function: str) -> None:
    """Raise `UnknownArgumentError` for the first keyword that `function` does not take."""
    known = sorted(known)
    for name in given:
        ours = SYNONYMS.get(name, "")
        if ours is None:
            hint = "dropout is not simulated"
        elif ours.startswith("nothing") or re.split(r"\W", ours)[0] in known:
            hint = f"here it is called {ours}"
        else:
            hint = choices(name, known)
        raise UnknownArgumentError(f"{function}() has no argument {name!r}; {hint}")


def own_errors(called: _Callable) -> _Callable:
    """A function or a class that refuses a call that does not fit it with an error of ours.

    Python says which argument is missing or unknown; `UnknownArgumentError` also what was given and
    what there is. A call that fits pays for a `try`.
    """
    if isinstance(called, type):
        maker = "__new__" if called.__init__ is object.__init__ else "__init__"  # type: ignore[misc]
        setattr(called, maker, _guarded(getattr(called, maker), bound=1))
        return called
    return _guarded(called, bound=0)


def _guarded(function: Any, bound: int) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if isinstance(error, FlashSimError):
                raise
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as misfit:
                wrong = str(misfit)
            else:  # another mistake, somewhere inside
                raise
        maker = args[0] if bound else function  # a class's __new__ has it, __init__ its object
        name = getattr(maker, "__name__", type(maker).__name__)
        known = list(signature.parameters)[bound:]
        takes = {one.kind for one in signature.parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in takes:
            reject_unknown((x for x in kwargs if x not in known), known, name)
        given = [*map(shown, args[bound:]), *(f"{x}={shown(y)}" for x, y in kwargs.items())]
        raise UnknownArgumentError(
            f"{name}(): {wrong}; given: {', '.join(given) or 'nothing'}; "
            f"it takes {', '.join(known)}"
        )

    if defaults := getattr(function, "__kwdefaults__", None):  # `functools.wraps` leaves them out
        call.__kwdefaults__ = defaults  # type: ignore[attr-defined]
    return call
