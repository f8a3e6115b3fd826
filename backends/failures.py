"""Turn errors of the GPU, its driver or its compilers into `BackendUnavailable` errors.

Errors of CuPy, torch, numba-cuda and cuda.core are recognised by their class names, so these
libraries are not imported.
"""

from flashsim.errors import BackendUnavailable

_EXTRAS = "'flashsim-attention[cuda13]' or 'flashsim-attention[cuda12]'"
INSTALL = f"install it for your driver's CUDA: pip install {_EXTRAS}"
_FULL = frozenset({"OutOfMemoryError"})  # names in CuPy and torch
_REFUSED = frozenset(
    {
        *("CUDADriverError", "CUDARuntimeError"),  # CuPy
        *("CudaAPIError", "CUDAError"),  # numba-cuda, and cuda.core through which it launches
        "AcceleratorError",  # torch
    }
)
_UNCOMPILED = frozenset(
    {
        *("CompileException", "NVRTCError"),  # CuPy
        *("LinkerError", "NvvmError", "NvrtcError", "nvJitLinkError", "nvvmError"),  # numba-cuda
    }
)
_UNLOADED = frozenset({"CudaSupportError", "NvvmSupportError", "NvrtcSupportError"})  # numba-cuda


def require_cupy(backend: str) -> None:
    """Raise `BackendUnavailable` for the given `backend` if CuPy cannot be imported."""
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(
            f"backend={backend!r} needs CuPy, which cannot be imported ({error}); {INSTALL}"
        ) from None
    except OSError as error:  # on import, CuPy creates its cache folder
        raise BackendUnavailable(
            f"backend={backend!r} needs CuPy, which cannot create its cache folder ({error}); set "
            "CUPY_CACHE_DIR to a writable folder"
        ) from error


class Explaining:
    """A context manager that turns exceptions about GPU failures into `BackendUnavailable`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            explain(error)


def explain(error: Exception) -> None:
    """Raise `BackendUnavailable` from an exception about a GPU failure; ignore other exceptions.

    In an `except` clause, it costs a call without a failure less time than `Explaining`.
    """
    if meaning := _meaning(error):
        raise BackendUnavailable(meaning) from error


def _meaning(error: Exception) -> str | None:
    names = {base.__name__ for base in type(error).__mro__}
    if names & _FULL:
        return (
            f"out of GPU memory: {error}; free arrays or use a smaller batch. For the backward "
            'pass, algorithm="flash2" with `deterministic` left out needs less memory: its three '
            "passes need no float32 accumulator for dQ"
        )
    # Before refused launches: cuda.core's compilers raise kinds of CUDAError.
    if names & _UNCOMPILED:
        return (
            f"a kernel does not compile: {_first_error(str(error))}; the compiler must support "
            "this GPU and find CUDA's headers: upgrade CuPy and numba-cuda to packages for the "
            f"CUDA version of your driver: pip install --upgrade {_EXTRAS}"
        )
    if names & _UNLOADED or "failed to load lib" in str(error):
        return f"a CUDA library is missing: {error}; {INSTALL}"
    if names & _REFUSED:
        return (
            f"the GPU refused the launch: {error}; if an earlier kernel failed, start a new process"
        )
    return None


def _first_error(log: str) -> str:
    """Return the first line that mentions an error in a compiler's log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else log)
