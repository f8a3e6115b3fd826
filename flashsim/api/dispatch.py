"""Find the engine that a backend's name means."""

from __future__ import annotations

from flashsim.engines.engine import Engine
from flashsim.errors import require_numba
from flashsim.problem import checks

BACKENDS = ("numpy", "numba", "cupy", "numba_cuda")
ON_CPU = ("numpy", "numba")


def engine(name: str) -> Engine:
    """The engine of that name, imported at first use.

    Raises
    ------
    OptionError
        If there is none.
    BackendUnavailable
        If what it needs is not installed.
    """
    checks.one_of("backend", name, BACKENDS)
    if name == "numpy":
        import flashsim.engines.simulator as simulator

        return simulator
    if name == "numba":
        require_numba("backend='numba'", "backend='numpy' gives the same results and counts")
        import flashsim.engines.cpu.engine as cpu

        return cpu
    if name == "cupy":
        import flashsim.backends.cupy_gpu.engine as cupy

        return cupy
    import flashsim.backends.numba_gpu.engine as numba_cuda

    return numba_cuda
