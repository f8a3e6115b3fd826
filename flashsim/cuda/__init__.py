"""Traces Numba-CUDA kernels in Numba's CUDA simulator, without a GPU.

To use it, set ``NUMBA_ENABLE_CUDASIM=1`` in the environment before Python starts.
"""

from flashsim.cuda.kernels import trace

__all__ = ["trace"]
