"""Compile kernels ahead of time in several processes, into CuPy's and flashsim's disk caches."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

#: A kernel family's name ("python" for kernels that numba-cuda compiles), and a kernel of it.
Job = tuple[str, Any]


def compile_all(kernels: Iterable[Job], jobs: int) -> None:
    """Compile each kernel once, the slow ones first; print the duration and the failures."""
    row_by_row = lambda job: job[1].shared_bytes == 0  # noqa: E731
    order = sorted(dict.fromkeys(kernels), key=lambda job: (row_by_row(job), job[0] != "python"))
    begin = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        failed = {said for said in pool.map(_compile, order) if said}
    print(
        f"{len(order)} kernels in {time.monotonic() - begin:.0f} s", *failed, sep="\n", flush=True
    )


def _compile(job: Job) -> str:
    """Return what went wrong, or an empty string."""
    family, kernel = job
    try:
        if family == "python":
            from flashsim.backends.numba_gpu import compiler

            compiler.image(kernel, (9, 0))
        else:
            from flashsim.backends.kernels import nvrtc

            nvrtc.load(kernel, 0)
    except Exception as error:
        return f"{family} {kernel.name}: {type(error).__name__}: {error}"[:300]
    return ""
