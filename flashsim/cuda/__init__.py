"""Traces of Numba-CUDA kernels, run by Numba's CUDA simulator: no GPU is needed.

Set ``NUMBA_ENABLE_CUDASIM=1`` in the environment before Python starts.
"""

from __future__ import annotations

from flashsim.cuda.kernels import trace

__all__ = ["trace"]
