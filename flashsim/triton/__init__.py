"""Run Triton kernels on the CPU, and record every load, store and atomic operation.

The package needs Triton (``pip install 'flashsim-attention[triton]'``), but neither a GPU nor
torch. Triton is imported only when a kernel is traced.
"""

from __future__ import annotations

from flashsim.triton.watching import Watch, trace, watch

__all__ = ["Watch", "trace", "watch"]
