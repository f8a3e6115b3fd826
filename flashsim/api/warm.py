"""`flashsim.warm`: compile the CPU engine ahead of time, for the processes that come later."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from flashsim.api.execution import run
from flashsim.api.samples import random_inputs
from flashsim.errors import BackendUnavailable, own_errors
from flashsim.problem import checks
from flashsim.problem.problem import Problem

DIRECTIONS = ("forward", "backward", "both")
ALGORITHMS = ("flash2", "flash2-fused")


@own_errors
@dataclass(frozen=True)
class Warmed:
    """What `warm` did.

    Attributes
    ----------
    dtype, algorithm, direction : str
    compiled : int
        Kernels compiled now; 0 where all lay on disk already.
    seconds, cpu_seconds : float
        Wall and CPU seconds of compiling, or loading, and one small pass.
    folder : Path
        Where the compiled code lies.
    kernel : str
        What the pass ran on: the micro-kernel, and how many threads.
    """

    dtype: str
    algorithm: str
    direction: str
    compiled: int
    seconds: float
    cpu_seconds: float
    folder: Path
    kernel: str


@own_errors
def warm(
    dtype: str = "float32",
    head_dim: int = 64,
    direction: str = "both",
    algorithm: str = "flash2-fused",
) -> Warmed:
    """Compile what `backend="numba"` needs, and keep it on disk.

    One compilation serves every shape, mask and option: code depends on the accumulator's type
    alone, so that float32, float16 and bfloat16 share theirs; on a CPU with AMX or AVX512-BF16
    bfloat16 has its own. A small pass is run to see it work.

    Parameters
    ----------
    dtype : str
        Of q, k and v.
    head_dim : int
        Of the pass that is run.
    direction : str
        "forward", "backward" or "both"; a backward pass needs a forward pass, so the last two
        compile the same.
    algorithm : str
        "flash2", whose backward pass is in three stages, or "flash2-fused".

    Raises
    ------
    BackendUnavailable
        If compiled code cannot be kept in any folder.
    """
    from flashsim.engines.cpu import threads  # Numba is imported when it is asked for

    checks.one_of("direction", direction, DIRECTIONS)
    checks.one_of("algorithm", algorithm, ALGORITHMS)
    folder = _writable(threads.folder())
    problem = Problem(n_q=64, head_dim=head_dim, dtype=dtype)
    q, k, v, dout = random_inputs(problem)
    before, wall, cpu = threads.compiled(), time.perf_counter(), time.process_time()
    result = run(q, k, v, backend="numba", algorithm=algorithm)
    if direction != "forward":
        result.backward(dout)
    took = time.perf_counter() - wall, time.process_time() - cpu
    compiled = threads.compiled() - before
    return Warmed(dtype, algorithm, direction, compiled, *took, folder, result.kernel)


def _writable(folder: Path | None) -> Path:
    """`folder`, if a file can be made there."""
    why = "Numba finds no folder that it may write"
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            why = f"{str(folder)!r} cannot be written ({error.strerror or error})"
    raise BackendUnavailable(
        f"compiled code cannot be kept: {why}; set NUMBA_CACHE_DIR to a folder that can be written"
    )
