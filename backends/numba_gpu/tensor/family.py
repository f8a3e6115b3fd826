"""The tensor-core kernels in Python: a kernel family as `families.portable` describes it.

Passes, tiles, threads and shared memory are those of the CUDA C++ kernels, but for what
`launch.Variant` says; what differs is the language, and so the compiler.
"""

from dataclasses import replace

from flashsim.backends.families import fitting
from flashsim.backends.families.portable import Portable
from flashsim.backends.numba_gpu import compiler

__all__ = ["NAME", "backward_passes", "forward_passes", "load"]

NAME = "tensor"
load = compiler.load
_passes = Portable(replace(fitting.PLAIN, python=True))
forward_passes, backward_passes = _passes.forward_passes, _passes.backward_passes
