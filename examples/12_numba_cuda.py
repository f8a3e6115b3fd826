"""Run the kernels in Python on a GPU's tensor cores, or else in Numba's CUDA simulator."""

import os

import numpy as np

import flashsim
from flashsim.errors import BackendUnavailable

try:
    import cupy

    on_gpu = cupy.cuda.runtime.getDeviceCount() > 0
except Exception:  # CuPy or the driver is missing; CuPy's error types cannot be imported then
    on_gpu = False
if not on_gpu:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # must be set before Numba is imported

n, dtype = (1024, np.float16) if on_gpu else (24, np.float32)
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, n, 16)).astype(dtype) for _ in range(3))

try:
    gpu = flashsim.run(q, k, v, causal=True, backend="numba_cuda", trace=True)
except BackendUnavailable as error:
    print(error)  # the error says what to install
else:
    # The simulator, with the same tiles, moves the same bytes, event by event.
    tiling = gpu.trace.tiling
    simulated = flashsim.run(q, k, v, causal=True, tiling=tiling, device="H100", trace=True)
    print(gpu.kernel, tiling)
    print(gpu.trace)
    difference = np.abs(gpu.out.astype(float) - simulated.out.astype(float)).max()
    print(f"largest difference: {difference:.1e}")
    assert gpu.trace.same_events(simulated.trace)
