"""What Numba compiles, on disk: kept where that works, compiled in memory where it does not.

Numba's cache raises where no folder can be written, where the disk is full and, for ever, where a
file of its own was cut short. Here each of these costs a compilation and says so in a line on
stderr. What is loaded has been checked: a file says for which key it was written, and its checksum.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from functools import cache
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.serialize import dumps


def keep(function: Any) -> Any:
    """What ``@njit(cache=True)`` means, above a plain ``@njit``."""
    try:
        function._cache = _Disk(function.py_func)
    except (RuntimeError, OSError):  # no folder that Numba knows of can be written
        function._cache = _Memory()
    return function


def kept(function: Any) -> bool:
    """Whether there is a place on disk for what `function` is compiled to."""
    return isinstance(function._cache, _Disk)


class _Disk(FunctionCache):
    """Numba's cache of one function; a failure is told, and is one to load or to keep only."""

    def __init__(self, py_func: Any) -> None:
        super().__init__(py_func)
        locator = self._impl.locator
        self._cache_file = _Files(
            self._cache_path, self._impl.filename_base, locator.get_source_stamp()
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for these types, or None."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # whatever unpickling a damaged file raises
            _say(f"compiled code in {self.cache_path} is damaged", error, "compiling again")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for these types, if that can be."""
        try:
            try:
                super().save_overload(sig, data)
            except OSError:
                raise
            except Exception:  # an index that cannot be read: begin a new one
                self.flush()
                super().save_overload(sig, data)
        except Exception as error:
            _say(f"cannot keep compiled code in {self.cache_path}", error, _AGAIN)


class _Files(IndexDataCacheFile):
    """Each entry with its key and checksum. Numba writes the index first and numbers files anew
    when sources change: without the key, an entry that could not be written is an older one.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write an entry."""
        blob = dumps(data)
        super().save(key, (key, hashlib.sha256(blob).digest(), blob))

    def load(self, key: Any) -> Any:
        """The entry of this key, or None."""
        entry = super().load(key)
        if entry is None:
            return None
        theirs, digest, blob = entry
        if theirs != key:
            return None
        if digest != hashlib.sha256(blob).digest():
            raise ValueError("its checksum is wrong")
        return pickle.loads(blob)


class _Memory(NullCache):
    """For where nothing can be kept."""

    def save_overload(self, sig: Any, cres: Any) -> None:
        """Say that it is lost."""
        _say("no folder for compiled code can be written", None, _AGAIN)


_AGAIN = "each process compiles it again; NUMBA_CACHE_DIR can name another folder"


def _say(what: str, error: Exception | None, then: str) -> None:
    why = "" if error is None else f" ({type(error).__name__}: {error})".replace("\n", " ")
    _once(f"flashsim: {what}{why}; {then}")


@cache
def _once(line: str) -> None:
    print(line, file=sys.stderr)
