"""Whether GPU tests can run; imports nothing of flashsim."""

import importlib.util


def why_no_gpu():
    """Return why tests marked `gpu` cannot run here; None if they can."""
    if importlib.util.find_spec("cupy") is None:
        return "needs CuPy and an NVIDIA GPU"
    import cupy

    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs an NVIDIA GPU: {error}"
    return None
