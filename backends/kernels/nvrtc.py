"""Compile CUDA C++ kernels with NVRTC, using CuPy's disk cache."""

import os
import re
import sys
import time
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from flashsim.backends.launch.kernel import Kernel

_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
#: Compiling for longer than this is worth a line on stderr.
_PATIENCE_S = 0.5


@cache
def source(file: str) -> str:
    """Return a kernel's source text with its headers inserted.

    Because the headers are part of the text, a changed header recompiles the kernel. A header's
    folder is that of the file which includes it, or ``kernels/`` for headers of all kernels.
    """
    folder = resources.files("flashsim.backends") / "kernels"
    room = file.rpartition("/")[0]

    def header(match: re.Match[str]) -> str:
        beside = f"{room}/{match[1]}"
        return source(beside if (folder / beside).is_file() else match[1])

    return _INCLUDE.sub(header, (folder / file).read_text("utf-8"))


def text(kernel: Kernel) -> str:
    """Return the CUDA text to compile: the generated functions, followed by the kernel's source."""
    ahead = "" if kernel.functions is None else kernel.functions.text
    return ahead + source(kernel.file)


@cache
def load(kernel: Kernel, device: int) -> Any:
    """Return the compiled kernel for CuPy's current device, ready to launch.

    The first compilation of a kernel takes about a second and is reported on stderr. Later calls
    read the compiled kernel from CuPy's disk cache (``~/.cupy/kernel_cache``, or
    ``CUPY_CACHE_DIR``). Only CuPy knows beforehand whether a kernel is cached, so the message
    appears after the compilation.
    """
    import cupy

    start, cached, where = time.perf_counter(), _last_cached(), "cached on disk"
    try:
        function = _compiled(cupy, kernel)
    except OSError as error:  # CuPy checks what it reads from its cache, but must be able to write
        _say_uncached(str(error))
        where = "not cached"
        before = os.environ.get("CUPY_CACHE_IN_MEMORY")
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # which CuPy looks at whenever it compiles
        try:
            function = _compiled(cupy, kernel)
        finally:
            os.environ.pop("CUPY_CACHE_IN_MEMORY")
            if before is not None:
                os.environ["CUPY_CACHE_IN_MEMORY"] = before
    took = time.perf_counter() - start
    if took > _PATIENCE_S and _last_cached() != cached:  # else it was loaded, however slowly
        print(
            f"flashsim: compiled {kernel.name} ({kernel.file}) in {took:.1f} s; {where}",
            file=sys.stderr,
        )
    if kernel.shared_bytes > 48 * 1024:
        function.max_dynamic_shared_size_bytes = kernel.shared_bytes
    return function.kernel  # what a RawKernel looks up again at every launch


def _compiled(cupy: Any, kernel: Kernel) -> Any:
    module = cupy.RawModule(code=text(kernel), options=kernel.options, backend="nvrtc")
    function = module.get_function(kernel.name)
    function.compile()
    return function


@cache
def _say_uncached(why: str) -> None:
    print(
        f"flashsim: CuPy's disk cache cannot be written ({why}); each process compiles CUDA "
        "kernels again; CUPY_CACHE_DIR can name another folder",
        file=sys.stderr,
    )


def _last_cached() -> int:
    """Return the time in ns of the last change of CuPy's disk cache, or 0 if there is no cache."""
    folder = os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache"
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0
