"""Run Triton kernels on the CPU and see every load, store and atomic operation that they make.

Needs Triton (``pip install 'flashsim-attention[triton]'``), and neither a GPU nor torch. Triton is
imported when a kernel is traced, not before.
"""

from __future__ import annotations

from flashsim.triton.watching import Watch, trace, watch

__all__ = ["Watch", "trace", "watch"]
