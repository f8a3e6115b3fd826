"""Import Triton and its interpreter, or raise an error that says how to install Triton.

The interpreter changes Triton's language, and `language_restored` undoes these changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from flashsim.errors import BackendUnavailable

#: The oldest and the newest Triton version whose interpreter this package supports.
OLDEST, NEWEST = (3, 6), (3, 9)


class Installed(NamedTuple):
    """The installed Triton: package, language, interpreter, version and folder."""

    triton: ModuleType
    tl: Any
    interpreter: Any
    version: str
    folder: str


@lru_cache(maxsize=1)
def installed() -> Installed:
    """Return Triton's modules; raise BackendUnavailable if Triton is missing or too old."""
    try:
        import triton
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError as error:
        raise BackendUnavailable(
            f"flashsim.triton needs Triton, which cannot be imported ({error}): "
            "pip install 'flashsim-attention[triton]' (it installs without a GPU, on Linux)"
        ) from None
    numbers = tuple(int(x) for x in re.findall(r"\d+", triton.__version__)[:2])
    if numbers < OLDEST:
        raise BackendUnavailable(
            f"flashsim.triton supports Triton {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, "
            f"but found {triton.__version__}: pip install --upgrade triton"
        )
    folder = str(Path(str(triton.__file__)).parent) + "/"
    return Installed(triton, tl, interpreter, triton.__version__, folder)


@contextmanager
def language_restored(tl: Any) -> Iterator[None]:
    """Restore what the interpreter changes in Triton's language after a ``with`` block."""
    objects = [tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype]
    objects += [tl.condition] if hasattr(tl, "condition") else []
    saved = [(obj, dict(vars(obj))) for obj in (*objects, tl.core.tensor_descriptor_base)]
    try:
        yield
    finally:
        for obj, before in saved:
            now = dict(vars(obj))
            for name in set(now) - set(before):
                delattr(obj, name)
            for name, value in before.items():
                if name not in now or (now[name] is not value and not name.startswith("__dict")):
                    setattr(obj, name, value)
