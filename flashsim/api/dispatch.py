"""Find the engine (the code that computes a pass) for the name of a backend."""

from collections.abc import Iterable
from typing import Any

from flashsim.engines.protocol import Engine
from flashsim.errors import require_numba
from flashsim.problem import checks

BACKENDS = ("simulator", "numba", "cupy", "numba_cuda")
ON_CPU = ("simulator", "numba")


def backend_name(name: Any, possible: Iterable[str] = BACKENDS) -> str:
    """Return a backend's name, "simulator" for the older "numpy"; raise unless it is `possible`."""
    simulator = isinstance(name, str) and name == "numpy"
    return checks.one_of("backend", "simulator" if simulator else name, possible)


def engine(name: str) -> Engine:
    """Return a backend's engine, imported at first use; raise if a package is not installed."""
    name = backend_name(name)
    if name == "simulator":
        import flashsim.engines.simulator as simulator

        return simulator
    if name == "numba":
        require_numba("backend='numba'", "backend='simulator' gives the same results and counts")
        import flashsim.engines.cpu.engine as cpu

        return cpu
    if name == "cupy":
        import flashsim.backends.cupy_gpu.engine as cupy

        return cupy
    import flashsim.backends.numba_gpu.engine as numba_cuda

    return numba_cuda
