"""A disk cache for Numba's compiled code; after a disk failure, Numba compiles the code anew.

Numba's own cache raises an error if no folder is writable, the disk is full, or a cache file is
truncated. With this module's cache, a failure of the disk only costs one compilation and prints a
line to stderr. Stored code is used only if the key and the checksum stored with the code are right.
Because loading a file runs the file's code, the cache does not use a folder to which other users
can write.
"""

import hashlib
import os
import pickle
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.serialize import dumps


def keep(function: Any) -> Any:
    """Decorate a plain ``@njit`` function, so that its compiled code is cached on disk."""
    try:
        function._cache = _Disk(function.py_func)
    except (RuntimeError, OSError):  # none of Numba's cache folders is writable
        function._cache = _Memory()
    else:
        theirs = function._cache.open_to_others(function.py_func.__code__.co_filename)
        if theirs is not None:
            _say(f"other users can write to {theirs}, so code in it is not used", None, _AGAIN)
            function._cache = _Memory(said=True)
    return function


def kept(function: Any) -> bool:
    """Return True if the compiled code of `function` can be cached on disk."""
    return isinstance(function._cache, _Disk)


class _Disk(FunctionCache):
    """Numba's disk cache of one function; a failed load or save is reported, not raised."""

    def __init__(self, py_func: Any) -> None:
        super().__init__(py_func)
        locator = self._impl.locator
        self._cache_file = _Files(
            self._cache_path, self._impl.filename_base, locator.get_source_stamp()
        )

    def open_to_others(self, source: str) -> Path | None:
        """Return a path (the cache's folder or a file in it) that another user can change, or None.

        The owner of the folder must be this user, root, or the owner of the source file, whose code
        runs anyway. The folder's group may have write access only if it is one user's private
        group, as on systems with umask 002.
        """
        if not hasattr(os, "getuid"):  # on Windows, other users cannot write to a user's folders
            return None
        trusted = {os.getuid(), 0}
        with suppress(OSError):  # the source may not be a file
            trusted.add(os.stat(source).st_uid)
        # The folder, and the files that it contains now.
        folder = Path(self.cache_path)
        for path in [folder, *folder.glob("*.nb[ic]")]:
            with suppress(FileNotFoundError):  # another process replaced it
                status = path.stat()
                shared = status.st_mode & stat.S_IWGRP and status.st_gid != status.st_uid
                if status.st_uid not in trusted or shared or status.st_mode & stat.S_IWOTH:
                    return path
        return None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the stored code compiled for these argument types, or None if there is none."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling a damaged file may raise any error
            _say(f"compiled code in {self.cache_path} is damaged", error, "compiling again")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save the code compiled for these argument types, if possible."""
        try:
            try:
                super().save_overload(sig, data)
            except OSError:
                raise
            except Exception:  # the index cannot be read: write a new one
                self.flush()
                super().save_overload(sig, data)
        except Exception as error:
            _say(f"cannot save compiled code in {self.cache_path}", error, _AGAIN)


class _Files(IndexDataCacheFile):
    """Numba's cache files, with entries that also store their key and a checksum.

    After a failed write, Numba's index may point to an older entry with a different key, because
    Numba writes the index first and reuses file numbers.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write an entry of the cache, with its key and checksum."""
        blob = dumps(data)
        super().save(key, (key, hashlib.sha256(blob).digest(), blob))

    def load(self, key: Any) -> Any:
        """Return the cache's entry for this key, or None without an entry."""
        entry = super().load(key)
        if entry is None:
            return None
        theirs, digest, blob = entry
        if theirs != key:
            return None
        if digest != hashlib.sha256(blob).digest():
            raise ValueError(
                "the checksum of this cache file does not match its content; delete the file, "
                "and flashsim writes it anew"
            )
        return pickle.loads(blob)


class _Memory(NullCache):
    """A cache that saves nothing, for machines on which no folder for the cache is writable."""

    def __init__(self, said: bool = False) -> None:
        self._said = said

    def save_overload(self, sig: Any, cres: Any) -> None:
        """Report, only once, that compiled code is not saved."""
        if not self._said:
            _say("no folder for compiled code is writable", None, _AGAIN)


_AGAIN = "each process compiles it again; NUMBA_CACHE_DIR can name another folder"


def _say(what: str, error: Exception | None, then: str) -> None:
    why = "" if error is None else f" ({type(error).__name__}: {error})".replace("\n", " ")
    _once(f"flashsim: {what}{why}; {then}")


@cache
def _once(line: str) -> None:
    print(line, file=sys.stderr)
