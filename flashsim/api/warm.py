"""`flashsim.warm`: compile the CPU engine ahead of time, so that later processes start fast."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from flashsim.api.execution import run
from flashsim.api.samples import random_inputs
from flashsim.errors import BackendUnavailable, own_errors, require_numba
from flashsim.problem import checks
from flashsim.problem.problem import Problem

DIRECTIONS = ("forward", "backward", "both", "decode", "all")
ALGORITHMS = ("flash2", "flash2-fused")
#: Numbers of query heads that share keys: for many of them, a CPU with AMX or AVX512-BF16 runs
#: other code, which multiplies pairs (below 16 columns, one is already many).
DECODED = (1, 16)


@own_errors
@dataclass(frozen=True)
class Warmed:
    """The result of `warm`: the kernels that it compiled, and their folder.

    Attributes
    ----------
    dtype, algorithm, direction : str
    compiled : tuple of str
        Names of the kernels that this call compiled; empty if all kernels were on disk already.
    seconds, cpu_seconds : float
        Wall time and CPU time, in seconds, of compiling or loading the kernels and running small
        passes.
    folder : Path
        The folder of the compiled code.
    kernel : str
        The micro-kernel and the number of threads of the last pass.
    """

    dtype: str
    algorithm: str
    direction: str
    compiled: tuple[str, ...]
    seconds: float
    cpu_seconds: float
    folder: Path
    kernel: str


@own_errors
def warm(
    dtype: str = "float32",
    head_dim: int = 64,
    direction: str = "all",
    algorithm: str = "flash2-fused",
) -> Warmed:
    """Compile the CPU kernels of `backend="numba"` ahead of time, and keep them on disk.

    One compilation per element type serves every shape, mask and option. float16 and bfloat16 share
    a compilation. On a CPU with AMX or AVX512-BF16, bfloat16 has a second compilation; decoding in
    bfloat16 uses both. Finally `warm` runs small passes to test the compiled code.

    Parameters
    ----------
    dtype : str
        The type of q, k and v.
    head_dim : int
        The head_dim of the small passes; at least 16 for decoding.
    direction : str
        "forward", "backward" or "both"; a backward pass needs a forward pass, so the last two
        compile the same. "decode": a forward pass of one query, which has a separate kernel.
        "all": "both" and "decode".
    algorithm : str
        "flash2", whose backward pass has three stages, or "flash2-fused".

    Raises
    ------
    BackendUnavailable
        If compiled code cannot be kept in any folder.
    """
    require_numba("warm()")
    from flashsim.engines.cpu import threads  # Numba is imported only if it is needed

    checks.one_of("direction", direction, DIRECTIONS)
    checks.one_of("algorithm", algorithm, ALGORITHMS)
    folder = _writable(threads.folder())
    q, k, v, dout = random_inputs(Problem(n_q=64, head_dim=head_dim, dtype=dtype))
    before, wall, cpu = threads.compiled(), time.perf_counter(), time.process_time()
    if direction != "decode":
        result = run(q, k, v, backend="numba", algorithm=algorithm)
        if direction != "forward":
            result.backward(dout)
    for group in DECODED if direction in ("decode", "all") else ():
        small = Problem(1, 64, max(head_dim, 16), heads=group, kv_heads=1, dtype=dtype)
        q, k, v, _ = random_inputs(small)
        result = run(q, k, v, backend="numba", algorithm=algorithm)
    took = time.perf_counter() - wall, time.process_time() - cpu
    compiled = tuple(name for name, times in threads.compiled().items() if times > before[name])
    return Warmed(dtype, algorithm, direction, compiled, *took, folder, result.kernel)


def _writable(folder: Path | None) -> Path:
    """Return `folder`; raise an error if no file can be created in it."""
    why = "Numba finds no folder that this user, and no other, may write"
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            why = f"{str(folder)!r} cannot be written ({error.strerror or error})"
    raise BackendUnavailable(
        f"compiled code cannot be cached: {why}; set NUMBA_CACHE_DIR to a writable folder"
    )
