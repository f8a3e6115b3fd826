"""Every error flashsim raises on purpose; all derive from `FlashSimError`.

Each kind is also the built-in that a caller would expect (`ValueError`, `TypeError`, ...), so code
that does not know flashsim still catches the right thing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlashSimError(Exception):
    """Base of every error raised by flashsim."""


class ShapeError(FlashSimError, ValueError):
    """An array or a length has a shape that the problem cannot have."""


class DTypeError(FlashSimError, TypeError):
    """An array or an argument has the wrong type."""


class OptionError(FlashSimError, ValueError):
    """An option has a value outside its range, or a name that does not exist."""


class UnknownArgumentError(FlashSimError, TypeError):
    """A keyword argument that the function does not take."""


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
