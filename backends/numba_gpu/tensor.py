"""The tensor-core kernels in Python: a kernel family as `flashsim.backends.portable` describes it.

Passes, tiles, threads and shared memory are those of the CUDA C++ kernels; what differs is the
language that the kernels are written in, and so the compiler.
"""

from flashsim.backends.numba_gpu import compiler
from flashsim.backends.portable import backward_passes, forward_passes

__all__ = ["NAME", "backward_passes", "forward_passes", "load"]

NAME = "tensor"
load = compiler.load
