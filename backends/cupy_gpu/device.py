"""The GPU that runs a pass: its properties, its preset, and errors if it is missing or too old."""

from functools import cache

import cupy

from flashsim.backends import failures
from flashsim.backends.cupy_gpu.launching import aside, clusters_at_once
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy.decode_plan import CLUSTERS
from flashsim.errors import BackendUnavailable
from flashsim.problem.hardware import Device, reported

#: The oldest compute capability that the kernels support.
OLDEST = (8, 0)


@cache
def gpu_of(device: int) -> Gpu:
    """Return a GPU's properties, or raise `BackendUnavailable` if the GPU is too old."""
    properties = cupy.cuda.runtime.getDeviceProperties(device)
    capability = (properties["major"], properties["minor"])
    name = properties["name"].decode()
    if capability < OLDEST:
        raise BackendUnavailable(
            f"the GPU {name} has compute capability {capability[0]}.{capability[1]}, but the "
            f"kernels need {OLDEST[0]}.{OLDEST[1]} (Ampere) or later; use backend='simulator' or "
            "'numba'"
        )
    return Gpu(
        name,
        capability,
        properties["sharedMemPerBlockOptin"],
        properties["l2CacheSize"],
        properties["clockRate"],
        properties["multiProcessorCount"],
        _hbm_bandwidth(device),
        _clusters(device, capability, properties["sharedMemPerBlockOptin"]),
    )


def _clusters(device: int, capability: tuple[int, int], shared: int) -> tuple[tuple[int, int], ...]:
    if capability < (9, 0):
        return ()
    with failures.Explaining(), cupy.cuda.Device(device), aside():
        return clusters_at_once(shared, CLUSTERS)


def preset() -> Device:
    """Return the device preset, such as "H100", that describes the current GPU.

    The function raises `BackendUnavailable` without a GPU, and `OptionError` if no preset fits.
    """
    require_gpu()
    runtime = cupy.cuda.runtime
    found = runtime.getDeviceProperties(runtime.getDevice())
    return reported(
        found["name"].decode(),
        (found["major"], found["minor"]),
        found["multiProcessorCount"],
        found["totalGlobalMem"],
    )


def _hbm_bandwidth(device: int) -> float:
    """Return HBM's bandwidth in bytes per second: bus width times twice the memory clock."""
    runtime = cupy.cuda.runtime
    khz = runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryClockRate, device)
    bits = runtime.deviceGetAttribute(runtime.cudaDevAttrGlobalMemoryBusWidth, device)
    return 2e3 * khz * bits / 8 or Gpu.hbm_bandwidth  # 0 if the driver does not report it


@cache
def require_gpu() -> None:
    """Raise `BackendUnavailable`, with the cause, if CuPy finds no GPU."""
    try:
        found = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        version = cupy.cuda.runtime.runtimeGetVersion()
        cuda = f"{version // 1000}.{version % 1000 // 10}"
        raise BackendUnavailable(
            f"CuPy {cupy.__version__} (built for CUDA {cuda}) finds no usable GPU: {error}; "
            "check nvidia-smi, and that the driver is new enough for this CuPy (flashsim's "
            "extra, [cuda12] or [cuda13], must match the driver)"
        ) from None
    if not found:
        raise BackendUnavailable(
            "no NVIDIA GPU is visible; check the variable CUDA_VISIBLE_DEVICES and the output "
            "of nvidia-smi, or use backend='simulator' or 'numba'"
        )
